"""Paths of results, of all commands: what is told before any work."""

import errno
import os
import pathlib

import numpy as np
import pytest

from aqtlite import __main__ as program

pytestmark = pytest.mark.code("quick")

MODEL = ["--model", "working.py:factory"]
DATA = ["--calibrate", "data.npz"]
CHOOSE = ["choose", "source", *MODEL, *DATA, "--budget", "1", "--candidates", "fp8"]
WRITES = {
    "out": ([*CHOOSE, "--out"], "rules.json"),
    "plot": ([*CHOOSE, "--plot"], "bits.png"),
    "page": (["report", *MODEL[1:], "--html"], "page.html"),
    "edge": (["edge", *MODEL, *DATA, "source"], "model.onnx"),
    "ranges": (["edge", *MODEL, *DATA, "source", "m.onnx", "--save-ranges"], "r.json"),
    "checkpoint": (["convert", *MODEL, "source"], "serving"),
}
"""Command lines by what they write, without the path, and its name."""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder with the inputs of the commands, of which none may be read."""
    (tmp_path / "working.py").write_text("raise SystemExit('too late')")
    (tmp_path / "source").mkdir()
    np.savez(tmp_path / "data.npz")
    monkeypatch.setattr("aqtlite.cli.edge._PACKAGES", {".onnx": ()})
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def closed(folder, monkeypatch):
    """A folder that nobody can write into, root included, whom no mode keeps out."""
    (folder / "closed").mkdir(mode=0o500)
    opened = os.open

    def refuse(path, flags, *args, **kwargs):
        if "closed" in pathlib.Path(path).parts and flags & (os.O_WRONLY | os.O_RDWR):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    return pathlib.Path("closed")


def refused(argv, capsys):
    """Returns the one line of a command that is refused."""
    assert program.main(argv) == 2
    shown = capsys.readouterr()
    assert not shown.out and shown.err.count("\n") == 1
    return shown.err.removeprefix(f"aqtlite {argv[0]}: error: ").strip()


@pytest.mark.parametrize("written", WRITES)
def test_a_folder_that_cannot_be_written_into(written, closed, capsys):
    argv, name = WRITES[written]
    text = refused([*argv, str(closed / name)], capsys)
    assert text == f"{closed / name} cannot be written: Permission denied"
    assert not list(closed.iterdir())


def test_a_checkpoint_in_a_folder_that_cannot_be_made(closed, capsys):
    argv, _ = WRITES["checkpoint"]
    target = closed / "of" / "run"
    text = refused([*argv, str(target)], capsys)
    assert text == f"{target} cannot be written: Permission denied"
    assert "too late" in refused([*argv, str(target), "--dry-run"], capsys)


@pytest.mark.parametrize("path", ["~/run", "gs://bucket/run"])
@pytest.mark.parametrize("written", WRITES)
def test_what_is_no_local_path(written, path, folder, capsys):
    argv, name = WRITES[written]
    text = refused([*argv, f"{path}/{name}"], capsys)
    assert text.partition(" ")[0] == str(pathlib.Path(path, name))
    assert ("write the whole path" in text) == path.startswith("~")
    assert not (folder / "~").exists() and not (folder / "gs:").exists()


@pytest.mark.parametrize(
    "argv",
    [
        ["show", "~/run"],
        ["generate", "~/run", "--prompt", "a"],
        ["demo", "--out", "~/run"],
        ["convert", "~/run", "out", *MODEL],
        ["convert", "source", "out", *MODEL, "--map", "~/run"],
        [*CHOOSE, "--config", "source", "--config", "~/run"],
    ],
)
def test_inputs_that_are_no_local_path(argv, capsys):
    words = "~/run begins with ~, which a shell replaces by a home only where it is"
    assert refused(argv, capsys).startswith(words)


@pytest.mark.parametrize("written", [name for name in WRITES if name != "checkpoint"])
def test_what_is_no_path_of_a_file(written, folder, capsys):
    argv, name = WRITES[written]
    suffix = pathlib.Path(name).suffix
    (folder / f"link{suffix}").symlink_to("another")
    (folder / f"folder{suffix}").mkdir()
    for path, words in {
        f"link{suffix}": f"link{suffix} is a symbolic link; name what it points to",
        f"folder{suffix}": f"folder{suffix} is a folder; name a file",
        f"none/{name}": f"there is no folder none to write {name} into",
        f"{'n' * 300}{suffix}": f"{'n' * 300}{suffix} cannot be written: File name too",
    }.items():
        assert refused([*argv, path, "--overwrite"], capsys).startswith(words)


def test_a_device(capsys):
    argv, _ = WRITES["out"]
    text = refused([*argv, os.devnull, "--overwrite"], capsys)
    assert text == f"{os.devnull} is a device or a pipe; name a file"


@pytest.mark.parametrize("written", WRITES)
def test_a_path_that_can_be_written_is_left_as_it_is(written, folder, capsys):
    argv, name = WRITES[written]
    before = set(folder.iterdir())
    assert "too late" in refused([*argv, name], capsys)
    assert {path for path in folder.iterdir() if path.name != "__pycache__"} == before
