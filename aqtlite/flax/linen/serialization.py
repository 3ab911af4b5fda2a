"""Serialization of serving variables by `flax.serialization` (``to_bytes``, msgpack).

Only arrays are stored. Static data (records, shapes of frozen kernels) and the types of
nodes come from the target of `flax.serialization.from_bytes`, as with Orbax. Statistics
may be in any of the stored forms that `restored_statistics` reads.
"""

import dataclasses
from typing import Any

import jax
from flax import serialization

from aqtlite.calibration import Statistics
from aqtlite.flax.linen.frozen_kernel import FrozenKernel
from aqtlite.kv_cache import KVCache, Packed
from aqtlite.program.serving import guards
from aqtlite.program.serving.frozen_record import FrozenRecord
from aqtlite.qtensor.packed_values import PackedValues
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization.preparation.smoothing import SmoothingStatistics
from aqtlite.quantization.states.fixed_scale import FixedScale
from aqtlite.quantization.states.gradient_statistics import GradientStatistics
from aqtlite.quantization.states.second_moment import SecondMoment
from aqtlite.quantization.states.stored_statistics import restored_statistics

_NODES = (
    QTensor,
    PackedValues,
    Packed,
    KVCache,
    FixedScale,
    Statistics,
    SecondMoment,
    GradientStatistics,
    SmoothingStatistics,
)


def _children(node: Any) -> dict[str, Any]:
    """The fields of a node that hold arrays, or would if they were not None."""
    found, _ = jax.tree_util.tree_flatten_with_path(node, lambda x: x is not node)
    return {path[0].name: child for path, child in found}


def _to_state(node: Any) -> dict[str, Any]:
    return {
        name: serialization.to_state_dict(x)
        for name, x in _children(node).items()
        if jax.tree.leaves(x)
    }


def _from_state(target: Any, state: dict[str, Any]) -> Any:
    found = restored_statistics(state)
    if isinstance(found, type(target)):
        state = vars(found)
    children = _children(target)
    missing = [
        name
        for name, child in children.items()
        if jax.tree.leaves(child) and state.get(name) is None
    ]
    if missing:
        raise ValueError(
            f"{serialization.current_path()}: what was stored as a "
            f"{type(target).__name__} lacks {missing}, which the target has; restore "
            "into a target of the config that was stored"
        )
    arrays = {
        name: serialization.from_state_dict(child, state[name], name=name)
        for name, child in children.items()
        if name in state
    }
    return dataclasses.replace(target, **arrays)


def register() -> None:
    """Registers the nodes of serving variables with `flax.serialization`."""
    for node in _NODES:
        serialization.register_serialization_state(node, _to_state, _from_state)
    serialization.register_serialization_state(
        FrozenKernel, lambda node: {}, lambda target, state: target
    )
    serialization.register_serialization_state(
        FrozenRecord, lambda node: dict(node.recipe or {}), _checked_site
    )


def _checked_site(target: FrozenRecord, state: dict[str, Any]) -> FrozenRecord:
    guards.check_recipe(target, state)
    return target
