import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import config
from tests.common import assert_same, mostly_slow, normal, tensor

INT8 = tensor(8)


@pytest.mark.slow
def test_one_result_in_every_program():
    """10^7 values, in a process with several devices: see `one_result.py`."""
    dtypes = "float32", "bfloat16", "float16"
    script = pathlib.Path(__file__).with_name("one_result.py")
    flags = os.environ.get("XLA_FLAGS", "")
    env = os.environ | {
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(script.parents[2]), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, str(script), *dtypes], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [f"{dtype}: all equal" for dtype in dtypes]


PRODUCERS = {
    "times_constant": lambda x, y: x * 0.1,
    "over_constant": lambda x, y: x / 3.3,
    "times_scalar": lambda x, y: x * y[0, 0],
    "over_rows": lambda x, y: x / y[:, :1],
    "multiply_add": lambda x, y: x * y + y,
    "softmax": lambda x, y: jax.nn.softmax(x),
    "gelu_then_scaled": lambda x, y: jax.nn.gelu(x) * 0.7,
}


@pytest.mark.parametrize("producer", PRODUCERS)
def test_one_result_whatever_made_the_array(producer):
    """The array is an output too, so that all quantize the very same values."""
    cfgs = [tensor(8, calib_shared_axes=axes) for axes in (None, "per_tensor")]
    x, y = normal((512, 512)), normal((512, 512), 1)

    def quantized(made):
        return [aqtlite.quantize(made, cfg, 1) for cfg in cfgs]

    @jax.jit
    def program(x, y):
        made = PRODUCERS[producer](x, y)
        return made, quantized(made)

    made, fused = program(x, y)
    assert_same(fused, quantized(made))


def test_one_result_with_a_clipping_scale():
    calibration = aqtlite.calibration.AbsMax(clipping_scale=0.7)
    cfg = tensor(8, calibration=calibration)
    x = normal((512, 512))
    fused = jax.jit(lambda x: aqtlite.quantize(x, cfg, 1))(x)
    with jax.disable_jit():
        assert_same(fused, aqtlite.quantize(x, cfg, 1))
    bound = np.max(np.abs(np.asarray(x)), axis=1, keepdims=True) * np.float32(0.7)
    np.testing.assert_allclose(fused.scale, bound / 127.5, rtol=3e-7)


def test_exactly_what_the_grid_says():
    got = aqtlite.quantize(jnp.array([[1.0, -2.0], [0.5, 0.25]]), INT8, (1,))
    assert got.qvalue.dtype == jnp.int8 and got.qvalue.tolist() == [
        [64, -127],
        [127, 64],
    ]
    assert got.scale.shape == (2, 1) and got.scale.dtype == jnp.float32
    np.testing.assert_allclose(got.scale, [[2 / 127.5], [1 / 255]], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_dequantized_values_are_within_half_a_step(bits, dtype):
    x = normal((16, 33), dtype=dtype)
    got = aqtlite.quantize(x, tensor(bits), 1)
    assert got.dtype == dtype and got.dequant().dtype == dtype
    error = np.abs(np.asarray(got.dequant(), np.float64) - np.asarray(x, np.float64))
    slack = 1 + 2 * float(jnp.finfo(dtype).eps) * 2**bits
    assert np.all(error <= np.asarray(got.scale) * 0.5 * slack)


@pytest.mark.parametrize(
    ("axes", "calib_shared_axes", "shape"),
    [
        (1, None, (3, 1, 5)),
        (-1, None, (3, 4, 1)),
        ((0, 2), None, (1, 4, 1)),
        ((), None, (3, 4, 5)),
        ([1], None, (3, 1, 5)),
        (1, "per_tensor", (1, 1, 1)),
        (1, (0, -1), (1, 4, 1)),
    ],
)
def test_granularity(axes, calib_shared_axes, shape):
    cfg = tensor(8, calib_shared_axes=calib_shared_axes)
    got = aqtlite.quantize(normal((3, 4, 5)), cfg, axes)
    assert got.scale.shape == shape and got.shape == (3, 4, 5)


def test_zeros():
    got = aqtlite.quantize(jnp.zeros((2, 3)), INT8, 1)
    assert got.scale.tolist() == [[1.0], [1.0]]
    assert not np.any(got.qvalue) and not np.any(got.dequant())


def test_subnormal_channels_count_as_zero():
    x = jnp.full((1, 3), 1e-42, jnp.float32)
    assert aqtlite.quantize(x, INT8, 1).scale.tolist() == [[1.0]]


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,)])
def test_empty(shape):
    got = aqtlite.quantize(jnp.zeros(shape), INT8, -1)
    assert got.shape == shape and got.scale.shape == (*shape[:-1], 1)
    assert np.all(np.asarray(got.scale) == 1)


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
def test_what_is_not_finite_poisons_its_channel_alone(value):
    x = normal((3, 4))
    got = aqtlite.quantize(x.at[1, 2].set(value), INT8, 1).dequant()
    assert np.all(np.isnan(got[1]))
    clean = aqtlite.quantize(x, INT8, 1).dequant()
    np.testing.assert_array_equal(got[::2], clean[::2])


