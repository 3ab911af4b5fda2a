"""Peak memory of calibration and conversion, each in a process of its own.

    python -m benchmarks.workloads.peaks NAME LAYERS WIDTH ROWS

Prints by how many bytes the resident memory of the process grows while the float32
weights of a stack of square layers are calibrated or converted. Linux only.
"""

import functools
import gc
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from aqtlite import config
from aqtlite.flax import AqtDotGeneral, calibrate, convert, quantize_model
from benchmarks.harness import contestants
from benchmarks.harness.contestants import AQTLITE, AQTP, FLOAT32, RNG_STREAM
from benchmarks.harness.peers import aqt_flax, qwix

Model = Callable[..., nn.Module]
"""Makes the layers with a ``dot_general``."""

RULES = f"{AQTLITE}, rules"
CONVERT = {FLOAT32: "forward", AQTP: "aqtp", "qwix": "qwix"} | {
    AQTLITE: "convert",
    RULES: "convert by rules",
}
"""What each contestant runs; float32 a forward pass."""

CALIBRATE = {
    FLOAT32: "forward",
    AQTLITE: "calibrate",
    RULES: "calibrate by rules",
}


def grown(name: str, layers: int, width: int, rows: int) -> int:
    """Growth of the resident memory of a process, in bytes."""
    sizes = (str(size) for size in (layers, width, rows))
    command = [sys.executable, "-m", "benchmarks.workloads.peaks", name, *sizes]
    # Memory that glibc keeps (`benchmarks.harness.allocator`) would hide growth.
    env = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=env
    )
    return int(done.stdout.split()[-1])


def main(name: str, layers: int, width: int, rows: int) -> None:
    """Initialize the layers, run one of `TASKS`, and print the growth."""

    def model(**how: Any) -> nn.Module:
        return nn.Sequential([nn.Dense(width, **how) for _ in range(layers)])

    x = jnp.ones((rows, width))
    variables = jax.jit(model().init)(jax.random.key(0), x)
    jax.block_until_ready(variables)
    gc.collect()
    before = _status("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # Resets the peak.
    jax.block_until_ready(TASKS[name](model, variables, x))
    print(max(0, _status("VmHWM") - before))


def _status(field: str) -> int:
    """A field of the process's status, in bytes."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if field in line)


def _forward(model: Model, variables: Any, x: jax.Array) -> Any:
    return jax.jit(model().apply)(variables, x)


def _aqtp(model: Model, variables: Any, x: jax.Array) -> Any:
    dot_general = aqt_flax.AqtDotGeneral(
        contestants.aqtp_config(),
        rhs_quant_mode=aqt_flax.QuantMode.CONVERT,
        rhs_freeze_mode=aqt_flax.FreezerMode.CALIBRATION_AND_VALUE,
    )
    converting = model(dot_general=dot_general)
    rngs = {RNG_STREAM: jax.random.key(0)}
    return converting.apply(variables, x, rngs=rngs, mutable=["aqt"])[1]


def _qwix(model: Model, variables: Any, x: jax.Array) -> Any:
    quantize = functools.partial(qwix.quantize, qtype="int8", channelwise_axes=(1,))
    return [quantize(layer["kernel"]) for layer in variables["params"].values()]


def _quantized(
    run: Callable[..., Any],
    cfg: config.DotGeneral,
    by_rules: bool,
    model: Model,
    variables: Any,
    x: jax.Array,
) -> Any:
    if by_rules:
        return run(quantize_model(model(), cfg), variables, x)
    return run(model(dot_general=AqtDotGeneral(cfg)), variables, x)


def _calibrate(model: nn.Module, variables: Any, x: jax.Array) -> Any:
    return calibrate(model, variables, [x])


_DYNAMIC = contestants.aqtlite_config()
_STATIC = config.static_int8()

TASKS: dict[str, Callable[[Model, Any, jax.Array], Any]] = {
    "forward": _forward,
    "aqtp": _aqtp,
    "qwix": _qwix,
    "convert": functools.partial(_quantized, convert, _DYNAMIC, False),
    "convert by rules": functools.partial(_quantized, convert, _DYNAMIC, True),
    "calibrate": functools.partial(_quantized, _calibrate, _STATIC, False),
    "calibrate by rules": functools.partial(_quantized, _calibrate, _STATIC, True),
}


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
