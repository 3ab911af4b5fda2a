import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from aqtlite import edge
from aqtlite.edge import Rule
from aqtlite.edge.onnx.forms import FORMS
from aqtlite.edge.operators.base import Equation, Operator
from aqtlite.edge.operators.weights import QuantizedOperand
from tests.common import mostly_slow
from tests.edge.onnx import runs

pytestmark = pytest.mark.code("quick")

_RNG = np.random.default_rng(0)


def normal(*shape):
    return _RNG.normal(size=shape).astype(np.float32)


X, Y = normal(2, 4, 6), normal(2, 4, 6)
IMAGE, KERNEL, DEPTHWISE = normal(1, 6, 6, 4), normal(3, 3, 4, 8), normal(3, 3, 1, 8)
WEIGHT, BIAS = normal(6, 5), normal(5)


def conv(x, kernel, padding="SAME", **options):
    return lax.conv_general_dilated(
        x,
        kernel,
        options.pop("strides", (1, 1)),
        padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        **options,
    )


# Function, arguments, operators that onnxruntime runs, the ones of them in float.
CASES = {
    "fully_connected": (lambda x: nn.relu(x @ WEIGHT + BIAS), [X], "Reshape QGemm"),
    "conv": (lambda x: nn.relu6(conv(x, KERNEL)), [IMAGE], "QLinearConv"),
    "conv_strided": (
        lambda x: conv(x, KERNEL, "VALID", strides=(2, 1), rhs_dilation=(1, 2)),
        [IMAGE],
        "QLinearConv",
    ),
    "conv_grouped": (
        lambda x: conv(x, KERNEL[:, :, :2], feature_group_count=2),
        [IMAGE],
        "QLinearConv",
    ),
    "depthwise": (
        lambda x: conv(x, DEPTHWISE, feature_group_count=4),
        [IMAGE],
        "QLinearConv",
    ),
    "batch_matmul": (lambda x, y: x @ y.mT, [X, Y], "QLinearMatMul"),
    "add": (lambda x, y: x + y, [X, 3 * Y[:1]], "QLinearAdd"),
    "add_number": (lambda x: nn.sigmoid(x) + 3.0, [X], "QLinearSigmoid QLinearAdd"),
    "sub": (lambda x, y: x - y, [X, 3 * Y], "BitwiseNot QLinearAdd"),
    "mul": (lambda x, y: x * y, [X, Y], "QLinearMul"),
    "maximum": (jnp.maximum, [X, Y], "Max", "Max"),
    "clip": (lambda x: jnp.clip(x, -0.5, 0.7), [X], "Clip"),
    "relu": (nn.relu, [X], "QLinearConcat"),
    "relu_scalar": (lambda x: nn.relu(x.mean()), [X], "QLinearConcat"),
    "mean": (lambda x: x.mean(-1), [X], "QLinearGlobalAveragePool"),
    "mean_of_images": (
        lambda x: x.mean((1, 2)),
        [IMAGE],
        "QLinearGlobalAveragePool",
    ),
    "sum": (lambda x: x.sum(1), [X], "QGemm"),
    # Its program selects from a known NaN.
    "variance": (lambda x: jnp.var(x, 1), [X], "QLinearGlobalAveragePool QLinearWhere"),
    "reduce_max": (lambda x: x.max(1), [X], "ReduceMax"),
    "max_pool": (lambda x: nn.max_pool(x, (3, 3), (2, 2), "SAME"), [IMAGE], "MaxPool"),
    "average_pool": (
        lambda x: nn.avg_pool(x, (3, 3), (2, 2), "SAME"),
        [IMAGE],
        "Pad QLinearAveragePool",
    ),
    "concatenate": (
        lambda x, y: jnp.concatenate([x, y], 1),
        [X, 3 * Y],
        "QLinearConcat",
    ),
    "pad": (lambda x: jnp.pad(x, ((0, 0), (1, 2), (0, 3))), [X], "Pad"),
    "slice": (lambda x: x[:, 1:4:2], [X], "Slice"),
    "take": (lambda i: jnp.take(WEIGHT, i, axis=0), [np.arange(-3, 9)], "Gather"),
    "select": (jnp.where, [X > 0, X, Y], "QLinearWhere"),
    "mask": (
        lambda x: jnp.where(np.tri(4, 6, dtype=bool), x, -1e9),
        [X],
        "QLinearWhere",
    ),
    "softmax": (lambda x: nn.softmax(x, axis=1), [X], "QLinearSoftmax"),
    "log_softmax": (nn.log_softmax, [X], "LogSoftmax", "LogSoftmax"),
    "leaky_relu": (lambda x: nn.leaky_relu(x, 0.1), [X], "QLinearLeakyRelu"),
    "silu": (nn.silu, [X], "QLinearSigmoid QLinearMul"),
    "tanh": (jnp.tanh, [X], "Tanh", "Tanh"),
    "gelu": (nn.gelu, [X], "Gelu", "Gelu"),
    "hard_swish": (
        nn.hard_swish,
        [X],
        "HardSigmoid Mul",
        "HardSigmoid Mul",
    ),
    "rsqrt": (lax.rsqrt, [abs(X) + 0.1], "Log QLinearMul Exp", "Exp Log"),
}


def of_variables(function):
    return lambda _, *args: function(*args)


