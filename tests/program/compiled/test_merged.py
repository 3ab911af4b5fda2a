"""Scales of serving programs, merged into one array."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import aqtlite
from aqtlite import config, numerics
from aqtlite.flax import convert, quantize_model
from aqtlite.flax import nnx as aqt_nnx
from aqtlite.program.compiled import merged
from aqtlite.quantization.states.fixed_scale import FixedScale
from tests import common
from tests.program.compiled.support import compiled_alike

pytestmark = pytest.mark.code("quick")


def test_merged_arrays_are_split_again():
    arrays = [jnp.array(2.0), common.normal((3, 1)), common.normal((1, 0)), jnp.ones(4)]
    how = merged.Merged.of(arrays)
    one = how.merge(arrays)
    assert one.shape == (8,)
    for got, wanted in zip(how.split(one), arrays, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_small_scales_of_quantized_arrays_are_found():
    def quantized(rows):
        int8 = config.Tensor(numerics=numerics.IntSymmetric(bits=8))
        return aqtlite.quantize(jnp.ones((rows, 2)), int8, (1,))

    fixed = FixedScale(jnp.ones((1, 1)), jnp.zeros((1, 1), jnp.int32))
    tree = [jnp.ones(3), quantized(4), fixed, quantized(2**12 + 1), jnp.ones(())]
    found = merged.scales(tree)
    assert [jax.tree.leaves(tree)[i].shape for i in found] == [(4, 1), (1, 1)]


class Layers(nnx.Module):
    """Layers of which one stands before, and one behind their frozen weights."""

    def __init__(self, dtype):
        rngs = nnx.Rngs(0)
        self.act = nnx.Linear(16, 16, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(16, 16, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.count = nnx.Variable(jnp.int32(2**24 + 1))

    def __call__(self, x):
        return self.up(nnx.relu(self.act(x))), self.count[...]


CASES = {
    "int8": config.fully_quantized(),
    "int4": config.weight_only(4),
    "learned": config.lsq(8),
}


@pytest.mark.code("users")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cfg", CASES.values(), ids=CASES)
def test_markers_before_scales_of_nnx(cfg, dtype):
    x = common.normal((4, 16)).astype(dtype)
    model = aqt_nnx.quantize_model(Layers(dtype), cfg)
    if cfg.fwd.lhs.is_learned:
        aqt_nnx.init_state(model, x)
    graph, state = nnx.split(aqt_nnx.convert(model, x))
    compiled_alike(lambda state, x: nnx.merge(graph, state)(x), state, x)


@pytest.mark.code("users")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cfg", CASES.values(), ids=CASES)
def test_markers_before_scales_of_two_trees(cfg, dtype):
    x = common.normal((4, 16)).astype(dtype)
    model = quantize_model(nn.Dense(16, dtype=dtype, param_dtype=dtype), cfg)
    trees = [
        convert(model, model.init(jax.random.key(seed), x), x) for seed in range(2)
    ]

    def function(trees, x):
        for one in trees:
            x = model.apply(one, x)
        return x

    compiled_alike(function, trees, x)
