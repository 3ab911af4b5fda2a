"""What writers leave that are stopped, and what others do with it."""

import errno
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from aqtlite import checkpoint
from aqtlite.checkpoint.new_path import new_path
from aqtlite.errors import UnwritableError

pytestmark = pytest.mark.code("quick")

WEIGHTS = {"w": np.ones((2, 32), np.float32)}
WRITER = """
import pathlib, sys
from aqtlite.checkpoint.new_path import new_path
with new_path(pathlib.Path(sys.argv[1])) as path:
    path.write_text("half")
    print("begun", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def writer(tmp_path):
    """Another process that is writing to a path."""
    command = [sys.executable, "-c", WRITER, str(tmp_path / "a.gguf")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout.readline() == "begun\n"
        yield process
        process.kill()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_a_killed_writer_left_is_removed(writer, tmp_path):
    (left,) = names(tmp_path)
    assert left.startswith(".aqtlite-") and left.endswith(".unfinished")
    for name in ("b.gguf", "a.gguf"):  # It works still.
        checkpoint.save_quantized(tmp_path / name, WEIGHTS, format="gguf")
        assert left in names(tmp_path)
        if name == "a.gguf":
            (tmp_path / name).unlink()
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    checkpoint.save_quantized(tmp_path / "c.gguf", WEIGHTS, format="gguf")
    assert left in names(tmp_path)  # It may be another user's, of another path.
    checkpoint.save_quantized(tmp_path / "a.gguf", WEIGHTS, format="gguf")
    assert names(tmp_path) == ["a.gguf", "b.gguf", "c.gguf"]


def test_what_others_made_is_left_alone(tmp_path):
    folder = tmp_path / ".aqtlite-x.unfinished"
    folder.mkdir()
    (folder / "notes").write_text("mine")
    link, file = (tmp_path / f".aqtlite-{one}.unfinished" for one in "yz")
    link.symlink_to(tmp_path / "away")
    (tmp_path / "away").mkdir()
    file.write_text("")
    with new_path(tmp_path / "a") as path:
        path.write_text("whole")
    assert (tmp_path / "a").read_text() == "whole"
    assert folder.exists() and link.is_symlink() and file.exists()
    assert (tmp_path / "away").exists()


def test_a_path_is_named_in_the_errors_of_writing_it(tmp_path, monkeypatch):
    path = tmp_path / "a.gguf"

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)  # As of a write, without a name.
        with pytest.raises(UnwritableError) as raised:
            checkpoint.save_quantized(path, WEIGHTS, format="gguf")
    assert str(raised.value) == f"{path} cannot be written: No space left on device"
    with (
        pytest.raises(UnwritableError, match=r"a.gguf cannot be written: Is a dir"),
        new_path(path) as unfinished,
    ):
        unfinished.mkdir()
        unfinished.write_text("")
    assert not any(tmp_path.iterdir())


def test_errors_of_reading_what_is_written_stay(tmp_path):
    for error in (FileNotFoundError(errno.ENOENT, "", "w"), OSError(errno.EIO, "")):
        with pytest.raises(OSError) as raised, new_path(tmp_path / "a"):
            raise error
        assert raised.value is error
