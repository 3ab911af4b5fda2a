"""The staging folder: locked, nobody else's, and resumed from."""

import json

import numpy as np
import pytest

from aqtlite import checkpoint
from aqtlite.checkpoint import replacement, staging
from aqtlite.checkpoint.arrays import ArrayInfo
from tests.checkpoint import support
from tests.checkpoint.support import MODEL, assert_same, refuses, snapshot
from tests.flax.support import X

pytestmark = pytest.mark.code("quick")

source = support.source
ARRAYS = {"qvalue": np.arange(6, dtype=np.int8), "scale": np.ones(2, np.float32)}


def converts(source, tmp_path):
    checkpoint.convert_checkpoint(source, tmp_path / "out", MODEL, X)


@pytest.mark.parametrize(
    "name", ["lock", "key", "0.qvalue", "0.json", "0.record", "out", "replaced"]
)
def test_symbolic_links_in_it(name, source, tmp_path):
    victim = tmp_path / "precious"
    victim.write_text("mine")
    folder = tmp_path / ".out.converting"
    folder.mkdir()
    (folder / "lock").touch()
    (folder / "key").write_text("0" * 64)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(victim)
    refuses("a symbolic link; move it", converts, source, tmp_path)
    assert victim.read_text() == "mine"
    assert not (tmp_path / "out").exists()


def test_a_symbolic_link_in_its_place(source, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / ".out.converting").symlink_to(elsewhere)
    refuses("a symbolic link; move it", converts, source, tmp_path)
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
def test_links_that_appear_later(link, source, tmp_path, monkeypatch):
    victim = tmp_path / "precious"
    victim.write_text("mine")
    claim = staging.Staging.claim

    def claim_and_link(self, key):
        claim(self, key)
        for name in ("0.qvalue", "0.scale", "0.record"):
            getattr(self.folder / name, link)(victim)

    monkeypatch.setattr(staging.Staging, "claim", claim_and_link)
    converts(source, tmp_path)
    assert victim.read_text() == "mine"
    wanted = support.serving()
    assert_same(checkpoint.load_serving(tmp_path / "out"), wanted)


@pytest.mark.parametrize(
    "files", [{"lock": "", "precious": "x"}, {"lock": "", "key": "K", "data": "x"}]
)
def test_somebody_elses(files, source, tmp_path):
    folder = tmp_path / ".out.converting"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    before = snapshot(folder)
    refuses("is in the way", converts, source, tmp_path)
    assert snapshot(folder) == before


def test_a_lock_that_was_removed(tmp_path):
    """Who waited for it does not hold the folder of the next one."""
    folder = tmp_path / "folder"
    first = staging.Staging(folder)
    flock, late = staging.fcntl.flock, []

    def flock_late(file, how):
        if not late:  # The first process ends between opening and locking.
            late.append(file)
            first.discard()
        return flock(file, how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging.fcntl, "flock", flock_late)
        second = staging.Staging(folder)
    with pytest.raises(checkpoint.CheckpointError, match="another conversion"):
        staging.Staging(folder)
    second.discard()
    assert not folder.exists()


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(checkpoint.CheckpointError, match="folder cannot be made"):
        staging.Staging(tmp_path / "link" / "folder")


def staged(folder):
    """A folder that one weight is staged in."""
    opened = staging.Staging(folder)
    opened.claim("0" * 64)
    opened.put(3, ARRAYS, 41.5)
    return opened


def test_a_staged_weight(tmp_path):
    opened = staged(tmp_path / "folder")
    finished = opened.finished(3, ARRAYS)
    assert finished.decibels == 41.5 and finished.checksums.keys() == ARRAYS.keys()
    for field, x in ARRAYS.items():
        got = opened.get(3, field, ArrayInfo(x.shape, x.dtype))
        np.testing.assert_array_equal(got, x)
    assert opened.finished(2, ARRAYS) is None
    assert opened.finished(3, [*ARRAYS, "zero_point"]) is None
    opened.close()


@pytest.mark.parametrize("name", ["3.qvalue", "3.scale"])
@pytest.mark.parametrize("data", [None, b"", b"x", b"\x01" * 8])
def test_a_weight_of_which_the_disk_has_a_part(name, data, tmp_path):
    opened = staged(tmp_path / "folder")
    file = opened.folder / name
    file.unlink()
    if data is not None:
        file.write_bytes(data)
    assert opened.finished(3, ARRAYS) is None
    opened.close()


@pytest.mark.parametrize("text", ["", "{}", "[", '{"checksums": {}, "decibels": 3}'])
def test_a_damaged_record(text, tmp_path):
    opened = staged(tmp_path / "folder")
    (opened.folder / "3.json").write_text(text)
    assert opened.finished(3, ARRAYS) is None
    opened.close()


@pytest.mark.parametrize("key, is_kept", [("0" * 64, True), ("1" * 64, False)])
def test_weights_of_another_conversion_go(key, is_kept, tmp_path):
    staged(tmp_path / "folder").close()
    again = staging.Staging(tmp_path / "folder")
    again.claim(key)
    assert (again.finished(3, ARRAYS) is not None) == is_kept
    again.discard()
    assert not (tmp_path / "folder").exists()


def test_an_error_names_the_folder_and_what_to_do(source, tmp_path, monkeypatch):
    def stop(*args):
        raise OSError("no space left")

    folder = tmp_path / ".out.converting"
    with monkeypatch.context() as patch:
        patch.setattr(replacement, "publish", stop)
        match = f"no space left. The weights that are done are in {folder}: the same "
        refuses(match, converts, source, tmp_path)
    assert json.loads((folder / "0.json").read_text())["checksums"]
    converts(source, tmp_path)
    assert not folder.exists()


def test_any_other_exception_has_it_as_a_note(source, tmp_path, monkeypatch):
    def stop(*args):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(replacement, "publish", stop)
    with pytest.raises(RuntimeError) as info:
        converts(source, tmp_path)
    assert "otherwise remove that folder" in info.value.__notes__[0]
