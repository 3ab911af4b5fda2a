"""Checkpoints to convert."""

import pathlib

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import linen as nn
from flax import serialization, traverse_util
from safetensors import flax as safetensors_flax

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
