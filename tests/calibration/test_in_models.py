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
from tests.common import MATMUL, mostly_slow, normal, quick_jit
from tests.extensions import models
from tests.flax.support import init

pytestmark = [
    pytest.mark.filterwarnings("ignore::aqtlite.errors.CostWarning"),
    pytest.mark.code("quick"),
]
X = normal((16, 12))
Y = np.tanh(X @ normal((12, 3), 1))


# `test_members` has powers of two for all of them.
TENSORS = {
    **members.TENSORS,
    "po2": dataclasses.replace(members.TENSORS["abs_mean"], po2_scale=True),
}
ONE_ROW = "rms", "affine_percentile", "po2"
MODEL = models.Heads(
    tuple((name, models.config_of(tensor, tensor)) for name, tensor in TENSORS.items())
)


@pytest.fixture(scope="module")
def trained():
    """The variables, and the losses of each head, whose parameters are its own."""

    def step(variables, _):
        def losses_of(variables):
            outputs = MODEL.apply(variables, X)
            losses = {name: ((out - Y) ** 2).mean() for name, out in outputs.items()}
            return sum(losses.values()), losses

        grads, losses = jax.grad(losses_of, has_aux=True)(variables)
        return jax.tree.map(lambda v, g: v - 0.1 * g, variables, grads), losses

    return quick_jit(lambda v: jax.lax.scan(step, v, length=20))(init(MODEL, X))


@pytest.mark.slow
@pytest.mark.parametrize("name", TENSORS)
def test_trains(trained, name):
    variables, losses = trained
    assert losses[name][-1] < 0.8 * losses[name][0]
    assert np.all(variables["params"][name]["gain"] != 1)


@pytest.mark.slow
def test_is_served_bit_for_bit(trained):
    variables, _ = trained
    serving = convert(MODEL, variables, X)
    for name, tensor in TENSORS.items():
        q = serving["aqt"][name]["Dense_0"]["kernel"]["rhs"]
        assert q.numerics == tensor.numerics
        assert np.isfinite(q.scale).all()
    assert_served_equals_trained(MODEL, variables, X, serving=serving)


@pytest.mark.slow
def test_one_row_is_served_bit_for_bit(trained):
    """Of either grid, and a power of two: a row is contracted in its own way."""
    heads = [(name, cfg) for name, cfg in MODEL.cfgs if name in ONE_ROW]
    variables = {"params": {name: trained[0]["params"][name] for name in ONE_ROW}}
    assert_served_equals_trained(models.Heads(tuple(heads)), variables, X[:1])


@pytest.mark.parametrize(
    "name", mostly_slow(members.TENSORS, "rms", "min_max", "constant")
)
def test_calibrates_operands_of_gradients(name):
    tensor = members.TENSORS[name]
    raw = config.DotGeneralRaw(lhs=tensor, rhs=tensor)
    dot = aqtlite.make_dot_general(config.DotGeneral(dlhs=raw, drhs=raw))
    lhs, rhs = normal((6, 12)), normal((12, 5), 1)

    @quick_jit
    def gradients(lhs, rhs):
        def loss(operands, dot):
            return jnp.mean(dot(*operands, MATMUL) ** 2)

        return [jax.grad(loss)((lhs, rhs), one) for one in (dot, jax.lax.dot_general)]

    clips = name in members.LOOKS_AT_NOTHING or name.startswith("clipped")
    for got, wanted in zip(*gradients(lhs, rhs), strict=True):
        correlation = np.corrcoef(np.ravel(got), np.ravel(wanted))[0, 1]
        assert correlation > (0.7 if clips else 0.99)
