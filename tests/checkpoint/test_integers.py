"""Conversions of quantized sources: integers kept, and those rounded again."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import checkpoint, config, numerics
from aqtlite.flax import AqtDotGeneral
from tests.common import normal

pytestmark = pytest.mark.code("quick")

INT4 = config.Tensor(
    numerics=numerics.IntSymmetric(bits=4), blocks=config.Blocks(size=32)
)
W4 = config.update(config.weight_only(4), {"fwd.rhs": INT4})
X = normal((2, 64))


def quantized(tensor):
    """A weight for which rounding again would choose other scales."""
    q = aqtlite.quantize(normal((6, 64)), tensor, axes=1)
    halved = np.asarray(q.qvalue, np.int8) // 2
    if q.zero_point is None:
        halved[0, 0] = -8  # As GPTQ and Q4_0 have it, and rounding here never.
    halved = halved.astype(q.qvalue.dtype)
    return dataclasses.replace(q, qvalue=jnp.asarray(halved))


class Doubled(nn.Module):
    """A layer that does more with its weight than move it."""

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.normal(), (64, 6))
        dims = (((1,), (0,)), ((), ()))
        return AqtDotGeneral(W4)(x, 2 * kernel, dims)


def converted(tmp_path, model, q):
    """A conversion of a source of one weight: its report, and the serving result."""
    checkpoint.save_quantized(
        tmp_path / "source", {"fc.weight": q}, format="compressed-tensors"
    )
    moves = [checkpoint.Move(sources="fc.weight", targets="params/kernel", axes=(1, 0))]
    report = checkpoint.convert_checkpoint(
        tmp_path / "source", tmp_path / "out", model, X, moves=moves
    )
    serving = checkpoint.load_serving(tmp_path / "out", model)
    return report.weights[0].integers, serving


def dense(cfg, **kwargs):
    dot_general = AqtDotGeneral(cfg)
    return nn.Dense(6, use_bias=False, dot_general=dot_general, **kwargs)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_integers_in_blocks_are_kept(tmp_path, dtype):
    q = quantized(INT4)
    model = dense(W4, dtype=dtype)
    integers, serving = converted(tmp_path, model, q)
    assert integers == "kept"
    (stored,) = (
        x
        for x in jax.tree.leaves(serving, is_leaf=lambda x: hasattr(x, "qvalue"))
        if hasattr(x, "qvalue")
    )
    moved = stored.in_own_order()
    np.testing.assert_array_equal(moved.qvalue, q.qvalue.T)
    np.testing.assert_array_equal(moved.scale, q.scale.T)
    if dtype == jnp.float32:
        wanted = X @ q.dequant().T
        np.testing.assert_allclose(model.apply(serving, X), wanted, atol=1e-4)


def changed(path, value):
    return dense(config.update(W4, {path: value}))


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        (changed("fwd.rhs.blocks", config.Blocks(size=16)), "kept"),
        (changed("fwd.rhs.blocks", None), "rounded again"),
        (changed("fwd.rhs.numerics", numerics.IntSymmetric(bits=3)), "rounded again"),
        (Doubled(), "rounded again"),
    ],
    ids=["smaller_blocks", "channels", "fewer_bits", "doubled"],
)
def test_integers_are_kept_where_grid_and_blocks_hold_them(tmp_path, model, wanted):
    integers, serving = converted(tmp_path, model, quantized(INT4))
    assert integers == wanted
    assert np.isfinite(model.apply(serving, X)).all()


def test_zero_points_are_kept(tmp_path):
    cfg = config.update(config.gptq(), {"fwd.rhs.rounding": None})
    integers, serving = converted(tmp_path, dense(cfg), quantized(cfg.fwd.rhs))
    assert integers == "kept"
    wanted = X @ quantized(cfg.fwd.rhs).dequant().T
    np.testing.assert_allclose(dense(cfg).apply(serving, X), wanted, atol=1e-4)
