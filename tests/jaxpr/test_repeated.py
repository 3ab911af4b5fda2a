"""Runs of equations that repeat, evaluated through one trace."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core
from jax.interpreters import ad, mlir

from aqtlite.jaxpr import scopes
from tests.common import normal
from tests.replacing import assert_bits, replaced

pytestmark = pytest.mark.code("quick")

X = normal((4, 4))


def layers(*factors, activation=jnp.tanh):
    """Contractions, each followed by the same equations with a factor of its own."""

    def function(x):
        for i, factor in enumerate(factors):
            with jax.named_scope(f"layer_{i}"):
                x = x @ x
                with jax.named_scope("after"):
                    x = activation(x + 1) * factor + jnp.sin(x)
        return x

    return function


def test_scopes_and_equations_stay():
    function = layers(2.0, 2.0, 2.0)
    wanted, got = (
        [
            (eqn.primitive, scopes.text_of(eqn))
            for eqn in jax.make_jaxpr(one)(X).jaxpr.eqns
        ]
        for one in (function, replaced(function))
    )
    assert got == wanted


# Layers that differ in a literal alone, were it only its sign.
@pytest.mark.parametrize("factors", [(2.0, 2.0, 2.0), (0.0, -0.0, 3.0, -0.0)])
def test_bits_stay(factors):
    function = layers(*factors)

    @jax.jit
    def both(x):
        return [
            (jax.value_and_grad(lambda x, f=one: f(x).sum())(x), jax.vmap(one)(x[None]))
            for one in (function, replaced(function))
        ]

    wanted, got = both(X)
    assert_bits(got, wanted)


def test_equal_runs_are_differentiated_once():
    calls = []
    tanh = core.Primitive("counted_tanh")
    tanh.def_abstract_eval(lambda x: x)
    mlir.register_lowering(tanh, mlir.lower_fun(jnp.tanh, multiple_results=False))

    def jvp(primals, tangents):
        calls.append(1)
        return tanh.bind(*primals), tangents[0] * jnp.cos(primals[0])

    ad.primitive_jvps[tanh] = jvp
    function = layers(2.0, 2.0, 2.0, 3.0, activation=tanh.bind)
    gradient = jax.jit(jax.grad(lambda x: replaced(function)(x).sum()))
    gradient.lower(X)
    assert len(calls) == 2  # The last run has another factor, and is the end.
