import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite import calibration, config, numerics
from aqtlite.config import DotGeneral, DotGeneralRaw, LocalAqt, Tensor, describe

pytestmark = pytest.mark.code("quick")

FLOAT = Tensor()
INT8 = Tensor(numerics=numerics.IntSymmetric(bits=8))
FAKE = Tensor(numerics=numerics.IntSymmetric(bits=8), use_fake_quant=True)
NOISY = Tensor(
    numerics=numerics.IntSymmetric(
        bits=8, preserve_max_val=True, stochastic_rounding=True
    )
)
REUSED = Tensor(use_fwd_quant=True)
BOTH = DotGeneralRaw(lhs=INT8, rhs=INT8)


@pytest.mark.parametrize("dtype", ["float32", jnp.float32, np.float32])
def test_dtypes_are_normalised(dtype):
    raw = DotGeneralRaw(dg_in_dtype=dtype)
    assert isinstance(raw.dg_in_dtype, np.dtype)
    assert raw == DotGeneralRaw(dg_in_dtype=np.dtype("float32"))
    assert hash(raw) == hash(DotGeneralRaw(dg_in_dtype=np.dtype("float32")))


def test_byte_order_is_normalised():
    assert DotGeneralRaw(dg_in_dtype=">f4") == DotGeneralRaw(dg_in_dtype="float32")


def test_float64_is_not_taken_for_none():
    assert DotGeneralRaw(dg_in_dtype="float64") != DotGeneralRaw()
    assert DotGeneralRaw(dg_accumulator_dtype="float64") != DotGeneralRaw()


def test_is_a_static_argument():
    traces = []

    def double(x, cfg):
        traces.append(cfg)
        return 2 * x

    jitted = jax.jit(double, static_argnames="cfg")
    jitted(1.0, cfg=DotGeneral(fwd=BOTH))
    jitted(1.0, cfg=DotGeneral(fwd=BOTH))
    assert len(traces) == 1


def test_is_quantized():
    assert not DotGeneral().is_quantized
    for name in ("fwd", "dlhs", "drhs"):
        for side in ("lhs", "rhs"):
            assert DotGeneral(**{name: DotGeneralRaw(**{side: INT8})}).is_quantized


@pytest.mark.parametrize(
    "make",
    [
        lambda: DotGeneralRaw(lhs=INT8, rhs=INT8, dg_accumulator_dtype=jnp.int32),
        lambda: DotGeneralRaw(
            lhs=INT8, rhs=INT8, dg_in_dtype="float32", dg_accumulator_dtype="float32"
        ),
        lambda: DotGeneral(
            fwd=BOTH,
            dlhs=DotGeneralRaw(lhs=NOISY, rhs=REUSED, dg_accumulator_dtype="int32"),
            drhs=DotGeneralRaw(
                lhs=NOISY,
                rhs=REUSED,
                local_aqt=LocalAqt(contraction_axis_shard_count=4),
            ),
        ),
        lambda: DotGeneral(
            fwd=DotGeneralRaw(lhs=INT8, rhs=FAKE),
            dlhs=DotGeneralRaw(
                lhs=INT8,
                rhs=Tensor(numerics=INT8.numerics, use_fwd_quant=True),
                dg_accumulator_dtype="int32",
            ),
        ),
        lambda: DotGeneral(fwd=DotGeneralRaw(rhs=FAKE), dlhs=DotGeneralRaw(rhs=REUSED)),
    ],
)
def test_accepts(make):
    make()


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"lhs": None}, TypeError, "^lhs must be a config.Tensor"),
        ({"rhs": INT8.numerics}, TypeError, "^rhs must be a config.Tensor"),
        ({"dg_in_dtype": "flaot32"}, TypeError, "^dg_in_dtype must be a dtype"),
        ({"dg_accumulator_dtype": 32}, TypeError, "^dg_accumulator_dtype must be a"),
        ({"local_aqt": 4}, TypeError, "^local_aqt must be a config.LocalAqt"),
        ({"dg_in_dtype": "int8"}, ValueError, "^dg_in_dtype='int8' is not a floating"),
        ({"dg_accumulator_dtype": "int8"}, ValueError, "'int8' is not available; use"),
        ({"dg_accumulator_dtype": bool}, ValueError, "'bool' is not available; use"),
        (
            {"dg_accumulator_dtype": "int32", "dg_in_dtype": "float32"},
            ValueError,
            "needs integer operands, but dg_in_dtype='float32' casts them",
        ),
        (
            {"dg_accumulator_dtype": "int32", "lhs": FLOAT},
            ValueError,
            "two integer operands, but lhs is not quantized; set lhs.numerics, or",
        ),
        (
            {"dg_accumulator_dtype": "int32", "rhs": FAKE},
            ValueError,
            "but rhs has use_fake_quant=True; set rhs.use_fake_quant=False",
        ),
        (
            {"lhs": REUSED},
            ValueError,
            "^lhs.use_fwd_quant=True: only dlhs.rhs and drhs.rhs .*set lhs.use_fwd",
        ),
        (
            {
                "local_aqt": LocalAqt(contraction_axis_shard_count=2),
                "rhs": Tensor(numerics=INT8.numerics, calib_shared_axes=(0,)),
            },
            ValueError,
            r"^local_aqt and rhs.calib_shared_axes=\(0,\) both say",
        ),
        (
            {
                "local_aqt": LocalAqt(contraction_axis_shard_count=2),
                "lhs": FLOAT,
                "rhs": FLOAT,
            },
            ValueError,
            "^local_aqt would have no effect",
        ),
        (
            {
                "lhs": FLOAT,
                "rhs": Tensor(numerics=INT8.numerics, use_fwd_quant=True),
                "local_aqt": LocalAqt(contraction_axis_shard_count=2),
            },
            ValueError,
            "^local_aqt would have no effect.* without rhs.use_fwd_quant",
        ),
    ],
)
def test_raw_refuses(arguments, error, match):
    with pytest.raises(error, match=match):
        DotGeneralRaw(**{"lhs": INT8, "rhs": INT8, **arguments})


