"""The static record of a frozen weight: the operand and config it was frozen for."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from aqtlite import config
from aqtlite.config import representation
from aqtlite.operations import Side
from aqtlite.program.serving.identity import Identity
from aqtlite.shapes.sharding import describe

COLLECTION = "aqt"
"""Name of the collection of frozen weights, and of the optional rng stream."""

RECORD = "site"
"""Key of the `FrozenRecord` in the entry of a frozen weight.

Part of the checkpoint format, as is "kind": "site" in the manifests."""

IDENTITY = "identity"
"""Key of the values that identify what stayed in float, if anything did: values of the
operand, or samples of parameters if the record's identity is a string."""


class Operand(NamedTuple):
    """The static description of one operand of a contraction."""

    side: Side

    shape: tuple[int, ...]
    contracting: tuple[int, ...]
    """Contracting axes, in ascending order."""

    dtype: np.dtype

    def serving_order(self) -> tuple[int, ...]:
        """Returns the order of axes to store a frozen weight in: contracting axes last.

        On CPUs this halves the time of a few rows by a 4096 x 4096 kernel.
        """
        others = (a for a in range(len(self.shape)) if a not in self.contracting)
        return (*others, *self.contracting)

    def is_like(self, other: "Operand") -> bool:
        """Whether both agree in everything except the dtype."""
        return self._replace(dtype=other.dtype) == other

    def __str__(self) -> str:
        return f"{self.side} {describe(self)}"


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["recipe"],
    meta_fields=[
        "cfg",
        "operand",
        "identity",
        "made_of",
        "beside_floats",
        "removed",
        "state",
    ],
)
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class FrozenRecord:
    """The contraction for which `convert` froze a weight; a pytree without leaves.

    Stored beside the integers, and compared with the call when served.
    """

    cfg: config.DotGeneral
    operand: Operand
    identity: Identity | None
    """Identity of the operand made of placeholders. None if its parameters stayed in
    float: values that identify it are then an array beside the integers."""

    made_of: tuple[str, ...]
    """Paths of the parameters it is made of, joined by dots."""

    beside_floats: bool = False
    """Whether the module also contracts float operands like this one."""

    removed: tuple[str, ...] | None = None
    """The parameters in `made_of` that the conversion removed: paths from the root,
    joined by slashes. None in records of conversions that did not store them."""

    state: tuple[str, ...] = ()
    """Path of the calibration states that it was quantized with, if rules quantized it:
    a layer that is called twice has states, and a weight, for each call. Empty if its
    quantization reads none, and in records of conversions that did not store it."""

    recipe: Mapping[str, Any] | None = dataclasses.field(default=None, compare=False)
    """`recipe_name` of the record, mapped to an empty dictionary. Checkpoints keep the
    name, so that restoring a weight into a target of another config raises; their
    readers would cast the integers of one grid to another."""

    def __post_init__(self) -> None:
        if self.recipe is None:
            object.__setattr__(self, "recipe", {recipe_name([self]): {}})

    def fits(self, cfg: config.DotGeneral, operand: Operand) -> bool:
        """Whether the weight was frozen for such an operand, and with such a config."""
        return self.cfg == cfg and self.operand == operand

    def is_made_of(self, module: Sequence[str], path: Sequence[str]) -> bool:
        """Whether the weight may be made of a parameter.

        Args:
            module: path of the module that contracts the weight.
            path: path of the parameter.
        """
        name = ".".join(path)
        return any(
            name in (one, ".".join((*module, *one.split(".")))) for one in self.made_of
        )

    def __repr__(self) -> str:
        # Serving variables hold a record per layer, and all fields fill a screen.
        return f"FrozenRecord({self.operand} of {'+'.join(self.made_of)})"


def recipe_name(records: Sequence[FrozenRecord]) -> str:
    """Returns the name that tells checkpoints how frozen weights were made.

    A digest of the forward configs, sides, contracting axes and dtypes. Part of the
    checkpoint format.
    """
    parts: list[Any] = []
    for record in records:
        side, _, contracting, dtype = record.operand
        forward = record.cfg.for_serving().fwd
        axes = tuple(map(int, contracting))
        parts.append((forward, side, axes, np.dtype(dtype)))
    return f"of_config_{representation.digest(tuple(parts))}"


class FrozenEntry(NamedTuple):
    """A frozen weight, as a conversion stores it and serving finds it."""

    module: tuple[str, ...]
    """Path of the module that contracts it."""

    name: str
    record: FrozenRecord
    values: Mapping[str, Any]
    """The `QTensor` keyed by side, and values of floats by `IDENTITY`, if any."""

    rounding: str = ""
    """Of one that is converted: whether it is sparse, has integers that were given, and
    how it was rounded if not as in training."""

    @property
    def stored(self) -> dict[str, Any]:
        """What the collection of frozen weights holds under its name."""
        return {RECORD: self.record, **self.values}


def frozen_entries(
    collection: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[FrozenEntry]:
    """Yields the frozen weights of a collection.

    Args:
        collection: the part of the collection below `path`.
        path: path of the module that it belongs to.
    """
    for name, child in collection.items():
        if isinstance(child, Mapping) and isinstance(child.get(RECORD), FrozenRecord):
            yield FrozenEntry(path, name, child[RECORD], child)
        elif isinstance(child, Mapping):
            yield from frozen_entries(child, (*path, name))
