import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pytest
from jax import lax

from aqtlite import edge
from aqtlite.edge import Rule
from tests.common import normal
from tests.edge.onnx import runs

pytestmark = pytest.mark.code("quick")

X = normal((2, 4))
WEIGHT = normal((4, 3), 1)
KERNEL = normal((3, 3, 2, 2), 1)


def export(function, path, rules=(), **options):
    ranges = edge.calibrate(function, {}, [X], rules)
    return edge.export(function, {}, ranges, X, path, rules, **options)


def dense(_, x):
    return jnp.tanh(x) @ WEIGHT


def test_the_report_has_the_grids_of_the_interface(tmp_path):
    path = tmp_path / "model.onnx"
    report = export(dense, path)
    (x,), (y,) = report.inputs, report.outputs
    assert (x.name, x.dtype, x.shape) == ("input", "int8", (2, 4))
    assert (y.name, y.dtype, y.shape) == ("output", "int8", (2, 3))
    ranges = edge.calibrate(dense, {}, [X])
    low, high = ranges["input"]
    assert x.scale == pytest.approx((high - low) / 255)
    assert -128 <= int(x.zero_point[0]) <= 127
    assert report.file.size == path.stat().st_size
    assert "Tanh" in str(report)
    assert [one.name for one in report.float_operators] == [
        "DequantizeLinear",
        "QuantizeLinear",
        "DequantizeLinear",
        "Tanh",
        "QuantizeLinear",
        "DequantizeLinear",
        "QuantizeLinear",
    ]


@pytest.mark.parametrize("name", ["model", "model.tfl", "model.ONNX"])
def test_another_suffix_is_refused(name, tmp_path):
    with pytest.raises(ValueError, match=r"path must end in .tflite or .onnx.*got"):
        export(dense, tmp_path / name)


def test_what_has_no_form_is_refused_by_name(tmp_path):
    def function(_, x):
        with jax.named_scope("block"):
            return lax.erf_inv(x / 9) * lax.digamma(x)

    rules = [Rule(op=op, is_float=True) for op in ("erf_inv", "digamma")]
    with pytest.raises(ValueError) as error:
        export(function, tmp_path / "model.onnx", rules)
    assert "\n  block: erf_inv: there is no form" in str(error.value)
    assert "\n  block: digamma: there is no form" in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("groups", "strides", "padding", "dilation"),
    [
        (1, (2, 2), "SAME", (1, 1)),
        (2, (2, 3), "VALID", (1, 2)),
        (1, (3, 2), [(1, 2), (0, 1)], (1, 1)),
    ],
)
def test_a_transposed_convolution_in_float(
    tmp_path, groups, strides, padding, dilation
):
    image = normal((2, 5, 4, 4), 2)
    weight = normal((2, 3, 4 // groups, 6), 3)
    if isinstance(padding, str):
        # Those that `lax.conv_transpose` has for such a window.
        dilated = jax.make_jaxpr(
            lambda x, w: lax.conv_transpose(
                x, w, strides, padding, rhs_dilation=dilation
            )
        )(image[..., : 4 // groups], weight)
        padding = dilated.eqns[-1].params["padding"]

    def function(_, x):
        with jax.named_scope("up"):
            return lax.conv_general_dilated(
                x,
                weight,
                (1, 1),
                padding,
                lhs_dilation=strides,
                rhs_dilation=dilation,
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
                feature_group_count=groups,
            )

    path, rules = tmp_path / "model.onnx", [Rule(path="up", is_float=True)]
    ranges = edge.calibrate(function, {}, [image], rules)
    edge.export(function, {}, ranges, image, path, rules, interface="float")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"input": np.asarray(image)})
    np.testing.assert_allclose(found, function({}, image), atol=1e-4)


@pytest.mark.parametrize(
    "first",
    [
        lambda x: lax.conv_transpose(x, KERNEL, (2, 2), "SAME"),
        lambda x: nn.avg_pool(x, (2, 2), (2, 2)),
        lambda x: jnp.tanh(x.swapaxes(1, 2)),
    ],
    ids=["conv_transpose", "avg_pool", "tanh"],
)
def test_a_first_operator_in_float_takes_integers(first, tmp_path):
    # onnxruntime moves the transposition in front of it.
    def function(w, x):
        with jax.named_scope("first"):
            y = first(x)
        return y @ w

    rules = [Rule(path="first.*", is_float=True)]
    args = normal((2, 2)), (normal((1, 4, 4, 2), 2),)
    run = runs.run(function, *args, tmp_path / "model.onnx", rules)
    assert run.report.inputs[0].dtype == "int8"
    assert {"ConvTranspose", "AveragePool", "Tanh"} & {*run.in_float}
    np.testing.assert_array_equal(run.found, run.expected)


def test_int2_is_refused(tmp_path):
    message = r'fully_connected: its weight is of int2.*weights="int4" or "int8"'
    with pytest.raises(ValueError, match=message):
        export(dense, tmp_path / "model.onnx", [Rule(weights="int2")])


def test_a_file_stays_where_an_export_fails(tmp_path):
    path = tmp_path / "model.onnx"
    export(dense, path)
    before = path.read_bytes()
    with pytest.raises(ValueError):
        export(dense, path, [Rule(weights="int2")])
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["onnx", "onnxruntime"])
def test_the_extra_is_named_where_a_package_is_missing(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'aqtlite\[onnx\]'"):
        export(dense, tmp_path / "model.onnx")


def test_an_input_that_is_an_output(tmp_path):
    import onnxruntime

    path = tmp_path / "model.onnx"
    export(lambda _, x: (x, jnp.tanh(x), np.arange(3)), path)
    session = onnxruntime.InferenceSession(path)
    q = np.arange(-4, 4, dtype=np.int8).reshape(2, 4)
    x, _, numbers = session.run(None, {"input": q})
    np.testing.assert_array_equal(x, q)
    np.testing.assert_array_equal(numbers, [0, 1, 2])
