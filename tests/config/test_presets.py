import itertools

import numpy as np
import pytest

import aqtlite
from aqtlite import calibration, config, numerics, statistics
from aqtlite.config.recipes import block_formats, post_training, training
from tests.common import MATMUL, normal

pytestmark = pytest.mark.code("quick")


def test_fully_quantized_default():
    cfg = config.fully_quantized()
    int8 = numerics.IntSymmetric(bits=8)
    gradient = numerics.IntSymmetric(
        bits=8, preserve_max_val=True, stochastic_rounding=True
    )
    assert cfg.fwd.lhs == cfg.fwd.rhs == config.Tensor(numerics=int8)
    for backward in (cfg.dlhs, cfg.drhs):
        assert backward.lhs == config.Tensor(numerics=gradient)
        assert backward.rhs == config.Tensor(numerics=int8, use_fwd_quant=True)
        assert backward.dg_accumulator_dtype is None


def test_fully_quantized_every_combination_is_valid():
    widths = (None, *range(1, 9))
    flags = (False, True)
    for fwd, bwd, reuse, noise in itertools.product(widths, widths, flags, flags):
        cfg = config.fully_quantized(
            fwd_bits=fwd,
            bwd_bits=bwd,
            use_fwd_quant=reuse,
            use_stochastic_rounding=noise,
        )
        assert cfg.is_quantized == (fwd is not None or bwd is not None)
        assert cfg.dlhs.rhs.use_fwd_quant == (reuse and fwd is not None)
        assert cfg.dlhs.lhs.needs_noise == (noise and bwd is not None)


def test_weight_only():
    cfg = config.weight_only(bits=4)
    assert cfg.fwd.rhs.numerics == numerics.IntSymmetric(bits=4)
    assert not cfg.fwd.lhs.is_quantized
    assert cfg.dlhs.rhs == config.Tensor(use_fwd_quant=True)
    assert cfg.drhs == config.DotGeneralRaw()


def test_qat():
    cfg = config.qat(bits=4)
    assert cfg.fwd.lhs == cfg.fwd.rhs
    assert cfg.fwd.rhs.numerics == numerics.IntSymmetric(bits=4)
    assert not cfg.dlhs.lhs.is_quantized and not cfg.drhs.lhs.is_quantized


def test_w4a8():
    cfg = config.w4a8(bwd_bits=None)
    assert cfg.fwd.lhs.numerics == numerics.IntSymmetric(bits=8)
    assert cfg.fwd.rhs.numerics == numerics.IntSymmetric(bits=4)
    assert not cfg.dlhs.lhs.is_quantized
    assert config.w4a8().dlhs.lhs.needs_noise


def test_static_int8():
    cfg = config.static_int8()
    assert cfg.fwd.lhs.calibration == calibration.MovingAverage()
    assert cfg.fwd.lhs.calib_shared_axes == "per_tensor"
    assert cfg.fwd.rhs == config.fully_quantized().fwd.rhs
    assert config.from_json(config.to_json(cfg)) == cfg
    assert "MovingAverage" in config.describe(cfg)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("name", ["moving_average", "max", "percentile", "mse"])
def test_static_int8_by_name(name, affine):
    cfg = config.static_int8(name, affine=affine, bwd_bits=None)
    x, rhs = normal((16, 8)) + 1, normal((8, 4))
    dot = aqtlite.make_dot_general(cfg)
    states = statistics.init_states(cfg, x, rhs, MATMUL)
    states = statistics.update_states(cfg, states, x, rhs, MATMUL)
    out = dot(x, rhs, MATMUL, states=states)
    assert np.abs(out - x @ rhs).mean() < 0.05
    assert config.from_json(config.to_json(cfg)) == cfg


def test_fp8():
    cfg = config.fp8()
    e4m3, e5m2 = (
        numerics.Float.from_dtype(name) for name in ("float8_e4m3fn", "float8_e5m2")
    )
    forward = config.Tensor(numerics=e4m3)
    assert cfg.fwd == config.DotGeneralRaw(lhs=forward, rhs=forward)
    assert cfg.dlhs.lhs == cfg.drhs.lhs == config.Tensor(numerics=e5m2)
    assert cfg.dlhs.rhs.use_fwd_quant and cfg.drhs.rhs.use_fwd_quant
    assert config.describe(cfg).count("float8") == 3
    for fields in (
        {},
        {"delayed": True},
        {"per_tensor": True, "use_stochastic_rounding": True},
        {"forward": "float8_e4m3fnuz", "gradient": "float8_e5m2fnuz"},
    ):
        cfg = config.fp8(**fields)
        assert config.from_json(config.to_json(cfg)) == cfg
        assert cfg.fwd.lhs.calibration.has_state == ("delayed" in fields)
        assert cfg.dlhs.lhs.needs_noise == ("use_stochastic_rounding" in fields)


