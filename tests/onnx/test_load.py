"""Files and models of ONNX as functions and parameters."""

import pathlib
import re
import sys

import numpy as np
import onnx
import pytest
from onnx import helper

import aqtlite.onnx
from tests.onnx.models import BOOL, FLOAT, INT64, convolutional, graph, model, node

pytestmark = pytest.mark.code("quick")

ROOT = pathlib.Path(__file__).parent.parent.parent


def shapes(parameters):
    return {name: x.shape for name, x in parameters.items()}


def test_a_file(tmp_path):
    onnx.save(convolutional(), tmp_path / "network.onnx")
    function, parameters = aqtlite.onnx.load(tmp_path / "network.onnx")
    (x,), (y,) = function.inputs, function.outputs
    assert x == aqtlite.onnx.Array("x", ("n", 3, 8, 8), np.dtype(np.float32))
    assert y == aqtlite.onnx.Array("y", ("n", 5), np.dtype(np.float32))
    assert shapes(parameters)["w2"] == (16, 4, 3, 3)
    assert len(parameters) == 9


def test_parameters_are_weights_and_no_numbers_of_formulas():
    weights = {
        "kernel": np.ones((1, 1, 1, 1), np.float32),  # One element, of a layer.
        "bias": np.ones(1, np.float32),
        "six": np.float32([6]),
        "mean": np.float32([[[1]], [[2]]]),
        "scales": np.float32([1, 1, 2, 2]),
        "unread": np.ones(3, np.float32),
        "axes": np.array([0]),
    }
    nodes = [
        node("Div", "x six", "h1"),
        node("Sub", "h1 mean", "h2"),
        node("ReduceMean", "h2", "h3", axes=[1]),
        node("Conv", "h3 kernel bias", "h4"),
        node("Resize", "h4 - scales", "h5"),
        node("Constant", "", "offset", value_floats=[1.0, 2.0]),
        node("Add", "h5 offset", "y"),
    ]
    io = {"x": (FLOAT, [1, 1, 1, 1])}, {"y": (FLOAT, None)}
    function, parameters = aqtlite.onnx.load(model(nodes, *io, weights))
    assert set(parameters) == {"kernel", "bias", "mean", "offset"}
    y = function(parameters, np.full((1, 1, 1, 1), 6, np.float32))
    np.testing.assert_allclose(y, [[[[1.5, 2.5]] * 2]])
    assert y.shape == (1, 1, 2, 2)


def test_dequantized_weights_are_parameters():
    weights = {
        "codes": np.array([[1, 2], [3, 4]], np.int8),
        "scales": np.float32([0.5, 2]),
    }
    nodes = [
        node("DequantizeLinear", "codes scales", "w", axis=1),
        node("MatMul", "x w", "y"),
    ]
    io = {"x": (FLOAT, [1, 2])}, {"y": (FLOAT, [1, 2])}
    function, parameters = aqtlite.onnx.load(model(nodes, *io, weights))
    np.testing.assert_array_equal(parameters["w"], [[0.5, 4], [1.5, 8]])
    y = function(parameters, np.ones((1, 2), np.float32))
    np.testing.assert_array_equal(y, [[2, 12]])


def test_weights_beside_the_file(tmp_path):
    path = tmp_path / "network.onnx"
    onnx.save(
        convolutional(),
        path,
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    _, parameters = aqtlite.onnx.load(str(path))
    _, expected = aqtlite.onnx.load(convolutional())
    np.testing.assert_array_equal(parameters["w2"], expected["w2"])
    content = (tmp_path / "weights.bin").read_bytes()
    (tmp_path / "weights.bin").write_bytes(content[:20])
    with pytest.raises(
        ValueError, match=r"'\w+' is not in .*weights.bin, .*be cut off"
    ):
        aqtlite.onnx.load(path)
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"'\w+' is in the file weights.bin"):
        aqtlite.onnx.load(path)


