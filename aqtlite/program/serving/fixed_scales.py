"""Fixed scales in place of the statistics of a model that is converted.

What statistics give does not depend on the model's inputs, so that it is computed once,
and none of the model is run.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from aqtlite.calibration import counting
from aqtlite.jaxpr import slicing, tracing
from aqtlite.operations import OperandAxes
from aqtlite.program.serving import uses as uses_lib
from aqtlite.program.serving.uses import Use, Uses
from aqtlite.quantization import quantizer
from aqtlite.quantization.fixed_scale import FixedScale
from aqtlite.quantization.state_collections import STATISTICS
from aqtlite.quantization.statistics import counts_of


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
        state = uses_lib.at(statistics, place)
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
    return uses_lib.replaced(statistics, made)


def _scale_of(use: Use, state: Any) -> Any:
    """The function from statistics to a scale; None if there is none."""
    depth = uses_lib.stacked(use.state, state)
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
