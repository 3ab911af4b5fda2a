"""ONNX files whose products are right on any processor, and those for some.

On x86-64 without VNNI, onnxruntime adds two products of uint8 and int8 in 16 bits,
which saturate. Tests do not see it on a processor with VNNI, so they look at the file.
"""

import flax.linen as nn
import jax
import numpy as np
import onnx
import onnxruntime
import pytest

from aqtlite import config, edge
from aqtlite.flax import convert, quantize_model
from aqtlite.onnx import load
from tests.edge import models
from tests.edge.onnx import runs
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

IMAGE, ROWS = models.normal((1, 5, 5, 4)), models.normal((4, 16))
MODELS = {
    "dense": (nn.Dense(8), ROWS, "int8"),
    "conv": (nn.Conv(8, (3, 3)), IMAGE, "int8"),
    "depthwise": (nn.Conv(4, (3, 3), feature_group_count=4), IMAGE, "int8"),
    "int4": (nn.Dense(8), ROWS, "int4"),
}


def exported(name, path, processors):
    """A report of a static file, and what the file gives, as integers."""
    model, x, weights = MODELS[name]
    variables, rules = init(model, x), [edge.Rule(weights=weights)]
    ranges = edge.calibrate(model, variables, [x], rules)
    report = edge.export(
        model, variables, ranges, x, path, rules, processors=processors
    )
    fake = edge.fake_quantize(model, ranges, rules, kernels=None)
    (output,) = report.outputs
    expected = runs.on_grid(jax.jit(fake)(variables, x), output)
    return report, expected


def weights_of(path):
    """The constants of 8 bits in a file that are multiplied, as integers."""
    graph = onnx.load(path).graph
    return [
        onnx.numpy_helper.to_array(one)
        for one in graph.initializer
        if one.data_type in (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)
        and len(one.dims) > 1
    ]


@pytest.mark.parametrize("name", MODELS)
def test_files_are_right_on_any_processor(name, tmp_path):
    path = tmp_path / "file.onnx"
    report, expected = exported(name, path, "any")
    assert report.processors == "any"
    for one in weights_of(path):
        assert one.dtype == np.uint8 or np.abs(one.astype(int)).max() <= 64
    found = runs.execute(path, report, MODELS[name][1:2])
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["dense", "conv"])
def test_files_for_processors_with_vnni(name, tmp_path):
    by_default, path = tmp_path / "default.onnx", tmp_path / "file.onnx"
    exported(name, by_default, "any")
    report, _ = exported(name, path, "vnni")
    (one,), (other,) = weights_of(by_default), weights_of(path)
    assert (one.dtype, other.dtype) == (np.uint8, np.int8)
    np.testing.assert_array_equal(one.astype(int) - 128, other)
    assert report.processors == report.to_dict()["processors"] == "vnni"
    assert "wrong on x86-64 without VNNI" in str(report)


@pytest.mark.parametrize("bits", [4, 7, 8])
def test_weights_of_a_converted_model(bits, tmp_path):
    model, path = nn.Dense(8), tmp_path / "file.onnx"
    cfg = config.update(
        config.qat(8), {"fwd.rhs.numerics": config.qat(bits).fwd.rhs.numerics}
    )
    quantized = quantize_model(model, cfg)
    serving = convert(quantized, init(model, ROWS), ROWS)
    report = edge.export(quantized, serving, None, ROWS, path)
    assert "dynamic" in report.contractions[0].asked
    assert {one.dtype for one in weights_of(path)} <= {
        np.dtype(np.uint8 if bits == 8 else np.int8)
    }
    # onnxruntime's own kernels for int8 by int8 do not saturate.
    function, params = load(path)
    expected = function(params, ROWS)
    found = runs.execute(path, report, (ROWS,))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_sessions_that_make_weights_unsigned(tmp_path):
    """They change the zero points of weights, which therefore have to be there."""
    model, path = nn.Dense(8), tmp_path / "file.onnx"
    quantized = quantize_model(model, config.weight_only(8))
    serving = convert(quantized, init(model, ROWS), ROWS)
    report = edge.export(quantized, serving, None, ROWS, path)
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")
    found = runs.execute(path, report, (ROWS,), options)
    np.testing.assert_allclose(found, runs.execute(path, report, (ROWS,)), rtol=1e-4)


@pytest.mark.parametrize(
    ("processors", "suffix", "match"),
    [
        ("avx2", "onnx", 'must be "any" or "vnni"'),
        ("vnni", "tflite", "LiteRT's results are right on all processors"),
    ],
)
def test_refused(processors, suffix, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        exported("dense", tmp_path / f"file.{suffix}", processors)
