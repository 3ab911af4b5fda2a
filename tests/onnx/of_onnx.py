"""Runs the tests of operators that ONNX ships: `python -m tests.onnx.of_onnx`.

Prints how many nodes compute what they should, and why others do not. Inputs of
integers are known in tracing; where that is not enough, all inputs are.
"""

import collections
import sys

import jax
import numpy as np
from onnx import TensorProto, numpy_helper
from onnx.backend.test.case import node

import aqtlite.onnx


def array(value):
    if isinstance(value, TensorProto):
        return numpy_helper.to_array(value)
    return value if isinstance(value, list) else np.asarray(value)


def check(model, inputs, outputs, known):
    """Evaluates a network, with some inputs as constants, and compares."""
    function, parameters = aqtlite.onnx.load(
        model, constants={name: x for name, x in inputs.items() if known(x)}
    )
    names = [one.name for one in function.inputs]
    results = function(parameters, **{name: inputs[name] for name in names})
    results = results if isinstance(results, tuple) else (results,)
    for result, expected in zip(results, outputs, strict=True):
        assert result.shape == expected.shape
        assert result.dtype == jax.dtypes.canonicalize_dtype(expected.dtype)
        is_half = expected.dtype.name in ("float16", "bfloat16")
        np.testing.assert_allclose(
            *(np.asarray(x, np.float64) for x in (result, expected)),
            rtol=1e-3,
            atol=1e-2 if is_half else 1e-4,
        )


def outcome(model, inputs, outputs):
    """ "equal", or the last line of an error."""
    for known in (lambda x: x.dtype.kind in "iub", lambda x: True):
        try:
            check(model, inputs, outputs, known)
            return "equal"
        except (ArithmeticError, AssertionError, TypeError, ValueError) as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            text = lines[0][:150] if lines else type(error).__name__
    return text


def main(pattern=""):
    found = collections.Counter()
    for one in node.collect_testcases(None):
        if pattern.lower() not in one.name:
            continue
        for inputs, outputs in one.data_sets:
            inputs, outputs = (list(map(array, xs)) for xs in (inputs, outputs))
            if any(isinstance(x, list) for x in (*inputs, *outputs)):
                found["sequence"] += 1
                continue
            names = [value.name for value in one.model.graph.input]
            text = outcome(one.model, dict(zip(names, inputs, strict=True)), outputs)
            unknown = "does not know" in text
            found[
                "unknown" if unknown else "equal" if text == "equal" else "other"
            ] += 1
            if text != "equal" and not unknown:
                print(f"{one.name}: {text}")
    print(", ".join(f"{count} {name}" for name, count in found.most_common()))


if __name__ == "__main__":
    main(*sys.argv[1:])
