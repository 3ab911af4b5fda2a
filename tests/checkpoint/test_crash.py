"""Whatever happens, the source stays, and a target is whole or not there."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import textwrap
import time

import jax
import numpy as np
import pytest
from flax import linen as nn

from aqtlite import checkpoint
from aqtlite.checkpoint import staging
from aqtlite.flax import convert
from tests.checkpoint.support import assert_same, save, snapshot
from tests.common import mostly_slow
from tests.flax import models
from tests.flax.support import DG, INT8, X, init

pytestmark = pytest.mark.code("quick")

MODEL = models.MlpBlock(INT8)
VARIABLES = init(MODEL, X)


class Crash(BaseException):
    """The process ends here: nothing catches it."""


def crash_at(monkeypatch, count):
    """Ends the process before the `count`-th time that something reaches the disk."""
    left = count

    def tick():
        nonlocal left
        left -= 1
        if left < 0:
            raise Crash

    def counted(function):
        def wrapper(*args, **kwargs):
            tick()
            return function(*args, **kwargs)

        return wrapper

    monkeypatch.setattr(staging, "write_file", counted(staging.write_file))
    monkeypatch.setattr(staging, "remove", counted(staging.remove))
    monkeypatch.setattr(staging.shutil, "rmtree", counted(staging.shutil.rmtree))
    monkeypatch.setattr(os, "fsync", counted(os.fsync))
    monkeypatch.setattr(pathlib.Path, "rename", counted(pathlib.Path.rename))
    monkeypatch.setattr(pathlib.Path, "replace", counted(pathlib.Path.replace))
    monkeypatch.setattr(staging.Staging, "get", counted(staging.Staging.get))


def whole(path, wanted):
    assert_same(checkpoint.load_serving(path), wanted)


@pytest.mark.parametrize("name", mostly_slow(["out", "out.safetensors"], "out"))
def test_a_crash_at_every_step(name, tmp_path, monkeypatch):
    model = nn.Dense(8, dot_general=DG)
    variables = init(model, X)
    source = save(tmp_path / "float", variables, "msgpack")
    target = tmp_path / name
    before = snapshot(source)
    wanted = convert(model, variables, X)
    for count in range(1000):
        with monkeypatch.context() as patch:
            crash_at(patch, count)
            try:
                checkpoint.convert_checkpoint(source, target, model, X)
            except Crash:
                assert snapshot(source) == before
                if target.exists():  # The crash came after the work was done.
                    whole(target, wanted)
                    break
                continue
        break
    assert count > 5  # Each of them went on from the one before.
    whole(target, wanted)
    if count:  # Another conversion is not hindered by what the crash left.
        checkpoint.convert_checkpoint(source, target, model, X, overwrite=True)
    whole(target, wanted)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["float.msgpack", name]


@pytest.mark.parametrize(
    "name", mostly_slow(["out", "out.safetensors"], "out.safetensors")
)
def test_a_crash_while_replacing(name, tmp_path, monkeypatch):
    """There is always one target that is whole, and a file is always in its place."""
    model = nn.Dense(8, dot_general=DG)
    variables = init(model, X)
    source = save(tmp_path / "float", variables, "msgpack")
    target = tmp_path / name
    old = convert(model, variables, X)
    checkpoint.convert_checkpoint(source, target, model, X)
    other = {
        "params": {**variables["params"], "kernel": -variables["params"]["kernel"]}
    }
    again = save(tmp_path / "other", other, "msgpack")
    new = convert(model, other, X)
    aside = tmp_path / f".{name}.converting" / "replaced"
    for count in range(1000):
        with monkeypatch.context() as patch:
            crash_at(patch, count)
            try:
                checkpoint.convert_checkpoint(again, target, model, X, overwrite=True)
            except Crash:
                is_aside = target.suffix == "" and not target.exists()
                stored = checkpoint.load_serving(aside if is_aside else target)
                equal = jax.tree.map(np.array_equal, stored, new)
                assert_same(stored, new if all(jax.tree.leaves(equal)) else old)
                continue
        break
    whole(target, new)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ["float.msgpack", "other.msgpack", name]
    )


def test_it_goes_on_from_what_is_finished(tmp_path, monkeypatch):
    source = save(tmp_path / "float", VARIABLES, "msgpack")
    put = staging.Staging.put
    indices = []

    def put_two(self, index, *args):
        if len(indices) == 2:
            raise Crash
        indices.append(index)
        return put(self, index, *args)

    monkeypatch.setattr(staging.Staging, "put", put_two)
    with pytest.raises(Crash):
        checkpoint.convert_checkpoint(source, tmp_path / "out", MODEL, X)
    indices.clear()
    checkpoint.convert_checkpoint(source, tmp_path / "out", MODEL, X)
    assert indices == [2]
    whole(tmp_path / "out", convert(MODEL, VARIABLES, X))


def test_it_does_not_go_on_from_another_source(tmp_path, monkeypatch):
    source = save(tmp_path / "float", VARIABLES, "msgpack")
    monkeypatch.setattr(staging, "sync_tree", lambda path: (_ for _ in ()).throw(Crash))
    with pytest.raises(Crash):
        checkpoint.convert_checkpoint(source, tmp_path / "out", MODEL, X)
    monkeypatch.undo()
    other = {"params": init(MODEL, X)["params"]}
    other["params"]["Dense_1"]["kernel"] = other["params"]["Dense_1"]["kernel"] * 2
    again = save(tmp_path / "float", other, "msgpack")
    checkpoint.convert_checkpoint(again, tmp_path / "out", MODEL, X)
    whole(tmp_path / "out", convert(MODEL, other, X))


def test_two_at_once(tmp_path):
    source = save(tmp_path / "float", VARIABLES, "msgpack")
    first = staging.Staging(tmp_path / ".out.converting")
    with pytest.raises(checkpoint.CheckpointError, match="another conversion"):
        checkpoint.convert_checkpoint(source, tmp_path / "out", MODEL, X)
    first.close()
    checkpoint.convert_checkpoint(source, tmp_path / "out", MODEL, X)


CONVERT = """
    import sys
    from aqtlite import checkpoint
    from tests.flax import models
    from tests.flax.support import INT8, X

    print("ready", flush=True)
    checkpoint.convert_checkpoint(sys.argv[1], sys.argv[2], models.MlpBlock(INT8), X)
"""


@pytest.mark.slow
def test_killed(tmp_path):
    """By kill -9, at a few moments; benchmarks/kill_conversion.py does it 50 times."""
    source = save(tmp_path / "float", VARIABLES, "orbax")
    target = tmp_path / "out"
    before = snapshot(source)
    command = [sys.executable, "-c", textwrap.dedent(CONVERT)]
    rng = random.Random(0)
    for _ in range(3):
        process = subprocess.Popen(
            [*command, str(source), str(target)], stdout=subprocess.PIPE
        )
        process.stdout.readline()
        time.sleep(rng.uniform(0, 1.5))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert snapshot(source) == before
        if target.exists():
            whole(target, convert(MODEL, VARIABLES, X))
    if not target.exists():
        checkpoint.convert_checkpoint(source, target, MODEL, X)
    whole(target, convert(MODEL, VARIABLES, X))
