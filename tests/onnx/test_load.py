"""Loaded ONNX networks are functions of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

import aqtlite.onnx


def model(nodes, inputs, outputs, weights=(), opset=17):
    """Model of nodes, values by name with (dtype, shape), and weights by name."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(n, *one) for n, one in inputs.items()],
        [helper.make_tensor_value_info(n, *one) for n, one in outputs.items()],
        [numpy_helper.from_array(x, n) for n, x in dict(weights).items()],
    )
    opsets = [helper.make_opsetid("", opset)]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    onnx.checker.check_model(made)
    return made


def convolutional():
    """Two convolutions, a normalization, pooling, and a dense layer."""
    rng = np.random.default_rng(0)

    def array(*shape):
        return rng.normal(size=shape).astype(np.float32) / 4

    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["h1"], "/a/Conv", pads=[1] * 4),
        helper.make_node(
            "BatchNormalization", ["h1", "s", "o", "m", "v"], ["h2"], "/a/Norm"
        ),
        helper.make_node("Relu", ["h2"], ["h3"], "/a/Relu"),
        helper.make_node("Conv", ["h3", "w2"], ["h4"], "/b/Conv", group=2),
        helper.make_node("GlobalAveragePool", ["h4"], ["h5"], "/b/Pool"),
        helper.make_node("Flatten", ["h5"], ["h6"], "/c/Flatten"),
        helper.make_node("Gemm", ["h6", "w3", "b3"], ["y"], "/c/Gemm", transB=1),
    ]
    weights = {
        "w1": array(8, 3, 3, 3),
        "b1": array(8),
        "s": array(8),
        "o": array(8),
        "m": array(8),
        "v": array(8) ** 2,
        "w2": array(16, 4, 3, 3),
        "w3": array(5, 16),
        "b3": array(5),
    }
    inputs = {"x": (TensorProto.FLOAT, ["n", 3, 8, 8])}
    return model(nodes, inputs, {"y": (TensorProto.FLOAT, ["n", 5])}, weights)


def of_onnxruntime(made, *inputs):
    session = onnxruntime.InferenceSession(made.SerializeToString())
    names = [one.name for one in session.get_inputs()]
    return session.run(None, dict(zip(names, map(np.asarray, inputs), strict=True)))


def test_loads_a_file(tmp_path):
    made = convolutional()
    onnx.save(made, tmp_path / "network.onnx")
    function, parameters = aqtlite.onnx.load(tmp_path / "network.onnx")
    assert function.inputs == (
        aqtlite.onnx.Array("x", ("n", 3, 8, 8), np.dtype(np.float32)),
    )
    assert [one.name for one in function.outputs] == ["y"]
    assert {n: x.shape for n, x in parameters.items()}["w2"] == (16, 4, 3, 3)
    x = jax.random.normal(jax.random.key(0), (2, 3, 8, 8))
    y = jax.jit(function)(parameters, x)
    np.testing.assert_allclose(y, of_onnxruntime(made, x)[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(jax.jit(function)(parameters, x=x), y)


def test_is_differentiated():
    function, parameters = aqtlite.onnx.load(convolutional())
    x = jnp.ones((1, 3, 8, 8))
    gradients = jax.jit(jax.grad(lambda p: function(p, x).sum()))(parameters)
    assert all(bool(jnp.isfinite(g).all()) for g in gradients.values())
    assert gradients["b3"].tolist() == [1] * 5
