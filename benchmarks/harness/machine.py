"""Hardware and package versions behind the figures."""

import importlib.metadata
import os
import pathlib
import platform
from typing import Any

import jax

from benchmarks.harness import floor

PACKAGES = ("jax", "jaxlib", "flax", "aqtp", "qwix", "aqtlite")

FEATURES = ("avx512_vnni", "avx_vnni", "amx_int8")
"""Processor flags that decide which integer kernels XLA:CPU has."""


def describe() -> dict[str, Any]:
    """The machine as plain data; the bandwidth is the one that floors are based on."""
    name, features = _processor()
    return {
        "platform": platform.platform(),
        "processor": name,
        "features": features,
        "cores": os.cpu_count(),
        "backend": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "bytes_per_second": floor.bandwidth(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def _processor() -> tuple[str, list[str]]:
    """Model name, and its flags of `FEATURES`; Linux alone tells the flags."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine(), []
    fields = {
        key.strip(): value.strip()
        for key, separator, value in (line.partition(":") for line in lines)
        if separator
    }
    flags = fields.get("flags", "").split()
    name = fields.get("model name", platform.machine())
    return name, [feature for feature in FEATURES if feature in flags]
