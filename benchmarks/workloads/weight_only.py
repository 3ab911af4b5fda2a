"""Weight-only serving with several numbers of rows, against float32 and the peers.

    python -m benchmarks --only weight_only

One layer with square weights. int4 weights are unpacked at every call, or widened to
int8 when loaded (`aqtlite.flax.widen_int4`).
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from aqtlite import config
from aqtlite.flax import AqtDotGeneral, convert, widen_int4
from benchmarks.harness import figures, timing
from benchmarks.harness.contestants import AQTLITE, AQTP, FLOAT32, RNG_STREAM
from benchmarks.harness.figures import Figure
from benchmarks.harness.options import Options
from benchmarks.harness.peers import aqt_config, aqt_flax, qwix

QWIX = "qwix"
INT4, WIDENED = f"{AQTLITE}, int4", f"{AQTLITE}, int4 widened"

WIDTH, ROWS = 4096, (1, 2, 4, 8, 16, 64, 128, 512, 2048)
QUICK_WIDTH, QUICK_ROWS = 64, (1, 8)


def run(options: Options, report: Callable[[str], None]) -> list[Figure]:
    """The layer with every number of rows."""
    width, rows = (QUICK_WIDTH, QUICK_ROWS) if options.quick else (WIDTH, ROWS)
    layers = served_layers(width)
    measured = []
    for count in rows:
        report(f"{width} x {width} weights, {count} rows")
        x = jax.random.normal(jax.random.key(1), (count, width))
        programs: dict[str, Callable[[], Any]] = {
            name: functools.partial(layer, x) for name, layer in layers.items()
        }
        spreads = timing.alternate(
            programs, repeats=4 * options.repeats, seconds=options.seconds
        )
        case = {"weights": f"{width} x {width}", "rows": count}
        measured += figures.compare("weight_only", case, spreads)
    return measured


def served_layers(width: int) -> dict[str, Callable[[jax.Array], jax.Array]]:
    """Compiled ``x -> x @ kernel + bias`` with float x and frozen weights."""
    x, key = jnp.ones((1, width)), jax.random.key(0)
    variables = nn.Dense(width).init(key, x)

    def aqtp(mode: aqt_flax.QuantMode) -> nn.Dense:
        dot_general = aqt_flax.AqtDotGeneral(
            aqt_config.dot_general_make(None, 8),
            rhs_quant_mode=mode,
            rhs_freeze_mode=aqt_flax.FreezerMode.CALIBRATION_AND_VALUE,
        )
        return nn.Dense(width, dot_general=dot_general)

    converting = aqtp(aqt_flax.QuantMode.CONVERT)
    _, frozen = converting.apply(variables, x, rngs={RNG_STREAM: key}, mutable=["aqt"])
    int8, int4 = (
        nn.Dense(width, dot_general=AqtDotGeneral(config.weight_only(bits)))
        for bits in (8, 4)
    )
    packed = convert(int4, variables, x)
    served = {
        FLOAT32: _layer(nn.Dense(width), variables),
        AQTP: _layer(aqtp(aqt_flax.QuantMode.SERVE), {**variables, **frozen}),
        QWIX: _qwix_layer(variables["params"]),
        AQTLITE: _layer(int8, convert(int8, variables, x)),
        INT4: _layer(int4, packed),
        WIDENED: _layer(int4, widen_int4(packed)),
    }
    return served


def _layer(model: nn.Module, variables: Any) -> Callable[[jax.Array], jax.Array]:
    key = jax.random.key(0)
    compiled = jax.jit(
        lambda variables, x: model.apply(variables, x, rngs={RNG_STREAM: key})
    )
    return functools.partial(compiled, variables)


def _qwix_layer(params: Any) -> Callable[[jax.Array], jax.Array]:
    kernel = qwix.quantize(params["kernel"], "int8", channelwise_axes=(1,))

    @jax.jit
    def layer(kernel: Any, bias: jax.Array, x: jax.Array) -> jax.Array:
        return qwix.dot_general(x, kernel, (((1,), (0,)), ((), ()))) + bias

    return functools.partial(layer, kernel, params["bias"])
