"""Checkpoints to convert, fixtures and assertions."""

import functools
import json
import pathlib
import tempfile

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import serialization, traverse_util
from safetensors import flax as safetensors_flax

from aqtlite import checkpoint
from aqtlite.checkpoint import run
from aqtlite.checkpoint.formats import open_reader
from aqtlite.checkpoint.job import Job
from aqtlite.checkpoint.manifest import Manifest, Plain, Stored
from aqtlite.checkpoint.packing import packing_of
from aqtlite.flax import convert
from tests.flax import models
from tests.flax.support import INT8, X, init

MODEL = models.MlpBlock(INT8)
VARIABLES = init(MODEL, X)
for _i, _layer in enumerate(VARIABLES["params"].values()):
    _layer["bias"] = _layer["bias"] + _i  # No two arrays are the same.

FORMATS = ("orbax", "safetensors", "msgpack")


def save(path: pathlib.Path, variables, how: str) -> pathlib.Path:
    """Writes float variables as users do; returns where."""
    if how == "orbax":
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path.resolve(), variables)
        return path
    if how == "safetensors":
        path = path.with_suffix(".safetensors")
        flat = traverse_util.flatten_dict(nn.meta.unbox(variables), sep=".")
        safetensors_flax.save_file(flat, path)
        return path
    path = path.with_suffix(".msgpack")
    path.write_bytes(serialization.to_bytes(variables))
    return path


def snapshot(path: pathlib.Path) -> dict[str, bytes]:
    """Everything below a path."""
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    return {str(file): file.read_bytes() for file in files if file.is_file()}


def assert_same(got, wanted):
    """The same tree, bit for bit."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    for a, b in pairs:
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture
def source(tmp_path):
    return save(tmp_path / "float", VARIABLES, "msgpack")


@functools.cache
def _converted() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        source = save(pathlib.Path(folder, "float"), VARIABLES, "msgpack")
        target = pathlib.Path(folder, "out")
        checkpoint.convert_checkpoint(source, target, MODEL, X)
        return {
            str(file.relative_to(target)): file.read_bytes()
            for file in target.rglob("*")
            if file.is_file()
        }


@pytest.fixture
def converted(tmp_path):
    """A copy of what `source` is converted to, which is done once."""
    for name, data in _converted().items():
        file = tmp_path / "out" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return tmp_path / "out"


@functools.cache
def serving():
    """What `convert` makes in memory."""
    return convert(MODEL, VARIABLES, X)


def edit(folder, change):
    """Changes a manifest, and takes its checksum away: there was none in the past."""
    file = folder / "aqtlite.json"
    data = json.loads(file.read_text())
    del data["crc32"]
    change(data)
    file.write_text(json.dumps(data))


def refuses(match, function, *args, **kwargs):
    """Calls a function, which raises one line."""
    with pytest.raises(checkpoint.CheckpointError, match=match) as info:
        function(*args, **kwargs)
    assert "\n" not in str(info.value)


def copy(source, target):
    """Copies every array of a checkpoint into a new one, as a conversion does."""
    reader = open_reader(source)
    stored = {name: Stored(x, packing_of(x)) for name, x in reader.arrays.items()}
    manifest = Manifest({name: Plain(name) for name in stored}, stored)
    job = Job(manifest, (), {name: name for name in stored})
    return run.run(job, reader, target, False, False, None)
