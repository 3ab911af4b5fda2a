"""Blocks of axes: split and merged, and cut into tiles."""

import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite.shapes import block_shapes

pytestmark = pytest.mark.code("quick")


@pytest.mark.parametrize(
    ("scale_shape", "split_shape"),
    [
        ((1, 6), (4, 6)),
        ((4, 1), (4, 6)),
        ((2, 6), (2, 2, 6)),
        ((4, 3), (4, 3, 2)),
        ((2, 2), (2, 2, 2, 3)),
    ],
)
def test_split_scale_and_merge(scale_shape, split_shape):
    x = jnp.arange(24.0).reshape(4, 6)
    scale = jnp.arange(1.0, 1 + np.prod(scale_shape)).reshape(scale_shape)
    pieces = block_shapes.split(x, scale_shape)
    assert pieces.shape == split_shape
    assert block_shapes.has_blocks(x.shape, scale_shape) == (pieces.ndim > 2)
    scaled = block_shapes.merge(
        pieces * block_shapes.split_keepdims(scale, x.shape), like=x
    )
    repeated = block_shapes.repeat(scale, x.shape, (0, 1))
    np.testing.assert_array_equal(scaled, x * repeated)


def test_cut():
    x = jnp.arange(24).reshape(4, 6)
    assert block_shapes.cut(x, (0, 1), (1, 1)) is x
    np.testing.assert_array_equal(
        block_shapes.cut(x, (0, 1), (2, 1)), x.reshape(2, 2, 6)
    )
    both = block_shapes.cut(x, (1, 0), (3, 2))
    wanted = x.reshape(2, 2, 3, 2).transpose(2, 0, 1, 3)
    np.testing.assert_array_equal(both, wanted)


def test_cut_repeats_what_is_coarser():
    scale = jnp.array([[1.0, 2.0]])
    assert block_shapes.cut(scale, (1,), (4,)).tolist() == [[[1]], [[1]], [[2]], [[2]]]
    assert block_shapes.cut(scale, (0,), (4,)).shape == (1, 1, 2)


def test_a_tile_has_a_part_of_each_group():
    x = jnp.arange(8).reshape(1, 8)
    assert block_shapes.cut(x, (1,), (2,), groups=2).tolist() == [
        [[0, 1, 4, 5]],
        [[2, 3, 6, 7]],
    ]
    scale = x[:, :2]  # One for each group.
    assert block_shapes.cut(scale, (1,), (2,), groups=2).tolist() == [[[0, 1]]] * 2
