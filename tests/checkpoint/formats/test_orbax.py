"""The format of Orbax: composite checkpoints, and what Orbax logs."""

import absl.logging
import numpy as np
import orbax.checkpoint as ocp
import pytest

from aqtlite.checkpoint.formats import open_reader
from tests.checkpoint.formats.test_formats import ARRAYS, write
from tests.checkpoint.support import refuses, save

pytestmark = pytest.mark.code("quick")


@pytest.fixture(autouse=True)
def warnings_are_logged():
    """The demo, which other tests run in this process, quietens absl."""
    before = absl.logging.get_verbosity()
    absl.logging.set_verbosity(absl.logging.WARNING)
    yield
    absl.logging.set_verbosity(before)


TREE = {"params": {"w": np.ones((2, 3), np.float32)}}


def test_items_of_a_composite_checkpoint(tmp_path):
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(TREE),
            ema=ocp.args.StandardSave({"w": np.zeros(3)}),
            notes=ocp.args.JsonSave({"a": 1}),
        )
        manager.save(3, args=items)
    reader = open_reader(tmp_path / "run" / "3")
    assert sorted(reader.arrays) == ["ema/w", "state/params/w"]
    np.testing.assert_array_equal(reader.read("state/params/w"), np.ones((2, 3)))
    np.testing.assert_array_equal(reader.read("ema/w"), np.zeros(3))


def test_the_default_item_is_the_root(tmp_path):
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, args=ocp.args.StandardSave(TREE))
    assert list(open_reader(tmp_path / "run" / "3").arrays) == ["params/w"]


def test_writing_and_reading_warn_of_nothing(tmp_path, caplog):
    reader = open_reader(write(tmp_path / "out", ARRAYS, str))
    reader.read("a/kernel")
    assert not [
        text for text in caplog.messages if "OCDBT" in text or "Metadata" in text
    ]


def test_other_messages_stay(tmp_path, caplog, monkeypatch):
    """The log of whoever writes at the same time, and of Orbax itself."""
    save_all = ocp.Checkpointer.save

    def save_and_warn(self, *args, **kwargs):
        absl.logging.warning("something else")
        absl.logging.warning("Skipping merge of OCDBT checkpoints: %s", "mine")
        return save_all(self, *args, **kwargs)

    monkeypatch.setattr(ocp.Checkpointer, "save", save_and_warn)
    write(tmp_path / "out", ARRAYS, str)
    absl.logging.warning("Skipping merge of OCDBT checkpoints: %s", "yours")
    shown = [text for text in caplog.messages if "Skip" in text or "something" in text]
    assert shown == ["something else", "Skipping merge of OCDBT checkpoints: yours"]


def test_what_it_does_without_the_filter(tmp_path, caplog):
    """So that the filter goes when Orbax no longer warns."""
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "x", args=ocp.args.PyTreeSave(TREE))
    assert any(text.count("Skipping merge of OCDBT") for text in caplog.messages)


def test_a_list_is_no_array(tmp_path):
    reader = open_reader(save(tmp_path / "x", {**TREE, "l": [np.ones(3)]}, "orbax"))
    assert list(reader.arrays) == ["params/w"]
    assert reader.others == {"l/0": "float64[3] in a list or a tuple"}


def test_a_file_that_goes_while_they_are_counted(tmp_path, monkeypatch):
    reader = open_reader(save(tmp_path / "x", TREE, "orbax"))
    files = [*reader.files(), tmp_path / "gone"]
    monkeypatch.setattr(type(reader), "files", lambda self: files)
    refuses("x cannot be read: .*gone", lambda: reader.arrays)
