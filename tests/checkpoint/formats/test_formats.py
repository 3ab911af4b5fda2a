"""Every format: arrays that are written are read, one at a time."""

import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite import checkpoint
from aqtlite.checkpoint.arrays import ArrayInfo, LazyArray
from aqtlite.checkpoint.formats import open_reader, writer_for
from tests.checkpoint.support import FORMATS, MODEL, VARIABLES, refuses, save
from tests.flax.support import X

pytestmark = pytest.mark.code("quick")

ARRAYS = {
    "a/kernel": np.arange(12, dtype=np.float32).reshape(3, 4),
    "a/half": jnp.arange(6).astype("bfloat16").reshape(2, 3),
    "bytes": np.arange(7, dtype=np.uint8),
    "deep/er/x": np.float32(3).reshape(1),
}
TARGETS = ("out", "out.safetensors")


def write(path, arrays, manifest=""):
    """Writes arrays, and checks that they are read in order and once each."""
    read = []

    def lazy(name, x):
        info = ArrayInfo(x.shape, np.dtype(x.dtype))
        return LazyArray(name, info, lambda: read.append(name) or np.asarray(x))

    writer_for(path).write(path, [lazy(*one) for one in arrays.items()], manifest)
    assert sorted(read) == sorted(arrays)
    return path


def assert_reads(reader, arrays):
    assert reader.arrays == {
        name: ArrayInfo(x.shape, np.dtype(x.dtype)) for name, x in arrays.items()
    }
    for name, x in arrays.items():
        got = reader.read(name)
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(got, x)


@pytest.mark.parametrize("target", TARGETS)
def test_written_and_read(target, tmp_path):
    path = write(tmp_path / target, ARRAYS, lambda: "the manifest")
    reader = open_reader(path)
    assert_reads(reader, ARRAYS)
    assert reader.others == {}
    assert reader.manifest() == "the manifest"
    assert all(file.is_file() for file in reader.files())
    assert writer_for(path).owns(path, ARRAYS)


@pytest.mark.parametrize("target", TARGETS)
def test_dots_slashes_and_percent_signs_in_names(target, tmp_path):
    """As the names of tied weights have them, which modules share."""
    names = ("aqt/Embed_0.embedding/rhs", "a%2Fb/c", "50%25/x.y")
    arrays = {name: ARRAYS["bytes"] + i for i, name in enumerate(names)}
    path = write(tmp_path / target, arrays, lambda: "the manifest")
    assert_reads(open_reader(path), arrays)


@pytest.mark.parametrize("target", TARGETS)
def test_without_a_manifest(target, tmp_path):
    assert open_reader(write(tmp_path / target, ARRAYS, str)).manifest() is None


@pytest.mark.parametrize("how", FORMATS)
def test_files_of_others(how, tmp_path):
    """As the libraries of the formats write them."""
    tree = {"a": {"kernel": ARRAYS["a/kernel"]}, "b": ARRAYS["bytes"]}
    reader = open_reader(save(tmp_path / "x", tree, how))
    assert_reads(reader, {"a/kernel": ARRAYS["a/kernel"], "b": ARRAYS["bytes"]})
    assert reader.manifest() is None


@pytest.mark.parametrize("how", FORMATS)
def test_slices(how, tmp_path):
    tree = {"kernel": ARRAYS["a/kernel"], "scalar": np.float32(3)}
    reader = open_reader(save(tmp_path / "x", tree, how))
    kernel = reader.slices("kernel")
    for index in ((slice(1, 3), slice(0, 2)), (slice(None), slice(3, None))):
        np.testing.assert_array_equal(kernel[index], ARRAYS["a/kernel"][index])
    assert reader.slices("scalar")[()] == 3


def test_files_beside_the_checkpoints_own(tmp_path):
    path = write(tmp_path / "out", ARRAYS, str)
    (path / "mine").touch()
    assert not writer_for(path).owns(path, ARRAYS)
    assert not writer_for(tmp_path / "x.safetensors").owns(path, ARRAYS)


def test_paths_of_no_format(tmp_path):
    refuses("does not exist", open_reader, tmp_path / "nothing")
    refuses("no _METADATA", open_reader, tmp_path)
    (tmp_path / "x.bin").touch()
    refuses("neither a folder.*nor a GGUF file", open_reader, tmp_path / "x.bin")
    refuses("read, not written", writer_for, tmp_path / "x.msgpack")


class TestAddresses:
    """Paths are local: an address would name a folder ``gs:`` here."""

    @pytest.mark.parametrize("there", ["gs://bucket/out", "s3://bucket/x.safetensors"])
    def test_are_refused(self, there, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        source = save(tmp_path / "v", VARIABLES, "msgpack")
        refuses("is an address", checkpoint.convert_checkpoint, source, there, MODEL, X)
        refuses("is an address", checkpoint.convert_checkpoint, there, "out", MODEL, X)
        refuses("is an address", checkpoint.load_serving, there, MODEL)
        refuses("is an address", checkpoint.load_quantized, there)
        with pytest.raises(checkpoint.CheckpointError, match="is an address"):
            checkpoint.save_quantized(there, {}, format="gguf")
        assert list(tmp_path.iterdir()) == [source]
