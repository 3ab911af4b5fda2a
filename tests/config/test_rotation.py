"""The config of rotations."""

import pytest

from aqtlite import config

pytestmark = pytest.mark.code("quick")

CFG = config.update(config.qat(4), {"fwd.rotation": config.Hadamard()})
SIXTEEN = config.Hadamard(size=16, fit=True, seed=3)


@pytest.mark.parametrize("how", [config.Hadamard(), SIXTEEN], ids=str)
def test_json(how):
    cfg = config.update(CFG, {"fwd.rotation": how})
    assert config.from_json(config.to_json(cfg)) == cfg
    assert hash(config.from_json(config.to_json(cfg))) == hash(cfg)
    assert cfg != config.update(CFG, {"fwd.rotation": None})


def test_update_and_differences():
    cfg = config.update(CFG, {"fwd.rotation.seed": 1, "fwd.rotation.size": 64})
    assert cfg.fwd.rotation == config.Hadamard(size=64, seed=1)
    assert config.differences(CFG, cfg) == [
        "fwd.rotation.size: None against 64",
        "fwd.rotation.seed: 0 against 1",
    ]
    (line,) = config.differences(config.qat(4), CFG)
    assert line == "fwd.rotation: None against Hadamard()"


def test_describe():
    assert "rotation" not in config.describe(config.qat(4))
    cfg = config.update(config.nvfp4(), {"fwd.rotation": config.Hadamard()})
    cfg = config.update(cfg, {"drhs.rotation": SIXTEEN})
    assert [line.split(maxsplit=1) for line in config.describe(cfg).splitlines()][
        -3:
    ] == [
        ["rotation", "mixes"],
        ["fwd", "all channels"],
        ["drhs", "blocks of up to 16 channels, seed 3"],
    ]


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: config.Hadamard(size=2), ValueError, "no Hadamard matrix.*; take 4"),
        (lambda: config.Hadamard(size=52), ValueError, "take 48 or 56"),
        (lambda: config.Hadamard(size=0), ValueError, "must be 1 or more"),
        (lambda: config.Hadamard(size=16.0), TypeError, "size must be an int"),
        (lambda: config.Hadamard(fit=True), ValueError, "fit=True would have no effec"),
        (lambda: config.Hadamard(size=8, fit=1), TypeError, "fit must be a bool"),
        (lambda: config.Hadamard(seed=-1), ValueError, "seed must be from 0 to"),
        (
            lambda: config.DotGeneralRaw(rotation=8),
            TypeError,
            r"rotation must be a config\.Hadamard or None",
        ),
        (
            lambda: config.DotGeneralRaw(rotation=SIXTEEN),
            ValueError,
            "rotation would have no effect, because neither",
        ),
        (
            lambda: config.update(config.fully_quantized(), {"drhs.rotation": SIXTEEN}),
            ValueError,
            "drhs: rhs.use_fwd_quant=True takes the forward's integers, which cannot",
        ),
    ],
)
def test_errors(make, error, match):
    with pytest.raises(error, match=match):
        make()
