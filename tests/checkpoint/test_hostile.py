"""Manifests, metadata and folders that were made to do harm: one clear line each."""

import json
import os
import subprocess
import sys
import textwrap

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors
from flax import linen as nn
from safetensors import numpy as safetensors_numpy

from aqtlite import checkpoint
from aqtlite.checkpoint import replacement, staging
from aqtlite.flax import convert
from tests.checkpoint.support import assert_same, save, snapshot
from tests.flax import models
from tests.flax.support import DG, INT8, X, init

MODEL = models.MlpBlock(INT8)
VARIABLES = init(MODEL, X)
for i, layer in enumerate(VARIABLES["params"].values()):
    layer["bias"] = layer["bias"] + i  # No two arrays are the same.


@pytest.fixture
def source(tmp_path):
    return save(tmp_path / "float", VARIABLES, "msgpack")


@pytest.fixture
def converted(source, tmp_path):
    checkpoint.convert_checkpoint(source, tmp_path / "out", MODEL, X)
    return tmp_path / "out"


def refuses(match, function, *args, **kwargs):
    """Calls a function, which raises one line."""
    with pytest.raises(checkpoint.CheckpointError, match=match) as info:
        function(*args, **kwargs)
    assert "\n" not in str(info.value)


def edit(folder, change):
    """Changes the manifest of a checkpoint."""
    file = folder / "aqtlite.json"
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


class TestNesting:
    """Deeper than Python's stack, or than any model."""

    @pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000])
    def test_manifest(self, text, converted):
        (converted / "aqtlite.json").write_text(text)
        refuses("nested too deeply", checkpoint.load_serving, converted)
        refuses("nested too deeply", checkpoint.summarize, converted)

    def test_manifest_in_safetensors(self, tmp_path):
        file = tmp_path / "out.safetensors"
        arrays = {"w": np.ones(3, np.float32)}
        safetensors_numpy.save_file(arrays, file, {"aqtlite": "[" * 200_000})
        refuses("nested too deeply", checkpoint.load_serving, file)

    def test_parts_of_a_manifest(self, converted):
        deep = "[" * 5000 + "]" * 5000
        file = converted / "aqtlite.json"
        data = json.loads(file.read_text())
        for part in ("sample", "configs", "nodes"):
            text = json.dumps({**data, part: "HERE"}).replace('"HERE"', deep)
            file.write_text(text)
            refuses("is damaged", checkpoint.load_serving, converted)

    @pytest.mark.parametrize(
        "data",
        [
            b"\x81\xa1a" * 50_000 + b"\xc0",
            b"\x81\xa1a" + b"\x91" * 50_000 + b"\xc0",
            b"\x81\xa1a" * 200 + b"\xc0",
        ],
    )
    def test_msgpack(self, data, tmp_path):
        file = tmp_path / "deep.msgpack"
        file.write_bytes(data)
        refuses(
            "is not a whole file of flax.serialization.to_bytes",
            checkpoint.convert_by_rules,
            *(file, tmp_path / "out", [checkpoint.Rule("a", (0,))]),
        )

    def test_metadata_of_orbax(self, tmp_path):
        path = save(tmp_path / "orbax", VARIABLES, "orbax")
        (path / "_METADATA").write_text('{"a":' * 200_000)
        refuses(
            "cannot be read", checkpoint.convert_checkpoint, path, tmp_path, MODEL, X
        )

    def test_rules(self):
        refuses("RecursionError", checkpoint.rules_from_json, "[" * 200_000)

    def test_records_in_staging(self, source, tmp_path, monkeypatch):
        """They are ignored: the weight is made again."""

        def stop(*args):
            raise OSError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(replacement, "publish", stop)
            args = (source, tmp_path / "out", MODEL, X)
            refuses("goes on from there", checkpoint.convert_checkpoint, *args)
        folder = tmp_path / ".out.converting"
        for i, text in enumerate(("[" * 200_000, "{}", '{"checksums": {}}')):
            (folder / f"{i}.json").write_text(text)
        checkpoint.convert_checkpoint(*args)
        assert_same(
            checkpoint.load_serving(tmp_path / "out"), convert(MODEL, VARIABLES, X)
        )


