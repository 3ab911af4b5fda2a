"""Contractions under JAX's strict modes: promotion of dtypes and ranks, leaks."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import aqtlite
from aqtlite import calibration, config, numerics
from aqtlite.flax import AqtDotGeneral, convert
from tests.common import normal

pytestmark = pytest.mark.code("quick")

INT8 = config.fully_quantized()


def weights_on(grid):
    tensor = config.Tensor(numerics=grid, blocks=config.Blocks(size=8))
    return config.update(config.weight_only(bits=4), {"fwd.rhs": tensor})


def activations_by(how):
    changes = {
        "fwd.lhs.calibration": how,
        "fwd.lhs.calib_shared_axes": "per_tensor",
    }
    return config.update(INT8, changes)


CONFIGS = {
    "int8": INT8,
    "mxfp4": config.mxfp4(),
    "nf4": weights_on(numerics.NormalFloat()),
    "nf4, stochastic": weights_on(numerics.NormalFloat(stochastic_rounding=True)),
    "mse": activations_by(calibration.MseSearch((1.0, 0.8))),
    "mse over batches": activations_by(calibration.MseOverBatches()),
    "smooth": config.smoothquant(),
}
MODES = [
    lambda: jax.numpy_dtype_promotion("strict"),
    lambda: jax.numpy_rank_promotion("raise"),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CONFIGS)
def test_functions_train_and_are_converted(name, mode):
    w, x = normal((32, 8), 1), normal((4, 32), 2)
    fn_q = aqtlite.quantize_function(lambda w, x: x @ w, CONFIGS[name], params=0)

    def step(w, x):
        if not fn_q.has_state:
            return fn_q(w, x)
        return fn_q(fn_q.init_state(w, x), w, x)[0]

    with mode():
        gradient = jax.grad(lambda w: jnp.sum(step(w, x) ** 2))
        assert jax.eval_shape(gradient, w).shape == w.shape
        state = None
        if fn_q.has_state:
            state = fn_q.gather(fn_q.init_state(w, x), w, x)
        serve, serving = aqtlite.convert_function(fn_q, w, x, state=state)
        assert jax.eval_shape(serve, serving, x).shape == (4, 8)


@pytest.mark.parametrize("mode", MODES)
def test_ragged_dot(mode):
    w, x, sizes = normal((2, 16, 8), 1), normal((4, 16), 2), jnp.array([1, 3])
    ragged_dot = aqtlite.make_ragged_dot(INT8)
    with mode():
        gradient = jax.grad(lambda w: jnp.sum(ragged_dot(x, w, sizes) ** 2))
        assert jax.eval_shape(gradient, w).shape == w.shape


def test_nothing_keeps_tracers():
    w, x = normal((32, 8), 1), normal((4, 32), 2)
    fn_q = aqtlite.quantize_function(lambda w, x: x @ w, INT8, params=0)
    model = nn.Dense(8, dot_general=AqtDotGeneral(INT8))
    variables = model.init(jax.random.key(0), x)
    with jax.checking_leaks():
        assert aqtlite.tap(fn_q)(w, x)
        assert convert(model, variables, x)
