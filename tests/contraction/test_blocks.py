"""Sub-channel blocks: what is stored, and contractions tile by tile."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import aqtlite
from aqtlite import calibration, config, numerics
from aqtlite.config import Blocks, DotGeneral, DotGeneralRaw, Tensor
from tests.common import mostly_slow, normal, quick_jit, relative_error

pytestmark = pytest.mark.code("quick")

INT8 = numerics.IntSymmetric(bits=8)
E4M3 = numerics.Float.from_dtype("float8_e4m3fn")
MATMUL = (((1,), (0,)), ((), ()))
FORMATS = {
    "mxfp8": config.mxfp8,
    "mxfp6": config.mxfp6,
    "mxfp4": config.mxfp4,
    "mxint8": config.mxint8,
    "nvfp4": config.nvfp4,
    "block_fp8": functools.partial(config.block_fp8, 16),
}


def spread(shape, seed=0):
    """Magnitudes that differ along the last axis but one, as blocks are there for."""
    x = normal(shape, seed)
    return x * jnp.exp(2 * normal((shape[-2], 1), seed + 1))


@functools.partial(quick_jit, static_argnums=(1, 2))
def dequantized(x, tensor, axes):
    return aqtlite.quantize(x, tensor, axes).dequant()


def int8(**blocks):
    return Tensor(numerics=INT8, blocks=Blocks(**blocks))


class TestStored:
    @pytest.mark.code("users")
    def test_each_block_is_quantized_alone(self):
        x = spread((8, 12))
        q = aqtlite.quantize(x, int8(size=4), 0)
        assert q.scale.shape == (2, 12) and q.blocks == (4, 1)
        for block in range(2):
            rows = slice(4 * block, 4 * block + 4)
            alone = aqtlite.quantize(x[rows], Tensor(numerics=INT8), 0)
            np.testing.assert_array_equal(q.qvalue[rows], alone.qvalue)
            np.testing.assert_array_equal(q.scale[block], alone.scale[0])

    @pytest.mark.code("users")
    def test_two_dimensional(self):
        x = spread((8, 12))
        q = aqtlite.quantize(x, int8(count=2, remaining_size=3), 0)
        assert q.scale.shape == (2, 4) and q.blocks == (4, 3)
        one = aqtlite.quantize(
            x[4:, 3:6], Tensor(numerics=INT8, calib_shared_axes="per_tensor"), 0
        )
        np.testing.assert_array_equal(q.qvalue[4:, 3:6], one.qvalue)
        assert q.scale[1, 1] == one.scale[0, 0]

    def test_further_contracting_axes_are_in_other_blocks(self):
        q = aqtlite.quantize(normal((3, 8, 5)), int8(size=4), (0, 1))
        assert q.scale.shape == (3, 2, 5)

    def test_blocks_that_span_further_contracting_axes(self):
        x = spread((3, 8, 5))
        q = aqtlite.quantize(x, int8(size=4, span_others=True), (0, 1))
        assert q.scale.shape == (1, 2, 5) and q.blocks == (3, 4, 1)
        one = aqtlite.quantize(x[:, 4:], Tensor(numerics=INT8), (0, 1))
        np.testing.assert_array_equal(q.qvalue[:, 4:], one.qvalue)
        np.testing.assert_array_equal(q.scale[:, 1:], one.scale)

    @pytest.mark.code("users")
    def test_one_block_and_blocks_of_one(self):
        x = spread((8, 12))
        one = aqtlite.quantize(x, int8(size=8), 0)
        np.testing.assert_array_equal(
            one.qvalue, aqtlite.quantize(x, Tensor(numerics=INT8), 0).qvalue
        )
        each = aqtlite.quantize(x, int8(size=1), 0)
        assert each.scale.shape == x.shape
        np.testing.assert_array_equal(jnp.abs(each.qvalue), 127)

    @pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
    def test_empty_axes(self, shape):
        q = aqtlite.quantize(jnp.zeros(shape), int8(size=4), 0)
        assert q.dequant().shape == shape

    def test_a_nan_poisons_its_block_alone(self):
        x = spread((8, 3)).at[5, 1].set(jnp.nan)
        got = dequantized(x, int8(size=4), 0)
        assert jnp.isnan(got[4:, 1]).all() and jnp.isnan(got).sum() == 4

    def test_zero_points(self):
        tensor = Tensor(
            numerics=numerics.IntAffine(),
            calibration=calibration.MinMax(),
            blocks=Blocks(size=4),
        )
        x = jnp.abs(spread((8, 12)))
        q = aqtlite.quantize(x, tensor, 0)
        assert q.zero_point.shape == q.scale.shape == (2, 12)
        step = jnp.repeat(q.scale, 4, 0)
        assert (jnp.abs(q.dequant() - x) <= 0.501 * step).all()

    @pytest.mark.code("users")
    @pytest.mark.parametrize(
        ("grid", "dtype"),
        [
            ("float8_e4m3fn", ml_dtypes.float8_e4m3fn),
            ("float8_e5m2", ml_dtypes.float8_e5m2),
            ("float6_e2m3fn", ml_dtypes.float6_e2m3fn),
            ("float6_e3m2fn", ml_dtypes.float6_e3m2fn),
            ("float4_e2m1fn", ml_dtypes.float4_e2m1fn),
        ],
    )
    def test_microscaling_against_ml_dtypes(self, grid, dtype):
        """Section 6.3 of the specification: shared exponent, then saturating casts."""
        x = np.asarray(spread((64, 5)))
        tensor = Tensor(
            numerics=numerics.Float.from_dtype(grid),
            blocks=Blocks(size=32),
            scale_dtype="float8_e8m0fnu",
        )
        q = aqtlite.quantize(x, tensor, 0)
        pieces = x.reshape(2, 32, 5)
        emax = np.floor(np.log2(float(ml_dtypes.finfo(dtype).max)))
        exponent = np.floor(np.log2(np.abs(pieces).max(1))) - emax
        np.testing.assert_array_equal(q.scale, 2.0**exponent)
        largest = float(ml_dtypes.finfo(dtype).max)
        scaled = np.clip(pieces / 2.0 ** exponent[:, None], -largest, largest)
        wanted = scaled.astype(dtype).astype(np.float32).reshape(x.shape)
        np.testing.assert_array_equal(q.qvalue.astype(jnp.float32), wanted)


CASES = {
    "lhs": (int8(size=4), Tensor(numerics=INT8)),
    "rhs": (Tensor(numerics=INT8), int8(count=4)),
    "other sizes": (int8(size=4), int8(size=8)),
    "squares": (int8(size=4), int8(size=8, remaining_size=3)),
    "weights alone": (Tensor(), int8(size=4, remaining_size=3)),
    "floats": (
        Tensor(numerics=numerics.Float.from_dtype("float8_e4m3fn")),
        Tensor(
            numerics=numerics.Float.from_dtype("float8_e4m3fn"),
            blocks=Blocks(size=4),
        ),
    ),
    "tables": (
        Tensor(),
        Tensor(numerics=numerics.NormalFloat(bits=4), blocks=Blocks(size=4)),
    ),
}


class TestContraction:
    @pytest.mark.parametrize("case", CASES)
    def test_is_that_of_the_dequantized_operands(self, case):
        lhs, rhs = CASES[case]
        x, w = normal((6, 16)), spread((16, 12))
        cfg = DotGeneral(fwd=DotGeneralRaw(lhs=lhs, rhs=rhs))
        dot = aqtlite.make_dot_general(cfg)
        x_q = dequantized(x, lhs, 1) if lhs.is_quantized else x
        wanted = x_q @ dequantized(w, rhs, 0)

        @quick_jit
        def run(x, w):
            out, pullback = jax.vjp(lambda x, w: dot(x, w, MATMUL), x, w)
            return out, pullback(out)[1]

        out, gradient = run(x, w)
        assert relative_error(out, wanted) < 3e-6
        assert relative_error(gradient, x.T @ out) < 1e-5

    @pytest.mark.parametrize("spans", [(False, False), (True, False), (True, True)])
    def test_several_contracting_axes_and_batches(self, spans):
        x, w = normal((2, 3, 4, 8)), normal((8, 2, 5, 4), 1)
        dims = (((2, 3), (3, 0)), ((0,), (1,)))
        lhs, rhs = (
            int8(size=size, span_others=span)
            for size, span in zip((4, 2), spans, strict=True)
        )
        cfg = DotGeneral(fwd=DotGeneralRaw(lhs=lhs, rhs=rhs))
        got = aqtlite.make_dot_general(cfg)(x, w, dims)
        x_q = dequantized(x, lhs, (2, 3))
        w_q = dequantized(w, rhs, (3, 0))
        wanted = jax.lax.dot_general(x_q, w_q, dims)
        assert relative_error(got, wanted) < 3e-6

    @pytest.mark.parametrize("use_fwd_quant", [False, True])
    @pytest.mark.parametrize("remaining_size", [1, 4])
    def test_gradients(self, use_fwd_quant, remaining_size):
        blocks = Blocks(size=4, remaining_size=remaining_size)
        x, w, g = normal((8, 16)), normal((16, 12), 1), normal((8, 12), 2)
        backward = DotGeneralRaw(
            lhs=int8(size=4), rhs=Tensor(numerics=INT8, use_fwd_quant=use_fwd_quant)
        )
        weight = Tensor(numerics=INT8, blocks=blocks)
        cfg = DotGeneral(
            fwd=DotGeneralRaw(lhs=int8(size=4), rhs=weight),
            dlhs=backward,
            drhs=backward,
        )
        dot = aqtlite.make_dot_general(cfg)

        @quick_jit
        def gradients(x, w, g):
            return jax.vjp(lambda x, w: dot(x, w, MATMUL), x, w)[1](g)

        dlhs, drhs = gradients(x, w, g)
        assert relative_error(dlhs, g @ w.T) < 0.02
        assert relative_error(drhs, x.T @ g) < 0.02
        if use_fwd_quant and remaining_size > 1:
            # The integers of the forward pass, in their squares.
            wanted = dequantized(g, int8(size=4), 1) @ dequantized(w, weight, 0).T
            assert relative_error(dlhs, wanted) < 3e-6

    @pytest.mark.code("users")
    @pytest.mark.parametrize("stored", [INT8, E4M3, numerics.NormalFloat()])
    @pytest.mark.parametrize(
        "own",
        [
            pytest.param(INT8, marks=pytest.mark.slow),
            numerics.IntSymmetric(bits=2),
            pytest.param(E4M3, marks=pytest.mark.slow),
        ],
    )
    def test_the_own_numerics_beside_use_fwd_quant(self, stored, own):
        """Scales of blocks do not move: what they stand for is quantized anew."""
        weight = Tensor(numerics=stored, blocks=Blocks(size=4))
        own = Tensor(numerics=own)
        backward = DotGeneralRaw(
            lhs=Tensor(numerics=INT8),
            rhs=dataclasses.replace(own, use_fwd_quant=True),
        )
        cfg = DotGeneral(fwd=DotGeneralRaw(rhs=weight), dlhs=backward)
        x, w, g = normal((4, 16)), normal((16, 8), 1), normal((4, 8), 2)
        dot = aqtlite.make_dot_general(cfg)
        (got,) = jax.vjp(lambda x: dot(x, w, MATMUL), x)[1](g)
        fresh = DotGeneral(fwd=dataclasses.replace(backward, rhs=own))
        transposed = (((1,), (1,)), ((), ()))
        wanted = aqtlite.make_dot_general(fresh)(
            g, dequantized(w, weight, 0), transposed
        )
        np.testing.assert_array_equal(got, wanted)
        rows = dict(
            line.split(None, 1) for line in config.describe(cfg).split("\n") if line
        )
        assert f"fwd's {stored.name}, {own.numerics.name} " in rows["dlhs.rhs"]

    @pytest.mark.parametrize(
        "name", mostly_slow(FORMATS, "mxfp8", "nvfp4", "block_fp8")
    )
    def test_formats(self, name):
        cfg = FORMATS[name]()
        assert config.from_json(config.to_json(cfg)) == cfg
        assert "blocks" in config.describe(cfg)
        x, w, g = normal((32, 64)), normal((64, 48), 1), normal((32, 48), 2)
        dot = aqtlite.make_dot_general(cfg)

        @quick_jit
        def run(x, w, g):
            out, pullback = jax.vjp(lambda x, w: dot(x, w, MATMUL), x, w)
            return out, *pullback(g)

        # Largest errors of gradients in 4 bits depend on the noise: .16 to .33.
        limit = {"mxfp4": 0.35, "nvfp4": 0.25, "mxint8": 0.03}.get(name, 0.09)
        wanted = x @ w, g @ w.T, x.T @ g
        for one, float_one in zip(run(x, w, g), wanted, strict=True):
            assert relative_error(one, float_one) < limit
        fwd = cfg.fwd
        quantized = dequantized(x, fwd.lhs, 1) @ dequantized(w, fwd.rhs, 0)
        assert relative_error(run(x, w, g)[0], quantized) < 3e-6

    def test_scales_of_the_specification_clip(self):
        """The largest element, 500, is above 448, and above 6 where 8 is the power."""
        x = jnp.full((32, 1), 500.0)
        for preset, largest in ((config.mxfp8, 448), (config.mxfp4, 384)):
            clipped, whole = (
                dequantized(x, preset(may_clip=may_clip).fwd.rhs, 0)
                for may_clip in (True, False)
            )
            assert clipped.max() == largest and whole.max() == 512
        with pytest.raises(TypeError, match="may_clip must be a bool, got 1"):
            config.mxfp8(may_clip=1)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_half_precision(self, dtype):
        x, w = normal((8, 32), dtype=dtype), normal((32, 12), 1, dtype)
        dot = aqtlite.make_dot_general(config.mxint8())
        got = jax.jit(jax.grad(lambda w: dot(x, w, MATMUL).sum()))(w)
        assert got.dtype == dtype
        wanted = jnp.broadcast_to(x.astype("float32").sum(0)[:, None], w.shape)
        assert relative_error(got.astype("float32"), wanted) < 0.05

    def test_transformations(self):
        dot = aqtlite.make_dot_general(config.mxint8())
        x, w = normal((2, 4, 32)), normal((32, 8), 1)

        def one(x):
            return dot(x, w, MATMUL)

        each = jnp.stack([one(row) for row in x])
        assert relative_error(jax.vmap(one)(x), each) < 1e-6
        assert relative_error(jax.lax.map(jax.checkpoint(one), x), each) < 1e-6

    def test_does_not_divide(self):
        cfg = DotGeneral(fwd=DotGeneralRaw(rhs=int8(size=5)))
        with pytest.raises(ValueError, match=r"fwd.rhs.blocks.size=5 does not .* 16;"):
            aqtlite.make_dot_general(cfg)(normal((6, 16)), normal((16, 12)), MATMUL)
        fitting = dataclasses.replace(cfg.fwd.rhs, blocks=Blocks(size=5, fit=True))
        q = aqtlite.quantize(normal((16, 12)), fitting, 0)
        assert q.blocks == (4, 1)

    @pytest.mark.parametrize("side", ["lhs", "rhs"])
    def test_affine_squares_of_one_block(self, side):
        """The contracting axis is one block, the other one is several."""
        affine = Tensor(
            numerics=numerics.IntAffine(),
            calibration=calibration.MinMax(),
            blocks=Blocks(size=16, remaining_size=2),
        )
        cfg = DotGeneral(fwd=DotGeneralRaw(**{"lhs": int8(size=4), side: affine}))
        x, w = jnp.abs(normal((6, 16))), normal((16, 12))
        cfg_lhs, cfg_rhs = cfg.fwd.lhs, cfg.fwd.rhs
        wanted = dequantized(x, cfg_lhs, 1) @ (
            dequantized(w, cfg_rhs, 0) if cfg_rhs.is_quantized else w
        )
        got = aqtlite.make_dot_general(cfg)(x, w, MATMUL)
        assert relative_error(got, wanted) < 3e-6

    def test_a_size_that_is_not_known(self):
        dot = aqtlite.make_dot_general(DotGeneral(fwd=DotGeneralRaw(rhs=int8(size=4))))
        (size,) = jax.export.symbolic_shape("k")
        x, w = (
            jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((6, size), (size, 8))
        )
        with pytest.raises(ValueError, match=r"fwd.rhs.blocks.size: blocks need axes"):
            jax.export.export(jax.jit(lambda x, w: dot(x, w, MATMUL)))(x, w)

    def test_local_aqt_and_blocks(self):
        tiles = config.LocalAqt(contraction_axis_shard_count=2)
        with pytest.raises(ValueError, match=r"local_aqt and lhs.blocks=.* both say"):
            DotGeneralRaw(lhs=int8(size=4), local_aqt=tiles)

    @pytest.mark.code("users")
    def test_a_given_qtensor(self):
        x, w = normal((6, 16)), spread((16, 12))
        cfg = DotGeneral(fwd=DotGeneralRaw(lhs=Tensor(numerics=INT8), rhs=int8(size=4)))
        dot = aqtlite.make_dot_general(cfg)
        q = aqtlite.quantize(w, cfg.fwd.rhs, 0)
        np.testing.assert_array_equal(dot(x, q, MATMUL), dot(x, w, MATMUL))
        stored = q.stored_in((1, 0))
        np.testing.assert_array_equal(dot(x, stored, MATMUL), dot(x, w, MATMUL))
