import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aqtlite import calibration, config, numerics
from aqtlite.config import tensor_checks, update
from tests.config import strategies

pytestmark = pytest.mark.code("quick")

PATHS = [
    f"{name}.{side}" for name in ("fwd", "dlhs", "drhs") for side in ("lhs", "rhs")
]

VALUES = {
    "calib_shared_axes": "per_tensor",
    "noise_shared_axes": (0,),
    "blocks": config.Blocks(size=32),
    "scale_dtype": "bfloat16",
    "scale_shared_axes": "per_tensor",
    "double_scales": config.DoubleScales(),
    "rounding": config.Gptq(),
    "sparsity": config.NofM(2, 4),
}


def _get(cfg, path):
    for step in path.split("."):
        cfg = getattr(cfg, step)
    return cfg


@settings(max_examples=20, deadline=None)
@given(strategies.dot_generals(), strategies.calibrations(), st.sampled_from(PATHS))
def test_sets_one_place_and_leaves_the_rest(cfg, value, path):
    before = config.to_json(cfg)
    changed = update(cfg, {f"{path}.calibration": value})
    assert _get(changed, path).calibration == value
    assert config.to_json(cfg) == before
    restored = update(changed, {f"{path}.calibration": _get(cfg, path).calibration})
    assert restored == cfg


@settings(max_examples=20, deadline=None)
@given(strategies.dot_generals(), strategies.calibrations())
def test_star_is_every_place(cfg, value):
    starred = update(cfg, {"*.*.calibration": value})
    assert starred == update(cfg, {f"{path}.calibration": value for path in PATHS})


@settings(max_examples=20, deadline=None)
@given(strategies.dot_generals())
def test_no_change_is_the_same_config(cfg):
    assert update(cfg, {}) == cfg


def test_changes_valid_only_together():
    cfg = config.unquantized()
    changed = update(
        cfg,
        {
            "dlhs.rhs.use_fwd_quant": True,
            "fwd.rhs.po2_scale": True,
            "fwd.rhs.numerics": numerics.IntSymmetric(bits=8),
        },
    )
    assert changed.fwd.rhs.po2_scale and changed.dlhs.rhs.use_fwd_quant


def test_goes_into_numerics_and_calibration():
    cfg = update(
        config.fully_quantized(),
        {"fwd.rhs.numerics.bits": 4, "fwd.*.calibration.clipping_scale": 0.9},
    )
    assert cfg.fwd.rhs.numerics == numerics.IntSymmetric(bits=4)
    assert cfg.fwd.lhs.numerics == numerics.IntSymmetric(bits=8)
    assert cfg.fwd.lhs.calibration == calibration.AbsMax(clipping_scale=0.9)


def test_derived_fields_are_derived_anew():
    cfg = update(config.weight_only(), {"fwd.rhs.numerics.bits": 1})
    assert cfg.fwd.rhs.numerics == numerics.IntSymmetric(bits=1)


def test_star_skips_branches_without_the_rest_of_the_path():
    cfg = update(config.weight_only(), {"fwd.*.numerics.bits": 4})
    assert cfg == config.weight_only(bits=4)


def test_star_skips_operands_without_a_grid():
    cfg = update(config.weight_only(), {"*.*.po2_scale": True, "*.*.find_nan": False})
    assert cfg == update(config.weight_only(), {"fwd.rhs.po2_scale": True})
    blocks = config.Blocks(size=32)
    cfg = update(
        config.weight_only(),
        {"fwd.*.blocks": blocks, "fwd.lhs.numerics": numerics.IntSymmetric(bits=8)},
    )
    assert cfg.fwd.lhs.blocks == cfg.fwd.rhs.blocks == blocks


@pytest.mark.parametrize("field", tensor_checks.OF_GRID)
def test_a_path_to_an_operand_without_a_grid(field):
    cfg, value = config.weight_only(), VALUES.get(field, True)
    with pytest.raises(ValueError, match=f"^fwd.lhs: {field}=.* would have no effect"):
        update(cfg, {f"fwd.*.{field}": value, f"fwd.lhs.{field}": value})
    with pytest.raises(
        ValueError, match=r"'\*.lhs.\w+' matches nothing: fwd.lhs and .* set numerics$"
    ):
        update(cfg, {f"*.lhs.{field}": value})


