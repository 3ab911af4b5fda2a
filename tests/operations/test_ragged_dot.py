"""`ragged_dot` as an operation: its axes, gradients, scales, tiles and integers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite import lowering, operations
from aqtlite.operations import DotInput
from aqtlite.shapes import block_shapes
from aqtlite.shapes.ragged_axes import RaggedAxes
from tests.common import normal

pytestmark = pytest.mark.code("quick")

SIZES = {"m": 40, "g": 4, "k": 20, "n": 12}
CASES = {
    "forward": ("mk", "gkn", "mn"),
    "stored_for_serving": ("mk", "gnk", "mn"),
    "gradient_of_rows": ("mn", "gkn", "mk"),
    "gradient_of_weights": ("mn", "mk", "gkn"),
}
each_case = pytest.mark.parametrize("axes", CASES.values(), ids=CASES)


def some_cases(*names):
    return pytest.mark.parametrize("axes", [CASES[one] for one in names], ids=names)


GROUPS = {
    "even": [10, 10, 10, 10],
    "an_empty_one": [17, 0, 2, 21],
    "below_the_rows": [3, 0, 20, 0],
    "none": [0, 0, 0, 0],
    "above_the_rows": [30, 5, 20, 9],
}


def operation_of(axes, group_sizes):
    return operations.RaggedDot(jnp.asarray(group_sizes), SIZES["m"], RaggedAxes(*axes))


def shape_of(letters):
    return tuple(SIZES[letter] for letter in letters)


def run(operation, lhs, rhs):
    return operation.contract(lowering.Floats(), DotInput(lhs), DotInput(rhs))


def in_numpy(axes, lhs, rhs, group_sizes):
    """The same contraction with a one-hot array of the groups of rows."""
    ends = np.cumsum(group_sizes)
    group = np.searchsorted(ends, np.arange(SIZES["m"]), side="right")
    is_in = (group[:, None] == np.arange(SIZES["g"])).astype(lhs.dtype)
    equation = f"{axes[0]},{axes[1]},mg->{axes[2]}"
    return np.einsum(equation, lhs, rhs, is_in)


@each_case
def test_axes_are_all_there(axes):
    operation = operation_of(axes, GROUPS["even"])
    for side in operations.SIDES:
        found = operation.axes(side)
        found = found.contracting + found.batch + found.remaining
        assert sorted(found) == list(range(operation.ndim(side)))
    shapes = shape_of(axes[0]), shape_of(axes[1])
    assert operation.output_shape(*shapes) == shape_of(axes[2])


@some_cases("forward", "gradient_of_weights")
def test_gradients_are_those_of_jax(axes):
    @jax.jit
    def both(operation, lhs, rhs, g):
        wanted = jax.vjp(functools.partial(run, operation), lhs, rhs)[1](g)
        gradient = operation.gradient
        got = run(gradient("lhs"), g, rhs), run(gradient("rhs"), g, lhs)
        return got, wanted

    lhs, rhs, g = (normal(shape_of(x), i) for i, x in enumerate(axes))
    got, wanted = both(operation_of(axes, GROUPS["below_the_rows"]), lhs, rhs, g)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.code("users")
@pytest.mark.parametrize(
    ("axes", "bits"),
    [
        *((axes, 8) for axes in CASES.values()),
        (CASES["forward"], 16),
        (CASES["gradient_of_weights"], 16),
    ],
)
def test_integers_are_exact(axes, bits):
    """Whatever the sizes of the groups, in one program."""
    rng, largest = np.random.default_rng(0), 2 ** (bits - 1) - 1
    lhs = rng.integers(-largest, largest + 1, shape_of(axes[0]))
    rhs = rng.integers(-127, 128, shape_of(axes[1]))

    @jax.jit
    def dot(operation, lhs, rhs):
        left, right = DotInput(lhs, None, largest), DotInput(rhs, None, 127)
        return operation.contract(lowering.Integers(), left, right)

    dtype = f"int{bits}"
    for group_sizes in GROUPS.values():
        got = dot(
            operation_of(axes, group_sizes), lhs.astype(dtype), rhs.astype("int8")
        )
        wanted = in_numpy(axes, lhs, rhs, group_sizes)
        assert np.asarray(got, np.int64).tolist() == wanted.tolist()


def test_sums_that_int32_does_not_hold():
    """They are taken in pieces of rows, each with the groups that it has."""
    rows = 140_000
    operation = operations.RaggedDot(
        jnp.array([rows - 10, 4]), rows, RaggedAxes("mn", "mk", "gkn")
    )
    ones = DotInput(jnp.full((rows, 1), 127, jnp.int8), None, 127)
    got = operation.contract(lowering.Integers(), ones, ones)
    assert got.dtype == jnp.float32
    assert got[:, 0, 0].tolist() == [float(np.float32(127**2 * (rows - 10))), 64516.0]


@some_cases("stored_for_serving", "gradient_of_weights")
def test_scales_on_the_output(axes):
    """Scaling an operand is scaling the result."""

    @jax.jit
    def both(operation, lhs, rhs):
        pairs = []
        for side, x in (("lhs", lhs), ("rhs", rhs)):
            contracting = operation.axes(side).contracting
            scale = jnp.abs(x).max(contracting, keepdims=True) + 1
            scaled = (lhs * scale, rhs) if side == "lhs" else (lhs, rhs * scale)
            got = run(operation, lhs, rhs) * operation.scale_to_output(side, scale)
            pairs.append((got, run(operation, *scaled)))
        # A scale that the gradient takes in place of rhs.
        remaining = operation.axes("rhs").remaining
        scale = jnp.abs(rhs).max(remaining, keepdims=True) + 1
        moved = lhs * operation.rhs_scale_to_lhs(scale)
        return *pairs, (run(operation, moved, rhs), run(operation, lhs, rhs * scale))

    lhs, rhs = normal(shape_of(axes[0])), normal(shape_of(axes[1]), 1)
    for got, wanted in both(operation_of(axes, GROUPS["below_the_rows"]), lhs, rhs):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


@some_cases("forward", "gradient_of_weights")
def test_tiles_add_up(axes):
    @jax.jit
    def parts(operation, lhs, rhs):
        a, b = (
            block_shapes.cut(x, operation.axes(side).contracting, (2,))
            for side, x in (("lhs", lhs), ("rhs", rhs))
        )
        stacked = operation.of_tiles((2,))
        each = [
            run(jax.tree.map(lambda x, i=i: x[i], stacked), a[i], b[i])
            for i in range(2)
        ]
        return run(operation.tiled((2,)), a, b), jnp.stack(each)

    lhs, rhs = normal(shape_of(axes[0])), normal(shape_of(axes[1]), 1)
    sizes = GROUPS["an_empty_one"]
    wanted = in_numpy(axes, np.asarray(lhs), np.asarray(rhs), sizes)
    for got in parts(operation_of(axes, sizes), lhs, rhs):
        assert got.shape == (2, *wanted.shape)
        np.testing.assert_allclose(got.sum(0), wanted, rtol=1e-4, atol=1e-4)


@some_cases("forward", "gradient_of_weights")
def test_zero_points(axes):
    rng = np.random.default_rng(0)
    operation = operation_of(axes, GROUPS["below_the_rows"])
    values, zeros = [], []
    for side, letters in zip(operations.SIDES, axes[:2], strict=True):
        shape = shape_of(letters)
        (contracted,) = operation.axes(side).contracting
        kept = tuple(1 if a == contracted else n for a, n in enumerate(shape))
        values.append(rng.integers(-128, 128, shape))
        zeros.append(rng.integers(-128, 128, kept))

    @jax.jit
    def dot(operation, values, zeros):
        return operation.contract(
            lowering.Integers(),
            *(
                DotInput(x.astype(jnp.int8), z.astype(jnp.int32), 255)
                for x, z in zip(values, zeros, strict=True)
            ),
            None,
        )

    centred = [x - z for x, z in zip(values, zeros, strict=True)]
    wanted = in_numpy(axes, *centred, GROUPS["below_the_rows"])
    assert dot(operation, values, zeros).tolist() == wanted.tolist()


def test_it_is_a_pytree_whose_group_sizes_are_data():
    operation = operation_of(CASES["forward"], GROUPS["even"])
    (sizes,) = jax.tree.leaves(operation)
    assert sizes.tolist() == GROUPS["even"]
    other = dataclasses.replace(operation, group_sizes=sizes + 1)
    assert jax.tree.structure(operation) == jax.tree.structure(other)
