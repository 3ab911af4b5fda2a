import os
import stat

import pytest

from aqtlite.errors import UnwritableError
from aqtlite.output import files

pytestmark = pytest.mark.code("quick")


def test_another_writer_of_an_equal_process_id_is_left_alone(tmp_path, monkeypatch):
    """As a thread, or a process in another container on the same volume."""
    path, sync = tmp_path / "m.onnx", os.fsync

    def write_another_first(descriptor):
        monkeypatch.setattr(os, "fsync", sync)
        files.write(b"another", path)
        assert path.read_bytes() == b"another"
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", write_another_first)
    files.write(b"one", path)
    assert path.read_bytes() == b"one"
    assert list(path.parent.iterdir()) == [path]


def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    path, others = tmp_path / "m.onnx", tmp_path / f".m.onnx.{os.getpid()}"
    path.write_bytes(b"before")
    others.write_bytes(b"another's")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UnwritableError) as raised:
        files.write(b"one", path)
    assert str(raised.value) == f"{path} cannot be written: No space left on device"
    assert (raised.value.errno, raised.value.filename) == (28, str(path))
    assert path.read_bytes() == b"before"
    assert set(tmp_path.iterdir()) == {path, others}


def test_a_failure_names_the_path_and_not_the_temporary_file(tmp_path):
    path = tmp_path / "none" / "m.onnx"
    with pytest.raises(UnwritableError) as raised:
        files.write(b"one", path)
    why = "cannot be written: No such file or directory"
    assert str(raised.value) == f"{path} {why}"


def test_what_writing_would_replace_by_a_file_is_refused(tmp_path):
    path = tmp_path / "m.onnx"
    files.check_target(path)
    path.symlink_to("another.onnx")
    with pytest.raises(ValueError, match=r"m.onnx is a symbolic link; name what it"):
        files.check_target(path)
    with pytest.raises(ValueError, match="is a folder; name a file"):
        files.check_target(tmp_path)
    with pytest.raises(ValueError, match="null is a device or a pipe; name a file"):
        files.check_target(os.devnull)


def test_files_have_the_mode_that_the_process_asks_for(tmp_path):
    before = os.umask(0o027)
    try:
        files.write(b"one", tmp_path / "m.onnx")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "m.onnx").stat().st_mode) == 0o640


def test_a_name_may_be_as_long_as_file_systems_take(tmp_path):
    path = tmp_path / f"{'n' * 250}.onnx"
    files.write(b"one", path)
    assert path.read_bytes() == b"one"
