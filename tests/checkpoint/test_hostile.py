"""Manifests, metadata and folders that were made to do harm: one clear line each."""

import json

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from safetensors import numpy as safetensors_numpy

from aqtlite import checkpoint
from aqtlite.checkpoint import replacement
from aqtlite.flax import convert
from tests.checkpoint import support
from tests.checkpoint.support import MODEL, VARIABLES, assert_same, edit, refuses, save
from tests.flax.support import DG, X, init

pytestmark = pytest.mark.code("quick")

source, converted = support.source, support.converted


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
        del data["crc32"]
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
            checkpoint.convert_checkpoint,
            *(file, tmp_path / "out", MODEL, X),
        )

    def test_metadata_of_orbax(self, tmp_path):
        path = save(tmp_path / "orbax", VARIABLES, "orbax")
        (path / "_METADATA").write_text('{"a":' * 200_000)
        refuses(
            "cannot be read", checkpoint.convert_checkpoint, path, tmp_path, MODEL, X
        )

    def test_records_in_staging(self, source, tmp_path, monkeypatch):
        """They are ignored: the weight is made again."""

        def stop(*args):
            raise OSError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(replacement, "publish", stop)
            args = (source, tmp_path / "out", MODEL, X)
            refuses("resumes there", checkpoint.convert_checkpoint, *args)
        folder = tmp_path / ".out.converting"
        for i, text in enumerate(("[" * 200_000, "{}", '{"checksums": {}}')):
            (folder / f"{i}.json").write_text(text)
        checkpoint.convert_checkpoint(*args)
        assert_same(checkpoint.load_serving(tmp_path / "out"), support.serving())


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
        {"list": [{"list": [{"shape": [], "keys": "dice"}]}, {"dict": {}}]},
        {"list": [{"list": [{"shape": [-1], "keys": "rbg"}]}, {"dict": {}}]},
        {"list": [{"list": [{"class": 3, "fields": {}}]}, {"dict": {}}]},
        {"list": [{"list": [{"class": "a:b", "fields": []}]}, {"dict": {}}]},
        {"list": [{"list": [{"class": "a:b", "fields": {"c": 3}}]}, {"dict": {}}]},
    ],
)
def test_samples(sample, converted):
    edit(converted, lambda data: data.update(sample=sample))
    refuses("manifest of .* is damaged", checkpoint.load_serving, converted, MODEL)


@pytest.mark.parametrize(
    "name",
    [
        *("no_such_module:Batch", "os:system", "sys", "sys:modules.os.system", ":", ""),
        *("subprocess:Popen", "builtins:tuple", "jax:numpy"),
        "fractions:Fraction",
        "aqtlite.config:Tensor",  # Has other fields.
    ],
)
def test_classes_of_samples(name, converted):
    """A class is looked for among what is imported, and never called."""
    one = {"class": name, "fields": {"args": {"value": "touch here"}}}
    sample = {"list": [{"list": [one]}, {"dict": {}}]}
    edit(converted, lambda data: data.update(sample=sample))
    load = checkpoint.load_serving
    refuses(
        "hold a .* the fields args, which .*import its module", load, converted, MODEL
    )
    assert_same(load(converted), support.serving())


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
            data["nodes"][f"{path}/below"] = data["nodes"][path]

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
    refuses(
        "holds 4398 GB, in files of",
        checkpoint.convert_checkpoint,
        *(path, tmp_path / "out", MODEL, X),
    )
