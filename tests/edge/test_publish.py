import os
import stat

import pytest

from aqtlite.edge.publish import publish

pytestmark = pytest.mark.code("quick")


def test_another_writer_of_an_equal_process_id_is_left_alone(tmp_path, monkeypatch):
    """As a thread, or a process in another container on the same volume."""
    path, sync = tmp_path / "new" / "m.onnx", os.fsync

    def write_another_first(descriptor):
        monkeypatch.setattr(os, "fsync", sync)
        publish(b"another", path)
        assert path.read_bytes() == b"another"
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", write_another_first)
    publish(b"one", path)
    assert path.read_bytes() == b"one"
    assert list(path.parent.iterdir()) == [path]


def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    path, others = tmp_path / "m.onnx", tmp_path / f".m.onnx.{os.getpid()}"
    path.write_bytes(b"before")
    others.write_bytes(b"another's")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        publish(b"one", path)
    assert path.read_bytes() == b"before"
    assert set(tmp_path.iterdir()) == {path, others}


def test_files_have_the_mode_that_the_process_asks_for(tmp_path):
    before = os.umask(0o027)
    try:
        publish(b"one", tmp_path / "m.onnx")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "m.onnx").stat().st_mode) == 0o640


def test_a_name_may_be_as_long_as_file_systems_take(tmp_path):
    path = tmp_path / f"{'n' * 250}.onnx"
    publish(b"one", path)
    assert path.read_bytes() == b"one"
