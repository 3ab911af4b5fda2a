"""Files of models that quantize contractions themselves, converted for serving."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest
from flax import nnx

import aqtlite
from aqtlite import calibration, config, edge, numerics
from aqtlite.edge.litert import flatbuffer
from aqtlite.flax import AqtDotGeneral, calibrate_in_float, convert, quantize_model
from aqtlite.flax import nnx as aqt_nnx
from tests.edge import models
from tests.flax.support import init

# Outputs are compared within tolerances, and weights with those that were frozen.
pytestmark = pytest.mark.code("quick")

_BLOCKS = {"fwd.rhs.blocks": config.Blocks(size=16, fit=True)}
_INT4_IN_BLOCKS = config.update(config.weight_only(4), _BLOCKS)
_AFFINE = config.update(
    _INT4_IN_BLOCKS,
    {
        "fwd.rhs.numerics": numerics.IntAffine(bits=4),
        "fwd.rhs.calibration": calibration.MinMax(),
    },
)


class Net(nn.Module):
    """A convolution, one of groups, attention, and dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(8, (3, 3))(x))
        x = nn.BatchNorm(use_running_average=True)(nn.Conv(16, (3, 3), 2)(x))
        x = nn.relu(nn.Conv(16, (3, 3), feature_group_count=16)(x))
        x = x.reshape(x.shape[0], -1, 16)
        x = x + nn.MultiHeadDotProductAttention(2)(x)
        return nn.Dense(5)(nn.gelu(nn.Dense(32)(x)).mean(1))


class Injected(nn.Module):
    """Two dense layers with an injected config."""

    cfg: config.DotGeneral

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dot_general = AqtDotGeneral(self.cfg)
        x = nn.relu(nn.Dense(32, dot_general=dot_general)(x))
        return nn.Dense(5, dot_general=dot_general)(x)


@pytest.fixture(scope="module")
def net():
    model, x = Net(), models.normal((2, 8, 8, 3))
    return model, models.trained(model, x), x


@pytest.fixture(scope="module")
def served(net):
    """Models converted with weights quantized, their variables and their outputs."""
    model, variables, x = net

    @functools.cache
    def of_config(name):
        rules = [aqtlite.Rule(operands="weight", cfg=_CONFIGS[name])]
        quantized = quantize_model(model, rules)
        serving = convert(quantized, variables, x)
        return quantized, serving, np.asarray(jax.jit(quantized.apply)(serving, x))

    return of_config


def _run(path, x):
    if path.suffix == ".tflite":
        return models.run(path, np.asarray(x))[0]
    options = onnxruntime.SessionOptions()
    # By default, MatMulNBits rounds activations to 8 bits.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    session = onnxruntime.InferenceSession(path, options)
    return session.run(None, {"input": np.asarray(x)})[0]


def _decibels(found, expected):
    noise = np.mean(np.square(np.asarray(found, np.float64) - expected))
    return 10 * np.log10(np.mean(np.square(expected)) / max(noise, 1e-30))


_RUNTIME = {
    ("int8", ".onnx"): {"float32", "MatMulNBits"},
    ("affine", ".onnx"): {"float32", "MatMulNBits"},
    ("dynamic", ".onnx"): {
        "float32",
        "ConvInteger",
        "MatMulIntegerToFloat",
        "DynamicQuantizeMatMul",
    },
    ("w4a8", ".onnx"): {"float32", "MatMulIntegerToFloat", "DynamicQuantizeMatMul"},
    ("int8", ".tflite"): {
        "CONV_2D of float32 and float32",
        "DEPTHWISE_CONV_2D of float32 and float32",
        "FULLY_CONNECTED of float32 and float32",
    },
    ("dynamic", ".tflite"): {
        "CONV_2D of float32 and int8",
        "DEPTHWISE_CONV_2D of float32 and int8",
        "FULLY_CONNECTED of float32 and int8",
    },
    ("w4a8", ".tflite"): {
        "CONV_2D of float32 and int4",
        "DEPTHWISE_CONV_2D of float32 and float32",
        "FULLY_CONNECTED of float32 and int4",
    },
}
_CONFIGS = {
    "int8": config.weight_only(8),
    "affine": _AFFINE,
    "dynamic": config.qat(8),
    "w4a8": config.w4a8(),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "suffix"), _RUNTIME)
def test_a_file_computes_what_is_served(tmp_path, net, served, name, suffix):
    path, cfg = tmp_path / f"model{suffix}", _CONFIGS[name]
    (_, _, x), (quantized, serving, expected) = net, served(name)
    report = edge.export(quantized, serving, None, x, path)
    is_dynamic = cfg.fwd.lhs.is_quantized
    # Runtimes find one range of all activations, the library one for each row.
    assert _decibels(_run(path, x), expected) > (33 if is_dynamic else 110)
    asked = [one for one in report.contractions if one.asked != "float32"]
    # The last two contractions are of activations.
    assert len(asked) == len(report.contractions) - 2 == 9
    assert {one.runs_in for one in asked} == _RUNTIME[name, suffix]
    assert all("dynamic" in one.asked for one in asked) == is_dynamic


@pytest.mark.parametrize("suffix", [".onnx", ".tflite"])
def test_the_integers_of_gptq_are_in_the_file(tmp_path, suffix):
    cfg = config.update(config.gptq(4), {"fwd.rhs.blocks": None})
    changes = {"fwd.rhs.numerics": numerics.IntSymmetric(bits=4)}
    changes["fwd.rhs.calibration"] = calibration.AbsMax()
    model, x = Injected(config.update(cfg, changes)), models.normal((64, 16))
    variables = calibrate_in_float(model, init(model, x), [x])
    serving, path = convert(model, variables, x), tmp_path / f"model{suffix}"
    edge.export(model, serving, None, x, path)
    frozen = jax.tree.leaves(serving["aqt"], is_leaf=lambda q: hasattr(q, "qvalue"))
    wanted = {
        np.asarray(q.qvalue, np.int8).tobytes() for q in frozen if hasattr(q, "qvalue")
    }
    assert len(wanted) == 2
    if suffix == ".tflite":
        tensors = [
            tensor
            for one in flatbuffer.read(path.read_bytes()).operators
            for tensor in one.inputs
            if tensor is not None and tensor.dtype == "int4"
        ]
        assert {tensor.array().tobytes() for tensor in tensors} == wanted
    else:
        arrays = map(onnx.numpy_helper.to_array, onnx.load(path).graph.initializer)
        found = {
            x.T.astype(np.int8).tobytes() for x in arrays if x.dtype.name == "int4"
        }
        assert found == wanted


def test_a_function_with_a_scan(tmp_path):
    def function(weights, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    weights, x = models.normal((3, 16, 16)), models.normal((2, 16))
    quantized = aqtlite.quantize_function(function, config.weight_only(), params=0)
    serve, serving = aqtlite.convert_function(quantized, weights, x)
    report = edge.export(serve, serving, None, x, tmp_path / "model.onnx")
    assert [one.asked for one in report.contractions] == ["int8 weights"] * 3
    expected = serve(serving, x)
    assert _decibels(_run(tmp_path / "model.onnx", x), expected) > 110


def test_an_nnx_model(tmp_path):
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.Linear(16, 32, rngs=rngs), nnx.relu, nnx.Linear(32, 16, rngs=rngs)
    )
    x = models.normal((2, 16))
    serving = aqt_nnx.convert(aqt_nnx.quantize_model(model, config.weight_only()), x)
    report = edge.export(serving, nnx.state(serving), None, x, tmp_path / "model.onnx")
    # A relu between them does not turn the first one into a Gemm of floats.
    assert [one.runs_in for one in report.contractions] == ["MatMulNBits"] * 2
    assert _decibels(_run(tmp_path / "model.onnx", x), serving(x)) > 110


def test_a_float_model_without_ranges(tmp_path, net):
    model, variables, x = net
    report = edge.export(model, variables, None, x, tmp_path / "model.onnx")
    assert {one.asked for one in report.contractions} == {"float32"}
    expected = jax.jit(model.apply)(variables, x)
    assert _decibels(_run(tmp_path / "model.onnx", x), expected) > 110


def _refusal(cfg, path, prepare=lambda model, variables, x: variables, **kwargs):
    model, x = Injected(cfg), models.normal((2, 16))
    variables = prepare(model, init(model, x), x)
    with pytest.raises(ValueError, match=".") as caught:
        edge.export(model, variables, None, x, path, **kwargs)
    assert not path.exists()
    return str(caught.value)


def test_refusals(tmp_path):
    path = tmp_path / "model.onnx"
    assert "aqtlite.flax.convert" in _refusal(config.qat(), path)

    def calibrated(model, variables, x):
        return convert(model, aqtlite.flax.calibrate(model, variables, [x]), x)

    message = _refusal(config.static_int8(), path, calibrated)
    assert "Injected/Dense_0: fwd.lhs has static ranges" in message
    assert "and weights in files are integers" in _refusal(config.fp8(), path, convert)
    message = _refusal(_INT4_IN_BLOCKS, tmp_path / "model.tflite", convert)
    assert "Injected/Dense_1: int4 in blocks of 16" in message
    rules = [edge.Rule(weights="int4")]
    assert "which needs ranges" in _refusal(config.qat(), path, convert, rules=rules)


@pytest.mark.parametrize(
    "cfg",
    [
        config.update(config.qat(), {"fwd.lhs.calibration": one})
        for one in (
            calibration.Constant(1.0),
            calibration.AbsMax(clipping_scale=0.3),
            calibration.Percentile(99.0),
            calibration.MseSearch(),
        )
    ]
    + [config.lsq(8)],
    ids=lambda cfg: type(cfg.fwd.lhs.calibration).__name__,
)
def test_activations_that_clip_are_refused(tmp_path, cfg):
    message = _refusal(cfg, tmp_path / "model.onnx", convert)
    assert f"fwd.lhs has ranges of {cfg.fwd.lhs.calibration!r}" in message
    assert "without clipping: take calibration.AbsMax()" in message


@pytest.mark.parametrize("bits", [4, 7])
def test_activations_of_fewer_bits_are_refused(tmp_path, bits):
    message = _refusal(config.qat(bits), tmp_path / "model.tflite", convert)
    assert f"fwd.lhs has IntSymmetric(bits={bits}" in message
    assert "set fwd.lhs.numerics to numerics.IntSymmetric(bits=8)" in message


def test_affine_activations_are_dynamic(tmp_path):
    affine = {
        "fwd.lhs.numerics": numerics.IntAffine(bits=8),
        "fwd.lhs.calibration": calibration.MinMax(),
    }
    model, x = Injected(config.update(config.qat(), affine)), models.normal((2, 16))
    serving = convert(model, init(model, x), x)
    report = edge.export(model, serving, None, x, tmp_path / "model.onnx")
    assert all("dynamic" in one.asked for one in report.contractions)
    expected = model.apply(serving, x)
    assert _decibels(_run(tmp_path / "model.onnx", x), expected) > 33


@pytest.mark.parametrize("cfg", [config.w4a8(), config.qat(8)])
@pytest.mark.parametrize("features, groups", [(1, 1), (2, 2)])
def test_convolutions_that_litert_runs_as_depthwise(tmp_path, cfg, features, groups):
    model = nn.Conv(4, (3, 3), feature_group_count=groups)
    x = models.normal((2, 8, 8, features))
    quantized = quantize_model(model, cfg)
    serving = convert(quantized, init(model, x), x)
    report = edge.export(quantized, serving, None, x, tmp_path / "model.tflite")
    (one,) = report.contractions
    # LiteRT has no depthwise kernel of int4 with dynamic ranges.
    is_float = cfg == config.w4a8()
    assert one.runs_in.endswith("and float32") == is_float
    expected = quantized.apply(serving, x)
    assert _decibels(_run(tmp_path / "model.tflite", x), expected) > 33


def test_parameters_of_bfloat16_are_refused(tmp_path):
    model, x = nn.Dense(4), models.normal((2, 16))
    narrow = jax.tree.map(lambda v: v.astype(jnp.bfloat16), init(model, x))
    quantized = quantize_model(model, config.weight_only(8))
    serving, path = convert(quantized, narrow, x), tmp_path / "model.onnx"
    message = "cast its variables to float32, before they are converted for serving"
    with pytest.raises(TypeError, match=message):
        edge.export(quantized, serving, None, x, path)
    wide = jax.tree.map(lambda v: v.astype(jnp.float32), narrow)
    edge.export(quantized, convert(quantized, wide, x), None, x, path)
    assert path.exists()


@pytest.mark.parametrize("suffix", [".onnx", ".tflite"])
def test_variables_and_samples_that_make_no_file(tmp_path, suffix):
    model, x = nn.Dense(4), models.normal((2, 16))
    variables, path = init(model, x), tmp_path / f"model{suffix}"
    quantized = quantize_model(model, config.weight_only(8))
    serving = convert(quantized, variables, x)
    message = "of shape (16, 4), has NaN.*the quantized model that was converted"
    with pytest.raises(ValueError, match=re.escape(message).replace(r"\.\*", ".*")):
        edge.export(model, serving, None, x, path)
    with pytest.raises(ValueError, match="has NaN: check the variables"):
        edge.export(model, jax.tree.map(jnp.log, variables), None, x, path)
    with pytest.raises(ValueError, match="a sample argument is empty"):
        edge.export(quantized, serving, None, x[:0], path)
    ranges = edge.calibrate(model, variables, [x])
    with pytest.raises(TypeError, match="ranges must be what edge.calibrate"):
        edge.export(model, variables, x, ranges, path)
    assert not path.exists()
    cfg = config.update(config.weight_only(4), {"fwd.rhs.rounding": config.Gptq()})
    rounded = quantize_model(model, cfg)
    gathered = calibrate_in_float(rounded, variables, [x])
    edge.export(rounded, convert(rounded, gathered, x), None, x, path)
    assert path.exists()


@pytest.mark.parametrize(
    "suffix, name",
    [
        *((".tflite", name) for name in ("int8", "int4", "qat")),
        *((".onnx", name) for name in ("int8", "int4", "blocks", "qat")),
    ],
)
def test_transposed_convolutions_keep_integers(tmp_path, suffix, name):
    cfg = {
        "int8": config.weight_only(8),
        "int4": config.weight_only(4),
        "blocks": _INT4_IN_BLOCKS,
        "qat": config.qat(8),
    }[name]

    class Up(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.ConvTranspose(32, (2, 2), (2, 2))(x)

    model, x = Up(), models.normal((1, 4, 4, 64))
    variables = models.trained(model, x)
    quantized = quantize_model(model, [aqtlite.Rule(operands="weight", cfg=cfg)])
    serving = convert(quantized, variables, x)
    path = tmp_path / f"up{suffix}"
    report = edge.export(quantized, serving, None, x, path)
    # In float, the kernel has 32 kB.
    assert path.stat().st_size < 16_000
    (one,) = report.contractions
    assert one.asked.startswith("int8" if name in ("int8", "qat") else "int4")
    # Activations stay in float: neither runtime has a kernel of dynamic ranges.
    assert "dynamic" not in one.asked
    weights = config.weight_only(8) if name == "qat" else cfg
    quantized = quantize_model(model, [aqtlite.Rule(operands="weight", cfg=weights)])
    expected = quantized.apply(convert(quantized, variables, x), x)
    np.testing.assert_allclose(_run(path, x), expected, atol=2e-5)