@pytest.mark.parametrize("bits", mostly_slow(range(1, 9), 1, 4, 8))
def test_what_is_not_finite_dequantizes_to_nan(bits):
    """On every grid, whatever integers it gives; NaN may have any bits."""
    grids = [
        {
            "preserve_zero": preserve_zero,
            "preserve_max_val": True,
            "stochastic_rounding": stochastic_rounding,
        }
        for preserve_zero in (None, False)
        for stochastic_rounding in (False, True)
    ]

    @jax.jit
    def dequantized(x):
        tensors = [tensor(bits, grid=grid) for grid in grids]
        return [aqtlite.quantize(x, how, 1).dequant() for how in tensors]

    payload = np.array([0x7FC00001], np.uint32).view(np.float32)[0]
    for size in (4, 8192):
        x = np.ones((3, size), np.float32)
        for value in (np.inf, -np.inf, np.nan, payload):
            x[1, 0] = value
            for out in dequantized(x):
                finite = np.isfinite(np.asarray(out))
                np.testing.assert_array_equal(finite.all(1), [True, False, True])
                assert np.isnan(np.asarray(out)[1]).all()


@pytest.mark.parametrize("magnitude", [1e-30, 1e30, 3e38])
def test_extreme_magnitudes(magnitude):
    x = jnp.array([[1.0, -0.5, 0.25]]) * magnitude
    got = aqtlite.quantize(x, INT8, 1)
    assert got.qvalue.tolist() == [[127, -64, 32]]


def test_float64():
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 8)))
        assert x.dtype == jnp.float64
        got = aqtlite.quantize(x, INT8, 1)
        assert got.dequant().dtype == jnp.float64
        assert_same(got.qvalue, aqtlite.quantize(x.astype("float32"), INT8, 1).qvalue)


def test_gradient_stops_at_the_scale_unless_asked_otherwise():
    def scales(x, **fields):
        return aqtlite.quantize(x, tensor(8, **fields), 0).scale.sum()

    x = jnp.array([1.0, -2.0])
    assert jax.grad(scales)(x).tolist() == [0.0, 0.0]
    free = jax.grad(lambda x: scales(x, scale_stop_grad=False))(x)
    np.testing.assert_allclose(free, [0.0, -1 / 127.5], rtol=1e-6)


def test_vmap():
    x = normal((3, 4, 5))
    assert_same(
        jax.vmap(lambda x: aqtlite.quantize(x, INT8, 1))(x),
        aqtlite.quantize(x, INT8, 2),
    )


@pytest.mark.parametrize(
    ("args", "error", "match"),
    [
        ((np.ones(3, np.int32), INT8, 0), TypeError, "x must be float32.*got int32"),
        ((np.ones(3), INT8.numerics, 0), TypeError, "must be a config.Tensor"),
        ((np.ones(3), config.Tensor(), 0), ValueError, "NoNumerics"),
        ((np.ones(3), INT8, 1), ValueError, r"axes=\(1,\) names an axis"),
        ((np.ones((3, 4)), INT8, (0, -2)), ValueError, "twice"),
        (
            (np.ones(3), tensor(8, calib_shared_axes=(1,)), 0),
            ValueError,
            r"tensor_config.calib_shared_axes=\(1,\) names an axis",
        ),
        (
            (np.ones((3, 4)), tensor(8, calib_shared_axes=(1, -1)), 0),
            ValueError,
            "twice",
        ),
    ],
)
def test_refuses(args, error, match):
    with pytest.raises(error, match=match):
        aqtlite.quantize(*args)


@pytest.mark.parametrize("po2_scale", [False, True])
@pytest.mark.parametrize("bits", [1, 2, 3])
def test_scales_whose_reciprocal_is_subnormal(bits, po2_scale):
    """On grids of few bits the scale of large values is itself as large."""
    x = jnp.array([1.0, -1.0, 0.9, -0.9]) * 3e38
    q = aqtlite.quantize(x, tensor(bits, po2_scale=po2_scale), 0)
    assert np.sign(q.qvalue).tolist() == [1, -1, 1, -1]
    assert np.all(np.isfinite(q.scale))
