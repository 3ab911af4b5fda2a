"""Statistics and learned scales in an einsum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import calibration, config, einsum_states, statistics
from tests.common import MATMUL, normal, tensor

pytestmark = pytest.mark.code("quick")

X, W = normal((2, 4, 8)), normal((8, 3), 1)
STATIC = config.update(
    config.static_int8(calibration.MaxOverBatches()),
    {
        "out": tensor(
            8, calibration=calibration.MaxOverBatches(), calib_shared_axes=(0,)
        )
    },
)


def test_statistics_of_operands_and_of_the_result():
    """What is quantized is what a matmul of the same rows quantizes."""
    eqn = "btk,kn->nbt"
    states = einsum_states.init_states(STATIC, eqn, X, W)
    with pytest.raises(ValueError, match=r"fwd.lhs.calibration=.* pass states="):
        aqtlite.einsum(eqn, X, W, cfg=STATIC)
    for x in (3 * X, X):
        states = einsum_states.update_states(STATIC, states, eqn, x, W)
    float_out = jnp.einsum(eqn, X, W)
    out = statistics.update_output(STATIC.out, states.out, float_out)
    states = states._replace(out=out)
    found = aqtlite.einsum(eqn, X, W, cfg=STATIC, states=states)
    assert found.shape == (3, 2, 4) and found.scale.shape == (1, 2, 4)
    np.testing.assert_allclose(
        found.scale, jnp.abs(float_out).max(0, keepdims=True) / 127.5, rtol=1e-6
    )
    cfg = config.update(STATIC, {"out": config.Tensor()})
    rows = X.reshape(8, 8)
    of_rows = statistics.init_states(cfg, rows, W, MATMUL)
    for x in (3 * rows, rows):
        of_rows = statistics.update_states(cfg, of_rows, x, W, MATMUL)
    dot = aqtlite.make_dot_general(cfg)
    wanted = dot(rows, W, MATMUL, states=of_rows)
    np.testing.assert_array_equal(
        found.unrounded, wanted.reshape(2, 4, 3).transpose(2, 0, 1)
    )


def test_learned_scales_of_what_is_contracted():
    """A letter that one operand alone has is summed before."""
    cfg, eqn = config.lsq(4, bwd_bits=None), "btk,kn->bn"
    states = einsum_states.init_states(cfg, eqn, X, W)
    summed = X.sum(1)
    wanted = statistics.init_states(cfg, summed, W, MATMUL)
    jax.tree.map(
        lambda *both: np.testing.assert_allclose(*both, rtol=1e-6), states, wanted
    )

    def loss(states):
        return aqtlite.einsum(eqn, X, W, cfg=cfg, states=states).sum()

    gradient = jax.grad(loss)(states)
    assert gradient.lhs["step"].any() and gradient.rhs["step"].all()
