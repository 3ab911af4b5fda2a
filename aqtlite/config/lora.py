"""Config of a low-rank adapter: what is trained beside a frozen weight."""

import dataclasses
import math

from aqtlite.config import representation
from aqtlite.numerics import fields


@dataclasses.dataclass(frozen=True, repr=False)
class Lora(representation.CompactRepr):
    """A low-rank adapter of the weight of a contraction (LoRA, Hu et al. 2021).

    The contraction ``x W`` becomes ``x W + scale (dropout(x) A) B``, where `A` maps the
    contracted axes of the weight to `rank` channels, and `B` these to the others. `W`
    is frozen, in float or in any grid (QLoRA, Dettmers et al. 2023, arXiv:2305.14314);
    `A` and `B` are float32 parameters. `A` starts uniform in ``±1 / sqrt(fan_in)``, and
    `B` at zero: the first output is that of `W` alone (arXiv:2106.09685).

    >>> from aqtlite import Rule, config
    >>> rule = Rule(cfg=config.weight_only(4), adapter=Lora(rank=8, alpha=16))
    >>> rule.adapter.scale
    2.0

    Raises:
        TypeError: if a field is of another type than declared.
        ValueError: if `rank` is less than 1, or `dropout` not from 0 to below 1.
    """

    rank: int
    """Number of channels between `A` and `B`."""

    alpha: float
    """Numerator of `scale`."""

    dropout: float = 0.0
    """Probability with which an input of the adapter is zero in training; calls without
    a key drop none."""

    is_rank_stabilized: bool = dataclasses.field(default=False, kw_only=True)
    """Whether `scale` is ``alpha / sqrt(rank)`` (rsLoRA, Kalajdzievski 2023,
    arXiv:2312.03732) in place of ``alpha / rank``."""

    seed: int = dataclasses.field(default=0, kw_only=True)
    """Seed of the initial `A`; contractions of other paths have other values."""

    def __post_init__(self) -> None:
        fields.check(
            self,
            rank=fields.integer(1),
            alpha=fields.number,
            dropout=fields.fraction,
            is_rank_stabilized=fields.flag,
            seed=fields.integer(0, 2**32 - 1),
        )

    @property
    def scale(self) -> float:
        """Factor of the product of the adapter."""
        root = math.sqrt(self.rank) if self.is_rank_stabilized else self.rank
        return self.alpha / root

    def __str__(self) -> str:
        return f"LoRA of rank {self.rank}"
