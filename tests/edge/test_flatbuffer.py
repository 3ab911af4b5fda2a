import numpy as np
import pytest

from aqtlite.edge.litert import flatbuffer
from aqtlite.edge.report import Tensor

pytestmark = pytest.mark.code("quick")


def test_what_is_no_file_is_refused():
    with pytest.raises(ValueError, match="TFL3"):
        flatbuffer.read(b"not a flatbuffer")


@pytest.mark.parametrize(
    "dtype, data, expected",
    [("int4", [0x71, 0x0F], [1, 7, -1]), ("int2", [0b00_11_01_10], [-2, 1, -1])],
)
def test_packed_integers(dtype, data, expected):
    tensor = Tensor("w", (3,), dtype, None, None, 0, bytes(data))
    np.testing.assert_array_equal(tensor.array(), expected)


def test_computed_tensors_have_no_array():
    tensor = Tensor("w", (3,), "int8", None, None, 0, None)
    with pytest.raises(ValueError, match="computed"):
        tensor.array()
