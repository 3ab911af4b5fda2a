"""Serialization of serving variables by `flax.serialization` (``to_bytes``, msgpack).

Arrays are stored; static nodes (a call site, the shape of a frozen kernel) come from
the target that `flax.serialization.from_bytes` takes, as they do with Orbax.
"""

import dataclasses
from typing import Any

from flax import serialization

from aqtlite.flax.linen.frozen_kernel import FrozenKernel
from aqtlite.qtensor import QTensor
from aqtlite.serving.call_site import CallSite

_ARRAYS = ("qvalue", "scale", "zero_point", "unrounded", "sums")


def _qtensor_to_state(q: QTensor) -> dict[str, Any]:
    arrays = {name: getattr(q, name) for name in _ARRAYS}
    return {
        name: serialization.to_state_dict(x)
        for name, x in arrays.items()
        if x is not None
    }


def _qtensor_from_state(target: QTensor, state: dict[str, Any]) -> QTensor:
    arrays = {
        name: serialization.from_state_dict(getattr(target, name), state[name])
        for name in _ARRAYS
        if name in state
    }
    return dataclasses.replace(target, **arrays)


def register() -> None:
    """Registers the nodes of serving variables with `flax.serialization`."""
    serialization.register_serialization_state(
        QTensor, _qtensor_to_state, _qtensor_from_state
    )
    for static in (FrozenKernel, CallSite):
        serialization.register_serialization_state(
            static, lambda node: {}, lambda target, state: target
        )
