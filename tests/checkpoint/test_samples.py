"""Sample inputs that are keys, and classes that are pytrees, of Linen and of NNX."""

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from aqtlite import checkpoint
from aqtlite.flax import AqtDotGeneral, convert
from aqtlite.flax import nnx as aqtlite_nnx
from tests.checkpoint.support import assert_same, refuses, save
from tests.common import nearest, normal, shapes_of
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

CFG = nearest()
X = normal((3, 8))


class Graph(NamedTuple):
    """As jraph's `GraphsTuple`: some of its fields may be None."""

    nodes: Any
    senders: jax.Array
    receivers: jax.Array
    edges: Any = None


@flax.struct.dataclass
class Batch:
    x: jax.Array
    noise: jax.Array | None = None
    activation: str = flax.struct.field(pytree_node=False, default="relu")


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["batch"], meta_fields=["scale"]
)
@dataclasses.dataclass(frozen=True)
class Scaled:
    batch: Batch
    scale: float

    def __post_init__(self):
        assert self.scale > 0


INPUTS = {
    "key": (X, jax.random.key(0)),
    "keys": (X, jax.random.split(jax.random.key(0, impl="rbg"), 3)),
    "named_tuple": (Graph({"x": X}, jnp.array([0, 1]), jnp.array([2, 2])),),
    "flax_struct": (Batch(X, activation="tanh"),),
    "register_dataclass": ((Scaled(Batch(X, noise=X), 2.0), [None]),),
}


def features(*args):
    """What a layer of these inputs contracts."""
    match args:
        case (x, key):
            first = key if key.ndim == 0 else key[0]
            return x + jax.random.normal(first, x.shape)
        case (Graph(nodes=nodes, senders=senders, receivers=receivers, edges=None),):
            return nodes["x"].at[receivers].add(nodes["x"][senders])
        case (Batch() as batch,):
            return getattr(nn, batch.activation)(batch.x)
        case ((Scaled() as scaled, [None]),):
            return (scaled.batch.x + scaled.batch.noise) * scaled.scale
    raise TypeError(f"inputs {args}")


class Layer(nn.Module):
    @nn.compact
    def __call__(self, *args):
        return nn.Dense(4, dot_general=AqtDotGeneral(CFG))(features(*args))


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, *args):
        return self.dense(features(*args))


@pytest.mark.parametrize("args", INPUTS.values(), ids=INPUTS)
def test_linen(args, tmp_path):
    model = Layer()
    variables = init(model, *args)
    wanted = convert(model, variables, *args)
    source = save(tmp_path / "float", variables, "msgpack")
    for name, sample in (("values", args), ("shapes", shapes_of(args))):
        checkpoint.convert_checkpoint(source, tmp_path / name, model, *sample)
        loaded = checkpoint.load_serving(tmp_path / name, model)
        assert_same(loaded, wanted)
    np.testing.assert_array_equal(
        jax.jit(model.apply)(loaded, *args), jax.jit(model.apply)(variables, *args)
    )


@pytest.mark.parametrize("args", INPUTS.values(), ids=INPUTS)
def test_nnx(args, tmp_path):
    model = aqtlite_nnx.quantize_model(NnxLayer(nnx.Rngs(0)), CFG)
    call = nnx.jit(lambda model, *args: model(*args))
    wanted = aqtlite_nnx.convert(model, *args)
    source = save(tmp_path / "float", nnx.to_pure_dict(nnx.state(model)), "msgpack")
    for name, sample in (("values", args), ("shapes", shapes_of(args))):
        checkpoint.convert_checkpoint(source, tmp_path / name, model, *sample)
        loaded = checkpoint.load_serving(tmp_path / name, model)
        assert_same(nnx.state(loaded), nnx.state(wanted))
    np.testing.assert_array_equal(call(loaded, *args), call(model, *args))


def test_rngs_of_linen(tmp_path):
    """Keys for streams are given to `apply` by name."""

    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dropout(0.5, deterministic=False)(x)
            return nn.Dense(4, dot_general=AqtDotGeneral(CFG))(x)

    model, key = Noisy(), jax.random.key(0)
    variables = model.init({"params": key, "dropout": key}, X)
    source = save(tmp_path / "float", variables, "msgpack")
    kwargs = {"rngs": {"dropout": key}}
    checkpoint.convert_checkpoint(
        source, tmp_path / "out", model, X, sample_kwargs=kwargs
    )
    loaded = checkpoint.load_serving(tmp_path / "out", model)
    assert_same(loaded, convert(model, variables, X, **kwargs))


def test_a_class_that_is_gone(tmp_path, monkeypatch):
    model = Layer()
    (batch,) = args = INPUTS["flax_struct"]
    variables = init(model, batch)
    source = save(tmp_path / "float", variables, "msgpack")
    checkpoint.convert_checkpoint(source, tmp_path / "out", model, *args)
    monkeypatch.delitem(globals(), "Batch")
    refuses(
        r"hold a tests.checkpoint.test_samples.Batch with the fields x, noise, "
        "activation, which this program has not imported: import its module",
        checkpoint.load_serving,
        tmp_path / "out",
        model,
    )
    assert checkpoint.load_serving(tmp_path / "out").keys() == {"params", "aqt"}


def test_a_class_that_no_module_has(tmp_path):
    """It could not be found again: a model cannot be compared."""

    class Local(NamedTuple):
        x: jax.Array

    class Model(nn.Module):
        @nn.compact
        def __call__(self, local):
            return nn.Dense(4, dot_general=AqtDotGeneral(CFG))(local.x)

    model = Model()
    source = save(
        tmp_path / "float", model.init(jax.random.key(1), Local(X)), "msgpack"
    )
    checkpoint.convert_checkpoint(source, tmp_path / "out", model, Local(X))
    refuses("load it without", checkpoint.load_serving, tmp_path / "out", model)
