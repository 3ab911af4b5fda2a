"""Hardware and package versions behind the figures."""

import importlib.metadata
import os
import pathlib
import platform
from typing import Any

import jax

from benchmarks.harness import floor, peers

PACKAGES = ("jax", "jaxlib", "flax", *peers.PACKAGES, "aqtlite")

FEATURES = ("avx512_vnni", "avx_vnni", "amx_int8")
"""Processor flags that determine XLA:CPU's integer kernels."""


def describe() -> dict[str, Any]:
    """The machine as plain data, with the bandwidth used for floors."""
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
    """Model name and the flags in `FEATURES`, which are known only on Linux."""
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
