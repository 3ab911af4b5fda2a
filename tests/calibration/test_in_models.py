"""Models whose operands are calibrated by each member are served as trained."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import config
from aqtlite.flax import convert
from aqtlite.testing import assert_served_equals_trained
from tests.calibration import members
from tests.common import MATMUL, normal
from tests.extensions import models

X = normal((16, 12))
Y = jnp.tanh(X @ normal((12, 3), 1))


# `test_members` has powers of two for all of them.
CASES = [*((name, False) for name in members.TENSORS), ("abs_mean", True)]


@pytest.mark.parametrize(("name", "po2"), CASES)
def test_trains_and_is_served_bit_for_bit(name, po2):
    tensor = dataclasses.replace(members.TENSORS[name], po2_scale=po2)
    model = models.Mlp(models.config_of(tensor, tensor))

    @jax.jit
    def step(variables):
        def loss(variables):
            return jnp.mean((model.apply(variables, X) - Y) ** 2)

        value, gradients = jax.value_and_grad(loss)(variables)
        return value, jax.tree.map(lambda v, g: v - 0.1 * g, variables, gradients)

    variables = model.init(jax.random.key(0), X)
    first, variables = step(variables)
    for _ in range(20):
        last, variables = step(variables)
    assert last < 0.8 * first
    serving = convert(model, variables, X)
    q = serving["aqt"]["Dense_0"]["kernel"]["rhs"]
    assert q.numerics == tensor.numerics
    assert np.isfinite(q.scale).all()
    for x in (X, X[:1]):
        assert_served_equals_trained(model, variables, x, serving=serving)


@pytest.mark.parametrize("name", members.TENSORS)
def test_calibrates_operands_of_gradients(name):
    tensor = members.TENSORS[name]
    raw = config.DotGeneralRaw(lhs=tensor, rhs=tensor)
    dot = aqtlite.make_dot_general(config.DotGeneral(fwd=raw, dlhs=raw, drhs=raw))
    lhs, rhs = normal((6, 12)), normal((12, 5), 1)

    @jax.jit
    def gradients(lhs, rhs):
        def loss(operands, dot):
            return jnp.mean(dot(*operands, MATMUL) ** 2)

        return [jax.grad(loss)((lhs, rhs), one) for one in (dot, jax.lax.dot_general)]

    clips = name in members.LOOKS_AT_NOTHING or name == "clipped"
    for got, wanted in zip(*gradients(lhs, rhs), strict=True):
        correlation = np.corrcoef(np.ravel(got), np.ravel(wanted))[0, 1]
        assert correlation > (0.7 if clips else 0.99)