@pytest.mark.parametrize(
    "sample",
    [
        3,
        "x",
        [],
        {},
        {"value": 1},
        {"list": []},
        {"list": [{"dict": {}}, {"dict": {}}]},
        {"list": [{"list": [3]}, {"dict": {}}]},
        {"list": [{"list": [{"shape": 3, "dtype": "int8"}]}, {"dict": {}}]},
        {"list": [{"list": [{"shape": ["a"], "dtype": "int8"}]}, {"dict": {}}]},
        {"list": [{"list": [{"shape": [-1], "dtype": "int8"}]}, {"dict": {}}]},
        {"list": [{"list": [{"shape": [1], "dtype": "nothing"}]}, {"dict": {}}]},
        {"list": [{"list": [{"shape": [1], "dtype": None}]}, {"dict": {}}]},
        {"list": [{"list": [{"value": {}}]}, {"dict": {}}]},
        {"list": [{"list": []}, {"dict": 3}]},
        {"list": [{"list": [{"shape": [1 << 30] * 2, "dtype": "int8"}]}, {"dict": {}}]},
    ],
)
def test_samples(sample, converted):
    edit(converted, lambda data: data.update(sample=sample))
    refuses("manifest of .* is damaged", checkpoint.load_serving, converted, MODEL)


def test_a_sample_that_no_manifest_holds(tmp_path):
    """Such a model is converted, but cannot be compared."""
    model = nn.Dense(8, dot_general=DG)
    source = save(tmp_path / "float", init(model, X), "msgpack")
    shape = jax.ShapeDtypeStruct((1 << 25, 8), X.dtype)
    checkpoint.convert_checkpoint(source, tmp_path / "out", model, shape)
    refuses("load it without", checkpoint.load_serving, tmp_path / "out", model)
    assert_same(
        checkpoint.load_serving(tmp_path / "out"),
        convert(model, init(model, X), shape),
    )


def first(data, kind, count):
    paths = [path for path, node in data["nodes"].items() if node["kind"] == kind]
    return paths[:count]


class TestSwappedEntries:
    """Found out without a model too."""

    @pytest.mark.parametrize("kind", ["array", "frozen"])
    def test_nodes(self, kind, converted):
        def swap(data):
            nodes = data["nodes"]
            a, b = first(data, kind, 2)
            nodes[a], nodes[b] = nodes[b], nodes[a]

        edit(converted, swap)
        refuses("an array of another node", checkpoint.load_serving, converted)

    def test_fields_of_a_weight(self, converted):
        def swap(data):
            node = data["nodes"][first(data, "frozen", 1)[0]]
            node["qvalue"], node["scale"] = node["scale"], node["qvalue"]

        edit(converted, swap)
        refuses("an array of another node", checkpoint.load_serving, converted)

    def test_two_nodes_of_one_array(self, converted):
        def share(data):
            a, b = first(data, "array", 2)
            data["nodes"][b] = data["nodes"][a]

        edit(converted, share)
        refuses("damaged", checkpoint.load_serving, converted)

    def test_an_array_without_a_node(self, converted):
        def drop(data):
            del data["nodes"][first(data, "array", 1)[0]]

        edit(converted, drop)
        refuses("no node names the array", checkpoint.load_serving, converted)

    def test_nodes_inside_others(self, converted):
        def nest(data):
            (path,) = first(data, "array", 1)
            data["nodes"][f"{path}/below"] = {"kind": "value", "value": 1}

        edit(converted, nest)
        refuses("do not fit into one tree", checkpoint.load_serving, converted)

    @pytest.mark.parametrize("order", [[0, 0], [1, 2], [0, 1, 2], ["a"], [[0]], 3])
    def test_orders_of_axes(self, order, converted):
        def change(data):
            data["nodes"][first(data, "frozen", 1)[0]]["order"] = order

        edit(converted, change)
        refuses("damaged", checkpoint.load_serving, converted)

    def test_descriptions_of_arrays(self, converted):
        """Only the files say which is which."""

        def swap(data):
            a, b = (data["nodes"][p]["array"] for p in first(data, "array", 2))
            arrays = data["arrays"]
            arrays[a], arrays[b] = arrays[b], arrays[a]

        edit(converted, swap)
        refuses("is damaged: its checksum", checkpoint.load_serving, converted)

    def test_files(self, converted):
        names = sorted(p.name for p in converted.iterdir() if p.name.endswith("bias"))
        (converted / names[0]).rename(converted / "x")
        (converted / names[1]).rename(converted / names[0])
        (converted / "x").rename(converted / names[1])
        refuses("is damaged: its checksum", checkpoint.load_serving, converted)

    @pytest.mark.parametrize("value", [[1], {"a": 1}])
    def test_values(self, value, converted):
        def add(data):
            data["nodes"]["step"] = {"kind": "value", "value": value}

        edit(converted, add)
        refuses("damaged", checkpoint.load_serving, converted)


