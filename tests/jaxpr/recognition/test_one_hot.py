"""Operands that only move data, by how they are made."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from aqtlite.jaxpr import sites
from aqtlite.jaxpr.recognition import one_hot, producers

TABLE, TOKENS = jnp.ones((7, 4)), jnp.zeros((2, 3), int)
IMAGE = jnp.ones((1, 8, 8, 2))
ORDER = np.random.default_rng(0).permutation(7)
NHWC = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}


def moves(function, *args):
    """Whether an operand of each contraction is one-hot along its contracting axes."""
    closed = jax.make_jaxpr(function)(*args)
    program, found = producers.Body(closed), []
    for site in sites.find(closed).contractions:
        if site.operation == "dot_general":
            axes, _ = site.eqn.params["dimension_numbers"]
        else:
            # The window and the input features, of the kernel alone.
            _, *contracting = site.eqn.params["dimension_numbers"].rhs_spec
            axes = None, contracting
        found.append(
            any(
                one_hot.is_one_hot(
                    program, site.location, i, axes[i], is_constant=not origin.needed
                )
                for i, origin in enumerate(site.operands)
                if axes[i] is not None
            )
        )
    return found


def encoded(tokens, **kwargs):
    return jax.nn.one_hot(tokens, 7, **kwargs)


def in_a_scan(table, tokens):
    def step(carry, one):
        return carry, encoded(one) @ table

    return lax.scan(step, 0.0, tokens)[1]


def closed_over_by_a_scan(table, tokens):
    rows = encoded(tokens)
    return lax.scan(lambda carry, x: (carry, rows @ table + x), 0.0, jnp.ones(3))[1]


def in_a_branch(table, tokens):
    def branch(rows):
        return rows @ table

    return lax.cond(tokens[0, 0] > 0, branch, branch, encoded(tokens))


LOOKUPS = {
    "jax.nn.one_hot": lambda table, tokens: encoded(tokens) @ table,
    "bfloat16": lambda table, tokens: encoded(tokens, dtype=jnp.bfloat16) @ table,
    "another axis": lambda table, tokens: jnp.einsum(
        "vbt,vd->btd", encoded(tokens, axis=0), table
    ),
    "a comparison": lambda table, tokens: jnp.dot(
        jnp.array(tokens[..., None] == lax.iota(jnp.int32, 7), jnp.float32), table
    ),
    "a choice": lambda table, tokens: (
        jnp.where(tokens[..., None] == jnp.arange(7), 1.0, 0.0) @ table
    ),
    "masked": lambda table, tokens: (encoded(tokens) * (tokens > 2)[..., None]) @ table,
    "masked by a choice": lambda table, tokens: (
        jnp.where((tokens > 2)[..., None], encoded(tokens), 0) @ table
    ),
    "weighted": lambda table, tokens: (
        (encoded(tokens) * jnp.cos(tokens)[..., None]) @ table
    ),
    "reshaped": lambda table, tokens: encoded(tokens).reshape(6, 7) @ table,
    "on the right": lambda table, tokens: table.T @ encoded(tokens[0]).T,
    "rows of an identity": lambda table, tokens: jnp.eye(7)[tokens] @ table,
    "jnp.take": lambda table, tokens: jnp.take(jnp.eye(7), tokens, axis=0) @ table,
    "shifted": lambda table, tokens: (
        (tokens[..., None] == jnp.arange(7) + tokens[0, 0]).astype(jnp.float32) @ table
    ),
    "in a jit": lambda table, tokens: jax.jit(jnp.matmul)(encoded(tokens), table),
    "in a checkpoint": lambda table, tokens: jax.checkpoint(jnp.matmul)(
        encoded(tokens), table
    ),
    "in a vmap": lambda table, tokens: jax.vmap(lambda one: encoded(one) @ table)(
        tokens
    ),
    "in a scan": in_a_scan,
    "closed over by a scan": closed_over_by_a_scan,
    "in a branch": in_a_branch,
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups(name):
    found = moves(LOOKUPS[name], TABLE, TOKENS)
    assert found
    assert all(found)


def convolved(x, kernel, **kwargs):
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", **NHWC, **kwargs)


CONSTANTS = {
    "an identity": lambda x: x @ jnp.eye(8),
    "scaled": lambda x: x @ (3 * jnp.eye(8)),
    "flipped": lambda x: x @ jnp.flip(jnp.eye(8), 0),
    "a permutation": lambda x: (
        np.eye(8, dtype=np.float32)[[3, 1, 0, 2, 4, 7, 6, 5]] @ x
    ),
    "written into zeros": lambda x: (
        jnp.zeros((7, 8)).at[jnp.arange(7), ORDER].set(1.0) @ x
    ),
    "a block": lambda x: x @ jnp.kron(jnp.eye(4), jnp.array([[1.0], [0.0]])),
    "over two axes": lambda x: jnp.einsum(
        "ij,ijn->n", x, jnp.eye(64).reshape(8, 8, 64)[..., ::5]
    ),
    "zeros": lambda x: x @ jnp.zeros((8, 3)),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants(name):
    assert moves(CONSTANTS[name], jnp.ones((8, 8))) == [True]


KERNELS = {
    "patches": lambda x: lax.conv_general_dilated_patches(
        x, (3, 3), (1, 1), "SAME", **NHWC
    ),
    "an identity": lambda x: convolved(x, jnp.eye(2)[None, None]),
    "a shift": lambda x: convolved(
        x, jnp.zeros((3, 3, 1, 2)).at[0, 2].set(1.0), feature_group_count=2
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name):
    assert moves(KERNELS[name], IMAGE) == [True]


OTHERS = {
    "two tokens": lambda table, tokens: encoded(tokens).sum(1) @ table,
    "an axis that is not compared": lambda table, tokens: jnp.einsum(
        "bt,btv->bv", jnp.cos(tokens), encoded(tokens)
    ),
    "an offset": lambda table, tokens: (encoded(tokens) + 0.1) @ table,
    "a threshold": lambda table, tokens: (
        (tokens[..., None] <= jnp.arange(7)).astype(jnp.float32) @ table
    ),
    "values that may be equal": lambda table, tokens: (
        (tokens[0][:, None] == jnp.tile(tokens[0], 3)[:7]).astype(jnp.float32) @ table
    ),
    "an iota that overflows": lambda table, tokens: jnp.einsum(
        "btv,d->btd",
        (tokens[..., None].astype(jnp.int8) == lax.iota(jnp.int8, 300)) * 1.0,
        table[0],
    ),
    "a triangle": lambda table, tokens: jnp.tri(7) @ table,
    "a constant of ones": lambda table, tokens: np.ones((3, 7), np.float32) @ table,
    "one that is changed in a loop": lambda table, tokens: lax.fori_loop(
        0,
        3,
        lambda _, rows: jnp.tanh(rows) @ jnp.ones((7, 7)) @ table @ table.T,
        encoded(tokens),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others(name):
    assert not any(moves(OTHERS[name], TABLE, TOKENS))


def test_a_blur():
    def blurred(x):
        return convolved(x, jnp.ones((3, 3, 1, 2)), feature_group_count=2)

    assert moves(blurred, IMAGE) == [False]


def test_large_constants_are_not_computed():
    def large(x):
        return jnp.cumsum(jnp.zeros((2**12, 2**11)), 0) @ x

    assert moves(large, jnp.ones((2**11, 2))) == [False]
