import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aqtlite.shapes import dimension_numbers as dn
from tests.common import DIMENSION_NUMBERS, MATMUL, operands

pytestmark = pytest.mark.code("quick")


@st.composite
def contractions(draw):
    """Shapes of two operands and any legal dimension numbers of them."""
    sizes = st.integers(1, 4)
    batch = draw(st.lists(sizes, max_size=2))
    contracting = draw(st.lists(sizes, max_size=2))
    shapes, axes = [], []
    for _ in range(2):
        remaining = draw(st.lists(sizes, max_size=2))
        flat = [*batch, *contracting, *remaining]
        order = draw(st.permutations(range(len(flat))))
        position = {axis: at for at, axis in enumerate(order)}
        shapes.append(tuple(flat[axis] for axis in order))
        batch_axes = tuple(position[i] for i in range(len(batch)))
        contracting_axes = tuple(
            position[len(batch) + i] for i in range(len(contracting))
        )
        axes.append((contracting_axes, batch_axes))
    (lhs_ca, lhs_ba), (rhs_ca, rhs_ba) = axes
    return *shapes, ((lhs_ca, rhs_ca), (lhs_ba, rhs_ba))


def numpy_dot(lhs, rhs, dims):
    """`lax.dot_general` in numpy, which has nothing to compile."""
    (lhs_ca, rhs_ca), (lhs_ba, rhs_ba) = dims
    lhs_names, rhs_names = list(range(lhs.ndim)), list(range(10, 10 + rhs.ndim))
    for left, right in zip(lhs_ca + lhs_ba, rhs_ca + rhs_ba, strict=True):
        rhs_names[right] = lhs_names[left]
    out = [lhs_names[a] for a in lhs_ba]
    out += [lhs_names[a] for a in dn.remaining_axes(lhs.ndim, lhs_ca, lhs_ba)]
    out += [rhs_names[a] for a in dn.remaining_axes(rhs.ndim, rhs_ca, rhs_ba)]
    return np.einsum(lhs, lhs_names, rhs, rhs_names, out)


def arrays(*shapes):
    rng = np.random.default_rng(0)
    return [rng.integers(-9, 10, shape).astype(np.float64) for shape in shapes]


@settings(max_examples=100, deadline=None)
@given(contractions())
def test_backward_dimension_numbers(contraction):
    """<g, lhs . rhs> == <dlhs, lhs> == <drhs, rhs>, and the axes are in order."""
    lhs_shape, rhs_shape, dims = contraction
    lhs, rhs = arrays(lhs_shape, rhs_shape)
    out = numpy_dot(lhs, rhs, dims)
    assert out.shape == dn.output_shape(dims, lhs_shape, rhs_shape)
    (g,) = arrays(out.shape)
    to_dlhs, lhs_order = dn.for_gradient("lhs", dims, lhs.ndim, rhs.ndim)
    to_drhs, rhs_order = dn.for_gradient("rhs", dims, lhs.ndim, rhs.ndim)
    dlhs = numpy_dot(g, rhs, to_dlhs).transpose(lhs_order)
    drhs = numpy_dot(g, lhs, to_drhs).transpose(rhs_order)
    assert dlhs.shape == lhs.shape and drhs.shape == rhs.shape
    inner = np.sum(g * out)
    np.testing.assert_allclose([np.sum(dlhs * lhs), np.sum(drhs * rhs)], inner)


