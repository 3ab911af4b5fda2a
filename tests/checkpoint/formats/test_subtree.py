"""Training states: the subtree to convert is named, and read alone."""

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from flax.training import train_state

from aqtlite import checkpoint
from aqtlite.checkpoint.formats import Subtree, open_reader
from aqtlite.flax import convert
from tests.checkpoint import support
from tests.checkpoint.support import MODEL, VARIABLES, assert_same, refuses, save
from tests.common import mostly_slow
from tests.flax import models
from tests.flax.support import INT8, X, init

pytestmark = pytest.mark.code("quick")

STATE = train_state.TrainState.create(
    apply_fn=MODEL.apply, params=VARIABLES["params"], tx=optax.adam(1e-3)
)


def save_state(path, how):
    """A training state, as users save it; the options that name its parameters."""
    if how == "msgpack":
        path = path.with_suffix(".msgpack")
        path.write_bytes(serialization.to_bytes(STATE))
        return path, "params"
    if how == "composite":
        with ocp.CheckpointManager(path) as manager:
            items = ocp.args.Composite(
                state=ocp.args.StandardSave(STATE), data=ocp.args.JsonSave({"at": 3})
            )
            manager.save(3, args=items)
        return path / "3", "state/params"
    if how == "nested":
        return save(path, {"train": {"state": STATE}}, "orbax"), "train/state/params"
    return save(path, STATE, "orbax"), "params"


@pytest.mark.parametrize(
    "how", mostly_slow(["orbax", "msgpack", "composite", "nested"], "nested")
)
def test_the_refusal_names_the_subtree_that_converts(how, tmp_path):
    source, subtree = save_state(tmp_path / "float", how)
    args = (source, tmp_path / "out", MODEL, X)
    refuses(f"--subtree {subtree}( or|$)", checkpoint.convert_checkpoint, *args)
    checkpoint.convert_checkpoint(*args, subtree=subtree)
    loaded = checkpoint.load_serving(tmp_path / "out", MODEL)
    assert_same(loaded, support.serving())


def test_no_subtree_is_named_that_has_more_than_the_model(tmp_path):
    params = {**VARIABLES["params"], "extra": {"kernel": np.ones(3)}}
    source = save(tmp_path / "float", {**VARIABLES, "params": params}, "orbax")
    args = (source, tmp_path / "out", MODEL, X)
    refuses(
        "params/extra/kernel is not in the model$", checkpoint.convert_checkpoint, *args
    )


def test_no_subtree_is_named_whose_arrays_have_other_shapes(tmp_path):
    other = jax.tree.map(lambda x: x[..., :1], VARIABLES["params"])
    state = {"params": other, "ema": VARIABLES["params"], "step": np.int32(3)}
    source = save(tmp_path / "float", state, "msgpack")
    args = (source, tmp_path / "out", MODEL, X)
    refuses("names: --subtree ema$", checkpoint.convert_checkpoint, *args)


def test_it_reads_nothing_else(tmp_path, monkeypatch):
    source, subtree = save_state(tmp_path / "float", "orbax")
    read = []
    whole = type(open_reader(source))
    read_one = whole.read
    monkeypatch.setattr(
        whole, "read", lambda self, name: read.append(name) or read_one(self, name)
    )
    args = (source, tmp_path / "out", MODEL, X)
    checkpoint.convert_checkpoint(*args, subtree=subtree)
    assert read and all(name.startswith("params/") for name in read)


def test_collections_beside_the_parameters(tmp_path):
    model, variables = models.Trained(INT8), init(models.Trained(INT8), X)
    state = {**variables, "step": np.int32(3), "opt": {"mu": variables["params"]}}
    source = save(tmp_path / "float", {"state": state}, "msgpack")
    args = (source, tmp_path / "out", model, X)
    both = "--subtree state/params --subtree state/batch_stats"
    refuses(both, checkpoint.convert_checkpoint, *args)
    paths = ["state/params", "state/batch_stats"]
    checkpoint.convert_checkpoint(*args, subtree=paths)
    loaded = checkpoint.load_serving(tmp_path / "out", model)
    assert_same(loaded, convert(model, variables, X))


def test_variables_as_a_subtree(tmp_path):
    source = save(tmp_path / "float", {"v": VARIABLES, "n": np.ones(3)}, "safetensors")
    args = (source, tmp_path / "out", MODEL, X)
    checkpoint.convert_checkpoint(*args, subtree="v/")
    loaded = checkpoint.load_serving(tmp_path / "out")
    assert_same(loaded, support.serving())


def test_two_subtrees_are_two_conversions(tmp_path, monkeypatch):
    """What is staged of one is no part of the other."""
    other = jax.tree.map(lambda x: x + 1, VARIABLES["params"])
    tree = {"a": VARIABLES["params"], "b": other}
    source = save(tmp_path / "float", tree, "orbax")
    args = (source, tmp_path / "out", MODEL, X)
    with monkeypatch.context() as patch:
        patch.setattr("aqtlite.checkpoint.replacement.publish", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            checkpoint.convert_checkpoint(*args, subtree="a")
    checkpoint.convert_checkpoint(*args, subtree="b")
    loaded = checkpoint.load_serving(tmp_path / "out")
    assert_same(loaded, convert(MODEL, {"params": other}, X))


@pytest.mark.parametrize(
    "subtree, match",
    [
        (["nothing"], "no subtree 'nothing'; there are params, params/Dense_0"),
        (["params/Dense_0/bias"], "no subtree"),
        (["params", "a/params"], "different names, the last steps"),
    ],
)
def test_wrong_subtrees(subtree, match, tmp_path):
    source = save(tmp_path / "float", VARIABLES, "msgpack")
    refuses(match, Subtree, open_reader(source), subtree)
