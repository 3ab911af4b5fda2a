"""Serving of four-bit weights by format and by rows, against float32 and onnxruntime.

    python -m benchmarks --only int4

Layers with frozen weights, compiled by `aqtlite.compile_serving`, beside int8, layers
in `jax.jit` (one that `convert` packed, and those of floats of four bits), and the
layers of onnxruntime, if it is installed.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import aqtlite
from aqtlite import config, numerics
from aqtlite.flax import AqtDotGeneral, convert
from benchmarks.harness import figures, mlas, timing
from benchmarks.harness.contestants import FLOAT32
from benchmarks.harness.figures import Figure
from benchmarks.harness.options import Options

SIZES = tuple((size, size) for size in (128, 512, 1024, 4096))
ROWS = (1, 8, 64)
QUICK_SIZES, QUICK_ROWS = ((128, 64),), (1,)


def in_blocks(cfg: config.DotGeneral, size: int) -> config.DotGeneral:
    """A config with a scale for each block of weights."""
    return config.update(cfg, {"fwd.rhs.blocks": config.Blocks(size=size)})


WEIGHT_ONLY = config.weight_only(4)
CONFIGS = {
    "int8": config.fully_quantized(),
    "weight_only(4)": WEIGHT_ONLY,
    "weight_only(4), blocks of 128": in_blocks(WEIGHT_ONLY, 128),
    "weight_only(4), blocks of 32": in_blocks(WEIGHT_ONLY, 32),
    "w4a8": config.w4a8(),
    "w4a8, blocks of 128": in_blocks(config.w4a8(), 128),
    "w4a8, blocks of 32": in_blocks(config.w4a8(), 32),
    "nf4": config.update(WEIGHT_ONLY, {"fwd.rhs.numerics": numerics.NormalFloat()}),
    "mxfp4": config.mxfp4(),
    "weights of mxfp4": config.DotGeneral(
        fwd=config.DotGeneralRaw(rhs=config.mxfp4().fwd.rhs)
    ),
}
PACKED = "w4a8, blocks of 32"
JITTED = "nf4", "mxfp4", "weights of mxfp4"


def run(options: Options, report: Callable[[str], None]) -> list[Figure]:
    """Layers of all sizes with every number of rows."""
    sizes = QUICK_SIZES if options.quick else SIZES
    rows = QUICK_ROWS if options.quick else ROWS
    measured = []
    for features, columns in sizes:
        layers = served_layers(features, columns)
        for count in rows:
            report(f"{features} x {columns} weights, {count} rows")
            x = jax.random.normal(jax.random.key(1), (count, features))
            programs = {name: layer(x) for name, layer in layers.items()}
            spreads = timing.alternate(
                programs, repeats=4 * options.repeats, seconds=options.seconds
            )
            case = {"weights": f"{features} x {columns}", "rows": count}
            measured += figures.compare("int4", case, spreads)
    return measured


def served_layers(
    features: int, columns: int
) -> dict[str, Callable[[jax.Array], Callable[[], Any]]]:
    """By contestant, a function from an input to the call of a layer with it."""
    x, plain = jnp.ones((1, features)), nn.Dense(columns)
    variables = plain.init(jax.random.key(0), x)
    layers = {FLOAT32: functools.partial(_compiled, plain, variables)}
    for name, cfg in CONFIGS.items():
        model = plain.clone(dot_general=AqtDotGeneral(cfg))
        serving = convert(model, variables, x)
        layers[name] = functools.partial(_compiled, model, serving)
        if name == PACKED:
            packed = convert(model, variables, x, packed="cpu")
            layers[f"{name}, packed"] = functools.partial(_jitted, model, packed)
        if name in JITTED:
            layers[f"{name}, jax.jit"] = functools.partial(_jitted, model, serving)
    if mlas.is_installed():
        weights = jax.tree.map(np.asarray, variables["params"])
        theirs = mlas.served_layers(weights["kernel"], weights["bias"])
        theirs[mlas.INT4] = mlas.served_int4_layer(weights["kernel"], weights["bias"])
        for name, call in theirs.items():
            layers[name] = functools.partial(_calling, call)
    return layers


def _compiled(model: nn.Module, variables: Any, x: jax.Array) -> Callable[[], Any]:
    return functools.partial(aqtlite.compile_serving(model.apply, variables, x), x)


def _jitted(model: nn.Module, variables: Any, x: jax.Array) -> Callable[[], Any]:
    return functools.partial(jax.jit(model.apply), variables, x)


def _calling(call: Callable[[np.ndarray], Any], x: jax.Array) -> Callable[[], Any]:
    return functools.partial(call, np.asarray(x))
