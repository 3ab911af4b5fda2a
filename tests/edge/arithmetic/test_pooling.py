import jax
import numpy as np
from flax import linen as nn

from aqtlite.edge.arithmetic import pooling
from tests.edge.arithmetic import interpreter
from tests.edge.arithmetic.interpreter import Case, grid, integers

_X = grid(0.0473, 20)


def _case(pool, function, window, strides, padding, to=_X, relu6=False, **options):
    x = integers(np.random.default_rng(0), (2, 11, 10, 9))
    clamp = {"clamp": (0.0, 6.0)} if relu6 else {}

    def model(x):
        pooled = function(x, window, strides, padding, **options)
        return jax.nn.relu6(pooled) if relu6 else pooled

    return Case(
        model,
        ((x, _X),),
        to,
        lambda x: pool(x, _X, to, window, strides, padding, **clamp),
    )


def test_equals_the_interpreter():
    other = grid(0.0317, -7)

    def average(*args, **options):
        options["count_include_pad"] = False
        return _case(pooling.average_pool_2d, nn.avg_pool, *args, **options)

    def largest(*args, **options):
        return _case(pooling.max_pool_2d, nn.max_pool, *args, **options)

    interpreter.check(
        {
            "average": average((2, 2), (2, 2), "VALID"),
            "average_same": average((3, 2), (1, 1), "SAME"),
            "average_other": average((5, 5), (2, 1), "VALID", other),
            "average_relu6": average((2, 2), (2, 2), "VALID", relu6=True),
            "max": largest((2, 2), (2, 2), "VALID"),
            "max_same": largest((3, 2), (1, 1), "SAME", relu6=True),
            "max_other": largest((3, 3), (2, 2), "SAME", other),
        }
    )
