"""Latency of files with integers in a runtime, against the best float file.

    python -m benchmarks.edge.latency [--suffix .onnx|.tflite] [--rounds N]
        [--models NAME ...]

All files are written by `aqtlite.edge`; the float file has batch normalizations folded
into convolutions and relus fused, as with other exporters. The files run in turns, in
one thread; the figures are the best and the median processor time over all rounds.
"""

import argparse
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import onnxruntime
from ai_edge_litert import interpreter

import aqtlite
from aqtlite import config, edge, flax


class Mlp(nn.Module):
    """Three dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (2048, 2048):
            x = nn.relu(nn.Dense(features)(x))
        return nn.Dense(10)(x)


class Cnn(nn.Module):
    """Five convolutions, each with batch normalization."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features, stride in ((32, 1), (32, 2), (64, 1), (64, 2), (128, 2)):
            x = nn.Conv(features, (3, 3), strides=stride)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=True)(x))
        return nn.Dense(10)(x.mean((1, 2)))


class Depthwise(nn.Module):
    """Depthwise and pointwise convolutions with residuals, as in MobileNet."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(16, (3, 3), strides=2, use_bias=False)(x)
        x = nn.relu6(nn.BatchNorm(use_running_average=True)(x))
        for features, stride in ((32, 1), (64, 2), (64, 1), (128, 2), (128, 1)):
            channels = x.shape[-1]
            y = nn.Conv(
                channels,
                (3, 3),
                strides=stride,
                feature_group_count=channels,
                use_bias=False,
            )(x)
            y = nn.relu6(nn.BatchNorm(use_running_average=True)(y))
            y = nn.Conv(features, (1, 1), use_bias=False)(y)
            y = nn.BatchNorm(use_running_average=True)(y)
            x = x + y if x.shape == y.shape else y
        return nn.Dense(10)(x.mean((1, 2)))


class Encoder(nn.Module):
    """Two layers of a transformer encoder."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(4)(y, y)
            y = nn.gelu(nn.Dense(1024)(nn.LayerNorm()(x)))
            x = x + nn.Dense(256)(y)
        return nn.Dense(10)(nn.LayerNorm()(x).mean(1))


MODELS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "MLP": (Mlp(), (16, 1024)),
    "CNN": (Cnn(), (1, 64, 64, 3)),
    "depthwise": (Depthwise(), (1, 96, 96, 3)),
    "encoder": (Encoder(), (1, 64, 256)),
}

INTEGERS = {
    "static int8": [],
    "static int4": [edge.Rule(weights="int4")],
}
"""Rules of the full-integer files."""

BLOCKS = config.update(
    config.weight_only(4), {"fwd.rhs.blocks": config.Blocks(size=32, fit=True)}
)
CONFIGS = {
    "dynamic int8": config.qat(8),
    "dynamic w4a8": config.w4a8(),
    "weights int8": config.weight_only(8),
    "weights int4": config.weight_only(4),
    "weights int4 in blocks": BLOCKS,
}
"""Configs of the weights of files with float activations."""

Runner = Callable[[np.ndarray], np.ndarray]


def onnx_runner(path: pathlib.Path) -> Runner:
    """A loaded file that runs in one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    providers = ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(path, options, providers=providers)
    name = session.get_inputs()[0].name
    return lambda x: session.run(None, {name: x})[0]


def litert_runner(path: pathlib.Path) -> Runner:
    """A loaded file that runs in one thread."""
    run = interpreter.Interpreter(str(path), num_threads=1).get_signature_runner()
    return lambda x: run(input=x)["output"]


# The times in figures.md are of a processor with VNNI.
OPTIONS: dict[str, Any] = {".onnx": {"processors": "vnni"}, ".tflite": {}}
RUNNERS = {".onnx": onnx_runner, ".tflite": litert_runner}


def write(name: str, x: jax.Array, folder: pathlib.Path, suffix: str) -> dict[str, Any]:
    """Writes the files of a model; returns their paths by kind."""
    model, _ = MODELS[name]
    variables = jax.jit(model.init)(jax.random.key(0), x)
    ranges = edge.calibrate(model, variables, [x])
    kinds = "float", *INTEGERS, *CONFIGS
    paths = {one: folder / f"{one.replace(' ', '_')}{suffix}" for one in kinds}
    edge.export(model, variables, None, x, paths["float"])
    for kind, rules in INTEGERS.items():
        given = model, variables, ranges, x, paths[kind], rules
        edge.export(*given, interface="float", **OPTIONS[suffix])
    for kind, cfg in CONFIGS.items():
        if kind == "weights int4 in blocks" and suffix == ".tflite":
            del paths[kind]
            continue
        rules = [aqtlite.Rule(operands="weight", cfg=cfg)]
        quantized = flax.quantize_model(model, rules)
        serving = flax.convert(quantized, variables, x)
        edge.export(quantized, serving, None, x, paths[kind], **OPTIONS[suffix])
    return paths


def measure(name: str, rounds: int, suffix: str) -> None:
    """Prints sizes, signal-to-noise ratios and latencies of the files of a model."""
    x = jax.random.normal(jax.random.key(1), MODELS[name][1])
    given = np.asarray(x)
    with tempfile.TemporaryDirectory() as folder:
        paths = write(name, x, pathlib.Path(folder), suffix)
        sizes = {kind: path.stat().st_size for kind, path in paths.items()}
        runners = {kind: RUNNERS[suffix](path) for kind, path in paths.items()}
    outputs = {
        kind: np.asarray(run(given), np.float64) for kind, run in runners.items()
    }
    times: dict[str, list[float]] = {kind: [] for kind in runners}
    for _ in range(rounds):
        for kind, run in runners.items():
            start = time.process_time()
            run(given)
            times[kind].append(1e3 * (time.process_time() - start))
    exact = outputs["float"]
    for kind, found in times.items():
        noise = np.mean(np.square(outputs[kind] - exact))
        ratio = np.mean(np.square(exact)) / max(noise, 1e-30)
        print(
            f"{name} {kind}: {sizes[kind] / sizes['float']:.3f} of the bytes, "
            f"{10 * np.log10(ratio):.1f} dB, "
            f"{min(found):.3f} ms at best, {statistics.median(found):.3f} ms median; "
            f"float takes {min(times['float']) / min(found):.2f} times as long",
            flush=True,
        )


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--suffix", choices=RUNNERS, default=".onnx")
    options = parser.parse_args()
    for name in options.models:
        measure(name, options.rounds, options.suffix)


if __name__ == "__main__":
    main()
