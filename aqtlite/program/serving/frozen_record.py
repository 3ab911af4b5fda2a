"""The static record of a frozen weight: what contracts it, and how."""

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

COLLECTION = "aqt"
"""The collection of frozen weights, and the name of the optional rng stream."""

RECORD = "site"
"""The name of the `FrozenRecord` among the values that are stored of a weight.

It is part of the format of checkpoints, as "kind": "site" is in their manifests."""

IDENTITY = "identity"
"""The name there of values of what stayed in float, where something did: those of the
operand, or samples of parameters where the record has a text for its identity."""


class Operand(NamedTuple):
    """The static part of one operand of a contraction."""

    side: Side

    shape: tuple[int, ...]
    contracting: tuple[int, ...]
    """Its contracting axes, in ascending order."""

    dtype: np.dtype

    def serving_order(self) -> tuple[int, ...]:
        """Returns the order to store it in when frozen: contracting axes last.

        A few rows by a 4096 x 4096 kernel take a CPU half the time that way.
        """
        others = (a for a in range(len(self.shape)) if a not in self.contracting)
        return (*others, *self.contracting)

    def is_like(self, other: "Operand") -> bool:
        """Whether both agree in all but the dtype."""
        return self._replace(dtype=other.dtype) == other

    def __str__(self) -> str:
        return f"{self.side} {describe_array(self.shape, self.dtype)}"


def describe_array(shape: tuple[int, ...], dtype: Any) -> str:
    """Writes a shape and a dtype as JAX does, such as "float32[8,24]"."""
    return f"{np.dtype(dtype).name}[{','.join(map(str, shape))}]"


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
    ],
)
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class FrozenRecord:
    """The contraction that `convert` froze a weight of: a pytree without leaves.

    It is stored beside the integers, and serving compares it with the call.
    """

    cfg: config.DotGeneral
    operand: Operand
    identity: Identity | None
    """Fingerprint of the operand where its parameters are placeholders. None where they
    stayed in float: then its values are an array beside the integers."""

    made_of: tuple[str, ...]
    """Paths of its parameters, joined by dots."""

    beside_floats: bool = False
    """The module also contracts operands like this one that are not frozen."""

    removed: tuple[str, ...] | None = None
    """Those of its parameters that the conversion took away: paths from the root of the
    parameters, joined by slashes. None where the conversion did not say."""

    recipe: Mapping[str, Any] | None = dataclasses.field(default=None, compare=False)
    """An empty dictionary under a name that tells how the weight was made. Checkpoints
    keep the name, and refuse to be restored as what was made in another way: their
    readers cast the integers of one grid to those of another."""

    def __post_init__(self) -> None:
        if self.recipe is None:
            object.__setattr__(self, "recipe", {recipe_name([self]): {}})

    @property
    def is_beside_floats_like_it(self) -> bool:
        """Whether an operand may be a float although it is like this one. One that is
        known by how it is made is not."""
        return self.beside_floats and not isinstance(self.identity, str)

    def is_made_of(self, module: Sequence[str], path: Sequence[str]) -> bool:
        """Whether the weight may be made of a parameter.

        Args:
            module: the path of the module that contracts the weight.
            path: path of the parameter.
        """
        name = ".".join(path)
        return any(
            name in (one, ".".join((*module, *one.split(".")))) for one in self.made_of
        )

    def __repr__(self) -> str:
        # Serving variables hold one of these per layer; its fields fill a screen.
        return f"FrozenRecord({self.operand} of {'+'.join(self.made_of)})"


def recipe_name(records: Sequence[FrozenRecord]) -> str:
    """The name under which checkpoints keep how frozen weights were made.

    Two names differ if the forward configs do, or what is contracted. It is part of the
    format of checkpoints.
    """
    parts: list[Any] = []
    for record in records:
        side, _, contracting, dtype = record.operand
        forward = record.cfg.for_serving().fwd
        axes = tuple(map(int, contracting))
        parts.append((forward, side, axes, np.dtype(dtype)))
    return f"of_config_{representation.digest(tuple(parts))}"


class FrozenEntry(NamedTuple):
    """A frozen weight of a module, as it is stored."""

    name: str
    record: FrozenRecord
    values: Mapping[str, Any]
    """The `QTensor` by its side; values of floats by `IDENTITY`, if there are any."""


def frozen_entries(
    collection: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], FrozenEntry]]:
    """Yields the frozen weights of a collection, each with the path of its module.

    Args:
        collection: collection of the module at `path`, and of those below it.
        path: of this module.
    """
    for name, child in collection.items():
        if isinstance(child, Mapping) and isinstance(child.get(RECORD), FrozenRecord):
            yield path, FrozenEntry(name, child[RECORD], child)
        elif isinstance(child, Mapping):
            yield from frozen_entries(child, (*path, name))
