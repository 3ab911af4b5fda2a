"""Equinox modules: their arrays are parameters of a quantized function."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import aqtlite
from aqtlite import Rule, config
from tests.common import left_in_float, normal, quick_jit, relative_error

pytestmark = pytest.mark.code("quick")

INT8 = config.fully_quantized()


class Block(eqx.Module):
    """Attention and an MLP over a sequence, to be mapped over a batch."""

    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        attention, up, down = jax.random.split(key, 3)
        self.norm = eqx.nn.LayerNorm(8)
        self.attention = eqx.nn.MultiheadAttention(2, 8, key=attention)
        self.up = eqx.nn.Linear(8, 16, key=up)
        self.down = eqx.nn.Linear(16, 8, key=down)

    def __call__(self, x):
        with jax.named_scope("attention"):
            normed = jax.vmap(self.norm)(x)
            x = x + self.attention(normed, normed, normed)
        with jax.named_scope("mlp"):
            return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(x)))


def function_of(module):
    """A module as a function of its arrays and a batch, and its arrays."""
    arrays, static = eqx.partition(module, eqx.is_array)
    return lambda arrays, x: jax.vmap(eqx.combine(arrays, static))(x), arrays


@pytest.mark.slow
def test_a_transformer_block():
    apply, arrays = function_of(Block(jax.random.key(0)))
    x = normal((2, 5, 8), 1)
    quantized = aqtlite.quantize_function(apply, INT8, params=0, strict=True)
    planned = quantized.plan(arrays, x).quantized()
    assert len(planned) == 8
    assert [one.is_exchanged for one in planned].count(True) == 6  # W @ x
    serve, serving = aqtlite.convert_function(quantized, arrays, x, strict=True)
    assert serving["params"].norm.weight is arrays.norm.weight
    assert not left_in_float(serving["params"].attention)

    @eqx.filter_jit
    def run(arrays, serving):
        return quantized(arrays, x), serve(serving, x)

    np.testing.assert_array_equal(*run(arrays, serving))

    @quick_jit
    def gradients(arrays):
        def loss(function):
            return eqx.filter_grad(lambda arrays: jnp.sum(function(arrays, x) ** 2))

        return loss(quantized)(arrays), loss(apply)(arrays)

    found, wanted = gradients(arrays)
    leaves = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    for one, other in leaves:
        assert relative_error(one, other) < 0.1


def test_rules_by_name_scopes():
    apply, arrays = function_of(Block(jax.random.key(0)))
    rules = [Rule(path="mlp/.*", cfg=INT8), Rule(path="attention/.*", cfg=None)]
    planned = aqtlite.plan(apply, arrays, jnp.ones((2, 5, 8)), rules=rules, params=0)
    assert {one.path for one in planned.quantized()} == {
        "mlp/eqx.nn.Linear",
        "mlp/eqx.nn.Linear#1",
    }
    assert len(planned.left_float()) == 6


def test_rules_by_the_paths_of_arrays():
    apply, arrays = function_of(eqx.nn.MLP(4, 1, 16, 2, key=jax.random.key(0)))
    rules = [Rule(path="layers/[01]/.*", cfg=INT8)]
    quantized = aqtlite.quantize_function(apply, rules, params=0)
    planned = quantized.plan(arrays, jnp.ones((2, 4)))
    assert [one.path for one in planned.quantized()] == [
        "layers/0/weight",
        "layers/1/weight",
    ]
    assert [one.path for one in planned.left_float()] == ["layers/2/weight"]


def test_by_parameters_where_there_are_name_scopes():
    apply, arrays = function_of(Block(jax.random.key(0)))
    x = jnp.ones((2, 5, 8))
    planned = aqtlite.plan(apply, arrays, x, rules=[], params=0, paths="parameters")
    assert [one.path for one in planned.contractions] == [
        "attention/query_proj/weight",
        "attention/key_proj/weight",
        "attention/value_proj/weight",
        "attention/attention/sd,Sd->sS",
        "attention/attention/sS,Sd->sd",
        "attention/output_proj/weight",
        "up/weight",
        "down/weight",
    ]


def test_an_mlp_learns_its_scales_and_is_served():
    apply, arrays = function_of(eqx.nn.MLP(4, 1, 16, 1, key=jax.random.key(0)))
    x = normal((16, 4), 1)
    y = jnp.sin(x.sum(axis=1, keepdims=True))
    quantized = aqtlite.quantize_function(apply, config.lsq(bits=8), params=0)
    state = quantized.init_state(arrays, x)
    optimizer = optax.adam(1e-2)

    @eqx.filter_jit
    def train(arrays, state):
        def loss(trained):
            out, _ = quantized({**state, "params": trained[1]}, trained[0], x)
            return jnp.mean((out - y) ** 2)

        def step(carry, _):
            trained, moments = carry
            value, gradients = eqx.filter_value_and_grad(loss)(trained)
            updates, moments = optimizer.update(gradients, moments)
            return (eqx.apply_updates(trained, updates), moments), value

        start = arrays, state["params"]
        (trained, _), losses = jax.lax.scan(
            step, (start, optimizer.init(start)), length=20
        )
        return trained, losses

    (arrays, learned), losses = train(arrays, state)
    assert losses[-1] < 0.5 * losses[0]
    before, after = (jax.tree.leaves(x) for x in (state["params"], learned))
    assert all((x != y).any() for x, y in zip(before, after, strict=True))
    state = {**state, "params": learned}
    serve, serving = aqtlite.convert_function(quantized, arrays, x, state=state)
    out, _ = jax.jit(quantized)(state, arrays, x)
    np.testing.assert_array_equal(jax.jit(serve)(serving, x), out)


def test_a_module_with_functions_among_its_leaves_has_to_be_partitioned():
    module = eqx.nn.MLP(4, 1, 16, 1, key=jax.random.key(0))
    quantized = aqtlite.quantize_function(
        lambda module, x: jax.vmap(module)(x), INT8, params=0
    )
    with pytest.raises(TypeError, match=r"'activation', .*eqx\.partition"):
        aqtlite.convert_function(quantized, module, jnp.ones((2, 4)))
