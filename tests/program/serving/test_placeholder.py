import itertools
import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from aqtlite.flax import (
    AqtDotGeneral,
    FrozenKernel,
    QuantMode,
    convert,
    quantize_model,
)
from aqtlite.flax.linen.bare import fingerprints
from aqtlite.program.serving.placeholder import sliced_axes
from tests.flax import models
from tests.flax.support import DG, INT8, X, init

pytestmark = pytest.mark.code("quick")

KERNEL = FrozenKernel((3, 5, 7), np.dtype("bfloat16"))


def test_is_a_static_pytree_node():
    assert jax.tree.leaves(KERNEL) == []
    assert jax.tree.map(lambda leaf: leaf + 1, KERNEL) == KERNEL
    assert hash(KERNEL) == hash(FrozenKernel((3, 5, 7), np.dtype("bfloat16")))
    assert jax.jit(lambda tree: tree)(KERNEL) == KERNEL
    assert pickle.loads(pickle.dumps(KERNEL)) == KERNEL


@pytest.mark.parametrize(
    ("shape", "sliced"),
    [((3, 5, 7), ()), ((8, 8), ()), ((3, 8, 8), (True, False, False)), ((1, 6), ())],
)
def test_whoever_contracts_it_gets_nan(shape, sliced):
    kernel = FrozenKernel(shape, np.dtype("bfloat16"), 4, sliced)
    value = nn.meta.unbox({"kernel": kernel})["kernel"]
    assert value.shape == shape and value.dtype == jnp.bfloat16
    assert not jnp.isnan(value[(0,) * len(shape)])
    assert jnp.isnan(value.sum())
    for axis, size in enumerate(shape):
        summed = jnp.isnan(jnp.tensordot(value, jnp.ones((size, 2)), (axis, 0)))
        assert summed.any()
        assert summed.all() or sliced or size == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_parameters_have_numbers_of_their_own(dtype):
    kernels = [FrozenKernel((2,), np.dtype(dtype), i) for i in range(500)]
    numbers = sorted({float(kernel.unbox()[0]) for kernel in kernels})
    assert len(numbers) == 500
    for a, b in itertools.pairwise(numbers):
        assert b - a >= 2**-7 * min(abs(a), abs(b))


@pytest.mark.parametrize("shape", [(8, 8), (4, 8, 8), (8, 8, 8), (4, 4, 8, 8)])
def test_transposed_placeholders_differ(shape):
    value = FrozenKernel(shape, np.dtype("float32")).unbox()
    seen = set()
    for order in itertools.permutations(range(len(shape))):
        turned = value.transpose(order)
        if turned.shape == shape:
            seen.add(fingerprints.from_values(fingerprints.fingerprint(turned)))
    sizes = [shape.count(size) for size in set(shape)]
    assert len(seen) == math.prod(math.factorial(count) for count in sizes)


def test_slices_of_a_placeholder_differ():
    stack = FrozenKernel(
        (3, 8, 8), np.dtype("float32"), 7, sliced_axes((3, 8, 8), [(8, 8)])
    ).unbox()
    assert sliced_axes((8, 24), [(8, 24)]) == ()
    joined = FrozenKernel(
        (8, 24), np.dtype("float32"), 7, sliced_axes((8, 24), [(8, 8)])
    ).unbox()
    for parts in (stack, joined.reshape(8, 3, 8).swapaxes(0, 1)):
        found = [
            fingerprints.from_values(fingerprints.fingerprint(part)) for part in parts
        ]
        assert None not in found and len(set(found)) == 3


def test_large_stacks_have_small_literals():
    sliced = sliced_axes((4096, 12288), [(4096, 4096)])
    text = str(
        jax.make_jaxpr(
            FrozenKernel((4096, 12288), np.dtype("float32"), 0, sliced).unbox
        )()
    )
    assert "f32[12288]" in text


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


def test_serving_by_rules_with_debug_nans():
    model = quantize_model(nn.Dense(24), INT8)
    serving = convert(model, init(model, X), X)
    with jax.debug_nans(True):
        assert model.apply(serving, X).shape == (*X.shape[:-1], 24)


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
