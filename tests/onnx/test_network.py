"""Loaded networks are functions: they are called, compiled, differentiated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from onnx import helper, numpy_helper

import aqtlite.onnx
from tests.onnx.models import (
    FLOAT,
    convolutional,
    model,
    node,
    of_onnxruntime,
    transformer,
)

pytestmark = pytest.mark.code("quick")

X = np.random.default_rng(1).normal(size=(2, 3, 8, 8)).astype(np.float32)
IDS = np.arange(12).reshape(2, 6) % 9


@pytest.mark.parametrize(
    ("made", "inputs"), [(convolutional(), X), (transformer(), IDS)]
)
def test_equals_onnxruntime_and_is_differentiated(made, inputs):
    function, parameters = aqtlite.onnx.load(made)

    @jax.jit
    def value_and_gradients(parameters, inputs):
        y, pull = jax.vjp(lambda p: function(p, inputs), parameters)
        return y, *pull(jnp.ones_like(y))

    y, gradients = value_and_gradients(parameters, inputs)
    (expected,) = of_onnxruntime(made, inputs)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    assert all(bool(jnp.any(g != 0)) for g in gradients.values())


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16])
def test_weights_and_inputs_of_16_bits(dtype):
    made = convolutional()
    function, parameters = aqtlite.onnx.load(made)
    exact = jax.jit(function)(parameters, X)
    number = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    for tensor in made.graph.initializer:
        array = numpy_helper.to_array(tensor).astype(dtype)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    for value in (*made.graph.input, *made.graph.output):
        value.type.tensor_type.elem_type = number
    function, parameters = aqtlite.onnx.load(made)
    assert {x.dtype for x in parameters.values()} == {np.dtype(dtype)}
    y = jax.jit(function)(parameters, X.astype(dtype))
    assert y.dtype == dtype
    tolerance = 4 * float(jnp.finfo(dtype).eps)
    assert jnp.linalg.norm(y - exact) < tolerance * jnp.linalg.norm(exact)


def test_several_outputs_are_a_tuple():
    made = model(
        [node("Add", "a b", "sum"), node("Sub", "a b", "difference")],
        {"a": (FLOAT, [2]), "b": (FLOAT, [2])},
        {"sum": (FLOAT, [2]), "difference": (FLOAT, [2])},
    )
    function, _ = aqtlite.onnx.load(made)
    a, b = np.float32([3, 4]), np.float32([1, 2])
    for total, difference in (function({}, a, b), function({}, b=b, a=a)):
        assert total.tolist() == [4, 6]
        assert difference.tolist() == [2, 2]


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        ((), {}, TypeError, "needs the inputs x"),
        ((X, X), {}, TypeError, "has 1 inputs, x; got 2"),
        ((X,), {"x": X}, TypeError, "'x' is given twice"),
        ((X,), {"z": X}, TypeError, "'z' is unknown; inputs: x"),
        ((X.astype(jnp.bfloat16),), {}, TypeError, "is float32 .* got bfloat16: cast"),
        ((X[0],), {}, ValueError, r"shape \(n, 3, 8, 8\) .* got \(3, 8, 8\)"),
        ((X[..., 1:],), {}, ValueError, r"shape \(n, 3, 8, 8\) .* got \(2, 3, 8, 7\)"),
    ],
)
def test_inputs_are_checked(args, kwargs, error, message):
    function, parameters = aqtlite.onnx.load(convolutional())
    with pytest.raises(error, match=message):
        function(parameters, *args, **kwargs)


def test_parameters_are_checked():
    function, parameters = aqtlite.onnx.load(convolutional())
    with pytest.raises(ValueError, match="'b3' has the shape .5,. .* got .4,."):
        function(parameters | {"b3": jnp.zeros(4)}, X)
    with pytest.raises(TypeError, match="'w2' has the dtype int8; .* are floats"):
        function(parameters | {"w2": parameters["w2"].astype(jnp.int8)}, X)
    with pytest.raises(TypeError, match="first argument is the dictionary of parame"):
        jax.jit(function)(X, parameters)
    del parameters["w2"]
    with pytest.raises(ValueError, match="'w2' is missing: the first argument"):
        function(parameters, X)


def test_sizes_of_one_name_agree():
    made = model(
        [node("Relu", "a", "y"), node("Relu", "b", "z")],
        {"a": (FLOAT, ["n", 2]), "b": (FLOAT, ["n", 2])},
        {"y": (FLOAT, ["n", 2]), "z": (FLOAT, ["n", 2])},
    )
    function, _ = aqtlite.onnx.load(made)
    a = np.ones((3, 2), np.float32)
    assert function({}, a, a)[0].shape == (3, 2)
    with pytest.raises(ValueError, match="'a' and 'b' .* size 'n' .*, got 3 and 2"):
        function({}, a, a[:2])


def test_values_without_a_type():
    made = convolutional()
    made.graph.input[0].ClearField("type")
    made.graph.output[0].ClearField("type")
    function, parameters = aqtlite.onnx.load(made)
    assert function.inputs == (aqtlite.onnx.Array("x", None, None),)
    assert function.outputs == (aqtlite.onnx.Array("y", None, None),)
    assert function(parameters, X).shape == (2, 5)


def test_errors_name_the_node():
    made = model(
        [node("Add", "a b", "c", "/block/Add")],
        {"a": (FLOAT, ["n"]), "b": (FLOAT, ["m"])},
        {"c": (FLOAT, None)},
    )
    function, parameters = aqtlite.onnx.load(made)
    with pytest.raises((TypeError, ValueError)) as caught:
        function(parameters, np.zeros(2, np.float32), np.zeros(3, np.float32))
    text = " ".join((str(caught.value), *getattr(caught.value, "__notes__", ())))
    assert "Add node '/block/Add'" in text and "float32[2], float32[3]" in text


@pytest.mark.parametrize(
    ("op", "constants", "reason"),
    [
        ("Reshape", [[-(2**40), 8]], r"cannot reshape .*\[-2147483648, 8\]"),
        ("Reshape", [[7, 8]], "cannot reshape"),
        ("Slice", [[0], [2], [5]], "out of range"),
        ("Tile", [[-3, 1]], "repeats .*are negative"),
    ],
)
def test_damaged_constants_of_shapes(op, constants, reason):
    names = [f"constant{i}" for i in range(len(constants))]
    made = model(
        [node(op, " ".join(["x", *names]), "y", "/block/node")],
        {"x": (FLOAT, [4, 16])},
        {"y": (FLOAT, None)},
        dict(zip(names, map(np.int64, constants), strict=True)),
    )
    function, parameters = aqtlite.onnx.load(made)
    with pytest.raises(ValueError, match=f"{op} node '/block/node'.*{reason}"):
        function(parameters, np.zeros((4, 16), np.float32))
