"""Config of sub-channel tiles in a backward contraction."""

import dataclasses

from aqtlite.config import representation
from aqtlite.numerics import fields


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class LocalAqt(representation.CompactRepr):
    """Sub-channel tiles in a backward contraction.

    >>> LocalAqt(contraction_axis_shard_count=4)
    LocalAqt(contraction_axis_shard_count=4)

    Raises:
        TypeError: if the count is not an int.
        ValueError: if the count is below 1.
    """

    contraction_axis_shard_count: int
    """Number of tiles along the first contracting axis, each with a scale; in a
    convolution, along the features (in ``dlhs``) or the examples (in ``drhs``)."""

    def __post_init__(self) -> None:
        fields.check(self, contraction_axis_shard_count=fields.integer(1))
