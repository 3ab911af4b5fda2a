"""The safetensors format: dtypes, files of others, a missing package."""

import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from safetensors import numpy as safetensors_numpy

from aqtlite.checkpoint.arrays import ArrayInfo, LazyArray
from aqtlite.checkpoint.formats import open_reader, writer_for
from tests.checkpoint.formats.test_formats import ARRAYS, write
from tests.checkpoint.support import refuses

pytestmark = pytest.mark.code("quick")


def test_the_library_reads_it(tmp_path):
    path = write(tmp_path / "out.safetensors", ARRAYS, lambda: "the manifest")
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"aqtlite": "the manifest"}
        np.testing.assert_array_equal(file.get_tensor("a.kernel"), ARRAYS["a/kernel"])


@pytest.mark.parametrize(
    "dtype",
    [
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
        "float8_e8m0fnu",
    ],
)
def test_float8(dtype, tmp_path):
    values = np.exp2(np.arange(24.0) % 7).reshape(4, 6).astype(jnp.dtype(dtype))
    arrays = {
        "one": np.ones(3, np.float32),
        "x": values,
        "y": values[:0],
        "z": values[0, 0],
    }
    reader = open_reader(write(tmp_path / "x.safetensors", arrays, str))
    for name, wanted in arrays.items():
        assert reader.read(name).dtype == wanted.dtype
        np.testing.assert_array_equal(reader.read(name), wanted)
    part = reader.slices("x")[slice(1, 3), slice(2, None)]
    np.testing.assert_array_equal(part, values[1:3, 2:])


def test_two_arrays_of_one_name(tmp_path):
    """A file with the bytes of both, and an entry of one, could not be read."""
    path = tmp_path / "x.safetensors"
    one = LazyArray("a/b", ArrayInfo((3,), np.dtype("float32")), lambda: np.ones(3))
    refuses("two arrays are named a/b", writer_for(path).write, path, [one, one], str)
    assert not path.exists()


def test_other_dtypes_that_numpy_lacks(tmp_path):
    """They are named, and not read."""
    header = json.dumps(
        {
            "x": {"dtype": "F4", "shape": [16], "data_offsets": [0, 8]},
            "y": {"dtype": "U8", "shape": [8], "data_offsets": [8, 16]},
        }
    ).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    reader = open_reader(path)
    assert list(reader.arrays) == ["y"]
    assert reader.others["x"].startswith("of dtype F4, which is none of F64")


def test_scales_of_microscaling(tmp_path):
    """Powers of two by their exponents, as others write them."""
    entry = {"dtype": "F8_E8M0", "shape": [4, 4], "data_offsets": [0, 16]}
    header = json.dumps({"w.weight_scale_inv": entry}).encode()
    codes = np.arange(120, 136, dtype=np.uint8)
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + codes.tobytes())
    reader = open_reader(path)
    assert not reader.others
    scales = reader.read("w/weight_scale_inv")
    wanted = np.exp2(np.arange(-7.0, 9.0)).reshape(4, 4)
    np.testing.assert_array_equal(scales.astype(np.float64), wanted)


@pytest.mark.parametrize("dtype", ["int4", "complex64", "float8_e3m4"])
def test_dtypes_that_it_lacks(dtype, tmp_path):
    info = ArrayInfo((4,), jnp.dtype(dtype))
    check = writer_for(tmp_path / "out.safetensors").check
    refuses(f"cannot hold x, {dtype}", check, {"x": info})


def test_the_package_is_missing(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    safetensors_numpy.save_file({"x": np.ones(3)}, path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    refuses(
        "pip install safetensors, or in a clone of aqtlite "
        r"pip install -e '.\[safetensors\]'",
        lambda: open_reader(path).arrays,
    )
