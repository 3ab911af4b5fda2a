"""Latency of integer ONNX models in onnxruntime, against the best float model.

    python -m benchmarks.edge.onnx_latency [--rounds N] [--models NAME ...]

Both files are written by `aqtlite.edge`; the float file has batch normalizations folded
into convolutions and relus fused, as with other exporters. The files run in turns, in
one thread; the figures are the best and the median processor time over all rounds.
"""

import argparse
import pathlib
import statistics
import tempfile
import time

import flax.linen as nn
import jax
import numpy as np
import onnxruntime

from aqtlite import edge


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

FILES = {
    "float": [edge.Rule(is_float=True)],
    "int8": [],
    "int4": [edge.Rule(weights="int4")],
}


def session(path: pathlib.Path) -> onnxruntime.InferenceSession:
    """A loaded file that runs in one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    providers = ["CPUExecutionProvider"]
    return onnxruntime.InferenceSession(path, options, providers=providers)


def measure(name: str, rounds: int) -> None:
    """Prints the sizes and latencies of the files of a model."""
    model, shape = MODELS[name]
    x = jax.random.normal(jax.random.key(1), shape)
    variables = jax.jit(model.init)(jax.random.key(0), x)
    ranges = edge.calibrate(model, variables, [x])
    sessions, sizes = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for kind, rules in FILES.items():
            path = pathlib.Path(folder, f"{kind}.onnx")
            edge.export(model, variables, ranges, x, path, rules, interface="float")
            sessions[kind], sizes[kind] = session(path), path.stat().st_size
    given = {sessions["float"].get_inputs()[0].name: np.asarray(x)}
    times: dict[str, list[float]] = {kind: [] for kind in FILES}
    for _ in range(rounds):
        for kind, one in sessions.items():
            start = time.process_time()
            one.run(None, given)
            times[kind].append(1e3 * (time.process_time() - start))
    for kind, found in times.items():
        print(
            f"{name} {kind}: {sizes[kind] / sizes['float']:.3f} of the bytes, "
            f"{min(found):.3f} ms at best, {statistics.median(found):.3f} ms median; "
            f"float takes {min(times['float']) / min(found):.2f} times as long",
            flush=True,
        )


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    for name in options.models:
        measure(name, options.rounds)


if __name__ == "__main__":
    main()
