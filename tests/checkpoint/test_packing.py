"""Packed integers: exact, as small as they can be, and read by slices."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import calibration, config
from aqtlite.checkpoint.arrays import ArrayInfo
from aqtlite.checkpoint.packing import Packing, packing_of
from aqtlite.numerics import IntAffine, IntSymmetric
from aqtlite.qtensor.codes import stored_bytes
from tests.common import normal

pytestmark = pytest.mark.code("quick")

GRIDS = {
    f"{bits} bits, {zero=}, {clip=}": IntSymmetric(
        bits=bits, preserve_zero=zero, clip=clip
    )
    for bits, zero, clip in itertools.product(range(1, 5), (True, False), (True, False))
    if (bits, zero) != (1, True) and (bits, zero, clip) != (4, False, False)
}
SHAPES = [(1,), (5,), (3, 7), (2, 3, 8), (4, 0), (0, 4), (2, 1), (3, 16, 1, 1)]


def info_of(x):
    return ArrayInfo(x.shape, x.dtype)


def test_codes_of_a_byte():
    for packing in (Packing(8, -128), Packing(8, 0), Packing(8, -255, step=2)):
        x = np.arange(256, dtype=np.int32) * packing.step + packing.lowest
        packed = packing.pack(x)
        assert packed.dtype == np.uint8 and sorted(packed) == list(range(256))
        np.testing.assert_array_equal(packing.unpack(packed, info_of(x)), x)


@pytest.mark.parametrize(
    "grid, bits",
    [
        (IntAffine(bits=2), 2),
        (IntAffine(bits=3, signed=True), 4),
        (IntAffine(bits=5), 8),
        (IntAffine(bits=8, signed=True), 8),
        (IntAffine(bits=8), 8),
        (None, None),
    ],
)
def test_widths_of_zero_points(grid, bits):
    packing = packing_of(ArrayInfo((3, 9), np.dtype(np.int32)), grid)
    assert (packing and packing.bits) == bits


def values(grid, shape):
    """Quantized values, the ends of the grid among them."""
    x = normal((4096,)) * 20
    x = x.at[:2].set(jnp.array([-100.0, 100.0]))
    stored = np.asarray(grid.round(x, None))
    return np.resize(np.unique(stored), shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", GRIDS)
def test_exact(name, shape):
    x = values(GRIDS[name], shape)
    packing = packing_of(info_of(x), GRIDS[name])
    packed = packing.pack(x)
    assert info_of(packed) == packing.packed(info_of(x))
    unpacked = packing.unpack(packed, info_of(x))
    assert unpacked.dtype == x.dtype
    np.testing.assert_array_equal(unpacked, x)


@pytest.mark.parametrize(
    "grid, bits",
    [
        (IntSymmetric(bits=1), 1),
        (IntSymmetric(bits=2), 2),
        (IntSymmetric(bits=2, preserve_zero=False), 2),
        (IntSymmetric(bits=2, clip=False), 4),
        (IntSymmetric(bits=3), 4),
        (IntSymmetric(bits=4), 4),
        (IntSymmetric(bits=4, preserve_zero=False), 4),
        (IntSymmetric(bits=4, preserve_zero=False, clip=False), None),
        (IntSymmetric(bits=5), None),
        (IntSymmetric(bits=8), None),
        (IntAffine(bits=2), 2),
        (IntAffine(bits=2, signed=True), 2),
        (IntAffine(bits=3), 4),
        (IntAffine(bits=4), 4),
        (IntAffine(bits=8), None),
    ],
)
def test_widths(grid, bits):
    info = ArrayInfo((3, 9), grid.storage_dtype)
    packing = packing_of(info, grid)
    assert (packing and packing.bits) == bits
    if bits:
        assert packing.packed(info).nbytes == 3 * -(-9 * bits // 8)


@pytest.mark.parametrize(
    "dtype, bits", [("int4", 4), ("uint4", 4), ("int2", 2), ("uint2", 2)]
)
def test_dtypes(dtype, bits):
    """Of arrays whose grid is not known, all values of the dtype are kept."""
    limits = jnp.iinfo(dtype)
    x = np.arange(limits.min, limits.max + 1).astype(dtype)
    packing = packing_of(info_of(x))
    assert packing.bits == bits
    np.testing.assert_array_equal(packing.unpack(packing.pack(x), info_of(x)), x)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "bool", "float32"])
def test_stored_as_they_are(dtype):
    assert packing_of(ArrayInfo((8,), np.dtype(dtype))) is None


def test_scalars_are_stored_as_they_are():
    assert packing_of(ArrayInfo((), jnp.dtype("int4"))) is None


@pytest.mark.parametrize("grid", [IntSymmetric(bits=b) for b in (1, 2, 4)])
@pytest.mark.parametrize("size", [1, 7, 16])
def test_slices(grid, size):
    """As devices read them; only the bytes that they need."""
    x = values(grid, (3, size))
    packing = packing_of(info_of(x), grid)
    packed = packing.pack(x)
    for start, stop in itertools.combinations(range(size + 1), 2):
        index = (slice(1, None), slice(start, stop))
        got = packing.unpack_slice(packed, info_of(x), index)
        np.testing.assert_array_equal(got, x[index])
        assert got.dtype == x.dtype
    index = (slice(None), slice(None, None, None))
    np.testing.assert_array_equal(packing.unpack_slice(packed, info_of(x), index), x)


@pytest.mark.parametrize("dtype", ["int4", "uint4"])
@pytest.mark.parametrize("narrow_range", [False, True])
def test_unsigned_grids_of_two_bits_fill_bytes_by_four(narrow_range, dtype):
    """Also as int4, which is what Orbax can save of uint4."""
    tensor = config.Tensor(
        numerics=IntAffine(bits=2, narrow_range=narrow_range),
        calibration=calibration.MinMax(),
    )
    q = aqtlite.quantize(normal((5, 8)), tensor, 0)
    x = np.asarray(q.qvalue).astype(np.int8).astype(dtype)
    packing = packing_of(info_of(x), tensor.numerics)
    packed = packing.pack(x)
    assert packed.size == x.size // 4
    np.testing.assert_array_equal(packing.unpack(packed, info_of(x)), x)


@pytest.mark.parametrize("shape, axis", [((6, 8, 1, 1), 1), ((4, 3), 0), ((4, 6), -1)])
def test_bytes_are_filled_along_the_axis_that_takes_fewest(shape, axis):
    x = values(IntSymmetric(bits=4), shape)
    packing = packing_of(info_of(x), IntSymmetric(bits=4))
    packed = packing.pack(x)
    assert packing.axis == axis
    assert packed.size == x.size // 2 == stored_bytes(x.astype("int4"))
    index = (slice(1, 4), slice(1, None), *(slice(None),) * (x.ndim - 2))
    got = packing.unpack_slice(packed, info_of(x), index)
    np.testing.assert_array_equal(got, x[index])


def test_a_channel_of_nan_becomes_values_of_the_grid():
    """Its scale is NaN, whatever its integers are."""
    tensor = config.weight_only(bits=1).fwd.rhs
    q = aqtlite.quantize(jnp.array([[1.0, jnp.nan], [-2.0, 3.0]]), tensor, 0)
    x = np.asarray(q.qvalue)
    packing = packing_of(info_of(x), tensor.numerics)
    unpacked = packing.unpack(packing.pack(x), info_of(x))
    np.testing.assert_array_equal(unpacked[:, 0], [1, -1])
    assert set(unpacked[:, 1].tolist()) <= {-1, 1}


@pytest.mark.parametrize("bits, lowest, step", [(3, 0, 1), (4, 16, 1), (2, -1, 3)])
def test_what_is_no_packing(bits, lowest, step):
    with pytest.raises(ValueError, match="no packing"):
        Packing(bits, lowest, step)
    with pytest.raises(ValueError, match="no packing"):
        Packing(2, -1.0)
