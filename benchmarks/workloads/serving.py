"""Serving of frozen weights, against others, and time per generated token.

    python -m benchmarks --only serving

One layer with square weights and several numbers of rows, against float and aqtp;
layers of several sizes, against onnxruntime if it is installed; and a decoding step of
the demo's transformer, in float32 and with frozen weights. "Packed" is
``convert(..., packed="cpu")``, "compiled" `aqtlite.compile_serving`, and all but that
and the decoding steps `jax.jit`.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import aqtlite
from aqtlite.flax import AqtDotGeneral, convert
from aqtlite_demo import generate
from aqtlite_demo.model import Transformer
from benchmarks.harness import contestants, figures, floor, mlas, timing
from benchmarks.harness.contestants import AQTLITE, AQTP, BFLOAT16, FLOAT32, RNG_STREAM
from benchmarks.harness.figures import BARE, Figure
from benchmarks.harness.options import Options
from benchmarks.harness.peers import aqt_flax

PACKED, COMPILED = "aqtlite, packed", "aqtlite, compiled"

Call = Callable[[], Any]

WIDTH, ROWS = 4096, (1, 2, 8, 32, 64, 128)
QUICK_WIDTH, QUICK_ROWS = 256, (1, 8)

SIZES = (
    (1, 1024, 1024),
    (1, 4096, 4096),
    (8, 1024, 1024),
    (8, 4096, 4096),
    (64, 1024, 1024),
    (64, 4096, 4096),
    (512, 1024, 4096),
)
"""Rows, features and columns of the layers that are compared with onnxruntime's."""

QUICK_SIZES = ((1, 64, 64), (8, 64, 128))

TRANSFORMER = Transformer(layers=4, width=512, heads=8, length=256)
QUICK_TRANSFORMER = Transformer(layers=2, width=64, heads=4, length=64)


def run(options: Options, report: Callable[[str], None]) -> list[Figure]:
    """The layer with every number of rows, layers of all sizes, and one token."""
    width, rows = (QUICK_WIDTH, QUICK_ROWS) if options.quick else (WIDTH, ROWS)
    layers = served_layers(width)
    measured = []
    for count in rows:
        report(f"{width} x {width} weights, {count} rows")
        case = {"program": f"layer, {width} x {width}", "rows": count}
        spreads = measure_layer(layers, width, count, options)
        measured += figures.compare("serving", case, spreads)
    if mlas.is_installed():
        for size in QUICK_SIZES if options.quick else SIZES:
            report(f"{' x '.join(map(str, size))}, beside onnxruntime")
            rows, features, columns = size
            name = f"layer, {features} x {columns}, beside onnxruntime"
            case = {"program": name, "rows": rows}
            measured += figures.compare("serving", case, measure_sizes(*size, options))
    model = QUICK_TRANSFORMER if options.quick else TRANSFORMER
    report(f"{model.layers} layers, width {model.width}, one token")
    case = {"program": f"token, {model.layers} layers, width {model.width}", "rows": 1}
    return measured + figures.compare("serving", case, measure_token(model, options))


def served_layers(width: int) -> dict[str, Callable[[jax.Array], Call]]:
    """Compiled ``x -> x @ kernel + bias`` with frozen weights, by contestant.

    The variables are arguments of the compiled function, as in a server.

    Returns:
        By name, a function from an input to the call of the layer with it.
    """
    x = jnp.ones((1, width))
    key = jax.random.key(0)
    variables = nn.Dense(width).init(key, x)

    def layer(dtype: Any = None, **how: Any) -> nn.Dense:
        return nn.Dense(width, dtype=dtype, **how)

    def aqtp(mode: aqt_flax.QuantMode) -> nn.Dense:
        dot_general = aqt_flax.AqtDotGeneral(
            contestants.aqtp_config(),
            rhs_quant_mode=mode,
            rhs_freeze_mode=aqt_flax.FreezerMode.CALIBRATION_AND_VALUE,
        )
        return layer(dot_general=dot_general)

    converting = aqtp(aqt_flax.QuantMode.CONVERT)
    _, frozen = converting.apply(variables, x, rngs={RNG_STREAM: key}, mutable=["aqt"])
    ours = converted_layer(layer(), variables)
    served = {
        FLOAT32: (layer(), variables),
        BFLOAT16: (
            layer(jnp.bfloat16),
            jax.tree.map(lambda p: p.astype(jnp.bfloat16), variables),
        ),
        # In serving, aqtp still requires the float kernel, but does not read it.
        AQTP: (aqtp(aqt_flax.QuantMode.SERVE), {**variables, **frozen}),
        AQTLITE: ours,
    }

    def jitted(model: nn.Module, variables: Any) -> Callable[[jax.Array], Call]:
        compiled = jax.jit(
            lambda variables, x: model.apply(variables, x, rngs={RNG_STREAM: key})
        )
        return lambda x: functools.partial(compiled, variables, x)

    layers = {name: jitted(*model) for name, model in served.items()}
    return layers | {COMPILED: functools.partial(compiled_layer, *ours)}


