"""Config of scales of frozen weights that are quantized, too."""

import dataclasses

from aqtlite.config import representation
from aqtlite.numerics import fields


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class DoubleScales(representation.CompactRepr):
    """Holds the scales of a frozen weight in 8 bits (double quantization of QLoRA).

    Dettmers et al. 2023, arXiv:2305.14314. A conversion subtracts the mean of the
    scales, and rounds the rest on the dynamic grid (`aqtlite.numerics.DynamicTree`), in
    blocks of `size` scales along one axis. Serving decodes them: with nf4 in blocks of
    64 a weight takes 4.127 bits in place of 4.5. Training, and models that are not
    converted, use the scales as they are found, as they do without it.

    >>> from aqtlite import config, numerics
    >>> nf4 = config.Tensor(
    ...     numerics=numerics.NormalFloat(),
    ...     blocks=config.Blocks(size=64),
    ...     double_scales=DoubleScales(),
    ... )
    >>> cfg = config.update(config.weight_only(4), {"fwd.rhs": nf4})

    Raises:
        TypeError: if `size` is not an integer.
        ValueError: if `size` is less than 1.
    """

    size: int = 256
    """Number of scales in a block; a smaller number that divides the axis where this
    one does not."""

    def __post_init__(self) -> None:
        fields.check(self, size=fields.integer(1))
