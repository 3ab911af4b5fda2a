import dataclasses
import json

import pytest
from hypothesis import given, settings

from aqtlite import calibration, config, numerics
from aqtlite.config import from_json, to_json
from tests.config import strategies

pytestmark = pytest.mark.code("quick")


@settings(max_examples=30, deadline=None)
@given(strategies.dot_generals())
def test_round_trip(cfg):
    back = from_json(to_json(cfg))
    assert back == cfg
    assert hash(back) == hash(cfg)
    assert from_json(to_json(cfg, indent=2)) == cfg
    assert from_json(to_json(cfg.dlhs)) == cfg.dlhs
    assert from_json(to_json(cfg.fwd.lhs)) == cfg.fwd.lhs


def test_writes_strict_json_with_every_field():
    data = json.loads(to_json(config.weight_only()))
    assert data["version"] == 1
    assert data["type"] == "DotGeneral"
    assert data["fwd"]["rhs"]["numerics"]["preserve_zero"] is True
    assert data["fwd"]["dg_in_dtype"] is None


def test_missing_fields_take_defaults():
    assert from_json('{"version": 1, "type": "DotGeneral"}') == config.DotGeneral()


def _text(fields):
    return f'{{"version": 1, "type": "DotGeneral", {fields}}}'


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", r"^\$: not valid JSON"),
        ('{"version": 1', r"^\$: not valid JSON"),
        ("[" * 100_000, r"^\$: not valid JSON"),
        ("[]", r"^\$: expected an object of type 'DotGeneral' or"),
        ("NaN", r"^\$: expected an object"),
        ('{"type": "Tensor"}', r'^\$: there is no "version"; .* version 1'),
        ('{"version": 2, "type": "Tensor"}', r"^\$.version: 2; .*only version 1"),
        ('{"version": true, "type": "Tensor"}', r"^\$.version: True"),
        ('{"version": 1}', r'^\$: there is no "type"; .*AbsMax, .*DotGeneral'),
        ('{"version": 1, "type": "AbsMax"}', r"^\$.type: expected 'DotGeneral' or"),
        ('{"version": 1, "type": "os.system"}', r"^\$.type: unknown type 'os.system'"),
        ('{"version": 1, "type": ["Tensor"]}', r"^\$.type: unknown type"),
        (_text('"bwd": 1'), r"^\$.bwd: a DotGeneral has no such field; .*fwd, dlhs"),
        (_text('"fwd": {}'), r'^\$.fwd: there is no "type"'),
        (_text('"fwd": 3'), r"^\$: fwd must be a config.DotGeneralRaw, got 3"),
        (_text('"fwd": {"type": "Foo"}'), r"^\$.fwd.type: unknown type 'Foo'"),
        (_text('"fwd": {"type": "Tensor"}'), r"^\$: fwd must be a config.DotGeneralR"),
        (_text('"fwd": 1, "fwd": 2'), r"^\$.fwd: this key is given twice"),
        (
            _text('"fwd": {"type": "DotGeneralRaw", "lhs": 1, "lhs": 2}'),
            r"^\$.fwd.lhs: this key is given twice",
        ),
        (
            _text('"fwd": {"type": "DotGeneralRaw", "dg_in_dtype": "flaot"}'),
            r"^\$.fwd: dg_in_dtype must be a dtype .*'flaot'",
        ),
    ],
)
def test_refuses(text, match):
    with pytest.raises(ValueError, match=match):
        from_json(text)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ('"po2_scale": 1', r"^\$: po2_scale must be a bool"),
        ('"numerics": null', r"^\$: numerics must be"),
        ('"numerics": {"type": "IntSymmetric"}', r"^\$.numerics: .*'bits'"),
        ('"numerics": {"type": "IntSymmetric", "bits": 8.0}', r"^\$.numerics: .*int"),
        ('"numerics": {"type": "NoNumerics", "bits": 8}', r"^\$.numerics.bits: .*none"),
        (
            '"calibration": {"type": "AbsMax", "clipping_scale": NaN}',
            r"^\$.calibration.clipping_scale: nan is not a finite",
        ),
        (
            '"calibration": {"type": "AbsMax", "clipping_scale": 1e999}',
            r"^\$.calibration.clipping_scale: inf is not a finite",
        ),
        ('"calib_shared_axes": [0, NaN]', r"^\$.calib_shared_axes\[1\]: nan"),
        ('"calib_shared_axes": [0, "a"]', r"^\$: calib_shared_axes=.* not an int"),
    ],
)
def test_refuses_in_a_tensor(fields, match):
    with pytest.raises(ValueError, match=match):
        from_json(f'{{"version": 1, "type": "Tensor", {fields}}}')


@dataclasses.dataclass(frozen=True)
class _OwnCalibration(calibration.Calibration):
    def bound(self, x, axes):
        raise NotImplementedError


def test_refuses_to_write_what_could_not_be_read():
    tensor = config.Tensor(
        numerics=numerics.IntSymmetric(bits=8), calibration=_OwnCalibration()
    )
    cfg = config.DotGeneral(fwd=config.DotGeneralRaw(rhs=tensor))
    match = r"^\$.fwd.rhs.calibration: a _OwnCalibration cannot be written"
    with pytest.raises(TypeError, match=match):
        to_json(cfg)


def test_wrong_argument_types():
    with pytest.raises(TypeError, match="needs a DotGeneral"):
        to_json({})
    with pytest.raises(TypeError, match="needs a string, got bytes"):
        from_json(b"{}")
