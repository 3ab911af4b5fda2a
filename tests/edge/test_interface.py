"""Inputs and outputs of files: integers, pixels, and floats."""

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pytest

from aqtlite import edge
from tests.edge import models

pytestmark = pytest.mark.code("quick")

_MEAN, _STD = np.float32([123.7, 116.3, 103.5]), np.float32([58.4, 57.1, 57.4])


def _run(path, *inputs):
    if path.suffix == ".tflite":
        return models.run(path, *inputs)
    session = onnxruntime.InferenceSession(path)
    names = [one.name for one in session.get_inputs()]
    return session.run(None, dict(zip(names, map(np.asarray, inputs), strict=True)))


def _floats(q, tensor):
    return (q.astype(np.float32) - tensor.zero_point) * tensor.scale


@pytest.fixture(scope="module")
def net():
    model, x = models.ConvNet(), abs(models.normal((4, 8, 8, 1)))
    variables = models.trained(model, x)
    return model, variables, x, edge.calibrate(model, variables, [x])


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".tflite", ".onnx"])
def test_uint8_is_int8_and_128(tmp_path, net, suffix):
    model, variables, x, ranges = net
    found = {}
    for interface in ("integer", "uint8"):
        path = tmp_path / f"{interface}{suffix}"
        report = edge.export(model, variables, ranges, x, path, interface=interface)
        (given,), (taken,) = report.inputs, report.outputs
        q = np.clip(np.rint(x / given.scale) + given.zero_point, -128, 255)
        (y,) = _run(path, q.astype(given.dtype))
        assert (given.dtype, taken.dtype) == (y.dtype, y.dtype)
        found[interface] = y.astype(int), taken.zero_point
    assert y.dtype == np.uint8
    assert found["uint8"][1] == found["integer"][1] + 128
    np.testing.assert_array_equal(found["uint8"][0], found["integer"][0] + 128)
    # A file of uint8 for onnxruntime converts nothing at its ends.
    if suffix == ".onnx":
        assert report.float_operators == ()


@pytest.mark.parametrize("suffix", [".tflite", ".onnx"])
def test_pixels_with_a_mean_and_a_deviation_for_each_channel(tmp_path, suffix):
    def model(params, pixels):
        x = (pixels - _MEAN) / _STD
        y = jax.lax.conv_general_dilated(
            x, params, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jax.nn.relu(y)

    params = models.normal((3, 3, 3, 4)) / 5
    rng = np.random.default_rng(1)
    pixels = rng.integers(0, 256, (2, 6, 6, 3), np.uint8)
    ranges = edge.calibrate(model, params, [pixels.astype(np.float32)])
    ranges = ranges.replace({"input": (0, 255)})
    path, sample = tmp_path / f"pixels{suffix}", jax.ShapeDtypeStruct(pixels.shape, "f")
    report = edge.export(model, params, ranges, sample, path, interface="uint8")
    (given,), (taken,) = report.inputs, report.outputs
    assert given.dtype == "uint8"
    assert (given.scale, given.zero_point) == (1, 0)
    expected = model(params, jnp.asarray(pixels, "float32"))
    (found,) = _run(path, pixels)
    assert found.dtype == np.uint8
    error = np.linalg.norm(_floats(found, taken) - expected)
    assert error < 0.03 * np.linalg.norm(expected)


@pytest.mark.parametrize("suffix", [".tflite", ".onnx"])
def test_pixels_of_files_without_ranges(tmp_path, suffix):
    def model(w, pixels):
        return ((pixels.astype("float32") - _MEAN) / _STD) @ w

    w, path = models.normal((3, 4)), tmp_path / f"pixels{suffix}"
    pixels = np.random.default_rng(1).integers(0, 256, (5, 3), np.uint8)
    report = edge.export(model, w, None, pixels, path)
    assert [one.dtype for one in report.inputs] == ["uint8"]
    (found,) = _run(path, pixels)
    np.testing.assert_allclose(found, model(w, jnp.asarray(pixels)), atol=1e-5)


@pytest.mark.parametrize("interface", ["integer", "uint8"])
def test_integers_without_ranges_are_refused(tmp_path, net, interface):
    model, variables, x, ranges = net
    path, rules = tmp_path / "m.tflite", [edge.Rule(is_float=True)]
    for given, found in ((None, ()), (ranges, rules)):
        with pytest.raises(ValueError, match=f"interface='{interface}' needs ranges"):
            edge.export(model, variables, given, x, path, found, interface=interface)
    assert not path.exists()
