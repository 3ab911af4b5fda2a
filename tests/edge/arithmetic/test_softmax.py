import jax
import numpy as np

from aqtlite.edge.arithmetic import softmax
from tests.edge.arithmetic import interpreter
from tests.edge.arithmetic.interpreter import Case, grid


def _case(spread, x_grid, to, shape=(60, 70)):
    low, high = x_grid.limits
    x = np.random.default_rng(0).normal(size=shape) * spread
    x = np.clip(x, low, high).astype(x_grid.dtype)
    return Case(jax.nn.softmax, ((x, x_grid),), to, lambda x: softmax.softmax(x, to))


def test_equals_the_interpreter():
    to = grid(1 / 256, -128)
    interpreter.check(
        {
            "even": _case(20, grid(0.0473, 20), to),
            "peaked": _case(90, grid(0.21, -77), to),
            "of_three_axes": _case(20, grid(0.0473, 20), to, (4, 9, 5)),
            "int16": _case(
                5000, grid(0.00051, dtype="int16"), grid(2.0**-15, dtype="int16")
            ),
        }
    )
