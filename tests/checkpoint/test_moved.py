"""The files that a mapped source is read from: one that changes is read again."""

import flax.linen as nn
import jax
import numpy as np
import pytest

from aqtlite import checkpoint
from aqtlite.checkpoint import moved, replacement
from tests.checkpoint.quantized_formats import edited
from tests.checkpoint.support import assert_same
from tests.flax.support import DG

pytestmark = pytest.mark.code("quick")

MODEL = nn.Sequential([nn.Dense(8, use_bias=False, dot_general=DG) for _ in range(2)])
MOVES = tuple(
    checkpoint.Move(
        sources=f"{i}.weight", targets=f"params/layers_{i}/kernel", axes=(1, 0)
    )
    for i in range(2)
)


class Crash(BaseException):
    """The process ends here: nothing catches it."""


def crash(*args):
    raise Crash


def part(folder, number, seed):
    """Writes one of two parts of a split; returns its path."""
    file = folder / f"m-{number + 1:05d}-of-00002.gguf"
    file.unlink(missing_ok=True)
    x = np.random.default_rng(seed).normal(size=(8, 8)).astype(np.float32)
    checkpoint.save_quantized(file, {f"{number}.weight": x}, format="gguf")
    return file


def test_a_part_of_a_split_that_changes(tmp_path, monkeypatch):
    """Whichever part is named, all are read."""
    source = part(tmp_path, 0, 0)
    part(tmp_path, 1, 1)
    args = (MODEL, jax.ShapeDtypeStruct((1, 8), "float32"))
    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(replacement, "publish", crash)
        checkpoint.convert_checkpoint(source, tmp_path / "out", *args, moves=MOVES)
    part(tmp_path, 1, 2)
    for name in ("out", "fresh"):
        checkpoint.convert_checkpoint(source, tmp_path / name, *args, moves=MOVES)
    resumed, fresh = (
        checkpoint.load_serving(tmp_path / name) for name in ("out", "fresh")
    )
    assert_same(resumed, fresh)


def test_configs_beside_a_file(tmp_path):
    folder = edited.write(
        tmp_path / "x", edited.tensors_of("fp8"), edited.config_of("fp8")
    )
    (folder / "other.txt").touch()
    (file,) = folder.glob("*.safetensors")
    move = checkpoint.Move(sources=f"{edited.LAYER}.weight", targets="params/kernel")
    assert set(moved.Moved(file, (move,)).files()) == {file, folder / "config.json"}
    assert set(moved.Moved(folder, (move,)).files()) == set(folder.iterdir())