def test_known_inputs_decide_about_shapes():
    made = model(
        [node("Reshape", "x shape", "y")],
        {"x": (FLOAT, [6]), "shape": (INT64, [2])},
        {"y": (FLOAT, None)},
    )
    x = np.arange(6, dtype=np.float32)
    function, parameters = aqtlite.onnx.load(made)
    with pytest.raises(ValueError, match="Reshape node 'Reshape_y': its shape depends"):
        function(parameters, x, np.array([2, 3]))
    function, parameters = aqtlite.onnx.load(made, constants={"shape": [2, 3]})
    assert [one.name for one in function.inputs] == ["x"]
    assert function(parameters, x).shape == (2, 3)
    with pytest.raises(ValueError, match="'size', which is no input .* x, shape"):
        aqtlite.onnx.load(made, constants={"size": 3})


def test_functions_of_the_file_and_of_onnx():
    opset = [helper.make_opsetid("", 17)]
    doubled = helper.make_function(
        "own", "Double", ["a"], ["b"], [node("Add", "a a", "b")], opset
    )
    nodes = [
        helper.make_node("Double", ["x"], ["z"], domain="own"),
        node("HannWindow", "size", "window"),
        node("Mul", "z window", "y"),
    ]
    io = {"x": (FLOAT, [6])}, {"y": (FLOAT, [6])}
    made = helper.make_model(
        graph(nodes, *io, {"size": np.array(6)}),
        opset_imports=[*opset, helper.make_opsetid("own", 1)],
        functions=[doubled],
        ir_version=10,
    )
    function, parameters = aqtlite.onnx.load(made)
    y = function(parameters, np.arange(6, dtype=np.float32))
    expected = 2 * np.arange(6) * np.hanning(7)[:6]
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_unknown_operators_are_named():
    nodes = [
        helper.make_node("NGramRepeatBlock", ["x"], ["h"], "n", domain="com.microsoft"),
        node("NonMaxSuppression", "h h", "y", "/head/NMS"),
    ]
    io = {"x": (FLOAT, [1, 2, 3])}, {"y": (INT64, None)}
    made = helper.make_model(
        graph(nodes, *io),
        opset_imports=[
            helper.make_opsetid("", 17),
            helper.make_opsetid("com.microsoft", 1),
        ],
    )
    with pytest.raises(
        ValueError,
        match=r"NonMaxSuppression \(domain ai.onnx, opset 17, node '/head/NMS'\), "
        r"NGramRepeatBlock \(domain com.microsoft, opset 1, node 'n'\); .*without "
        r"optimization by onnxruntime, or register .* aqtlite.onnx.operator",
    ):
        aqtlite.onnx.load(made)


def test_registers_an_operator():
    @aqtlite.onnx.operator("Halve", domain="test")
    def halve(call, x):
        return x / 2 + call.attribute("offset", 0)

    nodes = [helper.make_node("Halve", ["x"], ["y"], domain="test", offset=1.0)]
    io = {"x": (FLOAT, [2])}, {"y": (FLOAT, [2])}
    made = helper.make_model(
        graph(nodes, *io), opset_imports=[helper.make_opsetid("test", 1)]
    )
    function, parameters = aqtlite.onnx.load(made)
    assert function(parameters, np.float32([2, 4])).tolist() == [2, 3]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"no protocol buffer", "is no ONNX file"), (b"", "is no ONNX file")],
)
def test_files_of_another_kind(tmp_path, content, message):
    path = tmp_path / "network.onnx"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        aqtlite.onnx.load(path)


def test_a_file_that_is_cut_off(tmp_path):
    path = tmp_path / "network.onnx"
    path.write_bytes(convolutional().SerializeToString()[:-500])
    with pytest.raises(ValueError, match="is no ONNX file, or is cut off"):
        aqtlite.onnx.load(path)


