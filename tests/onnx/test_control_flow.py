"""Conditions, loops and sequences of arrays."""

import jax
import numpy as np
import pytest
from onnx import TensorProto

import aqtlite.onnx
from tests.common import inside_shard_map
from tests.onnx.models import FLOAT, INT64, graph, model, node, of_onnxruntime

pytestmark = pytest.mark.code("quick")

BOOL = TensorProto.BOOL
X = np.float32([[1, 2], [3, 4]])


def conditional(shape_of_else):
    """Branches with weights of equal names; the second may have another shape."""
    then = graph(
        [node("Add", "x w", "then")],
        {},
        {"then": (FLOAT, None)},
        {"w": np.float32([1, 2])},
    )
    other = graph(
        [node("Mul", "x v", "product"), node("Reshape", "product shape", "other")],
        {},
        {"other": (FLOAT, None)},
        {"v": np.float32([5, 7]), "shape": np.array(shape_of_else)},
    )
    return model(
        [
            node("Not", "c", "not"),
            node("If", "not", "y", "/If", then_branch=other, else_branch=then),
        ],
        {"c": (BOOL, []), "x": (FLOAT, [2, 2])},
        {"y": (FLOAT, None)},
    )


def test_a_condition_that_depends_on_data():
    made = conditional([2, 2])
    function, parameters = aqtlite.onnx.load(made)
    assert set(parameters) == {"w", "v"}
    run = jax.jit(function)
    for condition in (True, False):
        y = run(parameters, np.array(condition), X)
        np.testing.assert_array_equal(
            y, of_onnxruntime(made, np.array(condition), X)[0]
        )


def test_a_known_condition_runs_one_branch():
    made = conditional([4])
    function, parameters = aqtlite.onnx.load(made)
    with pytest.raises(ValueError, match="'/If' has branches with different results"):
        function(parameters, np.array(True), X)
    for condition in (True, False):
        known, parameters = aqtlite.onnx.load(made, constants={"c": condition})
        assert set(parameters) == ({"w"} if condition else {"v"})
        expected = of_onnxruntime(made, np.array(condition), X)[0]
        np.testing.assert_array_equal(known(parameters, X), expected)


def test_weights_of_equal_names_in_branches():
    def branch(name, number):
        weights = {"w": np.full(2, number, np.float32)}
        return graph([node("Add", "x w", name)], {}, {name: (FLOAT, None)}, weights)

    branches = {"then_branch": branch("a", 1), "else_branch": branch("b", 2)}
    made = model(
        [node("If", "c", "y", **branches)],
        {"c": (BOOL, []), "x": (FLOAT, [2, 2])},
        {"y": (FLOAT, [2, 2])},
    )
    function, parameters = aqtlite.onnx.load(made)
    assert len(parameters) == 2
    assert function(parameters, np.array(False), X).tolist() == (X + 2).tolist()
    assert function(parameters, np.array(True), X).tolist() == (X + 1).tolist()


def looping(condition_in_body, steps=5, go="go"):
    body = graph(
        [
            node("MatMul", "h w", "next"),
            node(*condition_in_body),
            node("Identity", "next", "step"),
        ],
        {"i": (INT64, []), "before": (BOOL, []), "h": (FLOAT, [2, 2])},
        {"after": (BOOL, []), "next": (FLOAT, [2, 2]), "step": (FLOAT, [2, 2])},
    )
    return model(
        [node("Loop", f"n {go} x", "y steps", "/Loop", body=body)],
        {"x": (FLOAT, [2, 2])},
        {"y": (FLOAT, [2, 2]), "steps": (FLOAT, None)},
        {
            "n": np.array(steps),
            "go": np.array(True),
            "two": np.array(2),
            "zero": np.float32(0),
            "w": np.float32([[0, 1], [1, 1]]),
        },
    )