def test_a_path_with_a_star_too_few():
    """It leads to the result alone, which has no grid."""
    with pytest.raises(ValueError, match="matches nothing: out would not change"):
        update(config.qat(8), {"*.use_fwd_quant": False})
    cfg = update(config.qat(8), {"*.*.use_fwd_quant": False})
    assert not cfg.dlhs.rhs.use_fwd_quant
    # What a star keeps may be changed by a path after it.
    changes = {"*.*.use_fwd_quant": False, "dlhs.rhs.use_fwd_quant": True}
    assert update(cfg, changes).dlhs.rhs.use_fwd_quant
    absmax = calibration.AbsMax()
    changes = {"fwd.*.calibration": absmax, "fwd.lhs.calibration.clipping_scale": 0.9}
    changed = update(config.weight_only(), changes)
    assert changed.fwd.lhs.calibration == calibration.AbsMax(clipping_scale=0.9)


def test_a_branch_replaced_later_is_not_asked_for_its_grid():
    drhs = config.fully_quantized().drhs
    cfg = config.fully_quantized(bwd_bits=None)
    changed = update(cfg, {"drhs.*.find_nan": True, "drhs": drhs})
    assert changed == update(cfg, {"drhs": drhs})


def test_later_change_holds():
    cfg = update(
        config.fully_quantized(),
        {
            "*.lhs.numerics": numerics.IntSymmetric(bits=4),
            "fwd.lhs.numerics.bits": 2,
        },
    )
    assert cfg.fwd.lhs.numerics.bits == 2
    assert cfg.dlhs.lhs.numerics.bits == 4


def test_other_config_types():
    int8 = numerics.IntSymmetric(bits=8)
    assert update(config.Tensor(), {"numerics": int8}) == config.Tensor(numerics=int8)
    raw = update(
        config.DotGeneralRaw(), {"lhs.numerics": int8, "dg_in_dtype": "float32"}
    )
    assert raw.lhs.is_quantized and raw.dg_in_dtype.name == "float32"
    tiles = config.LocalAqt(contraction_axis_shard_count=2)
    tiles = update(tiles, {"contraction_axis_shard_count": 3})
    assert tiles.contraction_axis_shard_count == 3


@pytest.mark.parametrize(
    ("path", "match"),
    [
        ("fdw.rhs.numerics", "the config has no field 'fdw'.*dlhs, drhs.*mean 'fwd'"),
        ("fwd.rsh.numerics", "'fwd.rsh.numerics' matches nothing: fwd has no .*'rhs'"),
        ("*.rhs.numeric", "fwd.rhs and dlhs.rhs and drhs.rhs have no.*mean 'numerics'"),
        ("fwd.*.numeric", "fwd.lhs and fwd.rhs have no .*their fields are: numerics"),
        ("fwd.lhs.po2_scale.x", "fwd.lhs.po2_scale has no fields, so 'x' cannot foll"),
        ("", "the config has no field ''"),
        ("fwd..lhs", "fwd has no field ''"),
    ],
)
def test_path_that_matches_nothing(path, match):
    with pytest.raises(ValueError, match=match):
        update(config.fully_quantized(), {path: None})


def test_star_that_matches_nothing():
    with pytest.raises(ValueError, match="fwd.lhs.numerics and .* have no fields, so"):
        update(config.unquantized(), {"fwd.*.numerics.bits": 4})


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        (
            {"fwd.rhs.numerics.bits": 17},
            ValueError,
            "^fwd.rhs.numerics: .*from 1 to 16",
        ),
        ({"fwd.rhs.numerics": 8}, TypeError, "^fwd.rhs: numerics must be"),
        ({"fwd.lhs": None}, TypeError, "^fwd: lhs must be a config.Tensor"),
        (
            {"fwd.rhs.numerics": numerics.NoNumerics()},
            ValueError,
            "^dlhs.rhs.use_fwd_quant=True takes",
        ),
        ({1: 2}, TypeError, "path must be a string, got 1"),
        ([("fwd", 1)], TypeError, "must map paths to values"),
    ],
)
def test_refuses(changes, error, match):
    with pytest.raises(error, match=match):
        update(config.fully_quantized(), changes)


def test_refuses_other_objects():
    with pytest.raises(TypeError, match="needs a config"):
        update({}, {"fwd": 1})
