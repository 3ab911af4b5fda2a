import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from aqtlite.edge.arithmetic import unary
from tests.edge.arithmetic import interpreter
from tests.edge.arithmetic.interpreter import Case, grid

_TANH, _SIGMOID = grid(1 / 128), grid(1 / 256, -128)
_RANGES = {"relu": (0, np.inf), "relu6": (0, 6), "relu_n1_to_1": (-1, 1)}


def _case(function, make, x_grid, out_grid, first=None):
    """Every integer of the input's dtype, from `first`."""
    low, high = x_grid.limits
    x = np.arange(low, high + 1)
    x = np.where(x < (low if first is None else first), high, x).astype(x_grid.dtype)
    table = make(x_grid, out_grid)
    return Case(
        function, ((x, x_grid),), out_grid, lambda x: unary.lookup(table, x.qvalue)
    )


def _relu(name):
    low, high = _RANGES[name]
    return lambda x_grid, out_grid: unary.relu(x_grid, out_grid, low, high)


def _leaky(slope, kernels="xnnpack"):
    return lambda x_grid, to: unary.leaky_relu(x_grid, to, slope, kernels)


def test_equals_the_interpreter():
    x, fine, coarse = grid(0.0473, 5), grid(0.00877, -112), grid(0.21, -37)
    interpreter.check(
        {
            "tanh": _case(jnp.tanh, unary.tanh, x, _TANH),
            "tanh_fine": _case(jnp.tanh, unary.tanh, fine, _TANH),
            "tanh_other": _case(jnp.tanh, unary.tanh, x, grid(0.0066, 9)),
            "logistic": _case(jax.nn.sigmoid, unary.logistic, x, _SIGMOID),
            "exp": _case(jnp.exp, unary.exp, grid(0.03, 100), grid(0.011, -128)),
            "log": _case(jnp.log, unary.log, x, grid(0.031, 40)),
            "gelu": _case(jax.nn.gelu, unary.gelu, x, grid(0.025, -120)),
            "sqrt": _case(jnp.sqrt, unary.sqrt, x, grid(0.0123, -128), 5),
            "abs": _case(jnp.abs, unary.abs, x, grid(0.0331, -128)),
            "abs_same": _case(jnp.abs, unary.abs, x, x),
            "relu": _case(jax.nn.relu, _relu("relu"), x, grid(0.0331, -128)),
            "relu6": _case(jax.nn.relu6, _relu("relu6"), coarse, grid(0.0331, -100)),
            "clip": _case(
                lambda x: jnp.clip(x, -1, 1), _relu("relu_n1_to_1"), x, grid(0.0331, 3)
            ),
            "leaky_relu": _case(jax.nn.leaky_relu, _leaky(0.01), x, grid(0.0331, -100)),
            "leaky_relu_steep": _case(
                lambda x: jax.nn.leaky_relu(x, 0.3), _leaky(0.3), x, grid(0.02, -50)
            ),
            "hard_swish": _case(
                jax.nn.hard_swish, unary.hard_swish, x, grid(0.03, -99)
            ),
            "hard_swish_coarse": _case(
                jax.nn.hard_swish, unary.hard_swish, coarse, grid(0.1, -120)
            ),
        }
    )


def test_equals_the_interpreter_without_xnnpack():
    x = grid(0.0473, 5)
    interpreter.check(
        {
            "tanh": _case(
                jnp.tanh, lambda *grids: unary.tanh(*grids, "builtin"), x, _TANH
            ),
            "logistic": _case(
                jax.nn.sigmoid, lambda *g: unary.logistic(*g, "builtin"), x, _SIGMOID
            ),
            "leaky_relu": _case(
                jax.nn.leaky_relu, _leaky(0.01, "builtin"), x, grid(0.0331, -100)
            ),
        },
        "builtin",
    )


def test_int16_equals_the_interpreter():
    x, unit = grid(0.00047, dtype="int16"), grid(2.0**-15, dtype="int16")
    to = grid(0.00061, dtype="int16")
    interpreter.check(
        {
            "tanh": _case(jnp.tanh, unary.tanh, x, unit),
            "logistic": _case(jax.nn.sigmoid, unary.logistic, x, unit),
            "exp": _case(jnp.exp, unary.exp, grid(0.00009, dtype="int16"), to),
            "sqrt": _case(jnp.sqrt, unary.sqrt, x, to, 0),
            "rsqrt": _case(lax.rsqrt, unary.rsqrt, x, to, 0),
            "abs": _case(jnp.abs, unary.abs, x, to),
            "relu": _case(jax.nn.relu, _relu("relu"), x, to),
            "leaky_relu": _case(jax.nn.leaky_relu, _leaky(0.01), x, to),
        }
    )


def test_tanh_of_the_reference_kernel_is_refused():
    with pytest.raises(ValueError, match="not simulated"):
        unary.tanh(grid(0.1), _TANH, "reference")


def test_hard_swish_refuses_grids_that_litert_refuses():
    with pytest.raises(ValueError, match="at least 1 / 128"):
        unary.hard_swish(grid(1.0), grid(0.001))
