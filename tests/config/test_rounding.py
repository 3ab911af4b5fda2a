"""Configs of the rounding of weights at conversion."""

import pytest

from aqtlite import config, numerics

INT4 = numerics.IntSymmetric(bits=4)


def test_written_as_json_and_described():
    cfg = config.gptq(bits=3, size=64)
    how = config.Gptq(damping=0.1, act_order=False)
    cfg = config.update(cfg, {"fwd.rhs.rounding": how})
    assert config.from_json(config.to_json(cfg)) == cfg
    assert cfg != config.gptq(bits=3, size=64)
    assert eval(repr(how), vars(config)) == how
    changed = config.update(cfg, {"fwd.rhs.rounding.damping": 0.2})
    assert changed.fwd.rhs.rounding == config.Gptq(damping=0.2, act_order=False)
    assert "nearest, by GPTQ at conversion" in str(config.describe(cfg))
    assert "GPTQ" not in str(config.describe(config.weight_only()))


@pytest.mark.parametrize(
    ("path", "cfg"),
    [
        ("fwd.lhs", config.fully_quantized()),
        ("dlhs.lhs", config.fully_quantized()),
        ("drhs.rhs", config.fully_quantized(use_fwd_quant=False)),
    ],
)
def test_weights_alone(path, cfg):
    with pytest.raises(ValueError, match=rf"{path}\.rounding=Gptq\(\) would have no"):
        config.update(cfg, {f"{path}.rounding": config.Gptq()})


def test_errors():
    with pytest.raises(ValueError, match="rounding=.* would have no effect"):
        config.Tensor(rounding=config.Gptq())
    with pytest.raises(TypeError, match="must be a config.Gptq or None"):
        config.Tensor(numerics=INT4, rounding="gptq")
    with pytest.raises(ValueError, match="Gptq.damping must be positive"):
        config.Gptq(damping=0)
    with pytest.raises(TypeError, match="Gptq.act_order must be a bool"):
        config.Gptq(act_order=1)
    with pytest.raises(ValueError, match="fwd.rhs.rounding=.* and fwd.smoothing"):
        config.update(config.smoothquant(), {"fwd.rhs.rounding": config.Gptq()})
