"""Operators that rules leave in float get floats, and whole programs of them do."""

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pytest

from aqtlite import edge
from tests.edge import models

pytestmark = pytest.mark.code("quick")

_FLOAT = [edge.Rule(is_float=True)]


def _run_onnx(path, x):
    session = onnxruntime.InferenceSession(path)
    return session.run(None, {session.get_inputs()[0].name: np.asarray(x)})


@pytest.fixture(scope="module")
def conv_net():
    model, x = models.ConvNet(), models.normal((4, 8, 8, 1))
    variables = models.trained(model, x)
    return model, variables, x, jax.jit(model.apply)(variables, x)


@pytest.mark.slow
def test_a_file_of_floats(tmp_path, conv_net):
    model, variables, x, expected = conv_net
    path = tmp_path / "float.tflite"
    ranges = edge.calibrate(model, variables, [x], _FLOAT)
    assert dict(ranges) == {}
    report = edge.export(model, variables, ranges, x, path, _FLOAT)
    assert "QUANTIZE" not in report.counts()
    # Some beyond what any range was found for.
    (found,) = models.run(path, 3 * x)
    np.testing.assert_allclose(found, model.apply(variables, 3 * x), atol=1e-4)
    rounded = edge.fake_quantize(model, ranges, _FLOAT)
    np.testing.assert_allclose(rounded(variables, x), expected, atol=1e-5)
    simulation = edge.simulate(model, variables, ranges, x, _FLOAT)
    np.testing.assert_allclose(simulation(x), expected, atol=1e-5)


def test_a_file_of_floats_needs_no_ranges_of_its_own(tmp_path, conv_net):
    model, variables, x, expected = conv_net
    of_integers = edge.calibrate(model, variables, [x])
    path = tmp_path / "float.onnx"
    report = edge.export(model, variables, of_integers, x, path, _FLOAT)
    np.testing.assert_allclose(_run_onnx(path, x)[0], expected, atol=1e-5)
    # Batch normalizations are part of the convolutions, as in files of integers.
    assert not {"Mul", "Sub", "Div", "Max"} & report.counts().keys()


@pytest.mark.parametrize("suffix", [".tflite", ".onnx"])
def test_an_average_pooling_of_channels_in_front(tmp_path, suffix):
    # LiteRT's converter drops the transposition after a pooling that has one before it,
    # which no shape shows where the axes are of equal sizes.
    def model(w, x):
        sums = jax.lax.reduce_window(
            w * x, 0.0, jax.lax.add, (1, 1, 2, 2), (1, 1, 2, 2), "VALID"
        )
        return jnp.tanh(sums / 4)

    w, x = jnp.ones(()), models.normal((2, 4, 8, 8))
    path = tmp_path / f"pool{suffix}"
    edge.export(model, w, None, x, path)
    (found,) = models.run(path, x) if suffix == ".tflite" else _run_onnx(path, x)
    np.testing.assert_allclose(found, model(w, x), atol=1e-5)


@pytest.mark.slow
def test_an_input_of_operators_of_floats_is_not_rounded(tmp_path):
    def model(w, x):
        with jax.named_scope("float"):
            y = x @ w
        return y, x @ (2 * w)

    w, x = models.normal((3, 4)), models.normal((5, 3), 2)
    rules = [edge.Rule(path="float", is_float=True)]
    ranges = edge.calibrate(model, w, [x], rules)
    for suffix, run in ((".tflite", models.run), (".onnx", _run_onnx)):
        path = tmp_path / f"mixed{suffix}"
        edge.export(model, w, ranges, x, path, rules, interface="float")
        floats, integers = run(path, x)
        np.testing.assert_allclose(floats, x @ w, atol=1e-5)
        assert 1e-4 < np.abs(integers - 2 * x @ w).max() < 0.1
    # With an interface of integers, it is, and so it is in training.
    floats, _ = edge.fake_quantize(model, ranges, rules)(w, x)
    assert 1e-4 < np.abs(floats - x @ w).max() < 0.1
    models.assert_simulated(tmp_path / "integers.tflite", model, w, x, rules)


@pytest.mark.parametrize("suffix", [".tflite", ".onnx"])
def test_the_rules_of_a_refusal_export_the_rest_in_integers(tmp_path, suffix):
    def model(params, x):
        w, kernel = params
        with jax.named_scope("up"):
            y = jax.lax.conv_general_dilated(
                (x @ w),
                kernel,
                (1, 1),
                [(1, 1), (1, 1)],
                lhs_dilation=(2, 2),
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
        y = jax.nn.relu(y)
        return (0.5 + y / (1 + y.sum(-1, keepdims=True))) ** -1.5 * (y > 0.1)

    params = models.normal((3, 4)), models.normal((2, 2, 4, 4), 2)
    x, path = models.normal((1, 4, 4, 3), 3), tmp_path / f"model{suffix}"
    with pytest.raises(ValueError, match="The rules that leave these alone") as caught:
        edge.calibrate(model, params, [x])
    text = str(caught.value)
    rules = eval(text[text.index("[edge.Rule(") :], {"edge": edge})
    assert [one.op for one in rules] == ["conv_general_dilated", "div", "pow", "gt"]
    ranges = edge.calibrate(model, params, [x], rules)
    report = edge.export(model, params, ranges, x, path, rules, interface="float")
    assert [one.runs_in == "float32" for one in report.contractions] == [False, True]
    (found,) = models.run(path, x) if suffix == ".tflite" else _run_onnx(path, x)
    error = np.abs(found - model(params, x))
    # Next to what is compared with, elements may fall to the other side.
    assert np.quantile(error, 0.9) < 0.05 * np.abs(found).max()


def test_what_a_library_computes_is_named(tmp_path):
    """In float, too, since LiteRT has no operator of it: where, and what to do."""

    def model(w, x):
        with jax.named_scope("rank"):
            return jnp.linalg.svd(x @ w, compute_uv=False)

    w, x = models.normal((8, 8)), models.normal((4, 8))
    rules = [edge.Rule(path=".*rank.*", is_float=True)]
    ranges = edge.calibrate(model, w, [(x,)], rules)
    path = tmp_path / "model.tflite"
    with pytest.raises(ValueError, match=r"(?s)a library.*leave them out.*rank.*: svd"):
        edge.export(model, w, ranges, x, path, rules)


def test_operators_print_as_their_types(tmp_path):
    def model(w, x):
        return jnp.exp(x) @ w

    w, x = models.normal((8, 8)), models.normal((4, 8))
    rules = [edge.Rule(op="exp", is_float=True)]
    ranges = edge.calibrate(model, w, [(x,)], rules)
    report = edge.export(model, w, ranges, x, tmp_path / "model.onnx", rules)
    text = repr(report.float_operators)
    assert "Exp(float32[4,8]) -> 'exp' float32[4,8]" in text
    assert "array" not in text
