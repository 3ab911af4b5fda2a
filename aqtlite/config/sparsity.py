"""Config of sparsity: weights that are set to zero before they are quantized."""

import dataclasses

from aqtlite.config import representation
from aqtlite.numerics import fields


@dataclasses.dataclass(frozen=True, repr=False)
class NofM(representation.CompactRepr):
    """Keeps n of each m consecutive weights, and sets the others to zero.

    Groups of m elements lie along the last contracting axis; in a convolution, along
    the input features, within a group of features. The n largest magnitudes are kept,
    of equal ones the first. A last group of fewer elements keeps n, too.

    Weights are pruned after smoothing and rotation, before their range is calibrated:
    at every call in training, and once by the conversion. With a `Gptq`, the conversion
    prunes while it rounds (SparseGPT, Frantar and Alistarh 2023, arXiv:2301.00774): by
    ``w^2 / [H^-1]_jj``, of weights that compensate what was pruned before.

    The gradient passes to all weights, so that pruned ones can return
    (straight-through). `decay` is added to that of the pruned ones (SR-STE, Zhou et al.
    2021, arXiv:2102.04010).

    >>> from aqtlite import config
    >>> cfg = config.weight_only(bits=4)
    >>> config.update(cfg, {"fwd.rhs.sparsity": NofM(2, 4)}).fwd.rhs
    Tensor(numerics=IntSymmetric(bits=4), sparsity=NofM(n=2, m=4))

    Raises:
        TypeError: if a field is of another type than declared.
        ValueError: if not 1 <= `n` < `m`, or if `decay` is negative.
    """

    n: int
    """Number of elements of a group that are kept."""

    m: int
    """Number of elements of a group."""

    decay: float = dataclasses.field(default=2e-4, kw_only=True)
    """Multiple of the pruned weights that is added to their gradient."""

    def __post_init__(self) -> None:
        count = fields.integer(1)
        fields.check(self, n=count, m=count, decay=fields.not_negative)
        if self.n >= self.m:
            raise ValueError(
                f"NofM(n={self.n}, m={self.m}) would have no effect: n must be less "
                "than m"
            )

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"
