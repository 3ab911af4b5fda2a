"""Replacing a target, beside other files and other conversions."""

import os
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest
import safetensors
from safetensors import numpy as safetensors_numpy

from aqtlite import checkpoint
from aqtlite.checkpoint import load as load_lib
from aqtlite.checkpoint import manifest_json, staging
from aqtlite.checkpoint.formats import open_reader
from aqtlite.flax import convert
from tests.checkpoint import support
from tests.checkpoint.support import MODEL, assert_same, refuses, snapshot
from tests.flax.support import X

pytestmark = pytest.mark.code("quick")

source, converted = support.source, support.converted


class TestOverwrite:
    """It replaces what a conversion wrote, and nothing else."""

    def check(self, source, target):
        before = snapshot(target)
        args = (source, target, MODEL, X)
        refuses("is not replaced", checkpoint.convert_checkpoint, *args, overwrite=True)
        assert snapshot(target) == before

    @pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 1}'])
    def test_a_folder_with_something_named_like_a_manifest(
        self, text, source, tmp_path
    ):
        target = tmp_path / "out"
        target.mkdir()
        (target / "aqtlite.json").write_text(text)
        (target / "_METADATA").write_text("{}")
        (target / "precious").write_text("mine")
        self.check(source, target)

    @pytest.mark.parametrize("text", ["", "{}"])
    def test_a_file_with_something_like_a_manifest(self, text, source, tmp_path):
        target = tmp_path / "out.safetensors"
        arrays = {"precious": np.ones(3, np.float32)}
        safetensors_numpy.save_file(arrays, target, {"aqtlite": text})
        self.check(source, target)

    def test_what_was_put_beside_a_checkpoint(self, source, converted):
        (converted / "precious").write_text("mine")
        self.check(source, converted)
        (converted / "precious").unlink()
        checkpoint.convert_checkpoint(source, converted, MODEL, X, overwrite=True)

    def test_a_folder_of_checkpoints(self, source, tmp_path):
        target = tmp_path / "models"
        target.mkdir()
        checkpoint.convert_checkpoint(source, target / "a.safetensors", MODEL, X)
        (target / "precious").write_text("mine")
        self.check(source, target)

    def test_a_step_that_holds_a_checkpoint(self, source, converted, tmp_path):
        target = tmp_path / "step"
        target.mkdir()
        converted.rename(target / "default")
        (target / "precious").write_text("mine")
        self.check(source, target)

    def test_arrays_that_the_manifest_lacks(self, source, tmp_path):
        target = tmp_path / "out.safetensors"
        checkpoint.convert_checkpoint(source, target, MODEL, X)
        with safetensors.safe_open(target, framework="numpy") as file:
            metadata = file.metadata()
        arrays = safetensors_numpy.load_file(target)
        arrays["precious"] = np.ones(3, np.float32)
        safetensors_numpy.save_file(arrays, target, metadata)
        self.check(source, target)


class TestInterrupted:
    """Between the two renames of a folder's replacement."""

    def interrupt(self, source, target, monkeypatch, also_back):
        """Ctrl-C when the new folder is moved to its place; returns the note."""
        rename = type(target).rename

        def interrupted(self, to):
            if to == target and (self.name == "out" or also_back):
                raise KeyboardInterrupt
            return rename(self, to)

        args = (source, target, MODEL, X)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as info:
            patch.setattr(type(target), "rename", interrupted)
            checkpoint.convert_checkpoint(*args, overwrite=True)
        return info.value.__notes__[0]

    def test_the_old_one_is_moved_back(self, source, converted, monkeypatch):
        before = snapshot(converted)
        note = self.interrupt(source, converted, monkeypatch, also_back=False)
        assert snapshot(converted) == before
        assert "otherwise remove that folder" in note

    def test_the_note_says_where_the_old_one_is(self, source, converted, monkeypatch):
        before = snapshot(converted)
        note = self.interrupt(source, converted, monkeypatch, also_back=True)
        folder = converted.parent / ".out.converting"
        assert not converted.exists()
        assert f"The earlier checkpoint of {converted} is in {folder}" in note
        assert "do not remove that folder" in note
        args = (source, converted, MODEL, X)
        refuses("exists; --overwrite", checkpoint.convert_checkpoint, *args)
        assert snapshot(converted) == before


