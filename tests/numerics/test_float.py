import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import aqtlite
from aqtlite import config, noise
from aqtlite.calibration import AbsMax
from aqtlite.numerics import Float
from tests.common import MATMUL, normal

E4M3, E5M2 = (Float(exponent_bits=e, mantissa_bits=m) for e, m in ((4, 3), (5, 2)))
E2M1 = Float(exponent_bits=2, mantissa_bits=1)
DTYPES = {
    "float4_e2m1fn": E2M1,
    "float6_e2m3fn": Float(exponent_bits=2, mantissa_bits=3),
    "float6_e3m2fn": Float(exponent_bits=3, mantissa_bits=2),
    "float8_e3m4": Float(exponent_bits=3, mantissa_bits=4),
    "float8_e4m3": Float(exponent_bits=4, mantissa_bits=3, special_values="ieee"),
    "float8_e4m3b11fnuz": Float(
        exponent_bits=4, mantissa_bits=3, special_values="fnuz", bias=11
    ),
    "float8_e4m3fn": E4M3,
    "float8_e4m3fnuz": Float(exponent_bits=4, mantissa_bits=3, special_values="fnuz"),
    "float8_e5m2": E5M2,
    "float8_e5m2fnuz": Float(exponent_bits=5, mantissa_bits=2, special_values="fnuz"),
    "float16": Float(exponent_bits=5, mantissa_bits=10),
}
EMULATED = {
    "e1m2": (Float(exponent_bits=1, mantissa_bits=2), 3.5, "float8_e4m3fn"),
    "e3m0": (Float(exponent_bits=3, mantissa_bits=0), 16.0, "float8_e4m3fn"),
    "e3m3": (Float(exponent_bits=3, mantissa_bits=3), 30.0, "float8_e4m3fn"),
    "e4m7": (Float(exponent_bits=4, mantissa_bits=7), 255.0, "float16"),
    "e5m0": (Float(exponent_bits=5, mantissa_bits=0), 65536.0, "bfloat16"),
    "e5m10": (
        Float(exponent_bits=5, mantissa_bits=10, special_values="none"),
        131008.0,
        "float32",
    ),
}
GRIDS = {**DTYPES, **{name: grid for name, (grid, _, _) in EMULATED.items()}}
each = pytest.mark.parametrize("name", GRIDS)
each_dtype = pytest.mark.parametrize("name", DTYPES)


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def values_of(grid):
    """All values that are not negative, from the formula of the docstring."""
    e, m = grid.exponent_bits, grid.mantissa_bits
    values = [
        2.0 ** (max(exponent, 1) - grid.bias) * ((exponent > 0) + mantissa / 2**m)
        for exponent in range(2**e)
        for mantissa in range(2**m)
    ]
    values = np.array(values, np.float32)
    return values[values <= grid.bound]


def around(values):
    """Values, midpoints between them, and the floats next to midpoints."""
    middle = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    above, below = np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf)
    half = np.concatenate([values, middle, above, below])
    return np.concatenate([half, -half])


def rounded(grid, x, random=None):
    out = jax.jit(grid.round)(jnp.asarray(x, jnp.float32), random)
    assert out.dtype == grid.storage_dtype
    return np.asarray(out).astype(np.float32)


@each_dtype
def test_rounds_as_ml_dtypes(name):
    """All values, midpoints, their neighbours, minus zero, bfloat16, random bits."""
    grid, dtype = DTYPES[name], dtype_of(name)
    codes = np.arange(2 ** (1 + grid.exponent_bits + grid.mantissa_bits))
    values = codes.astype(f"uint{8 * dtype.itemsize}").view(dtype).astype(np.float32)
    values = np.unique(np.abs(values[np.isfinite(values)]))
    np.testing.assert_array_equal(values_of(grid), values)
    anything = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    of_bfloat16 = np.arange(2**16, dtype=np.uint32) << 16
    anything = np.concatenate([anything, of_bfloat16]).view(np.float32)
    anything = anything[np.isfinite(anything)]
    x = np.concatenate([around(values), anything])
    wanted = np.clip(x, -grid.bound, grid.bound).astype(dtype).astype(np.float32)
    got = rounded(grid, x)
    np.testing.assert_array_equal(got.view(np.int32), wanted.view(np.int32))


@each_dtype
def test_from_dtype(name):
    assert Float.from_dtype(name) == DTYPES[name]
    assert Float.from_dtype(dtype_of(name), clip_gradient=True).clip_gradient
    assert DTYPES[name].bound == float(ml_dtypes.finfo(dtype_of(name)).max)


