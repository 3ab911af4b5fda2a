"""Config of the rounding of weights at conversion."""

import dataclasses

from aqtlite.config import representation
from aqtlite.numerics import fields


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Gptq(representation.CompactRepr):
    """Rounds weights at conversion so that their errors cancel in outputs (GPTQ).

    Frantar et al. 2022, arXiv:2210.17323. The inputs of a contraction are taken one
    after the other: the weights of an input are rounded, and the error is compensated
    by the weights of the inputs that are left, as well as their correlation allows. The
    scales are those of the weights before any compensation, and are found by the
    calibration of the weights.

    The correlation comes from statistics of the activations: sums of ``x_i x_j``
    over all rows, one square matrix per contraction, gathered by
    `aqtlite.flax.calibrate`. Only a conversion reads them. Training, and models that
    are not converted, round to the nearest value.

    >>> from aqtlite import config
    >>> cfg = config.update(config.weight_only(bits=4), {"fwd.rhs.rounding": Gptq()})
    >>> cfg.fwd.rhs
    Tensor(numerics=IntSymmetric(bits=4), rounding=Gptq())

    Raises:
        TypeError: if a field is of another type than declared.
        ValueError: if `damping` is not positive.
    """

    damping: float = 0.01
    """Number added to the diagonal of the matrix, as a multiple of the diagonal's mean.
    For a matrix that is still singular in float32, ten times as much is tried, and
    again until it is 1 or more; the report of the conversion says so."""

    act_order: bool = True
    """Take inputs in the order of decreasing power, the sum of ``x_i x_i``. Otherwise
    in their own order."""

    def __post_init__(self) -> None:
        fields.check(self, damping=fields.positive, act_order=fields.flag)
