"""Frozen weights in the variables, and errors for variables that do not fit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import traverse_util

import aqtlite
from aqtlite import config
from aqtlite.flax import AqtDotGeneral, AqtEinsum, convert
from tests.common import normal
from tests.flax import models
from tests.flax.support import DG, INT8, LAST_BY_FIRST, NORMAL, X, apply, init

pytestmark = pytest.mark.code("quick")


def _serving(model, x=X):
    return convert(model, init(model, x), x)


def test_site_is_static():
    node = _serving(nn.Dense(24, dot_general=DG))["aqt"]["kernel"]["site"]
    assert jax.tree.leaves(node) == []
    assert node.operand.side == "rhs" and node.made_of == ("kernel",)
    assert hash(node) == hash(jax.tree.map(lambda x: x, node))


def test_static_nodes_print_in_one_line():
    serving = _serving(nn.Dense(24, dot_general=DG))
    site = serving["aqt"]["kernel"]["site"]
    assert repr(site) == "FrozenRecord(rhs float32[8,24] of kernel)"
    assert repr(serving["params"]["kernel"]) == "FrozenKernel(float32[8,24])"


def test_paths():
    aqt = _serving(models.MlpBlock(INT8))["aqt"]
    assert sorted(aqt) == ["Dense_0", "Dense_1", "Dense_2"]
    assert sorted(aqt["Dense_0"]["kernel"]) == ["rhs", "site"]
    aqt = _serving(models.Setup(INT8))["aqt"]
    assert sorted(aqt) == ["layers_0", "layers_1", "w1", "w2"]
    model, tokens = models.Tied(INT8), jnp.arange(6)
    aqt = convert(model, init(model, tokens), tokens)["aqt"]
    assert sorted(aqt) == ["Dense_0", "Embed_0.embedding"]
    assert sorted(_serving(models.Loop(INT8))["aqt"]) == ["w", "w_1", "w_2"]
    gated = _serving(models.Setup(INT8))
    assert gated["aqt"]["w1"]["rhs"].shape == (8, 8)


@pytest.mark.parametrize("where", ["list", "dict"])
def test_instances_held_in_containers(where):
    class Model(nn.Module):
        def setup(self):
            one, two = AqtDotGeneral(INT8), AqtDotGeneral(INT8)
            self.held = {"list": [one, two], "dict": {"a": one, "b": two}}[where]
            self.w1 = self.param("w1", NORMAL, (8, 8))
            self.w2 = self.param("w2", NORMAL, (8, 8))

        def __call__(self, x):
            held = self.held.values() if where == "dict" else self.held
            for function, w in zip(held, (self.w1, self.w2), strict=True):
                x = function(x, w, LAST_BY_FIRST)
            return x

    model = Model()
    variables = init(model, X)
    serving = convert(model, variables, X)
    assert (apply(model, variables, X) == apply(model, serving, X)).all()


def test_another_config():
    serving = _serving(nn.Dense(24, dot_general=DG))
    other = nn.Dense(24, dot_general=AqtDotGeneral(config.weight_only()))
    with pytest.raises(ValueError, match="another config"):
        other.apply(serving, X)


@pytest.mark.parametrize(
    "other",
    [nn.Dense(25, dot_general=DG), nn.Sequential([nn.Dense(24, dot_general=DG)])],
)
def test_another_model(other):
    """Flax itself sees that the parameters do not fit."""
    with pytest.raises(Exception, match="parameter"):
        other.apply(_serving(nn.Dense(24, dot_general=DG)), X)


def test_another_model_with_parameters_that_fit():
    serving = _serving(nn.Dense(24, dot_general=DG))

    class Other(nn.Module):
        @nn.compact
        def __call__(self, x):
            kernel = self.param("kernel", NORMAL, (8, 24))
            kernel = kernel.reshape(2, 4, 24)
            return AqtEinsum(INT8)("bij,ijn->bn", x.reshape(-1, 2, 4), kernel)

    with pytest.raises(ValueError, match=r"contraction of axes \(0, 1\)"):
        Other().apply(serving, X)
    assert jnp.isnan(apply(Other(), serving, X)).all()


def test_weights_of_a_wider_layer():
    model = nn.Dense(24, dot_general=DG)
    wide = nn.Dense(25, dot_general=DG)
    mixed = {"params": _serving(model)["params"], "aqt": _serving(wide)["aqt"]}
    for run in (model.apply, functools.partial(apply, model)):
        with pytest.raises(ValueError, match=r"converted as rhs float32\[8,25\]"):
            run(mixed, X)


@pytest.mark.parametrize(
    "gone",
    ["rhs", "site", None],
)
def test_a_missing_frozen_weight(gone):
    model = models.MlpBlock(INT8)
    serving = _serving(model)
    if gone is None:
        del serving["aqt"]["Dense_1"]
    else:
        del serving["aqt"]["Dense_1"]["kernel"][gone]
    with pytest.raises(ValueError, match="'Dense_1/kernel' is frozen, but its frozen"):
        model.apply(serving, X)


def test_all_frozen_weights_missing():
    model = models.MlpBlock(INT8)
    serving = _serving(model)
    with pytest.raises(ValueError, match="frozen"):
        model.apply({**serving, "aqt": {}}, X)


def test_another_method():
    class Model(nn.Module):
        def setup(self):
            self.a = nn.Dense(8, dot_general=DG)
            self.b = nn.Dense(8, dot_general=DG)

        def encode(self, x):
            return self.a(x)

        def __call__(self, x):
            return self.b(self.encode(x))

    model = Model()
    variables = init(model, X)
    serving = convert(model, variables, X)
    expected = apply(model, variables, X, method="encode")
    for method in ("encode", Model.encode):
        assert (apply(model, serving, X, method=method) == expected).all()
        only = convert(model, variables, X, method=method)
        assert (apply(model, only, X, method=method) == expected).all()
        # What that method does not contract is still there, in float.
        assert (apply(model, only, X) == apply(model, variables, X)).all()


def test_gradients_of_frozen_weights():
    model = nn.Dense(24, dot_general=DG)
    serving = _serving(model)

    def loss(serving):
        return model.apply(serving, X).sum()

    with pytest.raises(TypeError, match="int8"):
        jax.grad(loss)(serving)
    with pytest.raises(TypeError, match="'kernel', which is frozen"):
        jax.grad(loss, allow_int=True)(serving)

    def loss_of_scale(scale):
        node = serving["aqt"]["kernel"]
        rhs = dataclasses.replace(node["rhs"], scale=scale)
        changed = {**serving, "aqt": {"kernel": {**node, "rhs": rhs}}}
        return loss(changed)

    with pytest.raises(TypeError, match="frozen integers are for serving"):
        jax.grad(loss_of_scale)(serving["aqt"]["kernel"]["rhs"].scale)


@pytest.mark.code("users")
def test_gradients_of_inputs_and_biases_pass_frozen_weights():
    model = models.MlpBlock(INT8)
    variables = init(model, X)
    serving = convert(model, variables, X)
    wanted, served = (
        jax.jit(jax.grad(lambda x, v: (model.apply(v, x) ** 2).sum()))(X, v)
        for v in (variables, serving)
    )
    assert (wanted == served).all()
    flat = traverse_util.flatten_dict(serving["params"])
    floats = {path: x for path, x in flat.items() if not aqtlite.is_frozen(x)}

    def loss(floats):
        params = traverse_util.unflatten_dict({**flat, **floats})
        return model.apply({**serving, "params": params}, X).sum()

    assert all(leaf.any() for leaf in jax.jit(jax.grad(loss))(floats).values())
    assert len(floats) == 3


def test_float_kernels_beside_frozen_weights_are_refused():
    model = nn.Dense(24, dot_general=DG)
    variables = init(model, X)
    mixed = {**variables, "aqt": _serving(model)["aqt"]}
    with pytest.raises(ValueError, match="parameter 'kernel' is a float"):
        model.apply(mixed, X)


class Tied(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(20, 8)
        return AqtEinsum(INT8)("...k,nk->...n", embed(tokens), embed.embedding)


def test_other_values_of_a_parameter_that_is_read_elsewhere():
    """No frozen weight of the old ones is served."""
    model, tokens = Tied(), jnp.arange(3)
    variables = init(model, tokens)
    serving = convert(model, variables, tokens)
    newer = jax.tree.map(lambda x: x + 0.5, variables["params"])
    mixed = {**serving, "params": newer}
    with pytest.raises(ValueError, match="stays beside it .* has other values now"):
        model.apply(mixed, tokens)
    assert jnp.isnan(apply(model, mixed, tokens)).all()


def test_gradients_of_a_parameter_that_is_read_elsewhere_are_refused():
    """Its float values are kept, but the contraction would not see them move."""
    model, tokens = Tied(), jnp.arange(3)
    serving = convert(model, init(model, tokens), tokens)

    def loss(params):
        return model.apply({**serving, "params": params}, tokens).sum()

    with pytest.raises(TypeError, match="not for training"):
        jax.grad(loss)(serving["params"])


def test_a_batch_of_the_size_of_the_kernel_with_a_nan():
    """It is no parameter that was frozen: its row is NaN."""
    model = nn.Dense(8, dot_general=AqtDotGeneral(config.fully_quantized()))
    x = normal((8, 4))
    serving = convert(model, init(model, x), x)
    out = apply(model, serving, x.at[3, 1].set(jnp.nan))
    np.testing.assert_array_equal(jnp.isnan(out).all(1), jnp.arange(8) == 3)
    assert not jnp.isnan(out[:3]).any()