def test_sizes_that_the_files_of_orbax_do_not_have(tmp_path):
    """Reading 4 TB of it would end the process, not the call."""
    path = tmp_path / "huge"
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    with ocp.Checkpointer(handler) as checkpointer:
        tree = {"kernel": np.ones((4, 4), np.float32)}
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))
    file = path / "kernel" / ".zarray"
    huge = [1 << 20, 1 << 20]
    data = {**json.loads(file.read_text()), "shape": huge, "chunks": huge}
    file.write_text(json.dumps(data))
    rules = [checkpoint.Rule("kernel", (0,))]
    refuses(
        "holds 4398 GB, in files of",
        checkpoint.convert_by_rules,
        *(path, tmp_path / "out", rules),
    )


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


class TestStaging:
    """The folder beside the target is nobody else's."""

    def convert(self, source, tmp_path):
        checkpoint.convert_checkpoint(source, tmp_path / "out", MODEL, X)

    @pytest.mark.parametrize(
        "name", ["lock", "key", "0.qvalue", "0.json", "0.record", "out", "replaced"]
    )
    def test_symbolic_links_in_it(self, name, source, tmp_path):
        victim = tmp_path / "precious"
        victim.write_text("mine")
        folder = tmp_path / ".out.converting"
        folder.mkdir()
        (folder / "lock").touch()
        (folder / "key").write_text("0" * 64)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(victim)
        refuses("a symbolic link; move it", self.convert, source, tmp_path)
        assert victim.read_text() == "mine"
        assert not (tmp_path / "out").exists()

    def test_a_symbolic_link_in_its_place(self, source, tmp_path):
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (tmp_path / ".out.converting").symlink_to(elsewhere)
        refuses("a symbolic link; move it", self.convert, source, tmp_path)
        assert not list(elsewhere.iterdir())

    @pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
    def test_links_that_appear_later(self, link, source, tmp_path, monkeypatch):
        victim = tmp_path / "precious"
        victim.write_text("mine")
        claim = staging.Staging.claim

        def claim_and_link(self, key):
            claim(self, key)
            for name in ("0.qvalue", "0.scale", "0.record"):
                getattr(self.folder / name, link)(victim)

        monkeypatch.setattr(staging.Staging, "claim", claim_and_link)
        self.convert(source, tmp_path)
        assert victim.read_text() == "mine"
        wanted = convert(MODEL, VARIABLES, X)
        assert_same(checkpoint.load_serving(tmp_path / "out"), wanted)

    @pytest.mark.parametrize(
        "files", [{"lock": "", "precious": "x"}, {"lock": "", "key": "K", "data": "x"}]
    )
    def test_somebody_elses(self, files, source, tmp_path):
        folder = tmp_path / ".out.converting"
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
        before = snapshot(folder)
        refuses("is in the way", self.convert, source, tmp_path)
        assert snapshot(folder) == before


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
        wanted = convert(MODEL, VARIABLES, X)
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

    def test_a_lock_that_was_removed(self, tmp_path):
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
        wanted = convert(MODEL, VARIABLES, X)
        assert_same(checkpoint.load_serving(tmp_path / "out"), wanted)
        assert sorted(os.listdir(tmp_path)) == ["float.msgpack", "out"]
