"""Small ONNX networks, and what onnxruntime computes of them."""

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

BOOL = TensorProto.BOOL
FLOAT = TensorProto.FLOAT
INT64 = TensorProto.INT64


def node(op, inputs, outputs, name="", **attributes):
    """Node of inputs and outputs as texts, with "-" for one left out."""
    names = ["" if one == "-" else one for one in inputs.split()]
    return helper.make_node(op, names, outputs.split(), name, **attributes)


def graph(nodes, inputs, outputs, weights=()):
    """Graph of nodes, values by name with (dtype, shape), and weights by name."""
    return helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(n, *one) for n, one in inputs.items()],
        [helper.make_tensor_value_info(n, *one) for n, one in outputs.items()],
        [numpy_helper.from_array(np.asarray(x), n) for n, x in dict(weights).items()],
    )


def model(nodes, inputs, outputs, weights=(), opset=17):
    """Model with one graph; arguments of `graph`, and the version of operators."""
    return helper.make_model(
        graph(nodes, inputs, outputs, weights),
        opset_imports=[helper.make_opsetid("", opset)],
        ir_version=10,
    )


def arrays(**shapes):
    """Random weights of shapes by name."""
    rng = np.random.default_rng(0)
    return {
        name: (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)
        for name, shape in shapes.items()
    }


def convolutional():
    """Two convolutions, a normalization, pooling, and a dense layer."""
    weights = arrays(
        **{"w1": (8, 3, 3, 3), "b1": (8,), "s": (8,), "o": (8,), "m": (8,)},
        **{"v": (8,), "w2": (16, 4, 3, 3), "w3": (5, 16), "b3": (5,)},
    )
    weights["v"] = weights["v"] ** 2
    nodes = [
        node("Conv", "x w1 b1", "h1", "/a/Conv", pads=[1] * 4),
        node("BatchNormalization", "h1 s o m v", "h2", "/a/Norm"),
        node("Relu", "h2", "h3", "/a/Relu"),
        node("Conv", "h3 w2", "h4", "/b/Conv", group=2),
        node("GlobalAveragePool", "h4", "h5", "/b/Pool"),
        node("Flatten", "h5", "h6", "/c/Flatten"),
        node("Gemm", "h6 w3 b3", "y", "/c/Gemm", transB=1),
    ]
    inputs = {"x": (FLOAT, ["n", 3, 8, 8])}
    return model(nodes, inputs, {"y": (FLOAT, ["n", 5])}, weights)


def transformer(width=16, heads=2, length=6):
    """A block of attention and an MLP, with shapes computed as PyTorch exports them."""
    weights = arrays(
        **{"wq": (width, width), "wk": (width, width), "wv": (width, width)},
        **{"wo": (width, width), "s1": (width,), "o1": (width,), "s2": (width,)},
        **{"up": (width, 32), "bias": (32,), "down": (32, width), "tokens": (9, width)},
    )
    weights |= {
        "split": np.array([heads, width // heads]),
        "joined": np.array([width]),
        "zero": np.array(0),
        "one": np.array(1),
        "ends": np.array([0]),
        "half": np.float32(0.5),
        "unit": np.float32(1),
        "root": np.float32(np.sqrt(2)),
        "scale": np.float32((width // heads) ** -0.5),
    }
    nodes = [
        node("Gather", "tokens ids", "x", "/embed/Gather"),
        node("Shape", "ids", "shape", "/Shape"),
        node("Gather", "shape zero", "batch", "/Gather", axis=0),
        node("Gather", "shape one", "length", "/Gather_1", axis=0),
        node("Unsqueeze", "batch ends", "batches", "/Unsqueeze"),
        node("Unsqueeze", "length ends", "lengths", "/Unsqueeze_1"),
        node("Concat", "batches lengths split", "apart", "/Concat", axis=0),
        node("Concat", "batches lengths joined", "whole", "/Concat_1", axis=0),
        node("LayerNormalization", "x s1 o1", "n1", "/norm/LayerNormalization"),
    ]
    for one in "qkv":
        axes = [0, 2, 3, 1] if one == "k" else [0, 2, 1, 3]
        nodes += [
            node("MatMul", f"n1 w{one}", f"flat{one}", f"/attention/{one}/MatMul"),
            node("Reshape", f"flat{one} apart", f"apart{one}", f"/{one}/Reshape"),
            node("Transpose", f"apart{one}", one, f"/{one}/Transpose", perm=axes),
        ]
    nodes += [
        node("MatMul", "q k", "scores", "/attention/scores/MatMul"),
        node("Mul", "scores scale", "scaled", "/attention/Mul"),
        node("Softmax", "scaled", "weights", "/attention/Softmax", axis=-1),
        node("MatMul", "weights v", "mixed", "/attention/values/MatMul"),
        node("Transpose", "mixed", "back", "/attention/Back", perm=[0, 2, 1, 3]),
        node("Reshape", "back whole", "merged", "/attention/Reshape"),
        node("MatMul", "merged wo", "attended", "/attention/out/MatMul"),
        node("Add", "x attended", "x1", "/Add"),
        node("LayerNormalization", "x1 s2", "n2", "/norm_1/LayerNormalization"),
        node("MatMul", "n2 up", "up_", "/mlp/up/MatMul"),
        node("Add", "up_ bias", "upped", "/mlp/up/Add"),
        node("Div", "upped root", "erf_in", "/mlp/Div"),
        node("Erf", "erf_in", "erf", "/mlp/Erf"),
        node("Add", "erf unit", "erf1", "/mlp/Add"),
        node("Mul", "upped erf1", "gelu2", "/mlp/Mul"),
        node("Mul", "gelu2 half", "gelu", "/mlp/Mul_1"),
        node("MatMul", "gelu down", "downed", "/mlp/down/MatMul"),
        node("Add", "x1 downed", "y", "/Add_1"),
    ]
    inputs = {"ids": (INT64, ["batch", length])}
    outputs = {"y": (FLOAT, ["batch", length, width])}
    return model(nodes, inputs, outputs, weights)


def of_onnxruntime(made, *inputs):
    """Outputs of a model."""
    session = onnxruntime.InferenceSession(made.SerializeToString())
    names = [one.name for one in session.get_inputs()]
    return session.run(None, dict(zip(names, inputs, strict=True)))
