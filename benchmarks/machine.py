"""The machine and the versions that figures are from."""

import importlib.metadata
import os
import platform
from typing import Any

import jax

from benchmarks import floor

PACKAGES = ("jax", "jaxlib", "flax", "aqtp", "qwix", "aqtlite")


def describe() -> dict[str, Any]:
    """Plain data; the bandwidth is the one that floors are computed with."""
    return {
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "backend": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "bytes_per_second": floor.bandwidth(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }
