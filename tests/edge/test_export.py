import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from aqtlite import edge
from aqtlite.edge.grid import Grid
from aqtlite.edge.litert import annotations, converter, flatbuffer
from tests.common import mostly_slow
from tests.edge import models

pytestmark = pytest.mark.code("quick")

MODELS = {
    "conv_net": (models.ConvNet(), models.normal((4, 8, 8, 1))),
    "depthwise": (models.Depthwise(), models.normal((4, 8, 8, 3))),
    "encoder": (models.Encoder(), models.normal((4, 6, 8))),
    "encoder of tokens": (
        models.Encoder(20),
        jax.random.randint(jax.random.key(2), (4, 6), 0, 20),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_interpreter_computes_what_is_simulated(tmp_path, name):
    model, x = MODELS[name]
    variables = models.trained(model, x)
    path = tmp_path / "model.tflite"
    report, _ = models.assert_simulated(path, model, variables, x)
    assert report.float_operators == ()
    assert path.stat().st_size == report.file.size


@pytest.mark.slow
def test_without_xnnpack(tmp_path):
    model, x = MODELS["depthwise"]
    variables = models.trained(model, x)
    path = tmp_path / "model.tflite"
    models.assert_simulated(path, model, variables, x, kernels="builtin")


def test_nnx(tmp_path):
    model = models.Mlp(nnx.Rngs(0))
    x = models.normal((16, 8))
    report, (found,) = models.assert_simulated(
        tmp_path / "mlp.tflite", model, nnx.state(model), x
    )
    assert report.counts() == {"FULLY_CONNECTED": 2, "LOGISTIC": 1, "MUL": 1}
    grid = report.outputs[0]
    floats = (found - grid.zero_point[0]) * grid.scale[0]
    error = np.abs(floats - model(1.2 * x[::-1]))
    assert np.median(error) < 0.1


class _Wide(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(16)(x))
        return nn.softmax(nn.Dense(4)(nn.LayerNorm()(x) + jnp.tanh(x)))


RULES = {
    "int16": (edge.Rule(activations="int16"),),
    "int4": (edge.Rule(weights="int4"),),
    "int2": (edge.Rule(path=".*/Dense_0", weights="int2"),),
    "normalizations of int16": (
        edge.Rule(path=".*LayerNorm.*", activations="int16"),
        edge.Rule(path=".*/Dense_1", weights="int4"),
    ),
    "float": (edge.Rule(op="gelu", is_float=True),),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_rules(tmp_path, name):
    model, x = MODELS["encoder"]
    if name == "int16":
        model, x = _Wide(), models.normal((4, 8))
    variables = models.trained(model, x)
    report, _ = models.assert_simulated(
        tmp_path / "model.tflite", model, variables, x, RULES[name]
    )
    dtypes = {t.dtype for one in report.file.operators for t in one.inputs if t}
    assert ("float32" in dtypes) == (name == "float")
    if name in ("int16", "int4", "int2"):
        assert name in dtypes
    if name == "float":
        names = [one.name for one in report.float_operators]
        assert "GELU" in names and "FULLY_CONNECTED" not in names


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "inputs"), [("int4", 17), ("int2", 9)])
def test_weights_that_fill_no_whole_bytes(tmp_path, weights, inputs):
    """XNNPACK does not take them, and TFLite rounds in another way."""
    x, w = models.normal((256, inputs)), models.normal((inputs, 5), 1)
    rules = [edge.Rule(weights=weights)]
    path = tmp_path / "model.tflite"
    models.assert_simulated(path, lambda w, x: x @ w, w, x, rules)


def test_an_input_that_is_returned_has_its_own_name(tmp_path):
    x, w = models.normal((3, 6)), models.normal((6, 4), 1)
    ranges = edge.calibrate(lambda w, x: (x, x @ w), w, [x])
    path = tmp_path / "model.tflite"
    report = edge.export(lambda w, x: (x, x @ w), w, ranges, x, path)
    assert [one.name for one in report.inputs] == ["input"]
    assert [one.name for one in report.outputs] == ["output", "output_1"]


def test_convolutions_of_int2_are_refused_by_name(tmp_path):
    model, x = nn.Conv(4, (3, 3)), models.normal((1, 6, 6, 3))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    rules = [edge.Rule(weights="int2")]
    ranges = edge.calibrate(model, variables, [x], rules)
    why = r"'Conv' has weights of int2.*Rule\(path='Conv', weights='int4'"
    with pytest.raises(ValueError, match=why):
        edge.export(model, variables, ranges, x, tmp_path / "model.tflite", rules)


@pytest.mark.filterwarnings("ignore:these ranges have no width")
@pytest.mark.parametrize("suffix", [".tflite", ".onnx"])
def test_zeros_are_added_on_the_grid_of_the_sum(tmp_path, suffix):
    """As the first state of an LSTM, whose own range says nothing of its steps."""

    def model(w, x):
        return x * w + x * 0.1

    x, w = models.normal((8, 6)), jnp.zeros(6)
    path = tmp_path / f"model{suffix}"
    ranges = edge.calibrate(model, w, [x])
    assert ranges["mul"] == (0, 0)
    edge.export(model, w, ranges, x, path)
    if suffix == ".tflite":
        models.assert_simulated(path, model, w, x)
    rounded = edge.fake_quantize(model, ranges)(w, x)
    np.testing.assert_allclose(rounded, x * 0.1, atol=0.005)


@pytest.mark.slow
def test_float_interface(tmp_path):
    model, x = MODELS["conv_net"]
    variables = models.trained(model, x)
    ranges = edge.calibrate(model, variables, [x])
    path = tmp_path / "model.tflite"
    report = edge.export(model, variables, ranges, x, path, interface="float")
    assert [one.name for one in report.float_operators] == ["QUANTIZE", "DEQUANTIZE"]
    simulation = edge.simulate(model, variables, ranges, x)
    (found,) = models.run(path, x)
    expected = simulation.dequantize("ConvNet/Dense_1/fully_connected", simulation(x))
    np.testing.assert_array_equal(found, expected)


def test_the_integers_of_the_file_are_those_of_the_library(tmp_path):
    model, x = MODELS["conv_net"]
    variables = models.trained(model, x)
    ranges = edge.calibrate(model, variables, [x])
    path = tmp_path / "model.tflite"
    edge.export(model, variables, ranges, x, path)
    file = flatbuffer.read(path.read_bytes())
    (*_, last) = file.operators
    kernel = variables["params"]["Dense_1"]["kernel"]
    scale = np.abs(kernel).max(0) / 127
    np.testing.assert_allclose(last.inputs[1].scale, scale, rtol=1e-6)
    expected = np.rint(np.asarray(kernel) / np.asarray(last.inputs[1].scale)).T
    np.testing.assert_array_equal(last.inputs[1].array(), expected)
    bias = np.asarray(variables["params"]["Dense_1"]["bias"])
    step = last.inputs[0].scale * last.inputs[1].scale
    np.testing.assert_array_equal(last.inputs[2].array(), np.rint(bias / step))


def test_several_inputs_and_outputs(tmp_path):
    def function(w, images, numbers):
        y = images["left"] @ w + images["right"] @ w
        return {"sum": y, "chosen": jnp.take(y, numbers, axis=0)}

    w = models.normal((6, 3), 0)
    args = (
        {"left": models.normal((4, 6), 1), "right": 2 * models.normal((4, 6), 2)},
        jnp.array([2, 0, 1]),
    )
    ranges = edge.calibrate(function, w, [args])
    assert {"input/0/left", "input/0/right"} < set(ranges)
    path = tmp_path / "model.tflite"
    edge.export(function, w, ranges, args, path)
    simulation = edge.simulate(function, w, ranges, args)
    predicted = simulation(*args)
    values = simulation.values(*args)
    found = models.run(path, values["input/0/left"], values["input/0/right"], args[1])
    np.testing.assert_array_equal(found[0], predicted["chosen"])
    np.testing.assert_array_equal(found[1], predicted["sum"])


class _Bad(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4)(x)
        with jax.named_scope("angles"):
            x = jnp.sin(x)
        return jnp.cumsum(x, axis=-1)


def _no_file(directory: pathlib.Path) -> bool:
    return list(directory.iterdir()) == []


def test_all_operations_without_integers_are_named(tmp_path):
    x = models.normal((2, 3))
    variables = _Bad().init(jax.random.key(0), x)
    with pytest.raises(ValueError, match=r"_Bad/angles: sin: .*\n  _Bad: cumsum: "):
        edge.calibrate(_Bad(), variables, [x])
    rules = (
        edge.Rule(op="sin", is_float=True),
        edge.Rule(op="cumsum", is_float=True),
    )
    report, _ = models.assert_simulated(
        tmp_path / "model.tflite", _Bad(), variables, x, rules
    )
    assert "SIN" in report.counts()


def _dense(w, x):
    return x @ w


_W, _X = models.normal((3, 2)), models.normal((4, 3))


def test_stale_ranges(tmp_path):
    path = tmp_path / "model.tflite"
    ranges = edge.Ranges({"input": (0, 1), "other": (0, 1)})
    with pytest.raises(ValueError, match="lacks fully_connected; the program has no"):
        edge.export(_dense, _W, ranges, _X, path)
    with pytest.raises(TypeError, match="got a dict"):
        edge.export(_dense, _W, {"input": (0, 1)}, _X, path)
    assert _no_file(tmp_path)


def test_symbolic_shapes_are_refused(tmp_path):
    (batch,) = jax.export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((batch, 3), jnp.float32)
    ranges = edge.calibrate(_dense, _W, [_X])
    with pytest.raises(ValueError, match="symbolic.*a file for each size"):
        edge.export(_dense, _W, ranges, x, tmp_path / "model.tflite")
    assert _no_file(tmp_path)


def test_half_precision_is_refused(tmp_path):
    ranges = edge.calibrate(_dense, _W, [_X])
    with pytest.raises(TypeError, match=r"bfloat16.*dtype=jnp\.float32"):
        edge.export(
            _dense,
            _W.astype(jnp.bfloat16),
            ranges,
            _X.astype(jnp.bfloat16),
            tmp_path / "model.tflite",
        )
    assert _no_file(tmp_path)


def test_nan_weights_are_refused(tmp_path):
    ranges = edge.calibrate(_dense, _W, [_X])
    with pytest.raises(ValueError, match="weight of .*fully_connected.* NaN"):
        edge.export(_dense, _W.at[0].set(jnp.nan), ranges, _X, tmp_path / "m.tflite")
    assert _no_file(tmp_path)


def test_a_file_that_is_there_stays_after_a_failure(tmp_path):
    path = tmp_path / "model.tflite"
    path.write_bytes(b"precious")
    ranges = edge.Ranges({"input": (0, 1)})
    with pytest.raises(ValueError, match="lacks"):
        edge.export(_dense, _W, ranges, _X, path)
    assert path.read_bytes() == b"precious"


def _untraced(w, x):
    raise AssertionError("traced")


@pytest.mark.parametrize("path", ["gs://bucket/m.onnx", "file:///m.tflite"])
def test_addresses_are_refused_before_any_work(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"an address \(\w+://\)"):
        edge.export(_untraced, _W, None, _X, path)
    one = edge.Signature(_untraced, _W, None, _X)
    with pytest.raises(ValueError, match=r"an address \(s3://\)"):
        edge.export_signatures({"one": one}, "s3://bucket/m.tflite")
    assert _no_file(tmp_path)


@pytest.mark.parametrize("suffix", [".onnx", ".tflite"])
def test_a_link_is_refused_before_any_work(suffix, tmp_path):
    file, link = tmp_path / f"file{suffix}", tmp_path / f"link{suffix}"
    file.write_bytes(b"precious")
    link.symlink_to(file)
    message = f"link{suffix} is a symbolic link; name what it points to"
    with pytest.raises(ValueError, match=message):
        edge.export(_untraced, _W, None, _X, link)
    if suffix == ".tflite":
        one = edge.Signature(_untraced, _W, None, _X)
        with pytest.raises(ValueError, match=message):
            edge.export_signatures({"one": one}, link)
    assert link.is_symlink() and file.read_bytes() == b"precious"


def test_unknown_interface():
    with pytest.raises(ValueError, match='"integer", "uint8" or "float", got'):
        edge.export(_dense, _W, edge.Ranges({}), _X, "m.tflite", interface="int")


def test_reports_print_as_tables(tmp_path):
    ranges = edge.calibrate(_dense, _W, [_X])
    report = edge.export(_dense, _W, ranges, _X, tmp_path / "m.tflite")
    text = str(report)
    assert "FULLY_CONNECTED" in text and "1 operators, 0 of them in float" in text
    assert report.inputs[0].dtype == "int8"
    assert (report.inputs[0].name, report.outputs[0].name) == ("input", "output")


def test_operators_without_int16_are_named(tmp_path):
    model, x = MODELS["conv_net"]
    variables = models.trained(model, x)
    rules = (edge.Rule(activations="int16"),)
    ranges = edge.calibrate(model, variables, [x], rules)
    with pytest.raises(ValueError, match=r"no int16 form.*\n  ConvNet/Conv_0: conv_2d"):
        edge.export(model, variables, ranges, x, tmp_path / "model.tflite", rules)
    assert _no_file(tmp_path)


@pytest.mark.slow
def test_a_channel_that_is_turned_off_keeps_its_bias(tmp_path):
    # Batch normalization leaves tiny weights, or none, of a channel and its bias.
    factors = jnp.array([1.0, 1e-4, 1e-8, 1e-30, 0.0])
    variables = models.normal((8, 5)) * factors, jnp.arange(1.0, 6.0)

    def model(variables, x):
        w, b = variables
        return x @ w + b

    for scale in (1.0, 1000.0):
        x = scale * models.normal((4, 8), 2)
        path = tmp_path / "off.tflite"
        report, (found,) = models.assert_simulated(path, model, variables, x)
        (grid,) = report.outputs
        floats = (found.astype(np.float32) - grid.zero_point) * grid.scale
        expected = np.broadcast_to(variables[1][2:], (4, 3))
        np.testing.assert_allclose(floats[:, 2:], expected, atol=grid.scale[0])


def test_channels_that_weight_decay_brought_near_the_smallest_floats(tmp_path):
    # Steps of sums below the smallest normal float are zero in some programs.
    scales = np.float32([1.0, 1e-36, 1e-37, 3e-40])
    weights = np.asarray(models.normal((8, 4))) * scales
    variables = weights, np.float32([1.0, -2e-38, -2e-42, 3e-40])

    def model(variables, x):
        w, b = variables
        return x @ w + b

    x, path = models.normal((4, 8), 2), tmp_path / "decayed.tflite"
    report, (found,) = models.assert_simulated(path, model, variables, x)
    (grid,) = report.outputs
    assert (found[:, 1:] == grid.zero_point).all()
    assert (found[:, 0] != grid.zero_point).any()


def test_inputs_that_are_not_used_and_known_outputs(tmp_path):
    x, path = models.normal((2, 3)), tmp_path / "m.tflite"

    def model(w, x, unused):
        return (x @ w) * 0.0, jnp.arange(3.0)

    ranges = edge.calibrate(model, models.normal((3, 4)), [(x, x)])
    edge.export(model, models.normal((3, 4)), ranges, (x, x), path)
    q = np.zeros((2, 3), np.int8)
    product, known = models.run(path, q, q)
    assert product.shape == (2, 4)
    np.testing.assert_array_equal(known, np.arange(3.0))


@pytest.mark.slow
def test_several_outputs_of_an_equation_of_weights(tmp_path):
    w, x = models.normal((6, 8)), models.normal((4, 6), 2)

    def model(w, x):
        first, second = jnp.split(w, 2, axis=1)
        return jnp.tanh(x @ first) + x @ second

    models.assert_simulated(tmp_path / "split.tflite", model, w, x)


def test_nnx_in_training_is_refused():
    class Dropped(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.layer = nnx.Linear(3, 2, rngs=rngs)
            self.norm = nnx.BatchNorm(2, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.dropout(self.norm(self.layer(x)))

    model, x = Dropped(nnx.Rngs(0)), models.normal((4, 3))
    with pytest.raises(ValueError, match=r"norm/mean.*call model.eval\(\)"):
        edge.calibrate(model, nnx.state(model), [x])
    model.eval()
    edge.calibrate(model, nnx.state(model), [x])


@pytest.mark.slow
def test_convolutions_without_bias(tmp_path):
    x = models.normal((2, 5, 5, 3))
    model = nn.Conv(4, (3, 3), use_bias=False)
    variables = models.trained(model, x)
    models.assert_simulated(tmp_path / "conv.tflite", model, variables, x)


def test_ranges_that_are_too_narrow_are_refused(tmp_path):
    x, w = models.normal((2, 3)), models.normal((3, 4))

    def model(w, x):
        y = x @ w
        return y + y[::-1]

    ranges = edge.calibrate(model, w, [x])
    for name in ("fully_connected", "add"):
        narrow = ranges.replace({name: (-1e-7, 1e-7)})
        with pytest.raises(ValueError, match=f"range of '{name}' is too narrow"):
            edge.export(model, w, narrow, x, tmp_path / "narrow.tflite")


def test_arguments_of_a_simulation():
    x, w = models.normal((2, 3)), models.normal((3, 4))
    ranges = edge.calibrate(jnp.matmul, x, [w])
    with pytest.raises(ValueError, match="kernels must be one of xnnpack, builtin"):
        edge.simulate(jnp.matmul, x, ranges, w, kernels="fastest")
    with pytest.raises(ValueError, match="takes 1 arrays.*got 0"):
        edge.simulate(jnp.matmul, x, ranges, w)()


@pytest.mark.parametrize(
    "op", mostly_slow(["fully_connected", "add", "softmax"], "fully_connected")
)
def test_int16_of_one_operator(tmp_path, op):
    # What is rescaled for it has its width, though no rule is for that.
    def model(w, x):
        y = x @ w
        return nn.softmax(y + x) @ w

    rules = [edge.Rule(op=op, activations="int16")]
    w, x = models.normal((4, 4)), models.normal((3, 4), 2)
    models.assert_simulated(tmp_path / "mixed.tflite", model, w, x, rules)


def test_a_file_that_does_not_run_is_refused():
    with pytest.raises(ValueError, match="interpreter refuses the file"):
        converter.check_runs(b"no model" * 20)


def test_a_file_that_ends_the_process_is_refused():
    def added(x):
        fine, coarse = Grid(np.float32(0.1)), Grid(np.float32(1e36))
        y = annotations.mark(x, fine) + annotations.mark(jnp.tanh(x), coarse)
        return [annotations.mark(y, coarse)]

    x = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    function = converter.Function(added, [x], ["input"], ["output"])
    data = converter.convert({converter.SIGNATURE: function})
    with pytest.raises(ValueError, match="interpreter refuses.* ended with SIGABRT: "):
        converter.check_runs(data)


def test_operators_that_the_converter_knows_as_text_alone(tmp_path):
    def model(w, x):
        return jax.lax.top_k(x @ w, 2)

    rules = [edge.Rule(op="top_k", is_float=True)]
    ranges = edge.calibrate(model, _W, [_X], rules)
    path = tmp_path / "best.tflite"
    report = edge.export(model, _W, ranges, _X, path, rules)
    assert report.counts()["TOPK_V2"] == 1
    _, places = models.run(path, np.zeros((4, 3), np.int8))
    np.testing.assert_array_equal(places, [[0, 1]] * 4)


def test_degenerate_ranges_are_named(tmp_path):
    # Calibrated on zeros, for one: the file is one of constants.
    ranges = edge.calibrate(_dense, _W, [0 * _X])
    message = r"no width.*\n  'input': \[0, 0\]\n  'fully_connected'"
    with pytest.warns(UserWarning, match=message):
        edge.export(_dense, _W, ranges, _X, tmp_path / "m.tflite")
    narrow = edge.calibrate(_dense, _W, [_X]).replace({"input": (-1e-30, 1e-30)})
    with pytest.warns(UserWarning, match=r"no width.*\n  'input': \[-1e-30, 1e-30\]$"):
        edge.simulate(_dense, _W, narrow, _X)


def test_ranges_beyond_what_runtimes_compute_are_refused():
    ranges = edge.calibrate(_dense, _W, [_X]).replace({"input": (-3.4e38, 1)})
    with pytest.raises(ValueError, match=r"range of 'input'.*-3.4e\+38.*1e\+30"):
        edge.simulate(_dense, _W, ranges, _X)