@pytest.mark.parametrize("name", EMULATED)
def test_emulated_grids(name):
    """Midpoints go to the even mantissa: to even numbers of the spacing."""
    grid, bound, storage = EMULATED[name]
    assert grid.bound == bound and grid.storage_dtype == dtype_of(storage)
    values = values_of(grid)
    x = around(values)
    index = np.searchsorted(values, np.abs(x)).clip(1, len(values) - 1)
    below, above = values[index - 1].astype(np.float64), values[index]
    spacing = above - below
    is_even_below = (below / spacing) % 2 == 0
    distance = np.abs(x) - below
    up = (distance > spacing / 2) | ((distance == spacing / 2) & ~is_even_below)
    wanted = np.copysign(np.where(up, above, below), x).astype(np.float32)
    np.testing.assert_array_equal(rounded(grid, x), wanted)


@each
@pytest.mark.parametrize("is_stochastic", [False, True])
def test_what_is_not_finite_becomes_the_bound(name, is_stochastic):
    grid = dataclasses.replace(GRIDS[name], stochastic_rounding=is_stochastic)
    random = jnp.full(4, 2**32 - 1, jnp.uint32) if is_stochastic else None
    x = np.array([np.inf, -np.inf, np.nan, -3e38], np.float32)
    bound = grid.bound
    np.testing.assert_array_equal(rounded(grid, x, random), [bound, -bound] * 2)


@each
def test_values_stay_what_they_are(name):
    values = values_of(GRIDS[name])
    np.testing.assert_array_equal(rounded(GRIDS[name], values), values)
    assert values[0] == 0 and values[-1] == GRIDS[name].bound


@pytest.mark.parametrize("name", ["float4_e2m1fn", "float8_e4m3fn", "e3m0"])
def test_stochastic_rounding_goes_to_a_neighbour(name):
    usual = GRIDS[name]
    grid = dataclasses.replace(usual, stochastic_rounding=True)
    assert grid.needs_noise and not usual.needs_noise
    values = values_of(grid)
    values = np.concatenate([-values[:0:-1], values])
    x = np.linspace(-grid.bound, grid.bound, 4001, dtype=np.float32)
    x = np.concatenate([x, x / 100, values])
    random = noise.random_bits(x.shape, jnp.array([3, 7], jnp.uint32))
    got = rounded(grid, x, random)
    above = values[np.searchsorted(values, x, "left").clip(max=len(values) - 1)]
    below = values[np.searchsorted(values, x, "right") - 1]
    assert ((got == below) | (got == above)).all()
    assert (got == below).sum() > 1000 and (got == above).sum() > 1000


@pytest.mark.parametrize("value", [0.3, -17.7, 1e-5, -300.0])
def test_stochastic_rounding_is_unbiased(value):
    grid = Float.from_dtype("float8_e4m3fn", stochastic_rounding=True)
    count = 2**20
    random = noise.random_bits((count,), jnp.array([5, 7], jnp.uint32))
    got = rounded(grid, np.full(count, value, np.float32), random).astype(np.float64)
    spacing = max(2.0 ** (np.floor(np.log2(abs(value))) - 3), 2.0**-9)
    error = abs(got.mean() - float(np.float32(value)))
    probability = abs(value) / spacing % 1
    assert error < 5 * spacing * np.sqrt((probability + 1e-9) / count)


def test_stochastic_rounding_needs_noise():
    with pytest.raises(ValueError, match="needs random bits"):
        Float.from_dtype("float8_e5m2", stochastic_rounding=True).round(
            jnp.ones(2), None
        )


def test_gradient_mask():
    scaled = jnp.array([-448.5, -448.0, 0.0, 448.0, 449.0, jnp.nan])
    assert E4M3.gradient_mask(scaled) is None
    mask = Float.from_dtype("float8_e4m3fn", clip_gradient=True).gradient_mask(scaled)
    assert mask.tolist() == [False, True, True, True, False, False]


def test_gradients_stop_where_values_are_clipped():
    grid = Float(exponent_bits=4, mantissa_bits=3, clip_gradient=True)
    how = config.Tensor(numerics=grid, calibration=AbsMax(clipping_scale=0.5))
    cfg = config.DotGeneral(fwd=config.DotGeneralRaw(lhs=how))
    dot = aqtlite.make_dot_general(cfg)
    x = jnp.array([[1.0, 0.4, -0.7, 0.1]])
    grad = jax.grad(lambda x: dot(x, jnp.ones((4, 1)), MATMUL).sum())(x)
    assert grad.tolist() == [[0.0, 1.0, 0.0, 1.0]]


