"""A convolution as an operation: its axes, its gradients, where scales go."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite import lowering, operations
from aqtlite.operations import DotInput
from aqtlite.shapes import block_shapes
from tests.convolutions import CASES, Case, integers, reference

pytestmark = pytest.mark.code("quick")

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def operation_of(case):
    return operations.ConvGeneralDilated.of(case.lhs, case.rhs, *case.geometry)


def int8(x, zero_point=None):
    return DotInput(jnp.asarray(x, jnp.int8), zero_point, 128)


@functools.partial(jax.jit, static_argnums=0)
def dots(operation, x, w, g):
    """The result and both gradients, of int8."""

    def dot(operation, lhs, rhs):
        return operation.contract(lowering.Integers(), int8(lhs), int8(rhs))

    to_lhs, to_rhs = (operation.gradient(side) for side in operations.SIDES)
    return dot(operation, x, w), dot(to_lhs, g, w), dot(to_rhs, g, x)


def arrays_of(case):
    x, w = integers(case.lhs), integers(case.rhs, 1)
    out, gradients = reference(case, x, w)
    return x, w, out, gradients, integers(out.shape, 2)


def check_integers(case):
    x, w, out, gradients, g = arrays_of(case)
    operands = (jnp.asarray(one, jnp.int8) for one in (x, w, g))
    found = dots(operation_of(case), *operands)
    for got, wanted in zip(found, (out, *gradients(g)), strict=True):
        assert got.dtype == jnp.int32
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.code("users")
@each_case
def test_integers_are_exact(case):
    check_integers(case)


@st.composite
def cases(draw):
    def pair(low, high):
        return draw(st.tuples(*(st.integers(low, high),) * 2))

    groups, per_group = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    window, dilation = pair(1, 3), pair(1, 2)
    return Case(
        lhs=(draw(st.integers(1, 3)), *pair(5, 6), groups * per_group),
        rhs=(*window, per_group, groups * draw(st.integers(1, 2))),
        strides=pair(1, 2),
        padding=tuple((low + 1, high) for low, high in (pair(-1, 2), pair(0, 2))),
        lhs_dilation=pair(1, 2),
        rhs_dilation=dilation,
        feature_groups=groups,
    )


@pytest.mark.code("users")
@hypothesis.given(cases())
@hypothesis.settings(max_examples=3, deadline=None)
def test_integers_are_exact_for_any_geometry(case):
    check_integers(case)


def all_operations(case):
    """The convolution and its gradients, each with NumPy operands and its result."""
    x, w, out, gradients, g = arrays_of(case)
    dx, dw = gradients(g)
    operation = operation_of(case)
    yield operation, x, w, out
    yield operation.gradient("lhs"), g, w, dx
    yield operation.gradient("rhs"), g, x, dw


def evaluate(case, operation, lhs, rhs):
    """What an operation computes, by the reference."""
    operands = (np.asarray(one, float) for one in (lhs, rhs))
    arrays = dict(zip(operation.arrays, operands, strict=False))
    x, w = arrays.get("x", np.zeros(case.lhs)), arrays.get("w", np.zeros(case.rhs))
    out, gradients = reference(case, x, w)
    results = {"y": out}
    if "y" in arrays:
        results["x"], results["w"] = gradients(arrays["y"])
    return results[operation.arrays[2]]


def powers(shape, axes, seed):
    """Powers of two of size 1 along some axes, as a scale."""
    kept = [1 if axis in axes else size for axis, size in enumerate(shape)]
    return 2.0 ** np.random.default_rng(seed).integers(-2, 3, kept)


@each_case
def test_axes_are_all_there_and_scales_leave_the_sums(case):
    for operation, lhs, rhs, out in all_operations(case):
        assert operation.output_shape(lhs.shape, rhs.shape) == out.shape
        for side, x in (("lhs", lhs), ("rhs", rhs)):
            axes = operation.axes(side)
            all_axes = axes.contracting + axes.batch + axes.remaining
            assert sorted(all_axes) == list(range(x.ndim))
            scale = powers(x.shape, axes.contracting, len(side))
            scaled = (lhs * scale, rhs) if side == "lhs" else (lhs, rhs * scale)
            laid_out = operation.scale_to_output(side, jnp.asarray(scale))
            wanted = evaluate(case, operation, *scaled)
            np.testing.assert_array_equal(out * np.asarray(laid_out), wanted)


@each_case
def test_scales_move_from_rhs_to_lhs(case):
    for operation, lhs, rhs, _ in list(all_operations(case))[1:]:
        forward = case.lhs if operation.arrays[1] == "x" else case.rhs
        own = operation_of(case).axes("lhs" if forward is case.lhs else "rhs")
        scale = powers(rhs.shape, own.contracting, 3)
        if not operation.rhs_scale_moves(scale.shape):
            assert operation.axes("rhs").batch == () != own.remaining
            continue
        moved = np.asarray(operation.rhs_scale_to_lhs(jnp.asarray(scale)))
        got = evaluate(case, operation, lhs * moved, rhs)
        np.testing.assert_array_equal(got, evaluate(case, operation, lhs, rhs * scale))


@pytest.mark.parametrize("name", ["strides", "groups", "batch_groups"])
def test_tiles_add_up(name):
    """Each is what a convolution of its own gives; of groups it has a part each."""
    case = CASES[name]._replace(lhs=(4, 5, 6, 4))
    groups = max(case.feature_groups, case.batch_groups)
    case = case._replace(rhs=(3, 2, 4 // case.feature_groups, 4 * groups))

    @functools.partial(jax.jit, static_argnums=0)
    def run(operation, lhs, rhs):
        a, b = (
            block_shapes.cut(x, axes.cuttable, (2,), axes.groups)
            for x, axes in zip(
                (lhs, rhs), map(operation.axes, operations.SIDES), strict=True
            )
        )
        one = operation.of_tiles((2,))
        each = [
            one.contract(lowering.Integers(), int8(a[i]), int8(b[i])) for i in range(2)
        ]
        together = operation.tiled((2,)).contract(lowering.Integers(), int8(a), int8(b))
        return together, jnp.stack(each)

    for operation, lhs, rhs, out in all_operations(case):
        lhs, rhs = (jnp.asarray(one, jnp.int8) for one in (lhs, rhs))
        together, each = run(operation, lhs, rhs)
        np.testing.assert_array_equal(together, each)
        np.testing.assert_array_equal(each.sum(0), out)


def test_gradients_of_gradients_are_the_convolution():
    operation = operation_of(CASES["strides"])
    for side in operations.SIDES:
        assert operation.gradient(side).gradient("lhs").arrays[2] == "y"
    assert operation.gradient("lhs").gradient("lhs") == operation


@pytest.mark.code("users")
@pytest.mark.parametrize(
    "case",
    [
        CASES["strides"],
        CASES["depthwise"],
        CASES["dilations"],
        CASES["groups"]._replace(lhs_dilation=(2, 1)),
    ],
    ids=["strides", "depthwise", "dilations", "dilated groups"],
)
def test_zero_points_pad_with_the_real_zero(case):
    x, w, *_ = arrays_of(case)
    x, w = x // 2, w // 2
    wanted, _ = reference(case, x, w)
    zero_x, zero_w = np.full((case.lhs[0], 1, 1, 1), 40), np.full((1, 1, 1, 1), -30)
    zero_x[0] = -20
    operation = operation_of(case)

    @jax.jit
    def run(x, w):
        left = int8(x, jnp.asarray(zero_x, jnp.int32))
        alone = operation.contract(lowering.Integers(), left, int8(w))
        right = int8(w + zero_w, jnp.asarray(zero_w, jnp.int32))
        return alone, operation.contract(lowering.Integers(), left, right)

    for got in run(x + zero_x, w):
        np.testing.assert_array_equal(got, wanted)


def test_sums_beyond_int32_are_taken_in_pieces():
    case = Case(lhs=(1, 300, 500, 1), rhs=(1, 1, 1, 2), padding=((0, 0), (0, 0)))
    operation = operation_of(case).gradient("rhs")
    x, g = np.full(case.lhs, 127), np.full((1, 300, 500, 2), 127)
    got = jax.jit(
        lambda g, x: operation.contract(lowering.Integers(), int8(g), int8(x))
    )(g, x)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, 300 * 500 * 127.0**2, rtol=1e-6)


@pytest.mark.code("users")
def test_wide_integers_and_floats():
    case = CASES["strides"]
    x, w, _, _, _ = arrays_of(case)
    operation = operation_of(case)

    @jax.jit
    def run(x, w):
        wide = DotInput((x * 100).astype(jnp.int16), None, 12_800)
        floats = DotInput(x.astype(jnp.float32) / 3, None, None)
        ints = int8(w)
        return (
            operation.contract(lowering.Integers(), wide, ints),
            operation.contract(lowering.Mixed(np.dtype("float32")), floats, ints),
            operation.contract(
                lowering.Floats(), floats, DotInput(w.astype(jnp.float32))
            ),
        )

    wide, mixed, floats = run(x, w)
    np.testing.assert_array_equal(wide, reference(case, x * 100, w)[0])
    wanted = reference(case, x / 3, w.astype(float))[0]
    for got in (mixed, floats):
        np.testing.assert_allclose(got, wanted, atol=1e-5 * np.abs(wanted).max())
