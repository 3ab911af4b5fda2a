import pytest

from aqtlite.edge.publish import publish

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