def test_a_loop_of_known_length_is_unrolled():
    made = looping(("Less", "i two", "after"))  # Three steps.
    function, parameters = aqtlite.onnx.load(made)
    found = jax.jit(function)(parameters, X)
    for one, expected in zip(found, of_onnxruntime(made, X), strict=True):
        np.testing.assert_array_equal(one, expected)
    assert found[1].shape == (3, 2, 2)


@pytest.mark.parametrize("go", ["go", "-"])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_loop_of_no_steps_or_without_a_condition(steps, go):
    made = looping(("Identity", "before", "after"), steps, go)
    function, parameters = aqtlite.onnx.load(made)
    found = jax.jit(function)(parameters, X)
    for one, expected in zip(found, of_onnxruntime(made, X), strict=True):
        np.testing.assert_array_equal(one, expected)
    assert found[1].shape == (steps, 2, 2)


def test_a_loop_that_ends_by_the_condition_of_its_body_alone():
    """As in onnxruntime; where it depends on data, it is refused."""
    made = looping(("Less", "i two", "after"), go="-")
    function, parameters = aqtlite.onnx.load(made)
    found = jax.jit(function)(parameters, X)
    assert found[1].shape == of_onnxruntime(made, X)[1].shape == (3, 2, 2)


def test_a_loop_whose_length_depends_on_data():
    body = [
        node("ReduceMax", "h", "largest", keepdims=0),
        node("Greater", "largest zero", "after"),
    ]
    made = looping(("Identity", "before", "after"))
    del made.graph.node[0].attribute[0].g.node[1]
    made.graph.node[0].attribute[0].g.node.extend(body)
    function, parameters = aqtlite.onnx.load(made)
    with pytest.raises(ValueError, match="Loop node '/Loop': its condition depends"):
        function(parameters, X)


@pytest.mark.parametrize("directions", [[0], [1]])
def test_a_scan(directions):
    body = graph(
        [node("Add", "h x", "next"), node("Mul", "next x", "out")],
        {"h": (FLOAT, [2]), "x": (FLOAT, [2])},
        {"next": (FLOAT, [2]), "out": (FLOAT, [2])},
    )
    made = model(
        [
            node(
                "Scan",
                "start xs",
                "y outs",
                body=body,
                num_scan_inputs=1,
                scan_input_directions=directions,
                scan_output_axes=[1],
            )
        ],
        {"start": (FLOAT, [2]), "xs": (FLOAT, [3, 2])},
        {"y": (FLOAT, [2]), "outs": (FLOAT, [2, 3])},
    )
    inputs = np.float32([1, 2]), np.float32([[1, 2], [3, 4], [5, 6]])
    function, parameters = aqtlite.onnx.load(made)
    expected = of_onnxruntime(made, *inputs)
    jax.tree.map(
        np.testing.assert_array_equal,
        list(jax.jit(function)(parameters, *inputs)),
        expected,
    )
    # A start that is known does not vary over the axes of a `jax.shard_map`.
    function, parameters = aqtlite.onnx.load(made, constants={"start": inputs[0]})
    inside = inside_shard_map(lambda xs: function(parameters, xs), inputs[1])
    jax.tree.map(np.testing.assert_array_equal, list(inside), expected)


def test_sequences():
    made = model(
        [
            node("SplitToSequence", "x", "rows", axis=0, keepdims=0),
            node("SequenceAt", "rows zero", "first"),
            node("SequenceInsert", "rows first", "more"),
            node("SequenceInsert", "more first zero", "most"),
            node("SequenceErase", "most", "left"),
            node("SequenceErase", "left zero", "least"),
            node("SequenceLength", "most", "count"),
            node("ConcatFromSequence", "least", "y", axis=0, new_axis=1),
        ],
        {"x": (FLOAT, [2, 2])},
        {"y": (FLOAT, None), "count": (INT64, [])},
        {"zero": np.array(0)},
    )
    function, parameters = aqtlite.onnx.load(made)
    y, count = jax.jit(function)(parameters, X)
    expected, _ = of_onnxruntime(made, X)
    np.testing.assert_array_equal(y, expected)
    assert count == 4
