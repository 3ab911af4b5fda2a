"""A mixture of experts with `AqtRaggedDot`: trained, converted and served."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax

from aqtlite import calibration, config
from aqtlite.flax import AqtRaggedDot, convert
from benchmarks.workloads.moe import MixtureOfExperts, training_step
from tests.common import normal, quick_jit
from tests.flax.support import apply, assert_equal, init, placeholders

pytestmark = pytest.mark.code("quick")

STEPS, TOKENS, WIDTH, HIDDEN = 60, 64, 8, 16
CFG = config.fully_quantized()
X = normal((TOKENS, WIDTH))
# A function that no single expert has: another permutation for each sign.
Y = jnp.where(X[:, :1] > 0, jnp.tanh(2 * X[:, ::-1]), -X)


def model_of(cfg):
    dot = lax.ragged_dot if cfg is None else AqtRaggedDot(cfg)
    return MixtureOfExperts(HIDDEN, dot)


def trained(cfg):
    """Variables after some steps of Adam, and the losses before each."""
    model, optimizer = model_of(cfg), optax.adam(1e-2)
    step = training_step(model, optimizer)
    params = init(model, X)["params"]

    @quick_jit
    def run(params):
        def body(carry, _):
            *carry, loss = step(*carry, X, Y)
            return tuple(carry), loss

        start = params, optimizer.init(params)
        (params, _), losses = lax.scan(body, start, length=STEPS)
        return params, losses

    params, losses = run(params)
    return {"params": params}, np.asarray(losses)


@pytest.fixture(scope="module")
def int8():
    return trained(CFG)


def test_it_trains_as_in_float(int8):
    losses = int8[1]
    _, wanted = trained(None)
    assert losses[-1] < 0.5 * losses[0]
    assert losses[-5:].mean() == pytest.approx(wanted[-5:].mean(), rel=0.1)


@pytest.mark.slow
@pytest.mark.code("users")
def test_served_equals_trained(int8):
    variables, _ = int8
    # Without noise, which serving does not have.
    model = model_of(CFG.for_serving())
    serving = convert(model, variables, X)
    assert len(placeholders(serving)) == 2
    frozen = jax.tree.leaves(serving["aqt"])
    assert sum(x.dtype == jnp.int8 for x in frozen) == 2
    assert_equal(apply(model, serving, X), apply(model, variables, X))


class Experts(nn.Module):
    """One contraction, of three experts."""

    cfg: config.DotGeneral

    @nn.compact
    def __call__(self, x, sizes):
        w = self.param("w", nn.initializers.normal(), (3, x.shape[1], 5))
        return AqtRaggedDot(self.cfg)(x, w, sizes)


def test_statistics_of_the_rows():
    cfg = config.update(
        CFG.for_serving(),
        {
            "fwd.lhs.calibration": calibration.MaxOverBatches(),
            "fwd.lhs.calib_shared_axes": "per_tensor",
        },
    )
    model, sizes = Experts(cfg), jnp.array([4, 0, 2])
    # The last rows are in no group.
    x = 3.0 * X[:8].at[1, 1].set(5.0).at[7, 2].set(100.0)
    variables = init(model, x, sizes)
    _, updated = model.apply(variables, x, sizes, mutable=["aqt_stats"])
    ((name, states),) = updated["aqt_stats"].items()
    assert name == "ragged_dot_mk_gkn"
    assert max(float(one.max()) for one in jax.tree.leaves(states)) == 15.0
