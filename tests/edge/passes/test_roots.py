"""Inverse square roots: in int8 by two tables, and otherwise one operator."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from aqtlite import edge
from aqtlite.edge import program
from tests.edge import models

pytestmark = pytest.mark.code("quick")

X = jnp.abs(models.normal((4, 8))) + 0.1


def made(function, *rules):
    return program.make(lambda _, x: function(x), (), (X,), rules)


def names(function, *rules):
    found = made(function, *rules)
    return [n.operator.name for n in found.graph.nodes if n.output not in found.static]


@pytest.mark.parametrize(
    "function",
    [lax.rsqrt, lambda x: x**-0.5, lambda x: 2.0 / jnp.sqrt(x)],
)
def test_an_inverse_root_is_an_exponential(function):
    found = names(function)
    assert found[:3] == ["log", "mul", "exp"] and "rsqrt" not in found
    whole = made(function)
    values = whole.graph.evaluate(whole.bind((), (X,)), lambda n, i: n.compute(i))
    np.testing.assert_allclose(whole.result(values), function(X), rtol=1e-5)


@pytest.mark.parametrize(
    "rule", [{"is_float": True}, {"activations": "int16"}], ids=["float", "int16"]
)
def test_a_rule_for_the_root_still_decides_about_it(rule):
    found = names(lambda x: 2.0 * lax.rsqrt(x), edge.Rule(op="rsqrt", **rule))
    assert "log" not in found and "exp" not in found
