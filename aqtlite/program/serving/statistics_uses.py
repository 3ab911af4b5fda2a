"""Uses of calibration statistics by the contractions in a model's trace.

A use tells which operand an entry of the statistics collection belongs to, and so which
fixed scale replaces it in a converted model. The scale does not depend on the model's
inputs: it is computed once, without running the model.
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
from aqtlite.quantization.states import second_moment
from aqtlite.quantization.states.fixed_scale import FixedScale
from aqtlite.quantization.states.second_moment import SecondMoment
from aqtlite.quantization.states.state_collections import STATISTICS
from aqtlite.quantization.states.statistics import records_of
from aqtlite.shapes.dimension_numbers import Axes

Place = tuple[str, ...]
"""Path of an operand's statistics in their collection."""


@dataclasses.dataclass(frozen=True)
class Use:
    """The use of statistics by one operand of a contraction."""

    tensor: config.Tensor
    contracting: Axes
    path: str
    """Path of `tensor` in the config, such as "fwd.lhs"."""

    needs_frozen: bool
    """Whether the contraction, unless its weights are frozen, runs as in training:
    with stochastic rounding, or gathering statistics."""

    state: Any
    """The statistics as shapes, without axes that a lifted transformation adds."""

    ndim: int
    x: jax.ShapeDtypeStruct = dataclasses.field(compare=False)
    """Shape and dtype of the operand."""


class Uses:
    """The uses of statistics in the traces of a model."""

    def __init__(self):
        self._found: dict[Place, Use | None] = {}

    def add(self, place: Place, use: Use) -> None:
        """Adds a use; two different uses of one place exclude it."""
        before = self._found.get(place, use)
        self._found[place] = use if before == use else None

    def exclude(self, place: Place) -> None:
        """Excludes the statistics at a place from being replaced by a scale."""
        self._found[place] = None

    def items(self) -> list[tuple[Place, Use | None]]:
        """Returns the places with their uses; None where a place is excluded."""
        return list(self._found.items())


_noted_in = jax.make_user_context(None)


@contextlib.contextmanager
def noted_in(uses: Uses) -> Iterator[None]:
    """Collects the uses of statistics inside the context into `uses`."""
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
    """Records a use of statistics; does nothing outside `noted_in`.

    Args:
        place: path of the statistics in the collection.
        x: the operand.
        tensor: config of the operand.
        contracting: contracting axes of the operand.
        path: path of `tensor` in the config.
        state: statistics of the operand, or a `FixedScale`.
        is_updated: whether the call also updates the statistics.
        needs_frozen: as `Use.needs_frozen`.
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
    """Records the uses of statistics by both operands of a contraction.

    Args:
        call: the contraction.
        place: path of the contraction's statistics, which are keyed by side.
        is_updated: whether the call also updates the statistics.
        needs_frozen: as `Use.needs_frozen`.
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
    if raw.rhs.rounding is not None:
        axes = call.operation.axes("rhs").contracting
        note(
            (*place, "moment"),
            call.rhs,
            raw.rhs,
            axes,
            "fwd.rhs.rounding",
            states.moment,
            is_updated=is_updated,
        )


def _shape_of(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def stacked(wanted: Any, state: Any) -> int | None:
    """Returns how many leading axes `state` has beyond `wanted`, None on a mismatch."""
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
    """Returns the subtree at a place of the collection, or None."""
    for step in place:
        if not isinstance(tree, Mapping) or step not in tree:
            return None
        tree = tree[step]
    return tree


def replaced(tree: Any, states: Mapping[Place, Any], place: Place = ()) -> Any:
    """Returns the collection with the given states at their places."""
    if place in states:
        return states[place]
    if not isinstance(tree, Mapping):
        return tree
    return {key: replaced(value, states, (*place, key)) for key, value in tree.items()}


def check_gathered(collection: Any, remedy: str) -> None:
    """Checks statistics before a conversion, as far as their values are known.

    Args:
        collection: the collection of statistics.
        remedy: advice for the message where they have seen no batch.

    Raises:
        ValueError: if statistics have seen no batch, or second moments are not finite.
    """
    records = [
        (f"{STATISTICS}{jax.tree_util.keystr(path)}", record)
        for path, record in records_of(collection)
        if isinstance(record.batches, jax.Array | np.ndarray)
    ]
    for name, record in records:
        if counting.problem(record.batches) is not None:
            raise ValueError(f"the statistics in {name} have seen no batch: {remedy}")
    moments = [(name, x) for name, x in records if isinstance(x, SecondMoment)]
    infinite = [name for name, x in moments if not second_moment.may_be_finite(x)]
    if infinite:
        raise ValueError(
            f"{len(infinite)} of {len(moments)} second moments of inputs, by which "
            "GPTQ rounds weights, hold NaN or infinities: those in "
            f"{', '.join(infinite[:4])}{', ...' if infinite[4:] else ''}. Check the "
            "batches and the variables, and gather statistics again"
        )


def fix(statistics: Mapping[str, Any], uses: Uses, *, is_frozen: bool) -> Any:
    """Replaces statistics by the scales computed from them.

    Statistics stay if two contractions use them with different configs, or if the scale
    also depends on the operand.

    Args:
        statistics: the collection, or its shapes.
        uses: uses of statistics in the model.
        is_frozen: whether weights of the model are frozen.
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
    """Returns the function from statistics to a `FixedScale`, or None.

    None if the scale also depends on the operand, or the statistics do not fit the use.
    """
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