def converted_layer(plain: nn.Dense, variables: Any) -> tuple[nn.Dense, Any]:
    """A layer with frozen weights, and its serving variables."""
    ours = plain.clone(dot_general=AqtDotGeneral(contestants.aqtlite_config()))
    features = variables["params"]["kernel"].shape[0]
    return ours, convert(ours, variables, jnp.ones((1, features)))


def compiled_layer(ours: nn.Dense, serving: Any, x: jax.Array) -> Call:
    """A call of a layer that `compile_serving` compiled."""
    return functools.partial(aqtlite.compile_serving(ours.apply, serving, x), x)


def measure_layer(
    layers: dict[str, Callable[[jax.Array], Call]],
    width: int,
    rows: int,
    options: Options,
) -> dict[str, timing.Spread]:
    """Seconds per call with `rows` rows, for each contestant and the floor.

    The floor's weights are stored as int8, with the contracting axis last.
    """
    x = jax.random.normal(jax.random.key(1), (rows, width))
    inputs = {name: x for name in layers} | {BFLOAT16: x.astype(jnp.bfloat16)}
    programs = {name: layer(inputs[name]) for name, layer in layers.items()}
    dims = (((1,), (1,)), ((), ()))
    contractions = [floor.Contraction((rows, width), (width, width), dims, frozen=True)]
    programs[BARE] = floor.program(contractions)
    spreads = timing.alternate(
        programs, repeats=4 * options.repeats, seconds=options.seconds
    )
    floor.add(spreads, contractions)
    return spreads


def measure_sizes(
    rows: int, features: int, columns: int, options: Options
) -> dict[str, timing.Spread]:
    """Seconds per call of a layer, here and in onnxruntime, in float32 and in int8."""
    x = jax.random.normal(jax.random.key(1), (rows, features))
    plain = nn.Dense(columns)
    variables = plain.init(jax.random.key(0), x)
    weights = jax.tree.map(np.asarray, variables["params"])
    theirs = mlas.served_layers(weights["kernel"], weights["bias"])
    ours, serving = converted_layer(plain, variables)
    packed = convert(ours, variables, x, packed="cpu")
    programs: dict[str, Call] = {
        FLOAT32: functools.partial(jax.jit(plain.apply), variables, x),
        AQTLITE: functools.partial(jax.jit(ours.apply), serving, x),
        PACKED: functools.partial(jax.jit(ours.apply), packed, x),
        COMPILED: compiled_layer(ours, serving, x),
    }
    programs |= {
        name: functools.partial(run, np.asarray(x)) for name, run in theirs.items()
    }
    return timing.alternate(
        programs, repeats=4 * options.repeats, seconds=options.seconds
    )


def measure_token(model: Transformer, options: Options) -> dict[str, timing.Spread]:
    """Seconds per generated token, in float32 and with frozen weights."""
    tokens = jnp.zeros((1, model.length), jnp.int32)
    variables = model.init(jax.random.key(0), tokens)
    quantized = model.clone(cfg=contestants.aqtlite_config())
    programs = {
        FLOAT32: _decoding(model, variables),
        AQTLITE: _decoding(quantized, convert(quantized, variables, tokens)),
    }
    # The first, unmeasured call takes one position of the context.
    repeats = min(8 * options.repeats, model.length - 1)
    return timing.alternate(programs, repeats=repeats, seconds=options.seconds)


def _decoding(model: Transformer, variables: Any) -> Callable[[], jax.Array]:
    """A function that decodes one more token per call."""
    decoder = model.clone(decode=True)
    step = generate.decode_step(decoder, variables)
    cache, token = generate.init_cache(decoder), jnp.zeros((1, 1), jnp.int32)
    key = jax.random.key(0)

    def decode() -> jax.Array:
        nonlocal cache, token
        cache, token = step(cache, token, key)
        return token

    return decode
