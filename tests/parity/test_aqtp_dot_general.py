"""Outputs and gradients of `make_dot_general` are aqtp's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aqt.jax.v2 import config as aqtp_config

import aqtlite
from aqtlite import config
from tests.common import (
    DIMENSION_NUMBERS,
    MATMUL,
    nearest,
    normal,
    operands,
    relative_error,
    tensor,
    value_and_gradients,
)

pytestmark = [pytest.mark.slow, pytest.mark.code("quick")]

TOLERANCE = 2e-6
NAMES = ("out", "dlhs", "drhs")


def aqtp_nearest(**kwargs):
    return aqtp_config.fully_quantized(
        use_fwd_quant=False, use_stochastic_rounding=False, **kwargs
    )


# The gradients whose elements are one product. They are exact; AQT maps each operand,
# which is the largest that has its scale, to 127 of 127.5.
ONE_PRODUCT = {"one_row": ("drhs",), "scalar_output": ("dlhs", "drhs")}
LOST = (127 / 127.5) ** 2


def assert_equal_runs(cfg, theirs, lhs, rhs, dims, one_product=()):
    ours = aqtlite.make_dot_general(cfg)

    @jax.jit
    def both(lhs, rhs):
        return (
            value_and_gradients(ours, lhs, rhs, dims),
            value_and_gradients(theirs, lhs, rhs, dims),
        )

    for name, got, wanted in zip(NAMES, *both(lhs, rhs), strict=True):
        got = got * LOST if name in one_product else got
        assert relative_error(got, wanted) <= TOLERANCE, name


@pytest.mark.parametrize("case", DIMENSION_NUMBERS)
def test_dimension_numbers(case):
    lhs, rhs, dims = operands(case)
    cfg, one_product = nearest(use_fwd_quant=False), ONE_PRODUCT.get(case, ())
    assert_equal_runs(cfg, aqtp_nearest(), lhs, rhs, dims, one_product)


@pytest.mark.parametrize(
    ("lhs_bits", "rhs_bits", "bwd_bits"),
    [
        (4, 4, 4),
        (2, 2, 2),
        (1, 1, 1),
        (8, 8, None),
        (None, None, 8),
        (8, None, 4),
        (None, 8, 2),
        (4, None, None),
        (8, 4, 1),
        (1, 8, 8),
        (2, 1, 8),
        (4, 2, None),
    ],
)
def test_bits(lhs_bits, rhs_bits, bwd_bits):
    backward = config.DotGeneralRaw(lhs=tensor(bwd_bits), rhs=tensor(bwd_bits))
    cfg = config.DotGeneral(
        fwd=config.DotGeneralRaw(lhs=tensor(lhs_bits), rhs=tensor(rhs_bits)),
        dlhs=backward,
        drhs=backward,
    )
    theirs = aqtp_config.dot_general_make(
        lhs_bits=lhs_bits, rhs_bits=rhs_bits, bwd_bits=bwd_bits, use_fwd_quant=False
    )
    assert_equal_runs(cfg, theirs, *operands("batch_in_the_middle"))


@pytest.mark.parametrize("bits", [8, 1])
def test_forward_with_use_fwd_quant(bits):
    """`use_fwd_quant` concerns the backward pass only."""
    lhs, rhs, dims = operands("batch_and_two_contracting")
    ours = aqtlite.make_dot_general(nearest(bits))
    theirs = aqtp_config.fully_quantized(
        fwd_bits=bits, bwd_bits=bits, use_stochastic_rounding=False
    )
    got, wanted = jax.jit(lambda *xs: (ours(*xs, dims), theirs(*xs, dims)))(lhs, rhs)
    assert relative_error(got, wanted) <= TOLERANCE


@pytest.mark.code("users")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_dtypes(dtype):
    """Ours is aqtp's float32 result, rounded once at the end."""
    lhs, rhs, dims = operands("odd_sizes", dtype)
    got = aqtlite.make_dot_general(nearest())(lhs, rhs, dims)
    wanted = aqtp_nearest()(lhs.astype(jnp.float32), rhs.astype(jnp.float32), dims)
    assert got.dtype == dtype
    np.testing.assert_array_equal(
        np.asarray(got, np.float32), np.asarray(wanted.astype(dtype), np.float32)
    )


def test_local_aqt():
    def local(module, count):
        return module.LocalAqt(contraction_axis_shard_count=count)

    cfg = config.update(
        nearest(use_fwd_quant=False),
        {"dlhs.local_aqt": local(config, 2), "drhs.local_aqt": local(config, 3)},
    )
    theirs = aqtp_nearest(
        dlhs_local_aqt=local(aqtp_config, 2), drhs_local_aqt=local(aqtp_config, 3)
    )
    assert_equal_runs(cfg, theirs, normal((6, 8)), normal((8, 4)), MATMUL)


def test_local_aqt_of_several_contracting_axes():
    cfg = config.update(
        nearest(use_fwd_quant=False),
        {"drhs.local_aqt": config.LocalAqt(contraction_axis_shard_count=2)},
    )
    theirs = aqtp_nearest(
        drhs_local_aqt=aqtp_config.LocalAqt(contraction_axis_shard_count=2)
    )
    dims = (((2,), (0,)), ((1,), (2,)))
    assert_equal_runs(cfg, theirs, normal((6, 2, 7)), normal((7, 3, 2)), dims)
