"""Frozen weights on a user's own grid with a zero point."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import serialization

from aqtlite.flax import AqtDotGeneral, convert
from tests.extensions import affine
from tests.flax.support import INT8, X, apply, assert_equal, check_served, init

pytestmark = pytest.mark.code("quick")

AFFINE = dataclasses.replace(INT8, fwd=dataclasses.replace(INT8.fwd, rhs=affine.TENSOR))
MODEL = nn.Dense(
    24,
    dot_general=AqtDotGeneral(AFFINE),
    kernel_init=nn.with_partitioning(nn.initializers.uniform(2.0), ("in", "out")),
)


def test_a_weight_with_a_zero_point_is_served():
    serving = check_served(MODEL, X, frozen=1)
    weight = serving["aqt"]["kernel"]["rhs"]
    assert nn.meta.unbox(weight.qvalue).dtype == jnp.uint8
    assert nn.meta.unbox(weight.zero_point).dtype == jnp.int32
    assert weight.numerics == affine.AffineUint8()


def test_its_zero_point_is_partitioned_like_its_scale():
    specs = nn.get_partition_spec(convert(MODEL, init(MODEL, X), X))
    weight = specs["aqt"]["kernel"]["rhs"]
    assert tuple(weight.qvalue) == ("out", "in")
    assert weight.zero_point == weight.scale == jax.sharding.PartitionSpec("out", None)


def test_its_zero_point_is_serialized():
    variables = init(MODEL, X)
    serving = convert(MODEL, variables, X)
    other = convert(MODEL, jax.tree.map(lambda leaf: -leaf, variables), X)
    restored = serialization.from_bytes(other, serialization.to_bytes(serving))
    assert_equal(apply(MODEL, variables, X), apply(MODEL, restored, X))
    assert isinstance(restored["aqt"]["kernel"]["rhs"].zero_point.value, np.ndarray)
