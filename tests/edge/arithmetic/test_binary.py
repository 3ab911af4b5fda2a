import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite.edge.arithmetic import binary
from tests.edge.arithmetic import interpreter
from tests.edge.arithmetic.interpreter import Case, grid, integers

_SHAPE = (40, 50)
_RELU6 = (0.0, 6.0)


def _case(operator, function, grids, y_shape=_SHAPE, relu6=False, **options):
    rng = np.random.default_rng(len(y_shape) + relu6)
    x_grid, y_grid, out_grid = grids
    x, y = integers(rng, _SHAPE, x_grid.dtype), integers(rng, y_shape, y_grid.dtype)
    if relu6:
        options["clamp"] = _RELU6
    return Case(
        lambda x, y: jax.nn.relu6(function(x, y)) if relu6 else function(x, y),
        ((x, x_grid), (y, y_grid)),
        out_grid,
        lambda x, y: operator(x, y, out_grid, **options),
    )


_PLAIN = grid(0.05, 3), grid(0.0317, -5), grid(0.0713, 11)
_OTHER = grid(0.0123, -100), grid(0.21, 90), grid(0.31, -128)
_PRODUCT = grid(0.05, 3), grid(0.0317, -5), grid(0.113, 11)
_SMALL_PRODUCT = grid(0.002, 3), grid(0.0003, -5), grid(0.3, 11)
_SMALL_RATIO = grid(0.0001, 3), grid(0.3, -5), grid(0.3, 11)


@pytest.mark.parametrize("kernels", ["xnnpack", "reference"])
def test_equals_the_interpreter(kernels):
    def case(operator, function, grids, *args, **options):
        return _case(operator, function, grids, *args, **options, kernels=kernels)

    add, sub, mul = binary.add, binary.sub, binary.mul
    interpreter.check(
        {
            "add": case(add, jnp.add, _PLAIN),
            "add_other": case(add, jnp.add, _OTHER, (50,)),
            "add_one": case(add, jnp.add, _OTHER, (1, 1)),
            "add_relu6": case(add, jnp.add, _OTHER, relu6=True),
            "add_small": case(add, jnp.add, _SMALL_RATIO),
            "sub": case(sub, jnp.subtract, _PLAIN, (40, 1)),
            "sub_other": case(sub, jnp.subtract, _OTHER),
            "mul": case(mul, jnp.multiply, _PRODUCT),
            "mul_relu6": case(mul, jnp.multiply, _PRODUCT, (50,), relu6=True),
            "mul_small": case(mul, jnp.multiply, _SMALL_PRODUCT),
        },
        kernels,
    )


def test_int16_equals_the_interpreter():
    grids = grid(0.0005, dtype="int16"), grid(0.0011, dtype="int16")
    to, product = grid(0.0013, dtype="int16"), grid(0.00021, dtype="int16")
    interpreter.check(
        {
            "add": _case(binary.add, jnp.add, (*grids, to)),
            "sub": _case(binary.sub, jnp.subtract, (*grids, to)),
            "mul": _case(binary.mul, jnp.multiply, (*grids, product)),
        },
        "reference",
    )
