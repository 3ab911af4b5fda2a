import pytest
from hypothesis import given, settings

from aqtlite import calibration, config, numerics
from aqtlite.config import describe
from tests.config import strategies

pytestmark = pytest.mark.code("quick")


def _rows(cfg):
    return {line.split()[0]: line for line in describe(cfg).splitlines() if line}


def test_weight_only():
    rows = _rows(config.weight_only())
    assert rows["fwd.lhs"].split() == ["fwd.lhs", "lhs", "float", "-", "-", "-"]
    assert "int8 ±127.5" in rows["fwd.rhs"]
    assert "fwd's int8" in rows["dlhs.rhs"]
    assert rows["fwd"].split() == ["fwd", "float", "float32"]


def test_every_mark():
    cfg = config.update(
        config.fully_quantized(fwd_bits=4),
        {
            "fwd.lhs.calib_shared_axes": "per_tensor",
            "fwd.lhs.po2_scale": True,
            "fwd.rhs.calib_shared_axes": (0, -1),
            "fwd.rhs.use_fake_quant": True,
            "fwd.rhs.calibration": calibration.AbsMax(clipping_scale=0.95),
            "drhs.local_aqt": config.LocalAqt(contraction_axis_shard_count=8),
            "drhs.dg_in_dtype": "bfloat16",
            "dlhs.rhs.numerics": numerics.IntSymmetric(bits=3),
        },
    )
    rows = _rows(cfg)
    assert "int4 ±7.5" in rows["fwd.lhs"] and "per-tensor po2" in rows["fwd.lhs"]
    assert "fake" in rows["fwd.rhs"] and "axes 0,-1" in rows["fwd.rhs"]
    assert "AbsMax(0.95)" in rows["fwd.rhs"]
    assert "fwd's int4" in rows["dlhs.rhs"]
    assert "8 tiles" in rows["drhs.lhs"] and "stochastic" in rows["drhs.lhs"]
    assert "fwd's int4" in rows["drhs.rhs"]
    assert rows["fwd"].split() == ["fwd", "float", "float32"]
    assert rows["dlhs"].split() == ["dlhs", "integers", "int32"]
    assert rows["drhs"].split() == ["drhs", "bfloat16", "float32"]


@settings(max_examples=15, deadline=None)
@given(strategies.dot_generals())
def test_any_config_has_six_operands_and_three_contractions(cfg):
    rows = _rows(cfg)
    # The rows of further tables have the names of contractions, too.
    has_smoothing = cfg.fwd.smoothing is not None
    raws = cfg.fwd, cfg.dlhs, cfg.drhs
    has_rotation = any(raw.rotation is not None for raw in raws)
    operands = 6 + cfg.out.is_quantized
    assert len(rows) == 2 + operands + 3 + has_smoothing + has_rotation


def test_presets_fit_a_screen():
    for cfg in (config.fully_quantized(), config.weight_only(), config.unquantized()):
        assert max(map(len, describe(cfg).splitlines())) <= 80


def test_refuses_other_objects():
    with pytest.raises(TypeError, match="needs a config.DotGeneral"):
        describe(config.Tensor())


def test_a_notebook_shows_tables():
    described = describe(config.smoothquant())
    html = described._repr_html_()
    assert html.count("<table>") == html.count("</table>") == 3
    assert "<th>path</th>" in html and "<td>int8 ±127.5</td>" in html
    assert repr(described) == str(described)