class TestReading:
    """While a conversion replaces what is read."""

    @pytest.mark.parametrize("name", ["out", "out.safetensors"])
    def test_it_is_named(self, name, source, tmp_path, monkeypatch):
        target = tmp_path / name
        other = jax.tree.map(lambda x: x + 1, support.VARIABLES)
        again = support.save(tmp_path / "other", other, "msgpack")
        checkpoint.convert_checkpoint(source, target, MODEL, X)
        from_json = manifest_json.from_json

        def from_json_and_replace(text, where):
            monkeypatch.undo()
            checkpoint.convert_checkpoint(again, target, MODEL, X, overwrite=True)
            return from_json(text, where)

        monkeypatch.setattr(manifest_json, "from_json", from_json_and_replace)
        match = f"{target} was replaced while it was read; load it again"
        refuses(match, checkpoint.load_serving, target)
        assert_same(checkpoint.load_serving(target), convert(MODEL, other, X))

    def test_between_the_two_renames(self, converted, monkeypatch):
        """A folder is not there for a moment, and then is."""
        aside = converted.rename(converted.parent / "aside")

        def open_and_move_back(path):
            monkeypatch.undo()
            try:
                return open_reader(path)
            finally:
                aside.rename(converted)

        monkeypatch.setattr(load_lib, "open_reader", open_and_move_back)
        refuses("was replaced while", checkpoint.load_serving, converted)

    def test_other_errors_stay(self, converted):
        data = (converted / "aqtlite.json").read_bytes()
        (converted / "aqtlite.json").write_bytes(data[1:])
        refuses("is damaged", checkpoint.load_serving, converted)


class TestTwoConversions:
    """Into one target, at the same time."""

    def test_while_one_replaces_the_target(self, source, converted, monkeypatch):
        """Between its two renames nothing is at the target's place."""
        rename = type(converted).rename
        seen = []

        def rename_and_start_another(self, target):
            done = rename(self, target)
            if self == converted:
                args = (source, converted, MODEL, X)
                refuses("another conversion", checkpoint.convert_checkpoint, *args)
                seen.append(converted.exists())
            return done

        monkeypatch.setattr(type(converted), "rename", rename_and_start_another)
        checkpoint.convert_checkpoint(source, converted, MODEL, X, overwrite=True)
        assert seen == [False]
        wanted = support.serving()
        assert_same(checkpoint.load_serving(converted), wanted)
        assert not (converted.parent / ".out.converting").exists()

    def test_a_target_that_appears_before_the_lock(self, source, tmp_path, monkeypatch):
        """Without --overwrite it is not replaced."""
        target = tmp_path / "out"
        opened = staging.Staging

        def open_late(folder):
            monkeypatch.setattr(staging, "Staging", opened)
            checkpoint.convert_checkpoint(source, target, MODEL, X)
            (target / "mine").touch()
            return opened(folder)

        monkeypatch.setattr(staging, "Staging", open_late)
        args = (source, target, MODEL, X)
        refuses("exists; --overwrite", checkpoint.convert_checkpoint, *args)
        assert (target / "mine").exists()
        assert not (tmp_path / ".out.converting").exists()

    @pytest.mark.slow
    def test_many(self, source, tmp_path):
        """Of processes that start together one converts; the others say so."""
        script = """
            import sys
            from aqtlite import checkpoint
            from tests.flax import models
            from tests.flax.support import INT8, X

            print("ready", flush=True)
            sys.stdin.readline()
            args = (sys.argv[1], sys.argv[2], models.MlpBlock(INT8), X)
            for _ in range(5):
                try:
                    checkpoint.convert_checkpoint(*args, overwrite=True)
                    print("done")
                except checkpoint.CheckpointError as error:
                    assert "another conversion" in str(error), error
        """
        command = [sys.executable, "-c", textwrap.dedent(script)]
        processes = [
            subprocess.Popen(
                [*command, str(source), str(tmp_path / "out")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        for process in processes:
            process.stdout.readline()
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        outputs = [process.communicate(timeout=120) for process in processes]
        assert [p.returncode for p in processes] == [0, 0], outputs
        assert "done" in outputs[0][0] + outputs[1][0]
        wanted = support.serving()
        assert_same(checkpoint.load_serving(tmp_path / "out"), wanted)
        assert sorted(os.listdir(tmp_path)) == ["float.msgpack", "out"]
