"""Calibration states of contractions in the variables of a Linen model."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from aqtlite import errors
from aqtlite.flax.linen import statistics
from aqtlite.program.planned import PlannedContraction
from aqtlite.program.planned_lookup import Planned
from aqtlite.program.program import Path
from aqtlite.quantization.states.state_collections import (
    ADAPTER,
    OF_CONVERSION,
    OF_GRADIENTS,
    STATISTICS,
)
from aqtlite.quantization.states.statistics import States


def put(tree: dict[str, Any], collection: str, path: Path, entry: Any) -> None:
    """Puts the states of a contraction into collections."""
    *module, name = path
    node = tree.setdefault(collection, {})
    for step in module:
        node = node.setdefault(step, {})
    node[statistics.name_in(collection, name)] = entry


def states_of(
    variables: Mapping[str, Any], one: PlannedContraction, path: Path
) -> States:
    """Returns the states of a contraction from all collections that it uses.

    Raises:
        ValueError: if a collection has nothing for it, except for gradients alone.
    """
    found: dict[str, Any] = {}
    for collection, fields in one.collections.items():
        node = entry_of(variables, collection, path)
        if set(fields) - set(node) - OF_CONVERSION - {ADAPTER}:
            if collection == OF_GRADIENTS:
                continue  # Only needed for gradients.
            raise ValueError(
                f"the collection {collection!r} has nothing for the contraction "
                f"{errors.quoted(one.path)}: make the variables with the init of the "
                "quantized model"
                + (
                    ", and gather statistics with aqtlite.flax.calibrate or "
                    f"model.apply(..., mutable=['{STATISTICS}'])"
                    if collection == STATISTICS
                    else ", or, of float parameters, by "
                    f"_, made = model.apply(variables, x, mutable=['{collection}'])"
                )
            )
        node = nn.meta.unbox(node)
        found.update({field: node[field] for field in fields if field in node})
    return States(**found)


def entry_of(
    variables: Mapping[str, Any], collection: str, path: Path
) -> Mapping[str, Any]:
    """Returns the states of a contraction in a collection; empty if there are none."""
    *module, name = path
    named = (*module, statistics.name_in(collection, name))
    found: Mapping[str, Any] = found_at(variables, collection, named)
    return found


def found_at(variables: Mapping[str, Any], collection: str, path: Path) -> Any:
    """Returns what a collection has at a path; an empty mapping for nothing."""
    node: Any = variables.get(collection, {})
    for step in path:
        node = node.get(step, {}) if isinstance(node, Mapping) else {}
    return node


def check_mapped(one: Planned, entry: Mapping[str, Any], params: Any) -> None:
    """Checks that learned scales have the axis of members that `nn.vmap` maps.

    Args:
        one: the contraction.
        entry: its parameters, by field of `States`.
        params: the parameters of its module.

    Raises:
        ValueError: if members share a learned scale, which Flax cannot map.
    """
    if "vmap" not in one.site.scope.transformations:
        return
    members = {jnp.shape(x)[:1] for x in jax.tree.leaves(params)}
    learned = {field: x for field, x in entry.items() if field != ADAPTER}
    for field, state in learned.items():
        if any(jnp.shape(x)[:1] not in members for x in jax.tree.leaves(state)):
            raise ValueError(
                f"the members of nn.vmap around {errors.quoted(one.path)} would share "
                f"the learned scale of fwd.{field}, by rules: inject its config, "
                "dot_general=AqtDotGeneral(cfg), or learn scales of weights alone"
            )


def merged(first: Any, second: Any) -> Any:
    """Merges nested dictionaries; leaves of `second` take precedence."""
    if not isinstance(first, Mapping) or not isinstance(second, Mapping):
        return second
    result = dict(first)
    for key, value in second.items():
        result[key] = merged(first[key], value) if key in first else value
    return result
