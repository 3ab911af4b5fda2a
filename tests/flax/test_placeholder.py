import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from aqtlite.flax import AqtDotGeneral, FrozenKernel, QuantMode, convert
from tests.flax import models
from tests.flax.support import DG, INT8, X, init

KERNEL = FrozenKernel((3, 5, 7), np.dtype("bfloat16"))


def test_is_a_static_pytree_node():
    assert jax.tree.leaves(KERNEL) == []
    assert jax.tree.map(lambda leaf: leaf + 1, KERNEL) == KERNEL
    assert hash(KERNEL) == hash(FrozenKernel((3, 5, 7), np.dtype("bfloat16")))
    assert jax.jit(lambda tree: tree)(KERNEL) == KERNEL
    assert pickle.loads(pickle.dumps(KERNEL)) == KERNEL


def test_unboxes_to_nan():
    value = nn.meta.unbox({"kernel": KERNEL})["kernel"]
    assert value.shape == (3, 5, 7)
    assert value.dtype == jnp.bfloat16
    assert jnp.isnan(value).all()


@pytest.mark.parametrize("index", [0, 1, 2, -1, -2, -3])
def test_axes_go_and_come_back(index):
    smaller = KERNEL.remove_axis(index, {})
    expected = list(KERNEL.shape)
    del expected[index]
    assert smaller.shape == tuple(expected)
    assert smaller.add_axis(index, {}) == KERNEL


def test_two_axes_go_and_come_back():
    smaller = KERNEL.remove_axis(0, {}).remove_axis(-1, {})
    assert smaller.shape == (5,)
    assert smaller.add_axis(-1, {}).add_axis(0, {}) == KERNEL


def _serving(model):
    return convert(model, init(model, X), X)


def test_optimizers_and_tree_maps_pass_it():
    params = _serving(models.MlpBlock(INT8))["params"]
    state = optax.adamw(1e-3).init(params)
    updates, _ = optax.adamw(1e-3).update(params, state, params)
    assert jax.tree.structure(optax.apply_updates(params, updates)) == (
        jax.tree.structure(params)
    )


def test_serving_with_debug_nans():
    model = models.MlpBlock(INT8)
    serving = _serving(model)
    with jax.debug_nans(True):
        assert jax.jit(model.apply)(serving, X).shape == X.shape
        assert model.apply(serving, X).shape == X.shape


@pytest.mark.parametrize(
    "dot_general",
    [
        AqtDotGeneral(None),
        AqtDotGeneral(INT8, QuantMode.TRAIN),
        AqtDotGeneral(INT8, frozen_operands="none"),
    ],
    ids=["cfg=None", "TRAIN", "frozen_operands=none"],
)
def test_a_float_contraction_of_serving_variables_raises(dot_general):
    serving = _serving(nn.Dense(24, dot_general=DG))
    with pytest.raises(ValueError, match="frozen"):
        nn.Dense(24, dot_general=dot_general).apply(serving, X)


def test_params_without_their_frozen_weights_raise():
    model = nn.Dense(24, dot_general=DG)
    with pytest.raises(ValueError, match="frozen"):
        model.apply({"params": _serving(model)["params"]}, X)
