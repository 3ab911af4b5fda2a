"""Serving variables as `flax.serialization` sees them (``to_bytes``, msgpack).

Values are stored; what is static (a site, the shape of a frozen kernel) comes from the
target that `flax.serialization.from_bytes` takes, as it does with Orbax.
"""

import dataclasses
from typing import Any

from flax import serialization

from aqtlite.flax.placeholder import FrozenKernel
from aqtlite.flax.site import Site
from aqtlite.qtensor import QTensor


def _qtensor_to_state(q: QTensor) -> dict[str, Any]:
    return {
        "qvalue": serialization.to_state_dict(q.qvalue),
        "scale": serialization.to_state_dict(q.scale),
    }


def _qtensor_from_state(target: QTensor, state: dict[str, Any]) -> QTensor:
    return dataclasses.replace(
        target,
        qvalue=serialization.from_state_dict(target.qvalue, state["qvalue"]),
        scale=serialization.from_state_dict(target.scale, state["scale"]),
    )


def register() -> None:
    """Makes `flax.serialization` know the nodes of serving variables."""
    serialization.register_serialization_state(
        QTensor, _qtensor_to_state, _qtensor_from_state
    )
    for static in (FrozenKernel, Site):
        serialization.register_serialization_state(
            static, lambda node: {}, lambda target, state: target
        )
