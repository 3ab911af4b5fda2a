"""`dot_general` as an operation: its axes, its gradients, where scales go."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite import lowering, operations
from aqtlite.operations import DotInput
from aqtlite.shapes import block_shapes
from tests.common import normal

pytestmark = pytest.mark.code("quick")

CASES = {
    "matmul": ((3, 4), (4, 5), (((1,), (0,)), ((), ()))),
    "batch": ((2, 3, 4), (2, 4, 5), (((2,), (1,)), ((0,), (0,)))),
    "two_batches_exchanged": (
        (2, 3, 4),
        (3, 2, 4, 5),
        (((2,), (2,)), ((0, 1), (1, 0))),
    ),
    "two_contracted": ((3, 4, 2), (2, 5, 4), (((1, 2), (2, 0)), ((), ()))),
    "outer": ((3,), (4,), (((), ()), ((), ()))),
    "inner": ((3, 4), (4, 3), (((0, 1), (1, 0)), ((), ()))),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def operands_of(case):
    lhs_shape, rhs_shape, dims = case
    lhs, rhs = normal(lhs_shape), normal(rhs_shape, 1)
    return lhs, rhs, operations.DotGeneral(dims, lhs.ndim, rhs.ndim)


def run(operation, lhs, rhs):
    return operation.contract(lowering.Floats(), DotInput(lhs), DotInput(rhs))


def orders_of(operation, lhs, rhs):
    ndim = run(operation, lhs, rhs).ndim
    yield operation
    yield dataclasses.replace(operation, order=tuple(reversed(range(ndim))))


@each_case
def test_axes_are_all_there(case):
    _, _, operation = operands_of(case)
    for side in operations.SIDES:
        axes = operation.axes(side)
        assert sorted(axes.contracting + axes.batch + axes.remaining) == list(
            range(operation.ndim(side))
        )


@each_case
def test_gradients_are_those_of_jax(case):
    lhs, rhs, operation = operands_of(case)
    for one in orders_of(operation, lhs, rhs):
        out, vjp = jax.vjp(functools.partial(run, one), lhs, rhs)
        g = normal(out.shape, 2)
        wanted = vjp(g)
        got = run(one.gradient("lhs"), g, rhs), run(one.gradient("rhs"), g, lhs)
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        assert one.gradient("lhs").ndim("lhs") == out.ndim


@each_case
def test_scales_on_the_output(case):
    """Scaling an operand is scaling the result."""
    lhs, rhs, operation = operands_of(case)
    for one in orders_of(operation, lhs, rhs):
        for side, x in (("lhs", lhs), ("rhs", rhs)):
            contracting = one.axes(side).contracting
            scale = jnp.abs(x).max(contracting, keepdims=True) + 1
            scaled = (lhs * scale, rhs) if side == "lhs" else (lhs, rhs * scale)
            got = run(one, lhs, rhs) * one.scale_to_output(side, scale)
            np.testing.assert_allclose(got, run(one, *scaled), rtol=1e-5, atol=1e-5)


@each_case
def test_a_scale_of_rhs_on_lhs(case):
    lhs, rhs, operation = operands_of(case)
    remaining = operation.axes("rhs").remaining
    scale = jnp.abs(rhs).max(remaining, keepdims=True) + 1
    got = run(operation, lhs * operation.rhs_scale_to_lhs(scale), rhs)
    np.testing.assert_allclose(
        got, run(operation, lhs, rhs * scale), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("order", [None, (1, 0)])
def test_tiles_add_up(order):
    lhs, rhs, operation = operands_of(CASES["matmul"])
    operation = dataclasses.replace(operation, order=order)
    lhs_axes, rhs_axes = (operation.axes(side).contracting for side in ("lhs", "rhs"))
    a, b = block_shapes.cut(lhs, lhs_axes, (2,)), block_shapes.cut(rhs, rhs_axes, (2,))
    out = run(operation.tiled((2,)), a, b)
    assert out.shape[0] == 2
    np.testing.assert_allclose(
        out.sum(0), run(operation, lhs, rhs), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("which", ["lhs", "rhs", "both"])
def test_zero_points_on_either_side(which):
    rng = np.random.default_rng(0)
    lhs, rhs = (rng.integers(-128, 128, shape) for shape in ((3, 40), (40, 5)))
    lz = rng.integers(-128, 128, (3, 1)) if which != "rhs" else np.zeros((3, 1), int)
    rz = rng.integers(-128, 128, (1, 5)) if which != "lhs" else np.zeros((1, 5), int)
    operation = operations.DotGeneral((((1,), (0,)), ((), ())), 2, 2)

    def given(x, z, used):
        zero_point = jnp.asarray(z, jnp.int32) if used else None
        return DotInput(jnp.asarray(x, jnp.int8), zero_point, 255)

    a, b = given(lhs, lz, which != "rhs"), given(rhs, rz, which != "lhs")
    wanted = (lhs - lz) @ (rhs - rz)
    assert operation.contract(lowering.Integers(), a, b).tolist() == wanted.tolist()
    in_float = operation.contract(lowering.IntegersInFloat(np.dtype("float32")), a, b)
    assert in_float.tolist() == wanted.tolist()


def test_a_zero_point_that_varies_along_contracting_axes():
    rng = np.random.default_rng(0)
    lhs, rhs = (rng.integers(-128, 128, shape) for shape in ((3, 40), (40, 5)))
    z = rng.integers(-128, 128, (40, 1))
    operation = operations.DotGeneral((((1,), (0,)), ((), ())), 2, 2)
    a = DotInput(jnp.asarray(lhs, jnp.int8), None, 127)
    b = DotInput(jnp.asarray(rhs, jnp.int8), jnp.asarray(z, jnp.int32), 255)
    got = operation.contract(lowering.Integers(), a, b)
    assert got.tolist() == (lhs @ (rhs - z)).tolist()
