import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pytest
from flax import nnx

from aqtlite.edge import Rule
from tests.common import quick_jit
from tests.edge.onnx import runs

pytestmark = [pytest.mark.slow, pytest.mark.code("quick")]


def normal(*shape):
    return jax.random.normal(jax.random.key(1), shape)


class Cnn(nn.Module):
    @nn.compact
    def __call__(self, x):
        for features in (4, 4):
            x = nn.Conv(features, (3, 3))(x)
            x = nn.relu(nn.BatchNorm(use_running_average=True)(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        return nn.Dense(10)(x.reshape(x.shape[0], -1))


class Depthwise(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(4, (3, 3), strides=2, use_bias=False)(x)
        for features, strides in ((8, 1), (8, 2), (8, 1)):
            inner = x.shape[-1]
            y = nn.Conv(
                inner, (3, 3), strides, feature_group_count=inner, use_bias=False
            )(x)
            y = nn.relu6(nn.BatchNorm(use_running_average=True)(y))
            y = nn.Conv(features, (1, 1), use_bias=False)(y)
            x = x + y if x.shape == y.shape else y
        return nn.softmax(nn.Dense(10)(x.mean(axis=(1, 2))))


class Encoder(nn.Module):
    vocabulary: int | None = None

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16)(x) if self.vocabulary is None else nn.Embed(20, 16)(x)
        x = x + self.param("positions", nn.initializers.normal(1.0), x.shape[1:])
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
        y = nn.gelu(nn.Dense(32)(nn.LayerNorm()(x)))
        x = x + nn.Dense(16)(y)
        return nn.Dense(10)(nn.LayerNorm()(x).mean(axis=1))


def linen(model, x, path, **options):
    variables = quick_jit(model.init)(jax.random.key(0), x)
    return runs.run(model, variables, (x,), path, **options)


def test_a_cnn_has_no_operator_of_floats(tmp_path):
    run = linen(Cnn(), normal(4, 8, 8, 1), tmp_path / "cnn.onnx")
    assert run.in_float == []
    assert run.operators == [
        "QLinearConv",
        "NhwcMaxPool",
        "QLinearConv",
        "NhwcMaxPool",
        "Reshape",
        "QGemm",
    ]
    np.testing.assert_array_equal(run.found, run.expected)


def test_depthwise_blocks_have_no_operator_of_floats(tmp_path):
    run = linen(Depthwise(), normal(2, 8, 8, 3), tmp_path / "mobile.onnx")
    assert run.in_float == []
    assert run.operators.count("QLinearConv") == 7
    assert "QLinearAdd" in run.operators and "QLinearSoftmax" in run.operators
    np.testing.assert_array_equal(run.found, run.expected)


@pytest.mark.parametrize("vocabulary", [None, 20])
def test_of_an_encoder_logarithms_exponentials_and_gelu_stay_in_float(
    vocabulary, tmp_path
):
    x = normal(2, 6, 5) if vocabulary is None else jnp.arange(12).reshape(2, 6)
    run = linen(Encoder(vocabulary), x, tmp_path / "encoder.onnx")
    assert run.in_float == ["Exp", "Gelu", "Log"]
    assert run.operators.count("QLinearMatMul") == 2
    assert run.operators.count("QGemm") == 7 + (vocabulary is None)
    # Inputs on the border between two integers, of floats that differ by rounding.
    assert run.quanta.max() <= 1 and (run.quanta > 0).mean() < 0.05


def test_an_nnx_mlp_of_int4_weights_has_no_operator_of_floats(tmp_path):
    class Mlp(nnx.Module):
        def __init__(self):
            self.first = nnx.Linear(8, 32, rngs=nnx.Rngs(0))
            self.second = nnx.Linear(32, 4, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.second(nnx.relu(self.first(x)))

    model = Mlp()
    run = runs.run(
        model,
        nnx.state(model),
        (normal(16, 8),),
        tmp_path / "mlp.onnx",
        rules=[Rule(weights="int4")],
    )
    assert run.operators == ["QGemm", "QGemm"]
    np.testing.assert_array_equal(run.found, run.expected)


@pytest.mark.parametrize(
    "option", ["session.x64quantprecision", "session.qdqisint8allowed"]
)
def test_options_of_sessions_fuse_the_same(option, tmp_path):
    path = tmp_path / "model.onnx"
    run = linen(Cnn(), normal(4, 8, 8, 1), path)
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry(option, "1")
    session = onnxruntime.InferenceSession(path, options)
    (tensor,) = run.report.inputs
    x = runs.on_grid(normal(4, 8, 8, 1), tensor)
    (found,) = session.run(None, {"input": x})
    np.testing.assert_array_equal(found, run.found)


@pytest.mark.parametrize("mode", ["edge", "reflect"])
def test_axes_of_no_elements(mode, tmp_path):
    """`jnp.pad` joins them where an axis gets no padding."""

    def model(w, x):
        return jnp.pad(x, ((0, 0), (1, 2)), mode=mode) * w

    x = normal(2, 8)
    run = runs.run(model, jnp.ones(11), (x,), tmp_path / "model.onnx")
    assert run.quanta.max() <= 1


def test_floats_at_the_ends(tmp_path):
    run = linen(Cnn(), normal(4, 8, 8, 1), tmp_path / "cnn.onnx", interface="float")
    assert [one.dtype for one in (*run.report.inputs, *run.report.outputs)] == (
        ["float32", "float32"]
    )
    np.testing.assert_array_equal(run.found, run.expected)


@pytest.mark.parametrize("layer", ["layers_2", "layers_4"])
@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("kind", ["dense", "conv"])
def test_a_layer_that_rules_leave_in_float_stays_so(kind, use_bias, layer, tmp_path):
    """onnxruntime would quantize its weight, with one scale for all channels."""

    def made(features):
        if kind == "conv":
            return nn.Conv(features, (3, 3), use_bias=use_bias)
        return nn.Dense(features, use_bias=use_bias)

    model = nn.Sequential([made(12), nn.relu, made(16), nn.relu, made(6)])
    x = normal(64, 8) if kind == "dense" else normal(2, 6, 6, 3)
    variables = quick_jit(model.init)(jax.random.key(0), x)
    # Harmless in float: a dead unit, whose weights are large.
    before = variables["params"]["layers_0" if layer == "layers_2" else "layers_2"]
    before["kernel"] = before["kernel"].at[..., 0].set(0)
    large = variables["params"][layer]
    large["kernel"] = large["kernel"].at[..., 0, :].mul(1000)
    rules = [Rule(path=f".*{layer}", is_float=True)]
    run = runs.run(model, variables, (x,), tmp_path / "model.onnx", rules)
    assert {"MatMul", "FusedConv", "Conv"} & {*run.in_float}
    assert run.quanta.max() <= 1 and (run.quanta > 0).mean() < 0.01


def test_a_transposed_convolution_in_float_stays_so(tmp_path):
    """onnxruntime would quantize its weight, with one scale for all channels."""
    kernel = normal(3, 3, 4, 3).at[:, :, 0].mul(1000)

    def function(w, x):
        y = nn.relu(x @ w) * jnp.asarray([1e-3, 1, 1, 1])
        with jax.named_scope("up"):
            return jax.lax.conv_transpose(y, kernel, (2, 2), "SAME")

    rules = [Rule(path="up.*", is_float=True)]
    args = normal(4, 4), (normal(2, 6, 6, 4),)
    run = runs.run(function, *args, tmp_path / "model.onnx", rules)
    assert "ConvTranspose" in run.in_float
    assert run.quanta.max() <= 1 and (run.quanta > 0).mean() < 0.01