def test_a_file_that_ends_before_the_opset(tmp_path):
    made = convolutional()
    made.ClearField("opset_import")
    onnx.save(made, tmp_path / "network.onnx")
    with pytest.raises(ValueError, match=r"network.onnx is no .*cut off.*opset_import"):
        aqtlite.onnx.load(tmp_path / "network.onnx")


def test_neither_a_path_nor_a_model():
    with pytest.raises(TypeError, match=r"a path .* onnx.ModelProto; got NoneType"):
        aqtlite.onnx.load(None)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (
            [node("Relu", "x", "y", "first"), node("Neg", "x", "y", "second")],
            "Neg node 'second' writes 'y', which another node",
        ),
        ([node("Neg", "x", "w", "n")], "'n' writes 'w', which .* an initializer gives"),
        (
            [node("Relu", "h", "y", "/head/Relu"), node("Neg", "x", "h")],
            "Relu node '/head/Relu' reads 'h', which no node before it, input or",
        ),
        ([node("Relu", "x", "h")], "returns 'y', which no node, input or initializer"),
        (
            [
                node(
                    "If",
                    "b",
                    "y",
                    "if",
                    then_branch=graph([node("Neg", "q", "z")], {}, {}),
                )
            ],
            "Neg node 'Neg_z' reads 'q'",
        ),
        (
            [node("Conv", "x w", "y", "conv", auto_pad="WEIRD")],
            "Conv node 'conv' has auto_pad='WEIRD'; known: NOTSET, SAME_UPPER",
        ),
        (
            [node("MaxPool", "x", "y", auto_pad="SAME", kernel_shape=[1])],
            "MaxPool node 'MaxPool_y' has auto_pad='SAME'",
        ),
        ([node("MatMul", "x", "y", "m")], "'m' has 1 inputs, and lacks number 1, 'B'"),
        ([node("Add", "- x", "y", "a")], "'a' has 2 inputs, and lacks number 0, 'A'"),
    ],
)
def test_malformed_nodes(nodes, message):
    inputs = {"x": (FLOAT, [1, 1, 1]), "b": (BOOL, [])}
    weights = {"w": np.ones((1, 1, 1), np.float32)}
    made = model(nodes, inputs, {"y": (FLOAT, None)}, weights)
    with pytest.raises(ValueError, match=message):
        aqtlite.onnx.load(made)


def test_old_operators():
    made = convolutional()
    made.opset_import[0].version = 6
    with pytest.raises(ValueError, match=r"version 6 .*oldest .* is 7: onnx.version_c"):
        aqtlite.onnx.load(made)


def test_the_extra_is_named_where_the_package_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'aqtlite\[onnx\]'"):
        aqtlite.onnx.load("network.onnx")


def test_integers_of_64_bits_are_clamped():
    largest = np.iinfo(np.int64).max
    made = model(
        [node("Min", "x largest", "y")],
        {"x": (INT64, [2])},
        {"y": (INT64, [2])},
        {"largest": np.array(largest)},
    )
    function, parameters = aqtlite.onnx.load(made)
    assert function(parameters, np.array([3, -4])).tolist() == [3, -4]


def test_the_documented_operators_are_known():
    page = (ROOT / "benchmarks" / "onnx_operators.md").read_text()
    table = page.partition("| operators |")[2]
    names = re.findall(r"`(\w+)`", table.partition("\n\n")[0])
    assert len(names) > 100
    for name in names:
        schema = onnx.defs.get_schema(name)
        reads = " ".join("x" * max(schema.min_input, 1))
        made = model([node(name, reads, "y")], {"x": (FLOAT, [])}, {"y": (FLOAT, [])})
        function, _ = aqtlite.onnx.load(made)
        assert [one.name for one in function.inputs] == ["x"]


def test_strings():
    nodes = [node("Constant", "", "text", value_string="a"), node("Size", "text", "y")]
    made = model(nodes, {}, {"y": (INT64, [])})
    with pytest.raises(ValueError, match="Constant node 'text' has 'value_string'"):
        aqtlite.onnx.load(made)