@pytest.mark.code("quick")
@pytest.mark.parametrize("name", ["float4_e2m1fn", "float8_e5m2", "e4m7"])
def test_contracts_the_values(name):
    """In float32, from operands whose products float32 holds."""
    how = config.Tensor(numerics=GRIDS[name], po2_scale=True)
    backward = config.DotGeneralRaw(rhs=config.Tensor(use_fwd_quant=True))
    raw = config.DotGeneralRaw(lhs=how, rhs=how)
    cfg = config.DotGeneral(fwd=raw, dlhs=backward, drhs=backward)
    dot = aqtlite.make_dot_general(cfg)
    x, w, g = normal((4, 32)), normal((32, 3), 1), normal((4, 3), 2)

    @jax.jit
    def run(x, w, g):
        out, vjp = jax.vjp(lambda x, w: dot(x, w, MATMUL), x, w)
        stacked = jax.vmap(lambda x: dot(x, w, MATMUL))(jnp.stack([x, x]))
        rounded = aqtlite.quantize(x, how, 1), aqtlite.quantize(w, how, 0)
        return out, vjp(g), stacked, [q.dequant() for q in rounded]

    out, gradients, stacked, (x_q, w_q) = run(x, w, g)
    np.testing.assert_allclose(out, x_q @ w_q, rtol=1e-5, atol=1e-5)
    for got, wanted in zip(gradients, (g @ w_q.T, x_q.T @ g), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(stacked[1], out, rtol=1e-6, atol=1e-6)


@pytest.mark.code("quick")
def test_gradients_in_e5m2():
    e5m2 = Float(exponent_bits=5, mantissa_bits=2, stochastic_rounding=True)
    forward = config.Tensor(numerics=E4M3)
    backward = config.DotGeneralRaw(
        lhs=config.Tensor(numerics=e5m2), rhs=config.Tensor(use_fwd_quant=True)
    )
    cfg = config.DotGeneral(
        fwd=config.DotGeneralRaw(lhs=forward, rhs=forward), dlhs=backward, drhs=backward
    )
    dot = aqtlite.make_dot_general(cfg)
    x, w, g = normal((4, 64)), normal((64, 3), 1), normal((4, 3), 2)

    @jax.jit
    def gradients(x, w, g):
        return jax.vjp(lambda x, w: dot(x, w, MATMUL), x, w)[1](g)

    for got, wanted in zip(gradients(x, w, g), (g @ w.T, x.T @ g), strict=True):
        error = jnp.linalg.norm(got - wanted) / jnp.linalg.norm(wanted)
        assert 0.001 < error < 0.2


@pytest.mark.code("quick")
@each
def test_zeros_one_element_and_what_is_not_finite(name):
    how = config.Tensor(numerics=GRIDS[name])
    assert aqtlite.quantize(jnp.zeros(3), how, 0).dequant().tolist() == [0.0] * 3
    one = aqtlite.quantize(jnp.array([-3.0]), how, 0).dequant()
    np.testing.assert_allclose(one, [-3.0], rtol=1e-6)
    x = jnp.array([[1.0, jnp.nan], [-jnp.inf, 1.0], [1.0, 2.0]])
    out = aqtlite.quantize(x, how, 1).dequant()
    assert jnp.isnan(out[:2]).all() and jnp.isfinite(out[2]).all()


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("float8_e4m3fn", "fp8_e4m3"),
        ("float8_e4m3", "fp8_e4m3_ieee"),
        ("float8_e4m3b11fnuz", "fp8_e4m3b11_fnuz"),
        ("float4_e2m1fn", "fp4_e2m1"),
    ],
)
def test_names(name, wanted):
    assert DTYPES[name].name == wanted


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"exponent_bits": 0}, ValueError, "exponent_bits must be from 1 to 5, got 0"),
        ({"exponent_bits": 6}, ValueError, "exponent_bits must be from 1 to 5, got 6"),
        ({"mantissa_bits": 11}, ValueError, "mantissa_bits must be from 0 to 10"),
        ({"mantissa_bits": 3.0}, TypeError, "mantissa_bits must be an int"),
        ({"bias": 32}, ValueError, "bias must be from 0 to 31, got 32"),
        ({"bias": True}, TypeError, "bias must be an int"),
        ({"bias": 20}, ValueError, "largest value of .* has to be 1 or more"),
        ({"special_values": "inf"}, ValueError, "'inf' is not known; give one of"),
        ({"stochastic_rounding": 1}, TypeError, "stochastic_rounding must be a bool"),
        ({"clip_gradient": 1}, TypeError, "clip_gradient must be a bool"),
    ],
)
def test_refuses(fields, error, match):
    with pytest.raises(error, match=match):
        Float(**{"exponent_bits": 4, "mantissa_bits": 3, **fields})


@pytest.mark.parametrize("dtype", ["float32", "int8", "float8_e8m0fnu"])
def test_refuses_other_dtypes(dtype):
    with pytest.raises(ValueError, match=f"{dtype} is no dtype of a Float grid"):
        Float.from_dtype(dtype)
