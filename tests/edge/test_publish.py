import contextlib
import errno
import importlib.util
import os
import pathlib
import resource
import tempfile

import jax.numpy as jnp
import pytest

from aqtlite import edge
from aqtlite.edge.publish import making, publish
from aqtlite.errors import UnwritableError
from tests.common import normal

pytestmark = pytest.mark.code("quick")


def test_folders_are_made(tmp_path):
    path = tmp_path / "new" / "er" / "m.onnx"
    publish(b"one", path)
    assert path.read_bytes() == b"one"


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "new").write_text("mine")
    path = tmp_path / "new" / "m.onnx"
    with pytest.raises(OSError, match=r"new/m.onnx cannot be written: File exists"):
        publish(b"one", path)


@contextlib.contextmanager
def files_of_64_kib():
    """As a full disk for what is larger."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


PACKAGES = {
    "m.onnx": "onnxruntime",
    "m.tflite": "litert_converter",
    "signatures.tflite": "litert_converter",
}


@pytest.mark.parametrize("name", PACKAGES)
def test_the_target_is_named_where_its_temporary_files_have_no_room(name, tmp_path):
    if importlib.util.find_spec(PACKAGES[name]) is None:
        pytest.skip("needs the packages of an extra")
    path = tmp_path / name
    w, x = jnp.asarray(normal((256, 256))), normal((2, 256), 1)
    one = edge.Signature(lambda w, x: x @ w, w, None, x)
    with files_of_64_kib(), pytest.raises(UnwritableError) as raised:
        if name.startswith("signatures"):
            edge.export_signatures({"f": one}, path)
        else:
            edge.export(one.model, w, None, x, path)
    folder = tempfile.gettempdir()
    why = f"File too large (a temporary file in {folder}; TMPDIR names another folder)"
    assert str(raised.value) == f"{path} cannot be written: {why}"
    assert raised.value.errno == errno.EFBIG and not any(tmp_path.iterdir())


def test_errors_of_other_files_are_left_as_they_are(tmp_path):
    missing = pathlib.Path(tempfile.gettempdir(), "none.npy")
    for path in ("/none", missing):
        with (
            pytest.raises(FileNotFoundError, match="none"),
            making(tmp_path / "m.onnx"),
        ):
            os.stat(path)
