import jax.numpy as jnp
import numpy as np
import onnx
import pytest

from aqtlite import edge
from aqtlite.edge.deployed import deploy
from aqtlite.edge.onnx import check, write
from tests.common import normal

pytestmark = pytest.mark.code("quick")

X = normal((2, 4))
WEIGHT = normal((4, 3), 1)


def function(variables, x):
    return jnp.tanh(x) @ variables["w"] + variables["b"]


VARIABLES = {"w": WEIGHT, "b": jnp.arange(3.0)}


@pytest.fixture(scope="module")
def deployed():
    ranges = edge.calibrate(function, VARIABLES, [X])
    return deploy(function, VARIABLES, ranges, (X,), ())


@pytest.fixture
def model(deployed):
    data = write.write(deployed, deployed.grids.get, ["input"], ["output"], "any")
    return onnx.load_from_string(data)


def initializer(model, name):
    (found,) = (one for one in model.graph.initializer if one.name == name)
    return found


def change(model, name, by):
    """Adds something to a constant."""
    one = initializer(model, name)
    array = onnx.numpy_helper.to_array(one)
    one.CopyFrom(
        onnx.numpy_helper.from_array(array + np.asarray(by, array.dtype), name)
    )


def test_integers_are_those_of_the_program(deployed, model):
    (operands,) = (found for found in deployed.operands.values() if found)
    for position, name, higher in ((1, "weight", 128), (2, "bias", 0)):
        found = onnx.numpy_helper.to_array(
            initializer(model, f"fully_connected/{name}")
        )
        wanted = operands[position].qvalue
        np.testing.assert_array_equal(found.astype(int) - higher, wanted)
    assert (
        check.check(model.SerializeToString(), deployed, "any").counts()["QGemm"] == 1
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fully_connected/weight", "the integers of operand 1 .* are not in the file"),
        ("fully_connected/bias", "the integers of operand 2 .* are not in the file"),
        ("scale", "as nothing in the program has"),
    ],
)
def test_other_integers_are_refused(name, message, deployed, model):
    change(model, name, 1)
    with pytest.raises(ValueError, match=message):
        check.check(model.SerializeToString(), deployed, "any")


def test_a_constant_of_its_own_is_refused(deployed, model):
    extra = onnx.numpy_helper.from_array(np.full(3, 7, np.int8), "extra")
    model.graph.initializer.append(extra)
    scale, zero = (
        onnx.numpy_helper.from_array(np.asarray(x), name)
        for x, name in ((np.float32(0.5), "s"), (np.int8(0), "z"))
    )
    model.graph.initializer.extend([scale, zero])
    made = onnx.helper.make_node("DequantizeLinear", ["extra", "s", "z"], ["made"])
    model.graph.node.insert(0, made)
    with pytest.raises(ValueError, match="'extra' of the file is none of the program"):
        check.check(model.SerializeToString(), deployed, "any")


def test_what_is_no_onnx_is_refused(deployed, model):
    model.graph.node[0].op_type = "Dequantize"
    with pytest.raises(ValueError, match="the file is no valid ONNX"):
        check.check(model.SerializeToString(), deployed, "any")