def test_unquantized():
    assert config.unquantized() == config.DotGeneral()


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (
            lambda: config.fully_quantized(fwd_bits=17),
            ValueError,
            "bits .*from 1 to 16",
        ),
        (lambda: config.fully_quantized(bwd_bits=0), ValueError, "bits .*from 1 to 16"),
        (lambda: config.fully_quantized(fwd_bits="8"), TypeError, "bits must be an in"),
        (lambda: config.qat(bits=None), TypeError, "bits must be an int, got None"),
        (lambda: config.fp8(forward="float16"), ValueError, "must be a float8 dtype"),
        (lambda: config.fp8(gradient="float8"), ValueError, "fp8: gradient must be a"),
        (lambda: config.fp8(gradient="float4_e2m1fn"), ValueError, "gradient must be"),
        (lambda: config.fp8(delayed=1), TypeError, "delayed must be a bool, got 1"),
        (lambda: config.static_int8(8), TypeError, "takes a calibration such as"),
        (lambda: config.static_int8("mean"), ValueError, "one of moving_average, max"),
        (lambda: config.static_int8(affine=1), TypeError, "affine must be a bool"),
        (
            lambda: config.static_int8(calibration.AbsMax()),
            ValueError,
            "gathers no statistics",
        ),
        (lambda: config.weight_only(None), TypeError, "bits must be an int, got None"),
        (lambda: config.gptq(size=None), TypeError, "size must be an int, got None"),
        (lambda: config.block_fp8(None), TypeError, "size must be an int, got None"),
        (
            lambda: config.fully_quantized(use_fwd_quant=None),
            TypeError,
            "use_fwd_quant must be a bool, got None",
        ),
    ],
)
def test_refuses(make, error, match):
    with pytest.raises(error, match=match):
        make()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("int8", r"no 'int8'\. The presets are .*w4a8.*fully_quantized\(.* is int8"),
        ("fully_quantised", "did you mean 'fully_quantized'"),
        ("DotGenral", "did you mean 'DotGeneral'"),
    ],
)
def test_names_that_there_are_not(name, words):
    with pytest.raises(AttributeError, match=words):
        getattr(config, name)
    assert not hasattr(config, name)


def test_lsq_weight_only_is_weight_only_on_learned_steps():
    learned = config.lsq_weight_only(bits=3)
    assert learned.fwd.rhs == config.lsq(bits=3).fwd.rhs
    plain = {"fwd.rhs": config.weight_only(bits=3).fwd.rhs}
    assert config.update(learned, plain) == config.weight_only(bits=3)


def test_presets_are_listed():
    listed = config.presets()
    modules = training, post_training, block_formats
    made_in = {module.__name__ for module in modules}
    public = [getattr(config, name) for name in config.__all__]
    functions = [x for x in public if getattr(x, "__module__", None) in made_in]
    assert sorted(one.make.__name__ for one in listed.values()) == sorted(
        x.__name__ for x in functions
    )
    for name, one in listed.items():
        assert one.make is getattr(config, name)
        cfg = one.make()
        tensors = [
            t for raw in (cfg.fwd, cfg.dlhs, cfg.drhs) for t in (raw.lhs, raw.rhs)
        ]
        found = [cfg.fwd.smoothing.lhs_calibration] if cfg.fwd.smoothing else []
        found += [tensor.calibration for tensor in tensors]
        gathers = any(c.has_state for c in found) or cfg.fwd.rhs.rounding is not None
        assert gathers == ("statistics" in one.needs)
        assert any(c.is_learned for c in found) == ("learns" in one.needs)
    assert "lsq_weight_only  int4 weights with learned steps" in repr(listed)
    assert listed._repr_html_().count("<tr>") == len(listed) + 1
