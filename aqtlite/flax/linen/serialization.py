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
from aqtlite.kv_cache import Packed
from aqtlite.program.serving import guards
from aqtlite.program.serving.frozen_record import FrozenRecord
from aqtlite.qtensor.packed_values import PackedValues
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization.preparation.smoothing import SmoothingStatistics
from aqtlite.quantization.states.fixed_scale import FixedScale
from aqtlite.quantization.states.gradient_statistics import GradientStatistics
from aqtlite.quantization.states.second_moment import SecondMoment
from aqtlite.quantization.states.stored_statistics import restored_statistics

_ARRAYS: dict[type, tuple[str, ...]] = {
    QTensor: ("qvalue", "scale", "zero_point", "unrounded", "sums"),
    PackedValues: ("panels",),
    Packed: ("packed", "scale"),
    FixedScale: ("scale", "zero_point"),
    Statistics: ("batches", "state"),
    SecondMoment: ("batches", "moment"),
    GradientStatistics: ("batches", "state", "roots", "uses"),
    SmoothingStatistics: ("batches", "lhs", "rhs", "lhs_factor", "absorbed"),
}


def _to_state(node: Any) -> dict[str, Any]:
    arrays = {name: getattr(node, name) for name in _ARRAYS[type(node)]}
    return {
        name: serialization.to_state_dict(x)
        for name, x in arrays.items()
        if jax.tree.leaves(x)
    }


def _from_state(target: Any, state: dict[str, Any]) -> Any:
    found = restored_statistics(state)
    if isinstance(found, type(target)):
        state = vars(found)
    arrays = {
        name: serialization.from_state_dict(getattr(target, name), state[name])
        for name in _ARRAYS[type(target)]
        if name in state
    }
    return dataclasses.replace(target, **arrays)


def register() -> None:
    """Registers the nodes of serving variables with `flax.serialization`."""
    for dynamic in _ARRAYS:
        serialization.register_serialization_state(dynamic, _to_state, _from_state)
    serialization.register_serialization_state(
        FrozenKernel, lambda node: {}, lambda target, state: target
    )
    serialization.register_serialization_state(
        FrozenRecord, lambda node: dict(node.recipe or {}), _checked_site
    )


def _checked_site(target: FrozenRecord, state: dict[str, Any]) -> FrozenRecord:
    guards.check_recipe(target, state)
    return target