@pytest.mark.parametrize("case", DIMENSION_NUMBERS)
def test_backward_dimension_numbers_against_jax(case):
    lhs, rhs, dims = operands(case)
    shape = dn.output_shape(dims, lhs.shape, rhs.shape)
    (g,) = arrays(shape)
    _, vjp = jax.vjp(lambda lhs, rhs: jax.lax.dot_general(lhs, rhs, dims), lhs, rhs)
    wanted = vjp(jnp.asarray(g, jnp.float32))
    to_dlhs, lhs_order = dn.for_gradient("lhs", dims, lhs.ndim, rhs.ndim)
    to_drhs, rhs_order = dn.for_gradient("rhs", dims, lhs.ndim, rhs.ndim)
    got = (
        numpy_dot(g, np.asarray(rhs), to_dlhs).transpose(lhs_order),
        numpy_dot(g, np.asarray(lhs), to_drhs).transpose(rhs_order),
    )
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@settings(max_examples=100, deadline=None)
@given(contractions())
def test_scales_move_to_the_output(contraction):
    """Scaling an operand outside its contracting axes scales the output."""
    lhs_shape, rhs_shape, dims = contraction
    (lhs_ca, rhs_ca), _ = dims
    lhs, rhs = arrays(lhs_shape, rhs_shape)
    lhs_scale, rhs_scale = arrays(
        [1 if axis in lhs_ca else size for axis, size in enumerate(lhs_shape)],
        [1 if axis in rhs_ca else size for axis, size in enumerate(rhs_shape)],
    )
    got = (
        numpy_dot(lhs, rhs, dims)
        * dn.scale_to_output("lhs", lhs_scale, dims, lhs.ndim, rhs.ndim)
        * dn.scale_to_output("rhs", rhs_scale, dims, lhs.ndim, rhs.ndim)
    )
    wanted = numpy_dot(lhs * lhs_scale, rhs * rhs_scale, dims)
    np.testing.assert_array_equal(got, wanted)


@settings(max_examples=100, deadline=None)
@given(contractions())
def test_scale_moves_to_the_other_operand(contraction):
    """A scale along contracting and batch axes of rhs may as well multiply lhs."""
    lhs_shape, rhs_shape, dims = contraction
    (_, rhs_ca), (_, rhs_ba) = dims
    lhs, rhs = arrays(lhs_shape, rhs_shape)
    keep = rhs_ca + rhs_ba
    (scale,) = arrays([s if axis in keep else 1 for axis, s in enumerate(rhs_shape)])
    got = numpy_dot(lhs * dn.rhs_scale_to_lhs(scale, dims, lhs.ndim), rhs, dims)
    np.testing.assert_array_equal(got, numpy_dot(lhs, rhs * scale, dims))


@settings(max_examples=50, deadline=None)
@given(contractions())
def test_transpose_and_sizes(contraction):
    lhs_shape, rhs_shape, dims = contraction
    (lhs_ca, rhs_ca), (lhs_ba, rhs_ba) = dims
    assert dn.transpose(dims) == ((rhs_ca, lhs_ca), (rhs_ba, lhs_ba))
    assert dn.transpose(dn.transpose(dims)) == dims
    assert dn.canonicalize(dims, lhs_shape, rhs_shape) == dims
    sizes = [rhs_shape[axis] for axis in rhs_ca]
    assert dn.contraction_size(dims, lhs_shape) == int(np.prod(sizes))


def test_canonicalize_takes_lists_and_numpy_integers():
    listed = [[np.array([1]), [0]], [[], ()]]
    assert dn.canonicalize(listed, (2, 3), (3, 4)) == MATMUL


@pytest.mark.parametrize(
    ("dims", "shapes", "error", "match"),
    [
        ((((2,), (0,)), ((), ())), ((2, 3), (3, 4)), ValueError, "lhs of shape"),
        ((((-1,), (0,)), ((), ())), ((2, 3), (3, 4)), ValueError, "lhs of shape"),
        ((((1,), (2,)), ((), ())), ((2, 3), (3, 4)), ValueError, "rhs of shape"),
        ((((1, 1), (0, 1)), ((), ())), ((2, 3), (3, 3)), ValueError, "lhs twice"),
        ((((1,), (0,)), ((1,), (1,))), ((2, 3), (3, 3)), ValueError, "lhs twice"),
        ((((1,), (0,)), ((0,), (0,))), ((2, 3), (3, 3)), ValueError, "rhs twice"),
        (MATMUL, ((2, 3), (4, 5)), ValueError, "contracting axes .* differ"),
        ((((1,), ()), ((), ())), ((2, 3), (3, 4)), ValueError, "differ in number"),
        ((((), ()), ((0,), (0,))), ((2, 3), (3, 4)), ValueError, "batch axes .* diff"),
        (((1,), (0,)), ((2, 3), (3, 4)), TypeError, "dimension_numbers must be"),
        (None, ((2, 3), (3, 4)), TypeError, "dimension_numbers must be"),
    ],
)
def test_refuses(dims, shapes, error, match):
    with pytest.raises(error, match=match):
        dn.canonicalize(dims, *shapes)