@pytest.mark.parametrize(
    "case",
    mostly_slow(CASES, "fully_connected", "conv", "add", "mean", "max_pool", "softmax"),
)
def test_operator(case, tmp_path):
    function, args, operators, *in_float = CASES[case]
    path = tmp_path / "file.onnx"
    run = runs.run(of_variables(function), {}, tuple(args), path)
    assert set(operators.split()) <= set(run.operators)
    assert run.in_float == " ".join(in_float).split()
    np.testing.assert_array_equal(run.found, run.expected)


def test_every_operator_has_a_form():
    def leaves(kind):
        found = {leaf for one in kind.__subclasses__() for leaf in leaves(one)}
        return found | ({kind} if hasattr(kind, "name") else set())

    # Weights that a conversion froze are written by `aqtlite.edge.onnx.weights`.
    assert leaves(Operator) == {*FORMS, Equation, QuantizedOperand}


def test_halves_in_average_pooling_are_rounded_to_even(tmp_path):
    run = runs.run(
        of_variables(lambda x: nn.avg_pool(x, (2, 2), (2, 2))),
        {},
        (normal(4, 16, 16, 4),),
        tmp_path / "file.onnx",
    )
    assert run.quanta.max() == 1 and 0.05 < run.quanta.mean() < 0.2


INT16 = ("fully_connected", "add", "sub", "mean", "pad", "softmax", "clip")


@pytest.mark.parametrize("case", INT16)
def test_int16_is_rounded_in_float(case, tmp_path):
    function, args, *_ = CASES[case]
    rules = [Rule(activations="int16")]
    path = tmp_path / "file.onnx"
    run = runs.run(of_variables(function), {}, tuple(args), path, rules)
    assert run.in_float and run.report.outputs[0].dtype == "int16"
    assert run.quanta.max() <= 1


@pytest.mark.parametrize("case", ["fully_connected", "conv", "depthwise"])
def test_int4_weights_are_two_in_a_byte(case, tmp_path):
    function, args, operators = CASES[case]
    sizes = {}
    for weights in ("int8", "int4"):
        path = tmp_path / f"{weights}.onnx"
        rules = [Rule(weights=weights)]
        run = runs.run(of_variables(function), {}, tuple(args), path, rules)
        assert set(operators.split()) <= set(run.operators) and run.in_float == []
        np.testing.assert_array_equal(run.found, run.expected)
        sizes[weights] = path.stat().st_size
    assert sizes["int4"] < sizes["int8"] + 200


FLOAT = {
    "sin": lambda x: jnp.sin(x) * x,
    "gt": lambda x: jnp.where(x > 0.5, x, 3.0),
    "erf": lambda x: lax.erf(x) * x,
    "cumsum": lambda x: jnp.cumsum(x, 1) * x,
    "dot_general": lambda x: nn.sigmoid(x) @ WEIGHT,
    "conv_general_dilated": lambda x: conv(nn.sigmoid(x)[..., None], KERNEL[:, :, :1]),
    "reduce_sum": lambda x: x.sum(1),
    "sort": lambda x: lax.sort((x, nn.tanh(x), 2 * x), dimension=0, num_keys=1)[1],
    "top_k": lambda x: lax.top_k(x, 3)[0] * 2,
}


@pytest.mark.parametrize("primitive", FLOAT)
def test_primitives_that_a_rule_leaves_in_float(primitive, tmp_path):
    rules = [Rule(op=primitive, is_float=True)]
    function = of_variables(FLOAT[primitive])
    run = runs.run(function, {}, (X,), tmp_path / "file.onnx", rules)
    assert run.in_float
    np.testing.assert_array_equal(run.found, run.expected)


def test_outputs_that_are_indices(tmp_path):
    function = of_variables(lambda x: jnp.argmax(x @ WEIGHT, -1) * 2)
    rules = [Rule(op="argmax", is_float=True)]
    run = runs.run(function, {}, (X,), tmp_path / "file.onnx", rules)
    assert run.found.dtype == np.int32
    np.testing.assert_array_equal(run.found, run.expected)


@pytest.mark.parametrize("case", ["fully_connected", "conv", "depthwise", "add"])
def test_the_simulation_of_xnnpack_is_that_of_onnxruntime(case, tmp_path):
    function, args, *_ = CASES[case]
    function, path = of_variables(function), tmp_path / "file.onnx"
    ranges = edge.calibrate(function, {}, [tuple(args)])
    report = edge.export(function, {}, ranges, tuple(args), path)
    simulation = edge.simulate(function, {}, ranges, tuple(args))
    given = [runs.on_grid(x, t) for x, t in zip(args, report.inputs, strict=True)]
    found = runs.execute(path, report, args)
    np.testing.assert_array_equal(found, simulation(*given))


def test_layers_share_no_scale_with_equal_integers(tmp_path):
    # Their weights are the same integers, and their biases zeros.
    function = of_variables(lambda x: (x @ EYE + ZERO) @ (3 * EYE) + ZERO)
    run = runs.run(function, {}, (X,), tmp_path / "file.onnx")
    assert run.operators.count("QGemm") == 2
    np.testing.assert_array_equal(run.found, run.expected)


EYE, ZERO = np.eye(6, dtype=np.float32), np.zeros(6, np.float32)
