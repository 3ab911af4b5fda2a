"""Loops of small programs run on one thread."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import lax

import aqtlite
from aqtlite import config, numerics
from aqtlite.flax import AqtDotGeneral, convert
from aqtlite.program.compiled import undivided
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

FEW, MANY = 2**15, 2**15 + 1
NF4 = config.update(config.weight_only(4), {"fwd.rhs.numerics": numerics.NormalFloat()})


def loop(x):
    return lax.scan(lambda carry, _: (carry * 2, None), x, None, 3)[0]


def branch(x):
    return lax.cond(x[0] > 0, lambda x: jnp.tile(x, 2), lambda x: jnp.tile(x, 2), x)


@pytest.mark.parametrize(
    ("function", "size", "is_small"),
    [
        (lambda x: x + 1, FEW, True),
        (lambda x: x + 1, MANY, False),
        (jnp.sum, FEW, True),
        (jnp.sum, MANY, False),
        (lambda x: jnp.outer(x, x).sum(), 128, True),
        (lambda x: jnp.outer(x, x).sum(), 256, False),
        (jax.jit(loop), FEW, True),
        (jax.jit(loop), MANY, False),
        (branch, FEW // 2, True),
        (branch, FEW, False),
        (lambda x: x, MANY, True),
        (lambda x: x[:8] + 1, MANY, True),
        (lambda x: (x + 1, x[:8] + 1)[1], MANY, True),
        (jax.jit(lambda x: (x + 1, x[:8] + 1)[1]), MANY, True),
        (lambda x: lax.bitcast_convert_type(x, jnp.int32)[:8], MANY, True),
        (lambda x: x.reshape(-1, 32) @ jnp.ones(32), 2 * FEW, True),
        (lambda x: (2 * x).reshape(-1, 32) @ jnp.ones(32), 2 * FEW, False),
        (lambda x: x.reshape(-1, 1) @ jnp.ones((1, 1)), MANY, False),
    ],
)
def test_a_program_is_small_if_the_arrays_of_its_loops_are(function, size, is_small):
    closed = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((size,), jnp.float32))
    found = undivided.options_for(closed)
    assert found == (undivided.UNDIVIDED if is_small else {})


def test_a_convolution_of_floats_is_not_small():
    x, kernel = jnp.ones((1, 8, 8, 4)), jnp.ones((3, 3, 4, 4))
    dims = ("NHWC", "HWIO", "NHWC")

    def conv(x, kernel):
        return lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=dims
        )

    assert undivided.options_for(jax.make_jaxpr(conv)(x, kernel)) == {}


@pytest.mark.parametrize(
    ("rows", "width", "cfg"),
    [
        (256, 64, config.fully_quantized()),
        (256, 256, config.fully_quantized()),
        (8, 512, config.w4a8()),
        (8, 512, config.mxfp4()),
        (8, 512, NF4),
    ],
)
def test_a_serving_program_of_small_layers_has_no_divided_loops(rows, width, cfg):
    """On one core, XLA divides none anyway. The weights of 8 rows are large."""
    model = nn.Dense(width, dot_general=AqtDotGeneral(cfg))
    x = jax.random.normal(jax.random.key(0), (rows, width))
    serving = convert(model, init(model, x), x)
    program = aqtlite.compile_serving(model.apply, serving, x)
    if rows * width <= FEW:
        assert 'outer_dimension_partitions":["' not in program.compiled.as_text()
    assert (program(x) == jax.jit(model.apply)(serving, x)).all()
