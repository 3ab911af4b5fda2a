"""What files compute in onnxruntime, beside what the library computes."""

import dataclasses

import jax
import numpy as np
import onnxruntime

from aqtlite import edge


@dataclasses.dataclass(frozen=True)
class Run:
    report: object
    found: np.ndarray
    """The output of the file, as integers."""

    expected: np.ndarray
    """The output of `edge.fake_quantize`, as integers."""

    @property
    def operators(self):
        """Those that onnxruntime runs, but for what rounds and scales back."""
        return [
            one.name
            for one in self.report.file.operators
            if one.name not in ("QuantizeLinear", "DequantizeLinear")
        ]

    @property
    def in_float(self):
        found = {one.name for one in self.report.float_operators}
        return sorted(found - {"DequantizeLinear", "QuantizeLinear"})

    @property
    def quanta(self):
        return np.abs(self.found - self.expected)


def run(model, variables, args, path, rules=(), interface=None):
    """Exports a model and runs the file."""
    ranges = edge.calibrate(model, variables, [args], rules)
    report = edge.export(
        model, variables, ranges, args, path, rules, interface=interface
    )
    fake = edge.fake_quantize(model, ranges, rules, kernels=None)
    floats = np.asarray(jax.jit(lambda v, *a: fake(v, *a))(variables, *args))
    (output,) = report.outputs
    found = execute(path, report, args)
    if output.scale is not None:
        return Run(report, found.astype(int), on_grid(floats, output).astype(int))
    return Run(report, found, floats)


def execute(path, report, args, options=None):
    """The only output of a file."""
    session = onnxruntime.InferenceSession(
        path, options, providers=["CPUExecutionProvider"]
    )
    given = {
        tensor.name: on_grid(x, tensor)
        for tensor, x in zip(report.inputs, args, strict=True)
    }
    (found,) = session.run(None, given)
    return found


def on_grid(x, tensor):
    """An array as an input or output of a file has it."""
    x = np.asarray(x)
    if tensor.scale is None:
        return x.astype(tensor.dtype)
    q, limits = np.rint(x / tensor.scale) + tensor.zero_point, np.iinfo(tensor.dtype)
    return np.clip(q, limits.min, limits.max).astype(tensor.dtype)
