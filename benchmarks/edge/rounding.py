"""Integers of onnxruntime beside those of training with the roundings.

    python -m benchmarks.edge.rounding [--seeds N ...] [--models NAME ...]

Trains the models of `benchmarks.edge` on the digits, exports each to ONNX in integers,
and compares the outputs for the test images with `edge.fake_quantize` of
``kernels=None``: the largest difference in quanta, the share of outputs that differ,
and the accuracies of the float model, of training's roundings and of the file.
"""

import argparse
import pathlib
import tempfile
from typing import Any

import jax
import numpy as np
import onnxruntime

from aqtlite import edge
from aqtlite.edge.report import Tensor
from benchmarks import digits
from benchmarks.edge.models import MODELS
from benchmarks.edge.training import train


def measure(name: str, seed: int, epochs: int = 20) -> str:
    """Trains a model, and returns its figures as a line."""
    (images, labels), (held, wanted) = digits.load()
    trained = train(MODELS[name], images, labels, epochs, seed)
    given = trained.model, trained.variables
    ranges = edge.calibrate(*given, [images])
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.onnx"
        report = edge.export(*given, ranges, held, path)
        session = onnxruntime.InferenceSession(path)
    (q,) = session.run(None, {"input": _on_grid(held, report.inputs[0])})
    rounded = edge.fake_quantize(trained.model, ranges, kernels=None)
    floats = np.asarray(jax.jit(rounded)(trained.variables, held))
    expected = _on_grid(floats, report.outputs[0])
    off = np.abs(q.astype(int) - expected)
    accuracies = (
        f"{(np.asarray(one).argmax(-1) == wanted).mean():.1%}"
        for one in (trained(held), floats, q)
    )
    return (
        f"{name}, seed {seed}: {off.max()} quanta, {(off > 0).mean():.2%} of the "
        f"outputs; accuracies {', '.join(accuracies)}"
    )


def _on_grid(x: Any, tensor: Tensor) -> np.ndarray:
    q = np.rint(np.asarray(x) / tensor.scale) + tensor.zero_point
    return np.clip(q, -128, 127).astype(np.int8)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    for name in options.models:
        for seed in options.seeds:
            print(measure(name, seed), flush=True)


if __name__ == "__main__":
    main()
