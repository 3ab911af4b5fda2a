"""Partitioning metadata of adapters, carried over from their weights."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen as nn

from aqtlite.flax.linen import partitioning
from aqtlite.program import served
from aqtlite.program.adapters import low_rank, merging
from aqtlite.program.planned import PlannedContraction
from aqtlite.program.program import Program
from aqtlite.program.serving.frozen_record import COLLECTION, frozen_entries
from aqtlite.quantization.states.state_collections import PARAMETERS

Boxed = Callable[[PlannedContraction, dict[str, Any]], dict[str, Any]]
"""Function from a contraction and the parameters of its adapter to these in boxes."""


def boxing(program: Program, variables: Mapping[str, Any]) -> Boxed:
    """Returns the function that boxes adapters as their weights are boxed.

    The axes of an adapter have the names of the weight's axes, and that of the rank
    none.

    Args:
        program: a call.
        variables: its variables, float or converted.
    """
    params = variables.get(PARAMETERS, {})
    nodes = jax.tree.leaves_with_path(
        (params, variables.get(COLLECTION, {})), is_leaf=nn.meta.is_axis_metadata
    )
    by_path = {path[1:]: node for path, node in nodes if _has_names(node)}
    if not by_path:
        return lambda one, adapter: adapter
    boxes: partitioning.Boxes = {}
    for parameter in program.parameters.values():
        for end in range(len(parameter.key_path) + 1):
            if parameter.key_path[:end] in by_path:
                boxes[parameter] = by_path[parameter.key_path[:end]]
    axes = merging.axes_of_weights(program)

    def boxed(one: PlannedContraction, adapter: dict[str, Any]) -> dict[str, Any]:
        box = _frozen_box(program, one, variables)
        if box is None:
            box = partitioning.box_of(axes[one.site.location], boxes)
        if box is None:
            return adapter
        of_each = low_rank.names(one, box.names)
        return {
            name: box.replace(names=of_each[name]).replace_boxed(x)
            for name, x in adapter.items()
        }

    return boxed


def _frozen_box(
    program: Program, one: PlannedContraction, variables: Mapping[str, Any]
) -> Any:
    """Returns the box of a frozen weight, with names in the order of its axes."""
    every = frozen_entries(variables.get(COLLECTION, {}))
    own = (entry for entry in every if entry.module == program.module_of(one))
    for entry in served.identified(program, one, "rhs", own):
        q = entry.values.get("rhs")
        box: Any = getattr(q, "qvalue", None)
        if _has_names(box):
            stored = nn.meta.unbox(q).stored_axes
            return box.replace(names=tuple(box.names[axis] for axis in stored))
    return None


def _has_names(node: Any) -> bool:
    return nn.meta.is_axis_metadata(node) and hasattr(node, "names")
