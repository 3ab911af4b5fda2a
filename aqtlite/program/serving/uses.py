"""The uses of statistics in the contractions of a model, as a trace of it shows them.

They say what the arrays of the collection are the statistics of.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from aqtlite import config
from aqtlite.program.serving.contraction import Contraction
from aqtlite.quantization.fixed_scale import FixedScale
from aqtlite.shapes.dimension_numbers import Axes

Place = tuple[str, ...]
"""The path in the collection of the statistics of an operand."""


@dataclasses.dataclass(frozen=True)
class Use:
    """A contraction's use of statistics."""

    tensor: config.Tensor
    contracting: Axes
    path: str
    """Where the tensor stands in the config."""

    needs_frozen: bool
    """Without frozen weights, the contraction is run as in training: it rounds
    stochastically, or gathers statistics."""

    state: Any
    """The statistics, as shapes: what a lifted transformation stacks is less."""

    ndim: int
    x: jax.ShapeDtypeStruct = dataclasses.field(compare=False)
    """The array."""


class Uses:
    """The uses of statistics in the traces of a model."""

    def __init__(self):
        self._found: dict[Place, Use | None] = {}

    def add(self, place: Place, use: Use) -> None:
        """Adds one."""
        before = self._found.get(place, use)
        self._found[place] = use if before == use else None

    def exclude(self, place: Place) -> None:
        """Leaves statistics as they are."""
        self._found[place] = None

    def items(self) -> list[tuple[Place, Use | None]]:
        """The places with their uses; None where there is no single one."""
        return list(self._found.items())


_noted_in = jax.make_user_context(None)


@contextlib.contextmanager
def noted_in(uses: Uses) -> Iterator[None]:
    """Notes the uses of statistics while it lasts."""
    with _noted_in(uses):
        yield


def note(
    place: Place,
    x: Any,
    tensor: config.Tensor,
    contracting: Axes,
    path: str,
    state: Any,
    *,
    is_updated: bool,
    needs_frozen: bool = False,
) -> None:
    """Notes a use of statistics, where `noted_in` is in effect.

    Args:
        place: place of the statistics.
        x: the operand.
        tensor: how it is quantized.
        contracting: its contracting axes.
        path: where `tensor` stands in the config.
        state: its statistics, or a `FixedScale`.
        is_updated: they are updated where they are used.
        needs_frozen: without frozen weights, the contraction is run as in training.
    """
    uses: Uses | None = _noted_in.value
    if uses is None:
        return
    is_given = isinstance(state, FixedScale) or not jax.tree.leaves(state)
    if is_updated or is_given:
        uses.exclude(place)
        return
    shapes = jax.tree.map(_shape_of, state)
    use = Use(tensor, contracting, path, needs_frozen, shapes, x.ndim, _shape_of(x))
    uses.add(place, use)


def note_operands(
    call: Contraction, place: Place, *, is_updated: bool = False, needs_frozen: bool
) -> None:
    """Notes the uses of the statistics of both operands of a contraction.

    Args:
        call: the contraction.
        place: place of the statistics of its operands, by side.
        is_updated: they are updated where they are used.
        needs_frozen: without frozen weights, the contraction is run as in training.
    """
    raw, states = call.cfg.fwd, call.states
    for side, tensor, x, state in (
        ("lhs", raw.lhs, call.lhs, states.lhs),
        ("rhs", raw.rhs, call.rhs, states.rhs),
    ):
        if tensor.gathers_statistics:
            note(
                (*place, side),
                x,
                tensor,
                call.operation.axes("lhs" if side == "lhs" else "rhs").contracting,
                f"fwd.{side}",
                state,
                is_updated=is_updated,
                needs_frozen=needs_frozen,
            )


def _shape_of(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def stacked(wanted: Any, state: Any) -> int | None:
    """How many leading axes statistics have more; None if they differ otherwise."""
    ones, leaves = (dict(jax.tree.leaves_with_path(x)) for x in (wanted, state))
    if ones.keys() != leaves.keys():
        return None
    leading = set()
    for path, leaf in leaves.items():
        one = ones[path]
        more = leaf.ndim - one.ndim
        if more < 0 or leaf.shape[more:] != one.shape or leaf.dtype != one.dtype:
            return None
        leading.add(leaf.shape[:more])
    return len(leading.pop()) if len(leading) == 1 else None


def at(tree: Any, place: Place) -> Any:
    """What is at a place of the collection; None if there is nothing."""
    for step in place:
        if not isinstance(tree, Mapping) or step not in tree:
            return None
        tree = tree[step]
    return tree


def replaced(tree: Any, states: Mapping[Place, Any], place: Place = ()) -> Any:
    """The collection with other states at some places."""
    if place in states:
        return states[place]
    if not isinstance(tree, Mapping):
        return tree
    return {key: replaced(value, states, (*place, key)) for key, value in tree.items()}
