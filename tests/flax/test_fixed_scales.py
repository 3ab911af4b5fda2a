"""Static ranges in serving: scales that conversion computes once."""

import dataclasses
import re

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from aqtlite import calibration, checkpoint, config, numerics
from aqtlite.fixed_scale import FixedScale
from aqtlite.flax import AqtDotGeneral, Call, calibrate, convert
from aqtlite.testing import assert_served_equals_trained
from tests.checkpoint.support import assert_same, save
from tests.common import normal
from tests.flax.support import apply, assert_equal, init

X = normal((4, 8))
BATCHES = [X, 3 * X]
INT8 = config.static_int8()
AFFINE = config.update(
    INT8,
    {
        "fwd.lhs.numerics": numerics.IntAffine(bits=8),
        "fwd.lhs.calibration": calibration.MeanOverBatches(of=calibration.MinMax()),
    },
)
NOISE = config.update(
    AFFINE,
    {
        "fwd.lhs.numerics": numerics.IntSymmetric(
            bits=8, preserve_max_val=True, stochastic_rounding=True
        ),
        "fwd.lhs.calibration": calibration.MaxOverBatches(),
    },
)


def dense(cfg=INT8):
    return nn.Dense(8, dot_general=AqtDotGeneral(cfg))


def calibrated(model):
    return calibrate(model, init(model, X), BATCHES)


def nodes(serving):
    found = jax.tree.leaves(
        serving["aqt_stats"], is_leaf=lambda node: isinstance(node, FixedScale)
    )
    return [node for node in found if isinstance(node, FixedScale)]


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return nn.relu(dense()(x)), None


class Lifted(nn.Module):
    """Layers whose statistics are stacked."""

    how: str

    @nn.compact
    def __call__(self, x):
        axes = {"params": 0, "aqt": 0, "aqt_stats": 0}
        lift = {"variable_axes": axes, "split_rngs": {"params": True}}
        if self.how == "vmap":
            body = nn.vmap(Layer, **lift, in_axes=0, axis_size=2)
            return body()(jnp.stack([x, 2 * x]))[0]
        return nn.scan(Layer, **lift, length=2)()(x, None)[0]


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (dense(AFFINE), (1, 1)),
        (dense(NOISE), (1, 1)),
        (Lifted("stacked"), (2, 1, 1)),
        (Lifted("vmap"), (2, 1, 1)),
    ],
    ids=["zero point", "noise", "scan", "vmap"],
)
def test_fixed_and_bit_for_bit(model, shape):
    variables = calibrated(model)
    serving = convert(model, variables, X)
    (fixed,) = nodes(serving)
    assert fixed.scale.shape == shape
    leaves = jax.tree.leaves(serving["aqt_stats"])
    assert len(leaves) == len(jax.tree.leaves(fixed)) <= 3
    assert_served_equals_trained(model, variables, X, serving=serving)
    assert_equal(apply(model, variables, X), apply(model, serving, X))
