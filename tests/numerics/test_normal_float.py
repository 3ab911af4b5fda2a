import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import config
from aqtlite.numerics import NormalFloat
from tests.common import MATMUL, normal

GRID = NormalFloat()
NF4 = config.Tensor(numerics=GRID)
VALUES = np.asarray(GRID.decode(jnp.arange(16).astype("uint4")))


def rounded(x):
    codes = jax.jit(GRID.round)(jnp.asarray(x, jnp.float32), None)
    assert codes.dtype == GRID.storage_dtype == jnp.uint4
    return np.asarray(GRID.decode(codes))


def test_values_are_quantiles():
    """The construction of the paper: the midpoint of the two outermost quantiles."""
    last = 1 - (1 / 30 + 1 / 32) / 2
    quantile = statistics.NormalDist().inv_cdf
    positive = [quantile(p) for p in np.linspace(0.5, last, 9)[1:]]
    negative = [-quantile(p) for p in np.linspace(0.5, last, 8)[1:]]
    wanted = np.array([*negative[::-1], 0.0, *positive]) / quantile(last)
    np.testing.assert_allclose(VALUES, wanted, atol=1e-6)
    assert VALUES[0] == -1 and VALUES[7] == 0 and VALUES[15] == 1


def nearest(x):
    """The nearest value, the lower one of two, in float64."""
    distance = np.abs(np.asarray(x, np.float64)[:, None] - VALUES.astype(np.float64))
    return VALUES[distance.argmin(1)]


def test_rounds_to_the_nearest():
    """All values, midpoints, and the floats next to midpoints."""
    middle = ((VALUES[1:].astype(np.float64) + VALUES[:-1]) / 2).astype(np.float32)
    x = [VALUES, middle, np.nextafter(middle, 2), np.nextafter(middle, -2)]
    x = np.concatenate(x).astype(np.float32)
    np.testing.assert_array_equal(rounded(x), nearest(x))
    np.testing.assert_array_equal(rounded(VALUES), VALUES)


def test_gradient_mask():
    scaled = jnp.array([-1.1, -1.0, 0.0, 1.0, 1.1])
    assert GRID.gradient_mask(scaled) is None
    mask = NormalFloat(clip_gradient=True).gradient_mask(scaled)
    assert mask.tolist() == [False, True, True, True, False]


def test_contraction_and_gradients():
    raw = config.DotGeneralRaw(rhs=NF4)
    reused = config.DotGeneralRaw(rhs=config.Tensor(use_fwd_quant=True))
    cfg = config.DotGeneral(fwd=raw, dlhs=reused)
    dot = aqtlite.make_dot_general(cfg)
    x, w, g = normal((4, 32)), normal((32, 3), 1), normal((4, 3), 2)
    out, vjp = jax.vjp(lambda x, w: dot(x, w, MATMUL), x, w)
    w_q = aqtlite.quantize(w, NF4, 0).dequant()
    assert 0.03 < jnp.linalg.norm(w_q - w) / jnp.linalg.norm(w) < 0.15
    wanted = (x @ w_q, g @ w_q.T, x.T @ g)
    for got, one in zip((out, *vjp(g)), wanted, strict=True):
        np.testing.assert_allclose(got, one, rtol=1e-5, atol=1e-5)
    stacked = jax.vmap(lambda w: dot(x, w, MATMUL))(jnp.stack([w, 2 * w]))
    np.testing.assert_allclose(stacked[1], 2 * out, rtol=1e-6, atol=1e-6)


def test_zeros_one_element_and_what_is_not_finite():
    assert aqtlite.quantize(jnp.zeros(3), NF4, 0).dequant().tolist() == [0.0] * 3
    for value in (3.0, -3.0):
        q = aqtlite.quantize(jnp.array([value]), NF4, 0)
        assert q.dequant().tolist() == [value]
    x = jnp.array([[1.0, jnp.nan], [-jnp.inf, 1.0], [1.0, 2.0]])
    out = aqtlite.quantize(x, NF4, 1).dequant()
    assert jnp.isnan(out[:2]).all() and jnp.isfinite(out[2]).all()


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"bits": 3}, ValueError, "bits must be 4, got 3"),
        ({"bits": 4.0}, TypeError, "bits must be an int"),
        ({"clip_gradient": 1}, TypeError, "clip_gradient must be a bool"),
        ({"stochastic_rounding": 1}, TypeError, "stochastic_rounding must be a bool"),
    ],
)
def test_refuses(fields, error, match):
    with pytest.raises(error, match=match):
        NormalFloat(**fields)
