"""Shape operations give what they give of the dequantized array, bit for bit."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax

import aqtlite
from aqtlite import QTensor, numerics
from aqtlite import shape_operations as ops
from tests.common import assert_same, normal, tensor

pytestmark = pytest.mark.code("quick")

_GRIDS = {
    "int8": numerics.IntSymmetric(bits=8),
    "int4": numerics.IntSymmetric(bits=4),
    "uint8 with zero points": numerics.IntAffine(bits=8, signed=False),
    "nf4": numerics.NormalFloat(bits=4),
}


def make(shape, counts, grid="int8", *, seed=0, has_gradient=False, order=None):
    """Random stored values with random scales, whatever could have made them."""
    # NumPy throughout: XLA would compile a program for every shape.
    rng = np.random.default_rng(seed)
    grid = _GRIDS[grid]
    low, high = (0, 15) if grid.arithmetic == "table" else (-7, 7)
    zero_point = None
    if grid.zero_point_range is not None:
        low, high = grid.zero_point_range
        zero_point = rng.integers(low, high, counts).astype(np.int32)
    stored = rng.integers(low, high + 1, shape).astype(grid.storage_dtype)
    q = QTensor(
        stored,
        rng.uniform(0.5, 2, counts).astype(np.float32),
        np.dtype("float32"),
        zero_point=zero_point,
        numerics=grid,
        unrounded=rng.standard_normal(shape, np.float32) if has_gradient else None,
    )
    return q if order is None else q.stored_in(order)


@st.composite
def qtensors(draw, max_dims=4):
    """Arrays of any granularity, on any grid, stored in any order."""
    sizes = st.sampled_from([1, 2, 3, 4, 6])
    shape = draw(st.lists(sizes, min_size=1, max_size=max_dims))
    counts = [draw(st.sampled_from(_divisors(size))) for size in shape]
    order = draw(st.none() | st.permutations(range(len(shape))))
    return make(
        tuple(shape),
        tuple(counts),
        draw(st.sampled_from(list(_GRIDS))),
        seed=draw(st.integers(0, 99)),
        has_gradient=draw(st.booleans()),
        order=None if order is None else tuple(order),
    )


def _divisors(size):
    return [count for count in range(1, size + 1) if size % count == 0]


def check(operations, on_arrays, *qs):
    """Each operation gives what the other gives of dequantized arrays.

    Compiled as one program. Returns the results.
    """

    def both(*qs):
        got = operations(*qs)
        unrounded = None
        if qs[0].unrounded is not None:
            unrounded = on_arrays(*(q.in_own_order().unrounded for q in qs))
        wanted = on_arrays(*(q.dequant() for q in qs))
        return got, [one.dequant() for one in got], wanted, unrounded

    got, values, wanted, unrounded = jax.jit(both)(*qs)
    for at, (q, value, x) in enumerate(zip(got, values, wanted, strict=True)):
        assert isinstance(q, QTensor) and q.shape == x.shape and q.scale.ndim == x.ndim
        np.testing.assert_array_equal(value, x)
        if unrounded is not None:
            own = q.in_own_order().unrounded
            np.testing.assert_array_equal(own, unrounded[at])
    return got


def quickly(test):
    return settings(max_examples=8, deadline=None)(test)


@quickly
@given(q=qtensors(), data=st.data())
def test_moves_axes(q, data):
    axes = data.draw(st.permutations(range(q.ndim)))
    first, second = (data.draw(st.integers(-q.ndim, q.ndim - 1)) for _ in range(2))
    shape = (2, *(3 if size == 1 else size for size in q.shape))
    check(
        lambda q: [
            q.transpose(axes),
            q.transpose(*axes),
            q.T,
            q.swapaxes(first, second),
            q.squeeze(),
            q[None].squeeze(np.int64(0)),
            ops.moveaxis(q, first, second),
            ops.flip(q, first),
            ops.expand_dims(q, first),
            ops.expand_dims(q, (0, 2)).squeeze((0, 2)),
            ops.expand_dims(q, 0).mT,
            ops.broadcast_to(q, shape),
        ],
        lambda x: [
            x.transpose(axes),
            x.transpose(*axes),
            x.T,
            x.swapaxes(first, second),
            x.squeeze(),
            x,
            jnp.moveaxis(x, first, second),
            jnp.flip(x, first),
            jnp.expand_dims(x, first),
            x,
            x[None].mT,
            jnp.broadcast_to(x, shape),
        ],
        q,
    )


@settings(max_examples=60, deadline=None)
@given(q=qtensors(), data=st.data())
def test_reshapes_or_says_why_not(q, data):
    sizes = data.draw(st.permutations(_factors(q.size)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sizes)), max_size=3)))
    edges = [0, *cuts, len(sizes)]
    shape = tuple(math.prod(sizes[a:b]) for a, b in itertools.pairwise(edges))
    try:
        got = q.reshape(shape)
    except ValueError as error:
        assert ".dequant()" in str(error)
        assert not _is_legal(q, shape)
    else:
        assert got.shape == shape and got.scale.size == q.scale.size
        np.testing.assert_array_equal(
            got.qvalue, q.in_own_order().qvalue.reshape(shape)
        )
        np.testing.assert_array_equal(_each(got.scale, got), _each_of(q).reshape(shape))


def _each_of(q):
    plain = q.in_own_order()
    return _each(plain.scale, plain)


def _each(scale, q):
    """A value of each block, for each element."""
    for axis, block in enumerate(q.blocks):
        scale = np.repeat(scale, block, axis)
    return scale


def _factors(n):
    """Its prime factors; a few elements have no others."""
    found = []
    for p in (2, 3):
        while n % p == 0:
            found.append(p)
            n //= p
    return found


def _is_legal(q, shape):
    """Says by looking at every element whether one scale for each block can do."""
    plain = q.in_own_order()
    labels = np.arange(plain.scale.size).reshape(plain.scale.shape)
    labels = _each(labels, plain).reshape(shape)
    counts = []
    for axis, size in enumerate(shape):
        rows = np.moveaxis(labels, axis, 0).reshape(size, -1)
        # As few blocks along each axis as the labels allow.
        for count in _divisors(size):
            blocks = rows.reshape(count, size // count, -1)
            if (blocks == blocks[:, :1]).all():
                counts.append(count)
                break
    return math.prod(counts) == plain.scale.size


@pytest.mark.parametrize(
    ("shape", "counts", "new", "scale_shape"),
    [
        ((4, 6), (4, 1), (2, 2, 6), (2, 2, 1)),
        ((4, 6), (4, 1), (4, 2, 3), (4, 1, 1)),
        ((4, 6), (4, 1), (24,), (4,)),
        ((24,), (4,), (4, 6), (4, 1)),
        ((24,), (4,), (2, 12), (2, 2)),
        ((2, 3, 4), (2, 3, 1), (-1, 4), (6, 1)),
        ((2, 3, 4), (1, 1, 4), (6, 4), (1, 4)),
        ((4, 6), (1, 1), (3, 8), (1, 1)),
        ((1, 6), (1, 6), (6, 1, 1), (6, 1, 1)),
    ],
)
def test_reshape_keeps_blocks_together(shape, counts, new, scale_shape):
    q = make(shape, counts)
    assert q.reshape(new).scale.shape == q.reshape(*new).scale.shape == scale_shape


@pytest.mark.parametrize(
    ("shape", "counts", "new"),
    [
        ((4, 6), (1, 6), (24,)),
        ((4, 6), (4, 1), (3, 8)),
        ((4, 6), (4, 1), (5, 5)),
        ((4, 6), (4, 1), (-1, -1)),
        ((4, 6), (4, 1), (-1, 7)),
    ],
)
def test_refuses_reshape(shape, counts, new):
    with pytest.raises(ValueError, match="cannot be reshaped"):
        make(shape, counts).reshape(new)


@settings(max_examples=60, deadline=None)
@given(q=qtensors(), data=st.data())
def test_indexes_and_slices(q, data):
    """Ints and slices of whole blocks or inside of one; others raise."""
    index = []
    for size in q.shape:
        bound = st.none() | st.integers(-size, size)
        step = st.sampled_from([None, 1, 2, -1])
        index.append(
            data.draw(
                st.integers(-size, size - 1) | st.builds(slice, bound, bound, step)
            )
        )
    at = tuple(index)
    try:
        got = q[at]
    except TypeError as error:
        assert ".dequant()" in str(error)
        assert any(1 < b < n for b, n in zip(q.blocks, q.shape, strict=True))
    else:
        plain = q.in_own_order()
        np.testing.assert_array_equal(got.qvalue, plain.qvalue[at])
        np.testing.assert_array_equal(_each(got.scale, got), _each_of(q)[at])


def test_slices_whole_blocks():
    q = make((2, 12), (2, 4))
    at = [slice(3, 9), slice(None, None, -1), slice(4, 6), slice(8, 2, -1), 7, -4]
    check(
        lambda q, i: [*(q[:, one] for one in at), q[:, i.qvalue], q[:, -i.qvalue]],
        lambda x, i: [*(x[:, one] for one in at), x[:, 5], x[:, -5]],
        q,
        dataclasses.replace(make((), ()), qvalue=np.int32(5)),
    )
    assert q[:, 3:9].scale.shape == (2, 2) and q[:, 4:6].scale.shape == (2, 1)
    with pytest.raises(TypeError, match=r"4 blocks of 3 .* cuts through them"):
        q[:, 1:4]


@quickly
@given(q=qtensors(max_dims=3), data=st.data())
def test_dynamic_slices(q, data):
    """Out of range, too: starts are clamped alike."""
    sizes = [
        size if 1 < block < size else data.draw(st.integers(1, size))
        for size, block in zip(q.shape, q.blocks, strict=True)
    ]
    starts = [data.draw(st.integers(-2, size + 1)) for size in q.shape]
    axis = data.draw(st.integers(-q.ndim, q.ndim - 1))
    at = starts[axis]
    check(
        lambda q: [
            ops.dynamic_slice(q, starts, sizes),
            ops.dynamic_index_in_dim(q, at, axis),
            ops.dynamic_index_in_dim(q, at, axis, keepdims=False),
        ],
        lambda x: [
            lax.dynamic_slice(x, starts, sizes),
            lax.dynamic_index_in_dim(x, at, axis),
            lax.dynamic_index_in_dim(x, at, axis, keepdims=False),
        ],
        q,
    )


@quickly
@given(q=qtensors(max_dims=3), data=st.data())
def test_pads(q, data):
    counts = q.in_own_order().scale.shape
    widths = [
        [data.draw(st.integers(0, 2)) * (block if count > 1 else 1) for _ in range(2)]
        for block, count in zip(q.blocks, counts, strict=True)
    ]
    check(lambda q: [ops.pad(q, widths)], lambda x: [jnp.pad(x, widths)], q)


@pytest.mark.parametrize("grid", _GRIDS)
def test_pads_a_symbolic_axis(grid):
    """The program holds no array of the size of the values."""
    q, widths = make((4, 6), (4, 1), grid), ((1, 2), (0, 3))
    size = jax.export.symbolic_shape("b")
    symbolic = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((*size, *x.shape[1:]), x.dtype), q
    )
    exported = jax.export.export(jax.jit(lambda q: ops.pad(q, widths).dequant()))
    np.testing.assert_array_equal(
        exported(symbolic).call(q), jnp.pad(q.dequant(), widths)
    )


@quickly
@given(q=qtensors(max_dims=3), data=st.data())
def test_takes_along_whole_channels(q, data):
    q, axis = q.stop_gradient(), data.draw(st.integers(0, q.ndim - 1))
    assume(q.blocks[axis] in (1, q.shape[axis]))
    indices = jnp.array([[0, -1, 9], [1, 0, -9]])
    modes = ["clip", "wrap"]
    if q.shape[axis] != 1 == q.blocks[axis]:
        modes += [None, "fill"]
    check(
        lambda q: [ops.take(q, indices, axis, mode=mode) for mode in modes],
        lambda x: [jnp.take(x, indices, axis, mode=mode) for mode in modes],
        q,
    )


@quickly
@given(q=qtensors(max_dims=3), data=st.data())
def test_joins(q, data):
    axis = data.draw(st.integers(0, q.ndim - 1))
    is_shared = q.in_own_order().scale.shape[axis] == 1 != q.shape[axis]
    other = q if is_shared else dataclasses.replace(q, scale=2 * q.scale)
    check(
        lambda q, r: [ops.stack([q, r, q], axis), ops.concatenate([q, r], axis)],
        lambda x, y: [jnp.stack([x, y, x], axis), jnp.concatenate([x, y], axis)],
        q,
        other,
    )


def test_concatenates_what_has_equal_scales():
    q = make((4, 6), (4, 1))
    halves = q[:, :2], q[:, 2:]
    assert_same(ops.concatenate(halves, axis=-1), q)
    assert_same(jax.jit(ops.concatenate, static_argnums=1)(halves, 1), q)
    # Other scales: an error where they are known, and NaN where they are not.
    other = dataclasses.replace(halves[1], scale=2 * halves[1].scale)
    with pytest.raises(ValueError, match="would share a scale, but have others"):
        ops.concatenate([halves[0], other], axis=1)
    poisoned = jax.jit(ops.concatenate, static_argnums=1)([halves[0], other], 1)
    assert jnp.isnan(poisoned.dequant()).all()


def test_joins_what_is_poisoned_alike():
    q = make((2, 4), (2, 1))
    q = dataclasses.replace(q, scale=jnp.array([[jnp.nan], [2.0]]))
    x = q.dequant()
    wanted = jnp.concatenate([x, x], axis=1)
    for join in (ops.concatenate, jax.jit(ops.concatenate, static_argnums=1)):
        np.testing.assert_array_equal(join([q, q], 1).dequant(), wanted)


@quickly
@given(q=qtensors(max_dims=3), data=st.data())
def test_updates_in_place(q, data):
    """Scales are replaced along with the values that they belong to."""
    sizes, counts, starts = [], [], []
    for size, count in zip(q.shape, q.in_own_order().scale.shape, strict=True):
        is_free = count == size != 1
        new = data.draw(st.integers(1, size)) if is_free else size
        own = data.draw(st.sampled_from([1, new])) if is_free else count
        sizes.append(new)
        counts.append(own)
        starts.append(data.draw(st.integers(-1, size)))
    grid = next(name for name, one in _GRIDS.items() if one == q.numerics)
    has_gradient = q.unrounded is not None
    check(
        lambda q, update: [ops.dynamic_update_slice(q, update, starts)],
        lambda x, y: [lax.dynamic_update_slice(x, y, starts)],
        q,
        make(sizes, counts, grid, seed=1, has_gradient=has_gradient),
    )


def test_updates_a_part_of_what_shares_a_scale():
    q = make((2, 8), (2, 1))
    update = q[:, 3:5][:, ::-1]
    wanted = lax.dynamic_update_slice(q.dequant(), update.dequant(), (0, 5))
    jitted = jax.jit(ops.dynamic_update_slice)
    for function in (ops.dynamic_update_slice, jitted):
        np.testing.assert_array_equal(function(q, update, (0, 5)).dequant(), wanted)
    with pytest.raises(ValueError, match="would share a scale, but have others"):
        ops.dynamic_update_slice(q, update[::-1], (0, 5))
    assert jnp.isnan(jitted(q, update[::-1], (0, 5)).scale).all()


def test_a_cache_of_positions_under_jit_and_in_a_scan():
    """As in decoding: one position at a time, with scales of its own."""
    x = normal((5, 2, 3))
    cache = jax.tree.map(jnp.zeros_like, aqtlite.quantize(x, tensor(8), -1))

    def step(cache, one):
        position, row = one
        new = aqtlite.quantize(row[None], tensor(8), -1)
        return ops.dynamic_update_slice(cache, new, (position, 0, 0)), None

    filled, _ = jax.lax.scan(step, cache, (jnp.arange(5), x))
    assert_same(filled, aqtlite.quantize(x, tensor(8), -1))


def test_an_update_keeps_the_order_of_storage():
    q = aqtlite.quantize(normal((3, 4, 2)), tensor(8), axes=2)
    update = aqtlite.quantize(normal((1, 4, 2), 1), tensor(8), axes=2)
    got = ops.dynamic_update_slice(q.stored_in((1, 2, 0)), update, (1, 0, 0))
    assert (got.order, got.qvalue.shape) == ((1, 2, 0), (4, 2, 3))
    wanted = ops.dynamic_update_slice(q, update, (1, 0, 0))
    assert_same(got.in_own_order(), wanted)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda q: ops.dynamic_slice(q, (0, 0), (2, 2)), TypeError, "cut through"),
        (lambda q: ops.take(q, jnp.array([0]), 1), TypeError, "cut through"),
        (lambda q: ops.take(q[:, :3], jnp.array([0]), 1), ValueError, "mode='clip'"),
        (lambda q: ops.pad(q, ((0, 0), (0, 1))), TypeError, "cut through"),
        (lambda q: ops.concatenate([q, q[:, :3][:, :2]], 1), ValueError, "do not join"),
        (lambda q: ops.concatenate([q, q[:1]], 1), ValueError, "differ along axis 0"),
        (lambda q: ops.concatenate([]), ValueError, "got none"),
        (lambda q: ops.concatenate([q, q.dequant()]), TypeError, "got ArrayImpl"),
        (lambda q: ops.concatenate([q, q], 2), ValueError, "out of range"),
        (lambda q: ops.stack([q, q[:1]]), ValueError, "must be equal"),
        (
            lambda q: ops.stack([q, q.astype("bfloat16")]),
            TypeError,
            "dtype float32",
        ),
        (lambda q: ops.stack([q, make((2, 12), (2, 4), "nf4")]), TypeError, "storage"),
        (
            lambda q: ops.stack([q, make((2, 12), (2, 4), has_gradient=True)]),
            TypeError,
            ".stop_gradient",
        ),
        (
            lambda q: ops.dynamic_update_slice(q, q[:, :3], (0, 0)),
            TypeError,
            "cut through",
        ),
        (
            lambda q: ops.dynamic_update_slice(q, make((2, 12), (2, 3)), (0, 0)),
            ValueError,
            "3 scales for 12 elements",
        ),
        (lambda q: ops.dynamic_slice(q, (0, 0, 0), (2, 12)), ValueError, "takes 2"),
        (lambda q: ops.dynamic_slice(q, (0, 0), (2, 12, 1)), ValueError, "takes 2"),
        (lambda q: ops.dynamic_update_slice(q, q, (0,)), ValueError, "takes 2"),
        (lambda q: q.transpose(0, 0), ValueError, r"\(0, 0\) is no .* the 2 axes"),
        (lambda q: q.transpose([-1]), ValueError, r"\(-1,\) is no perm"),
        (lambda q: q.transpose(0, 2), ValueError, r"\(0, 2\) is no perm"),
        (lambda q: q.squeeze(0), ValueError, "not of size 1"),
        (lambda q: q.squeeze(np.int64(7)), ValueError, "7 is out of range"),
        (lambda q: q.astype("int8"), TypeError, "no float dtype"),
        (lambda q: q + 1, TypeError, ".dequant()"),
        (lambda q: jnp.ones(12) + q, TypeError, ".dequant()"),
        (lambda q: np.ones(12) * q, TypeError, ".dequant()"),
        (jnp.exp, TypeError, ".dequant()"),
        (np.asarray, TypeError, ".dequant()"),
    ],
)
def test_says_why_not(function, error, message):
    with pytest.raises(error, match=message):
        function(make((2, 12), (2, 4)))


def test_a_grid_without_zero_is_not_padded():
    q = aqtlite.quantize(normal((2, 3)), tensor(1), 1)
    with pytest.raises(ValueError, match="does not have"):
        ops.pad(q, 1)


def test_dtype_of_the_dequantized_array():
    q = make((2, 3), (2, 1), has_gradient=True)
    wanted = q.dequant().astype(jnp.bfloat16)
    assert_same(q.astype(jnp.bfloat16).dequant(), wanted)
