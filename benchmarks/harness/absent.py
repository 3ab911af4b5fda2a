"""Devices that need not be there, to compile for."""

import sys
from collections.abc import Sequence
from typing import Any


def devices(name: str, platform: str, missing: str, **options: Any) -> Sequence[Any]:
    """The devices of a topology of `jax.experimental.topologies`.

    Args:
        name: name of the topology.
        platform: "tpu" or "cuda".
        missing: what to exit with, before the reason, if there is no compiler for it.
        **options: of `jax.experimental.topologies.get_topology_desc`.
    """
    # Flags of XLA must be set before JAX reads them.
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(name, platform, **options).devices
    except (RuntimeError, NotImplementedError) as error:
        sys.exit(f"{missing}: {error}")
