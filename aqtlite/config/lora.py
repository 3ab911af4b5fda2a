"""Config of a low-rank adapter: what is trained beside a frozen weight."""

import dataclasses
import math
from typing import Literal, get_args

from aqtlite.config import representation
from aqtlite.numerics import fields

Init = Literal["zero", "loftq", "pissa"]
"""How an adapter starts."""


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
        ValueError: if `rank` is less than 1, `dropout` not from 0 to below 1, or `init`
            unknown; or if `alpha` is 0 and `init` is not "zero".
    """

    rank: int
    """Number of channels between `A` and `B`."""

    alpha: float
    """Numerator of `scale`."""

    init: Init = dataclasses.field(default="zero", kw_only=True)
    """How the adapter starts. "zero": with `B` at zero. "loftq": with the `rank`
    largest singular directions of the rounding error of the weight, so that the sum
    with the rounded weight is nearer to the float one (LoftQ of one round, Li et al.
    2023, arXiv:2310.08659). "pissa": with those of the weight, which keeps the rest
    (PiSSA, Meng et al. 2024, arXiv:2404.02948). The last two take float weights."""

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
        if self.init not in get_args(Init):
            raise ValueError(
                f"Lora.init must be one of {', '.join(get_args(Init))}, "
                f"got {self.init!r}"
            )
        if self.init != "zero" and self.alpha == 0:
            raise ValueError(f"init={self.init!r} takes an alpha other than 0")

    @property
    def scale(self) -> float:
        """Factor of the product of the adapter."""
        root = math.sqrt(self.rank) if self.is_rank_stabilized else self.rank
        return self.alpha / root

    def __str__(self) -> str:
        return f"LoRA of rank {self.rank}"


@dataclasses.dataclass(frozen=True, repr=False)
class Dora(Lora):
    """A low-rank adapter with a trained magnitude for each output (DoRA).

    Liu et al. 2024, arXiv:2402.09353. The weight becomes ``m (W + scale A B) / norm``,
    where the norm is over the contracted axes of ``W + scale A B``, and constant to
    differentiation. `m` starts at that norm, as a third parameter. A rounded `W` is
    decoded in each call to find it.

    >>> Dora(rank=8, alpha=16)
    Dora(rank=8, alpha=16.0)

    Raises:
        TypeError: as for `Lora`.
        ValueError: as for `Lora`.
    """

    def __str__(self) -> str:
        return f"DoRA of rank {self.rank}"
