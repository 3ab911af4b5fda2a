"""Fixed scales in place of the statistics of a model that is converted.

A trace of the model notes which statistics a contraction reads, and how. What they give
does not depend on the model's inputs, so that it is computed once, and none of the
model is run.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from aqtlite import config, operands
from aqtlite.dimension_numbers import Axes
from aqtlite.fixed_scale import FixedScale
from aqtlite.jaxpr import slicing, tracing

Place = tuple[str, ...]
"""The path in the collection of the statistics of an operand."""


@dataclasses.dataclass(frozen=True)
class Use:
    """A contraction's use of statistics."""

    tensor: config.Tensor
    contracting: Axes
    path: str
    """Where the tensor stands in the config."""

    is_noisy: bool
    """Without frozen weights, the contraction rounds stochastically."""

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

    def fix(self, statistics: Mapping[str, Any], *, is_frozen: bool) -> dict[str, Any]:
        """Replaces statistics by the scales that they give.

        Those stay that two contractions use with different configs, or that a
        calibration uses together with the operand.

        Args:
            statistics: the collection, or its shapes.
            is_frozen: weights of the model are frozen.
        """
        states = {}
        for place, use in self._found.items():
            state = _at(statistics, place)
            if use is None or (use.is_noisy and not is_frozen):
                continue
            if state is not None:
                make = _scale_of(use, state)
                if make is not None:
                    states[place] = state, make
        given = {place: state for place, (state, _) in states.items()}

        def run(given: Any) -> Any:
            return {place: states[place][1](state) for place, state in given.items()}

        leaves = jax.tree.leaves(given)
        is_abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
        fixed = (jax.eval_shape if is_abstract else _run)(run, given)
        return _replaced(statistics, fixed, ())


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
    is_noisy: bool = False,
) -> None:
    """Notes a use of statistics, where `noted_in` is in effect.

    Args:
        place: of the statistics.
        x: the operand.
        tensor: how it is quantized.
        contracting: its contracting axes.
        path: where `tensor` stands in the config.
        state: its statistics, or a `FixedScale`.
        is_updated: they are updated where they are used.
        is_noisy: without frozen weights, the contraction rounds stochastically.
    """
    uses: Uses | None = _noted_in.value
    if uses is None:
        return
    is_given = isinstance(state, FixedScale) or not jax.tree.leaves(state)
    if is_updated or is_given or tensor.needs_noise:
        uses.exclude(place)
        return
    shapes = jax.tree.map(_shape_of, state)
    use = Use(tensor, contracting, path, is_noisy, shapes, x.ndim, _shape_of(x))
    uses.add(place, use)


def _run(function: Any, *args: Any) -> Any:
    return jax.jit(function)(*args)


def _shape_of(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _scale_of(use: Use, state: Any) -> Any:
    """The function from statistics to a scale; None if there is none."""
    stacked = _stacked(use.state, state)
    if stacked is None:
        return None

    def scale(state: Any, x: Any) -> FixedScale:
        found = operands.calibrate(x, use.tensor, use.contracting, use.path, state)
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
    for _ in range(stacked):
        function = jax.vmap(function)
    return function


def _stacked(wanted: Any, state: Any) -> int | None:
    """How many leading axes statistics have more; None if they differ otherwise."""
    if jax.tree.structure(wanted) != jax.tree.structure(state):
        return None
    leading = set()
    pairs = zip(jax.tree.leaves(wanted), jax.tree.leaves(state), strict=True)
    for one, leaf in pairs:
        more = leaf.ndim - one.ndim
        if more < 0 or leaf.shape[more:] != one.shape or leaf.dtype != one.dtype:
            return None
        leading.add(leaf.shape[:more])
    return len(leading.pop()) if len(leading) == 1 else None


def _at(tree: Any, place: Place) -> Any:
    for step in place:
        if not isinstance(tree, Mapping) or step not in tree:
            return None
        tree = tree[step]
    return tree


def _replaced(tree: Any, fixed: Mapping[Place, FixedScale], place: Place) -> Any:
    if place in fixed:
        return fixed[place]
    if not isinstance(tree, Mapping):
        return tree
    return {key: _replaced(value, fixed, (*place, key)) for key, value in tree.items()}