def test_any_operand_may_be_rounded_stochastically():
    assert not DotGeneral(fwd=BOTH).needs_noise
    for name in ("fwd", "dlhs", "drhs"):
        for side in ("lhs", "rhs"):
            assert DotGeneral(**{name: DotGeneralRaw(**{side: NOISY})}).needs_noise


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"fwd": None}, TypeError, "^fwd must be a config.DotGeneralRaw"),
        ({"dlhs": INT8}, TypeError, "^dlhs must be a config.DotGeneralRaw"),
        (
            {"fwd": DotGeneralRaw(rhs=REUSED)},
            ValueError,
            "^fwd.rhs.use_fwd_quant=True: only dlhs.rhs and drhs.rhs",
        ),
        (
            {
                "fwd": DotGeneralRaw(
                    lhs=INT8, local_aqt=LocalAqt(contraction_axis_shard_count=2)
                )
            },
            ValueError,
            "^fwd.local_aqt: sub-channel tiles .* only dlhs and drhs take local_aqt",
        ),
        (
            {"fwd": DotGeneralRaw(lhs=INT8), "dlhs": DotGeneralRaw(rhs=REUSED)},
            ValueError,
            "^dlhs.rhs.use_fwd_quant=True .*fwd.rhs is not quantized; set fwd.rhs.num",
        ),
        (
            {"fwd": DotGeneralRaw(rhs=INT8), "drhs": DotGeneralRaw(rhs=REUSED)},
            ValueError,
            "^drhs.rhs.use_fwd_quant=True .*fwd.lhs is not quantized; set fwd.lhs.num",
        ),
        (
            {
                "fwd": DotGeneralRaw(lhs=INT8, rhs=FAKE),
                "dlhs": DotGeneralRaw(
                    lhs=INT8, rhs=REUSED, dg_accumulator_dtype="int32"
                ),
            },
            ValueError,
            "^dlhs.dg_accumulator_dtype='int32' .*but dlhs.rhs is not quantized; set "
            "dlhs.rhs.numerics, or leave dlhs.dg_accumulator_dtype None",
        ),
    ],
)
def test_dot_general_refuses(arguments, error, match):
    with pytest.raises(error, match=match):
        DotGeneral(**arguments)


@pytest.mark.parametrize(
    ("count", "error"), [(0, ValueError), (True, TypeError), (2.0, TypeError)]
)
def test_local_aqt_refuses(count, error):
    with pytest.raises(error, match="contraction_axis_shard_count must be"):
        LocalAqt(contraction_axis_shard_count=count)


def test_refuses_dtypes_that_lose_integers():
    int8 = Tensor(numerics=numerics.IntSymmetric(bits=8))
    with pytest.raises(ValueError, match="does not hold the int8 integers of lhs"):
        DotGeneralRaw(lhs=int8, rhs=int8, dg_in_dtype=jnp.float8_e4m3fn)
    with pytest.raises(ValueError, match="'float16' overflows"):
        DotGeneralRaw(lhs=int8, rhs=int8, dg_accumulator_dtype=jnp.float16)
    narrow = Tensor(numerics=numerics.IntSymmetric(bits=4))
    DotGeneralRaw(lhs=narrow, rhs=narrow, dg_in_dtype=jnp.float8_e4m3fn)


@pytest.mark.parametrize(
    ("out", "error", "match"),
    [
        (8, TypeError, "^out must be a config.Tensor"),
        (Tensor(use_fwd_quant=True), ValueError, "^out.use_fwd_quant=True: only"),
        (
            NOISY,
            ValueError,
            "^out.numerics=.* rounds stochastically",
        ),
        (
            Tensor(
                numerics=numerics.IntSymmetric(bits=8),
                calibration=calibration.LSQ(),
            ),
            ValueError,
            "^out.calibration=.* is learned",
        ),
    ],
)
def test_out_refuses(out, error, match):
    with pytest.raises(error, match=match):
        DotGeneral(out=out)


def test_a_star_does_not_reach_the_result():
    """What is said of all operands leaves it in float."""
    cfg = config.update(config.fully_quantized(), {"fwd.*.po2_scale": True})
    assert not cfg.out.is_quantized
    only = DotGeneral(out=INT8)
    assert only.is_quantized and config.from_json(config.to_json(only)) == only
    assert hash(only) != hash(DotGeneral()) and only != DotGeneral()
    assert "out       result    int8 ±127.5  AbsMax       per-row" in describe(only)
