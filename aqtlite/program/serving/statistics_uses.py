"""The uses of statistics in the contractions of a model, as a trace of it shows them.

They say what the arrays of the collection are the statistics of, and so which fixed
scales take their place in a model that is converted: these do not depend on the model's
inputs, so that they are computed once, and none of the model is run.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from aqtlite import config
from aqtlite.calibration import counting
from aqtlite.jaxpr import slicing, tracing
from aqtlite.operations import OperandAxes
from aqtlite.program.serving.contraction import Contraction
from aqtlite.quantization import quantizer
from aqtlite.quantization.fixed_scale import FixedScale
from aqtlite.quantization.state_collections import STATISTICS
from aqtlite.quantization.statistics import counts_of
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


def check_gathered(collection: Any, remedy: str) -> None:
    """Raises ValueError if statistics are certainly of no batch.

    Args:
        collection: the collection of statistics.
        remedy: what to do, for the message.
    """
    for path, count in counts_of(collection):
        is_known = isinstance(count, jax.Array | np.ndarray)
        if is_known and counting.problem(count) is not None:
            raise ValueError(
                f"the statistics in {STATISTICS}{jax.tree_util.keystr(path)} are of no "
                f"batch: {remedy}"
            )


def fix(statistics: Mapping[str, Any], uses: Uses, *, is_frozen: bool) -> Any:
    """Replaces statistics by the scales that they give.

    Those stay that two contractions use with different configs, or that a calibration
    uses together with the operand.

    Args:
        statistics: the collection, or its shapes.
        uses: uses of the model.
        is_frozen: weights of the model are frozen.
    """
    states, functions = {}, {}
    for place, use in uses.items():
        state = at(statistics, place)
        if use is None or state is None:
            continue
        if use.tensor.needs_noise or (use.needs_frozen and not is_frozen):
            continue
        function = _scale_of(use, state)
        if function is not None:
            states[place], functions[place] = state, function

    def run(states: Any) -> Any:
        return {place: functions[place](state) for place, state in states.items()}

    leaves = jax.tree.leaves(states)
    is_abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    made = jax.eval_shape(run, states) if is_abstract else jax.jit(run)(states)
    return replaced(statistics, made)


def _scale_of(use: Use, state: Any) -> Any:
    """The function from statistics to a scale; None if there is none."""
    depth = stacked(use.state, state)
    if depth is None:
        return None

    def scale(state: Any, x: Any) -> FixedScale:
        axes = OperandAxes.of_contracting(x.ndim, use.contracting)
        found = quantizer.find_scale(x, use.tensor, axes, use.path, state)
        return FixedScale(found.scale, found.zero_point)

    traced = tracing.trace(scale, (use.state, use.x))
    part = slicing.slice_outputs(traced.jaxpr, traced.outputs)
    _, index_of_x = traced.inputs
    if index_of_x in part.inputs:
        return None

    def of_one(state: Any) -> FixedScale:
        leaves = jax.tree.leaves(state)
        return part(*(leaves[i] for i in part.inputs))

    function: Any = of_one
    for _ in range(depth):
        function = jax.vmap(function)
    return function
