import numpy as np
from flax import linen as nn

from aqtlite.edge.arithmetic import reductions
from tests.edge.arithmetic import interpreter
from tests.edge.arithmetic.interpreter import Case, grid, integers

_X = grid(0.0473, 20)


def _case(window, strides):
    x = integers(np.random.default_rng(0), (2, 11, 10, 9))
    return Case(
        lambda x: nn.avg_pool(x, window, strides, "VALID"),
        ((x, _X),),
        _X,
        lambda x: reductions.average_pool_2d(x.qvalue, window, strides),
    )


def test_equals_the_interpreter():
    interpreter.check(
        {
            "square": _case((2, 2), (2, 2)),
            "overlapping": _case((3, 2), (1, 1)),
            "large": _case((5, 5), (2, 1)),
        }
    )
