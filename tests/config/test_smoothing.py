"""The config of smoothing."""

import pytest

from aqtlite import calibration, config

pytestmark = pytest.mark.code("quick")

MAX = calibration.MaxOverBatches()
CFG = config.update(config.fully_quantized(), {"fwd.smoothing": config.Smoothing()})


@pytest.mark.parametrize(
    "how",
    [
        config.Smoothing(),
        config.Smoothing(lhs_exponent=1, rhs_exponent=0, po2_scale=False),
        config.Smoothing(lhs_calibration=MAX),
    ],
    ids=str,
)
def test_json(how):
    cfg = config.update(CFG, {"fwd.smoothing": how})
    assert config.from_json(config.to_json(cfg)) == cfg
    assert hash(config.from_json(config.to_json(cfg))) == hash(cfg)
    assert cfg != config.update(CFG, {"fwd.smoothing": None})


def test_update_and_differences():
    cfg = config.update(CFG, {"fwd.smoothing.lhs_calibration": MAX})
    assert cfg.fwd.smoothing.has_state and not CFG.fwd.smoothing.has_state
    (line,) = config.differences(CFG, cfg)
    assert line.startswith("fwd.smoothing.lhs_calibration: AbsMax")


def test_describe():
    assert "smoothing" not in config.describe(config.fully_quantized())
    rows = config.describe(CFG).splitlines()
    assert rows[-1].split(maxsplit=1) == [
        "fwd",
        "AbsMax(lhs)^0.5 / AbsMax(rhs)^0.5 po2",
    ]
    lhs = config.Smoothing(lhs_exponent=0.75, rhs_exponent=0, po2_scale=False)
    text = config.describe(config.update(CFG, {"fwd.smoothing": lhs}))
    assert text.splitlines()[-1].endswith("AbsMax(lhs)^0.75")


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: config.Smoothing(lhs_exponent=1.1), ValueError, "from 0 to 1"),
        (lambda: config.Smoothing(rhs_exponent=-0.1), ValueError, "from 0 to 1"),
        (lambda: config.Smoothing(lhs_exponent="a"), TypeError, "must be a number"),
        (lambda: config.Smoothing(lhs_exponent=1e-46), ValueError, "a normal float32"),
        (lambda: config.Smoothing(po2_scale=1), TypeError, "must be a bool"),
        (
            lambda: config.Smoothing(lhs_exponent=0, rhs_exponent=0),
            ValueError,
            "no effect, because both exponents are 0",
        ),
        (
            lambda: config.Smoothing(lhs_exponent=0, lhs_calibration=MAX),
            ValueError,
            "lhs_calibration=.* no effect, because lhs_exponent is 0",
        ),
        (
            lambda: config.Smoothing(rhs_calibration=8),
            TypeError,
            "rhs_calibration must be a calibration",
        ),
        (
            lambda: config.DotGeneralRaw(smoothing=0.5),
            TypeError,
            r"smoothing must be a config\.Smoothing",
        ),
        (
            lambda: config.DotGeneralRaw(smoothing=config.Smoothing()),
            ValueError,
            "smoothing would have no effect",
        ),
        (
            lambda: config.update(
                config.fully_quantized(), {"drhs.smoothing": config.Smoothing()}
            ),
            ValueError,
            r"drhs\.smoothing: gradients have no smoothing",
        ),
        (lambda: config.smoothquant(0), ValueError, "would have no effect|from 0 to 1"),
        (
            lambda: config.smoothquant(statistic=calibration.AbsMax()),
            ValueError,
            "gathers no statistics",
        ),
        (lambda: config.smoothquant("0.5"), TypeError, "alpha must be a number"),
        (lambda: config.smoothquant(statistic=8), TypeError, "must be a calibration"),
    ],
)
def test_errors(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_smoothquant():
    cfg = config.smoothquant(0.75, bwd_bits=None)
    assert cfg.fwd.smoothing == config.Smoothing(
        lhs_exponent=0.75, rhs_exponent=0.25, lhs_calibration=MAX
    )
    assert cfg.fwd.lhs == cfg.fwd.rhs and not cfg.dlhs.lhs.is_quantized
    assert config.from_json(config.to_json(cfg)) == cfg
    assert "MaxOverBatches(lhs)^0.75" in config.describe(cfg)
