import functools

import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite.edge.arithmetic import reductions
from tests.edge.arithmetic import interpreter
from tests.edge.arithmetic.interpreter import Case, grid, integers


def _case(reduce, function, axes, scale=0.017, shape=(8, 5, 7, 12)):
    x_grid, to = grid(0.0473, 20), grid(scale, -11)
    x = integers(np.random.default_rng(0), shape)
    return Case(
        lambda x: function(x, axis=axes),
        ((x, x_grid),),
        to,
        lambda x: reduce(x, to, axes),
    )


@pytest.mark.parametrize("kernels", ["xnnpack", "builtin", "reference"])
def test_mean_equals_the_interpreter(kernels):
    mean = functools.partial(reductions.mean, kernels=kernels)
    interpreter.check(
        {
            "spatial": _case(mean, jnp.mean, (1, 2)),
            "last": _case(mean, jnp.mean, (3,)),
            "first": _case(mean, jnp.mean, (0, 1)),
            "some": _case(mean, jnp.mean, (1, 3)),
            "rows": _case(mean, jnp.mean, (1,), shape=(400, 33)),
        },
        kernels,
    )


def test_sum_equals_the_interpreter():
    interpreter.check(
        {
            "sum": _case(reductions.total, jnp.sum, (1, 2), scale=1.3),
            "sum_of_rows": _case(
                reductions.total, jnp.sum, (1,), scale=0.9, shape=(400, 33)
            ),
        }
    )


def test_mean_of_int16_equals_the_interpreter():
    x_grid, to = grid(0.0005, dtype="int16"), grid(0.0002, dtype="int16")
    x = integers(np.random.default_rng(0), (300, 40), "int16")
    case = Case(
        lambda x: jnp.mean(x, -1),
        ((x, x_grid),),
        to,
        lambda x: reductions.mean(x, to, (1,)),
    )
    interpreter.check({"mean": case})
