"""The config of N:M sparsity."""

import pytest

from aqtlite import config, numerics

pytestmark = pytest.mark.code("quick")

PATH = "fwd.rhs.sparsity"
CFG = config.update(config.fully_quantized(fwd_bits=4), {PATH: config.NofM(2, 4)})


def test_json():
    assert config.from_json(config.to_json(CFG)) == CFG
    assert hash(config.from_json(config.to_json(CFG))) == hash(CFG)
    assert config.fully_quantized(fwd_bits=4) != CFG


def test_update_and_differences():
    cfg = config.update(CFG, {f"{PATH}.n": 1, f"{PATH}.decay": 0})
    assert cfg.fwd.rhs.sparsity == config.NofM(1, 4, decay=0.0)
    assert config.differences(CFG, cfg) == [
        "fwd.rhs.sparsity.n: 2 against 1",
        "fwd.rhs.sparsity.decay: 0.0002 against 0.0",
    ]


def test_describe():
    assert "sparse" not in config.describe(config.fully_quantized(fwd_bits=4))
    (line,) = [x for x in config.describe(CFG).splitlines() if "sparse" in x]
    assert line.startswith("fwd.rhs") and "int4 ±7.5, 2:4 sparse" in line


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: config.NofM(4, 4), ValueError, "n must be less than m"),
        (lambda: config.NofM(0, 4), ValueError, "n must be 1 or more"),
        (lambda: config.NofM(2.0, 4), TypeError, "n must be an int"),
        (lambda: config.NofM(2, 4, decay=-1), ValueError, "decay must not be negative"),
        (
            lambda: config.Tensor(
                numerics=numerics.IntSymmetric(bits=4), sparsity=(2, 4)
            ),
            TypeError,
            r"sparsity must be a config\.NofM or None",
        ),
        (
            lambda: config.Tensor(sparsity=config.NofM(2, 4)),
            ValueError,
            "sparsity=.* would have no effect, because numerics is NoNumerics",
        ),
        (
            lambda: config.update(CFG, {"fwd.lhs.sparsity": config.NofM(2, 4)}),
            ValueError,
            "only weights, which are fwd.rhs, are pruned",
        ),
        (
            lambda: config.update(
                config.fully_quantized(bwd_bits=8, use_fwd_quant=False),
                {"dlhs.rhs.sparsity": config.NofM(2, 4)},
            ),
            ValueError,
            "leave dlhs.rhs.sparsity None",
        ),
    ],
)
def test_errors(make, error, match):
    with pytest.raises(error, match=match):
        make()
