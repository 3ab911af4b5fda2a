"""Nodes of ONNX graphs, on small arrays, for comparison with onnxruntime."""

import dataclasses
from typing import Any

import numpy as np
from onnx import TensorProto

U8, I8 = np.uint8, np.int8
RNG = np.random.default_rng(0)


@dataclasses.dataclass(frozen=True, eq=False)
class Known:
    """An input that is an initializer of the graph."""

    array: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A node with its inputs: arrays, `Known` ones, or None for one left out."""

    op: str
    inputs: tuple[Any, ...]
    outputs: int
    opset: int
    attributes: dict[str, Any]

    def __str__(self) -> str:
        attributes = "-".join(f"{k}={v}" for k, v in self.attributes.items())
        return f"{self.op}-{self.opset}-{attributes}".replace(" ", "")[:60]


def case(op, *inputs, outputs=1, opset=17, **attributes):
    return Case(op, inputs, outputs, opset, attributes)


def f(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def positive(*shape):
    return RNG.uniform(0.1, 0.9, size=shape).astype(np.float32)


def i(*values, dtype=np.int64):
    return np.array(values, dtype)


def k(*values, dtype=np.int64):
    return Known(np.array(values, dtype))


def kf(*values):
    return Known(np.array(values, np.float32))


def scalar(value, dtype=np.int64):
    return Known(np.array(value, dtype))


def whole(*shape):
    return RNG.integers(-5, 6, size=shape)


def mask(*shape):
    return RNG.integers(0, 2, size=shape).astype(bool)


IMAGE = f(2, 4, 7, 6)


def each(names, *inputs, **attributes):
    """A case for each operator, all of equal inputs."""
    return [case(op, *inputs, **attributes) for op in names.split()]


UNARY = [
    *each("Abs Ceil Cos Erf Exp Floor Neg Sign Sin", f(2, 3)),
    *each("Atan Sinh Cosh Asinh Tan Tanh Sigmoid", f(2, 3)),
    *each("Relu Selu Softplus Softsign HardSwish", f(2, 3)),
    *each("Elu Celu LeakyRelu HardSigmoid", f(2, 3)),
    *each("Acos Asin Atanh Log Reciprocal Sqrt", positive(2, 3)),
    case("Acosh", positive(3) + 1),
    case("Round", np.array([-1.5, -0.5, 0.5, 1.5, 2.2], np.float32)),
    case("Elu", f(2, 3), alpha=0.5),
    case("LeakyRelu", f(2, 3), alpha=0.3),
    case("HardSigmoid", f(2, 3), alpha=0.4, beta=0.3),
    case("ThresholdedRelu", f(2, 3), alpha=0.3),
    case("Shrink", f(2, 3), lambd=0.4, bias=0.1),
    case("Mish", f(2, 3), opset=18),
    case("Gelu", f(2, 3), opset=20),
    case("Gelu", f(2, 3), opset=20, approximate="tanh"),
    case("PRelu", f(2, 3, 4), Known(f(3, 1))),
    case("Not", mask(4)),
    case("IsNaN", np.array([1, np.nan, np.inf], np.float32)),
    case("IsInf", np.array([1, -np.inf, np.inf], np.float32), detect_negative=0),
    case("Cast", f(2, 3) * 3, to=TensorProto.INT32),
    case("Cast", f(2, 3) * 3, to=TensorProto.FLOAT16),
    case("Cast", f(2, 3), to=TensorProto.BOOL),
    case("Softmax", f(2, 3, 4), axis=1),
    case("Softmax", f(2, 3, 4), axis=1, opset=11),
    case("Softmax", f(2, 3, 4), opset=11, axis=2),
    case("LogSoftmax", f(2, 3, 4)),
    case("LogSoftmax", f(2, 3, 4), opset=11),
    case("Hardmax", f(2, 3)),
    case("Clip", f(3, 4), scalar(-0.5, np.float32), scalar(0.5, np.float32)),
    case("Clip", f(3, 4), None, scalar(0.5, np.float32)),
    case("Clip", f(3, 4), opset=7, min=-0.3, max=0.2),
    case("Identity", f(2)),
    case("Dropout", f(2, 3), outputs=2),
    case("Dropout", f(2, 3), opset=11),
]

BINARY = [
    *each("Add Sub Mul Div Min Max Sum Mean", f(2, 3), f(3)),
    *each("GreaterOrEqual LessOrEqual", f(2, 3), f(3)),
    *each("Add Sub Mul Mod", whole(2, 3), i(2, 1, 3)),
    *each("Equal Greater Less", whole(2, 3), i(2, 0, 3)),
    *each("And Or Xor", mask(2, 3), mask(3)),
    case("Div", i(7, -7, 7, -7), i(2, 2, -2, -2)),
    case("Mod", i(7, -7, 7, -7), i(3, 3, -3, -3)),
    case("Mod", i(7, -7, 7, -7), i(3, 3, -3, -3), fmod=1),
    case("Mod", f(4) * 5, f(4), fmod=1),
    case("Add", f(2, 3), kf([[[1.5]]])),
    case("Pow", f(2, 3), scalar(2, np.float32)),
    case("Pow", f(2, 3), scalar(3)),
    case("Pow", positive(2, 3), scalar(0.5, np.float32)),
    case("Pow", positive(2, 3), f(3)),
    case("Pow", positive(2, 3), scalar(-2, np.float32)),
    case("Max", f(2, 3), f(3), f(2, 1)),
    case("Where", mask(2, 3), f(3), f(2, 1)),
    case(
        "BitShift", i(1, 2, dtype=np.uint8), i(3, 1, dtype=np.uint8), direction="LEFT"
    ),
    case("BitwiseAnd", i(6, 3), i(5, 1), opset=18),
    case("MatMul", f(2, 3), f(3, 4)),
    case("MatMul", f(2, 3, 4), f(4, 5)),
    case("MatMul", f(2, 3, 4), f(2, 4, 5)),
    case("MatMul", f(1, 2, 3, 4), f(2, 1, 4, 5)),
    case("MatMul", f(4), f(4, 5)),
    case("MatMul", f(2, 3, 4), f(4)),
    case("Gemm", f(2, 3), f(3, 4), f(4)),
    case("Gemm", f(3, 2), f(4, 3), f(2, 1), transA=1, transB=1, alpha=0.5, beta=2.0),
    case("Gemm", f(2, 3), f(3, 4)),
    case("Einsum", f(2, 3, 4), f(2, 5, 4), equation="bij,bkj->bik"),
    case("Einsum", f(3, 3), equation="ii->i"),
    case("Det", f(2, 3, 3)),
]

LAYOUT = [
    case("Reshape", f(2, 3, 4), k(0, -1)),
    case("Reshape", f(2, 3, 4), k(4, 0, 2)),
    case("Flatten", f(2, 3, 4), axis=2),
    case("Flatten", f(2, 3, 4), axis=0),
    case("Squeeze", f(1, 2, 1), k(-1)),
    case("Squeeze", f(1, 2, 1)),
    case("Squeeze", f(1, 2, 1), opset=11, axes=[0]),
    case("Unsqueeze", f(2, 3), k(0, -1)),
    case("Unsqueeze", f(2, 3), opset=11, axes=[1]),
    case("Transpose", f(2, 3, 4)),
    case("Transpose", f(2, 3, 4), perm=[1, 0, 2]),
    case("Concat", f(2, 3), f(2, 1), axis=-1),
    case("Concat", f(2, 3), kf([1], [2]), axis=1),
    case("Split", f(2, 6), outputs=3, axis=1),
    case("Split", f(2, 6), k(1, 5), outputs=2, axis=1),
    case("Split", f(2, 6), outputs=2, opset=11, axis=1, split=[2, 4]),
    case("Split", f(2, 7), outputs=3, opset=18, axis=1, num_outputs=3),
    case("Slice", f(5, 6), k(1), k(-1), k(1), k(2)),
    case("Slice", f(5, 6), k(-1, 4), k(-(2**63), -7), k(0, 1), k(-1, -2)),
    case("Slice", f(5, 6), k(0, 1), k(2**62, 9)),
    case("Slice", f(5, 6), k(3), k(3)),
    case("Slice", f(5, 6), opset=9, starts=[1, 0], ends=[3, -2], axes=[0, 1]),
    case("Expand", f(3, 1), k(2, 1, 4)),
    case("Tile", f(2, 3), k(2, 1)),
    case("Pad", f(2, 3), k(1, 0, 0, 2), scalar(1.5, np.float32)),
    case("Pad", f(2, 3), k(1, 0, 0, -1)),
    case("Pad", f(2, 3), k(1, 2, 0, 2), mode="reflect"),
    case("Pad", f(2, 3), k(1, 2), None, k(1), opset=18, mode="edge"),
    case("Pad", f(2, 3), opset=10, pads=[0, 1, 1, 0], value=0.5),
    case("DepthToSpace", f(1, 8, 2, 3), blocksize=2),
    case("DepthToSpace", f(1, 8, 2, 3), blocksize=2, mode="CRD"),
    case("SpaceToDepth", f(1, 2, 4, 6), blocksize=2),
    case("Trilu", f(3, 4), upper=0),
    case("Trilu", f(3, 4), scalar(1)),
    case("Trilu", f(3, 4), scalar([-1]), upper=0),
    case("Shape", f(2, 3, 4)),
    case("Shape", f(2, 3, 4), start=-2),
    case("Size", f(2, 3)),
    case("ConstantOfShape", k(2, 3)),
    case("Range", scalar(2), scalar(9), scalar(3)),
    case("Range", *(scalar(x, np.float32) for x in (1, -2, -0.75))),
    case("EyeLike", f(3, 4), k=1),
    case("OneHot", i(1, -1, 7), scalar(4), kf(-1, 2)),
    case("OneHot", whole(2, 3), scalar(4), kf(0, 1), axis=0),
]

INDEXING = [
    case("Gather", f(3, 4), i(2, -1, 0)),
    case("Gather", f(3, 4), scalar(-1), axis=1),
    case("Gather", f(3, 4), i([1, 0], [2, 3]), axis=1),
    case("GatherElements", f(3, 4), i([0, -1], [2, 1]), axis=1),
    case("GatherND", f(3, 4), i([0, 1], [2, -1])),
    case("GatherND", f(2, 3, 4), i([1], [0]), batch_dims=1),
    case("GatherND", f(2, 3, 4), i([[1]], [[0]])),
    case("ScatterElements", f(3, 4), i([0, -1], [2, 1]), f(2, 2), axis=1),
    case("ScatterElements", f(3), i(1, 1), f(2), reduction="add"),
    case("ScatterND", f(3, 4), i([2], [0]), f(2, 4)),
    case("ScatterND", f(3, 4), i([2], [2]), f(2, 4), opset=18, reduction="max"),
    case("Compress", f(3, 4), Known(np.array([True, False, True])), axis=0),
    case("ArgMax", f(3, 4), axis=1),
    case("ArgMin", f(3, 4), axis=-1, keepdims=0),
    case("ArgMax", i([1, 3, 3], [2, 2, 0]), axis=1, select_last_index=1),
    case("TopK", f(3, 5), k(2), outputs=2),
    case("TopK", f(3, 5), k(2), outputs=2, axis=0, largest=0),
    case("CumSum", f(3, 4), scalar(1)),
    case("CumSum", f(3, 4), scalar(0), exclusive=1, reverse=1),
    case("ReverseSequence", f(4, 3), i(4, 2, 1)),
    case("NonZero", k([1, 0], [0, 3])),
]

REDUCTIONS = [
    *each("ReduceMean ReduceMax ReduceMin ReduceProd", f(2, 3, 4), axes=[1]),
    *each("ReduceL1 ReduceL2 ReduceSumSquare", f(2, 3, 4), axes=[1, -1]),
    case("ReduceLogSum", positive(2, 3), axes=[1], keepdims=0),
    case("ReduceLogSumExp", f(2, 3), axes=[0]),
    case("ReduceMean", f(2, 3)),
    case("ReduceSum", f(2, 3, 4), k(0, 2), keepdims=0),
    case("ReduceSum", f(2, 3), noop_with_empty_axes=1),
    case("ReduceSum", f(2, 3), opset=11, axes=[1]),
    case("ReduceMax", f(2, 3), k(1), opset=18),
    case("ReduceSum", whole(2, 3), k(0)),
    case("MeanVarianceNormalization", f(2, 3, 4, 2)),
]

WINDOWS = [
    case("Conv", IMAGE, f(6, 4, 3, 3), f(6)),
    case("Conv", IMAGE, f(6, 2, 3, 2), group=2, strides=[2, 1], pads=[1, 0, 2, 1]),
    case("Conv", IMAGE, f(8, 1, 3, 3), group=4, dilations=[2, 1]),
    case("Conv", f(1, 2, 9), f(3, 2, 4), auto_pad="SAME_UPPER", strides=[2]),
    case("Conv", f(1, 2, 9), f(3, 2, 4), auto_pad="SAME_LOWER"),
    case("Conv", f(1, 2, 4, 4, 3), f(3, 2, 2, 2, 2), auto_pad="VALID"),
    case("ConvTranspose", IMAGE, f(4, 3, 3, 3), f(3)),
    case("ConvTranspose", IMAGE, f(4, 3, 2, 2), strides=[2, 2], pads=[1, 0, 0, 1]),
    case("ConvTranspose", IMAGE, f(4, 2, 3, 3), group=2, dilations=[1, 2]),
    case("ConvTranspose", f(1, 2, 5), f(2, 3, 3), strides=[3], output_padding=[1]),
    case("ConvTranspose", f(1, 2, 5), f(2, 3, 3), strides=[2], output_shape=[10]),
    case("ConvTranspose", f(1, 2, 5), f(2, 3, 3), strides=[2], auto_pad="SAME_UPPER"),
    case(
        "ConvTranspose",
        f(1, 2, 5),
        f(2, 3, 3),
        strides=[2],
        output_shape=[12],
        auto_pad="SAME_UPPER",
    ),
    case("MaxPool", IMAGE, kernel_shape=[3, 2], strides=[2, 2]),
    case("MaxPool", IMAGE, kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1),
    case("MaxPool", IMAGE, kernel_shape=[2, 2], dilations=[2, 1], pads=[1, 1, 0, 0]),
    case("MaxPool", f(1, 2, 9), kernel_shape=[4], auto_pad="SAME_UPPER", strides=[2]),
    case("AveragePool", IMAGE, kernel_shape=[3, 3], strides=[2, 2]),
    case("AveragePool", IMAGE, kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
    case("AveragePool", IMAGE, kernel_shape=[3, 3], pads=[1] * 4, count_include_pad=1),
    case("AveragePool", IMAGE, kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1),
    case("LpPool", IMAGE, kernel_shape=[2, 2], p=2),
    *each("GlobalAveragePool GlobalMaxPool GlobalLpPool", IMAGE),
    case("BatchNormalization", IMAGE, f(4), f(4), f(4), positive(4), epsilon=1e-3),
    case("InstanceNormalization", IMAGE, f(4), f(4)),
    case("LayerNormalization", f(2, 3, 4), f(4), f(4)),
    case("LayerNormalization", f(2, 3, 4), f(3, 4), axis=1, outputs=3),
    case("GroupNormalization", IMAGE, f(2), f(2), opset=18, num_groups=2),
    case("GroupNormalization", IMAGE, f(4), f(4), opset=21, num_groups=2),
    case("LpNormalization", f(2, 3), axis=1),
    case("LpNormalization", f(2, 3), axis=0, p=1),
    case("LRN", IMAGE, size=3, alpha=0.1),
]

MODES = "half_pixel align_corners asymmetric pytorch_half_pixel half_pixel_symmetric"


def resize(scales=None, sizes=None, x=IMAGE, opset=19, **attributes):
    given = kf(*scales) if scales else None, k(*sizes) if sizes else None
    attributes = {"coordinate_transformation_mode": "half_pixel"} | attributes
    return case("Resize", x, None, *given, opset=opset, **attributes)


RESIZES = [
    *(
        resize((1, 1, 1.6, 0.7), mode="linear", coordinate_transformation_mode=mode)
        for mode in MODES.split()
    ),
    *(
        resize((1, 1, 2, 0.7), mode="nearest", nearest_mode=mode)
        for mode in ["floor", "ceil", "round_prefer_floor", "round_prefer_ceil"]
    ),
    resize(
        (1, 1, 2, 3), coordinate_transformation_mode="asymmetric", nearest_mode="floor"
    ),
    resize(sizes=(2, 4, 9, 4), mode="cubic"),
    resize(sizes=(2, 4, 9, 4), mode="cubic", exclude_outside=1, cubic_coeff_a=-0.5),
    resize(sizes=(2, 4, 3, 4), mode="linear", antialias=1),
    resize(sizes=(2, 4, 3, 4), mode="cubic", antialias=1),
    resize(sizes=(9, 3), axes=[2, 3], mode="linear"),
    resize(sizes=(9, 4), axes=[2, 3], keep_aspect_ratio_policy="not_larger"),
    case(
        "Resize",
        IMAGE,
        kf(0, 0, 0.2, -0.1, 1, 1, 0.8, 1.2),
        None,
        k(2, 4, 5, 5),
        mode="linear",
        coordinate_transformation_mode="tf_crop_and_resize",
        extrapolation_value=3.0,
    ),
    case("Resize", IMAGE, kf(1, 1, 2, 0.7), opset=10, mode="linear"),
    case("Resize", IMAGE, kf(1, 1, 2, 2), opset=10, mode="nearest"),
    case("Upsample", IMAGE, kf(1, 1, 2, 2), opset=9, mode="nearest"),
]


Q, K, V = f(2, 4, 3, 8), f(2, 2, 5, 8), f(2, 2, 5, 6)
PAST = f(2, 2, 4, 8), f(2, 2, 4, 6)
ATTENTION = [
    case("Attention", Q, K, V, opset=23),
    case("Attention", Q, K, V, mask(2, 1, 3, 5), opset=23, is_causal=1, scale=0.5),
    case("Attention", Q, K, V, f(3, 9), *PAST, opset=23, outputs=3),
    case("Attention", Q, K, V, None, *PAST, opset=23, outputs=3, is_causal=1),
    case(
        "Attention",
        *(f(2, 3, 16), f(2, 5, 8), f(2, 5, 6)),
        opset=23,
        q_num_heads=4,
        kv_num_heads=2,
        softcap=2.0,
    ),
    case("RotaryEmbedding", Q, f(2, 3, 4), f(2, 3, 4), opset=23),
]


def recurrent(op, gates, *inputs, directions=1, outputs=2, hidden=3, **attributes):
    kernels = f(directions, gates * hidden, 2), f(directions, gates * hidden, hidden)
    bias = f(directions, 2 * gates * hidden)
    x = f(5, 2, 2) if not attributes.get("layout") else f(2, 5, 2)
    return case(
        op,
        x,
        *kernels,
        bias,
        *inputs,
        outputs=outputs,
        hidden_size=hidden,
        **attributes,
    )


LENGTHS = i(3, 5, dtype=np.int32)
RECURRENT = [
    recurrent("LSTM", 4, outputs=3),
    recurrent("LSTM", 4, None, f(1, 2, 3), f(1, 2, 3), f(1, 9), outputs=3),
    recurrent("LSTM", 4, None, f(1, 2, 3), f(1, 2, 3), f(1, 9), outputs=3, clip=0.5),
    recurrent("LSTM", 4, LENGTHS, outputs=3, directions=2, direction="bidirectional"),
    recurrent("LSTM", 4, direction="reverse", clip=0.5, outputs=3),
    recurrent("LSTM", 4, activations=["HardSigmoid", "Tanh", "Relu"], outputs=3),
    recurrent("GRU", 3),
    recurrent("GRU", 3, None, f(2, 2, 3), directions=2, direction="bidirectional"),
    recurrent("GRU", 3, linear_before_reset=1),
    recurrent("GRU", 3, LENGTHS, direction="reverse"),
    recurrent("RNN", 1),
    recurrent("RNN", 1, directions=2, direction="bidirectional"),
    recurrent("RNN", 1, activations=["LeakyRelu"], activation_alpha=[0.2]),
]

QUANTIZED = [
    case("QuantizeLinear", f(2, 3), scalar(0.02, np.float32), scalar(7, U8)),
    case("QuantizeLinear", f(2, 3), kf(0.02, 0.5, 1), k(0, 0, 0, dtype=I8), axis=1),
    case("DequantizeLinear", i(1, 7, dtype=I8), scalar(0.5, np.float32), scalar(2, I8)),
    case(
        "DequantizeLinear",
        i([1, 7], [3, 9], dtype=U8),
        kf(0.5, 2),
        k(1, 2, dtype=U8),
        axis=0,
    ),
    case("DynamicQuantizeLinear", f(4, 5), outputs=3),
    case(
        "MatMulInteger", whole(2, 3).astype(U8), whole(3, 4).astype(I8), scalar(2, U8)
    ),
]

FAMILIES = {
    "unary": UNARY,
    "binary": BINARY,
    "layout": LAYOUT,
    "indexing": INDEXING,
    "reductions": REDUCTIONS,
    "windows": WINDOWS,
    "resizes": RESIZES,
    "attention": ATTENTION,
    "recurrent": RECURRENT,
    "quantized": QUANTIZED,
}
