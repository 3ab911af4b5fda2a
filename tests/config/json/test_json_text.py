"""Every reader of JSON refuses what no writer wrote, and says where it is."""

import pytest

from aqtlite import config, edge, rules
from aqtlite.config.json import json_text
from aqtlite.edge import rules as edge_rules

pytestmark = pytest.mark.code("quick")

READERS = {
    "config": (config.from_json, '{"version": 1, "type": "Tensor", "scale_dtype": %s}'),
    "rules": (rules.from_json, '{"version": 1, "rules": [{"cfg": null, "path": %s}]}'),
    "edge rules": (edge_rules.from_json, '{"version": 1, "rules": [{"path": %s}]}'),
    "ranges": (
        edge.Ranges.from_json,
        '{"version": 1, "ranges": {"a": {"low": 0, "high": %s}}}',
    ),
}
each = pytest.mark.parametrize("name", READERS)

DEEP = 500
NESTED = (
    '{"version": 1, "type": "Tensor", "calibration": '
    + '{"type": "MovingAverage", "of": ' * DEEP
    + "null"
    + "}" * (DEEP + 1)
)


@each
@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("[" * DEEP + "]" * DEEP, r"\$: nested more than 100 levels"),
        ("[" * 10**6 + "]" * 10**6, r"\$: not valid JSON: it is nested too deeply"),
        ('{"a": 1, "a": 2}', r"a: this key is given twice"),
        ("1" * 30, "an integer of more than 64 bits"),
        ("1" * 10**5, r"\$: not valid JSON"),
        ("nan", r"\$: not valid JSON"),
    ],
    ids=["nested", "deep", "twice", "long", "longest", "word"],
)
def test_no_data(name, value, words):
    read, text = READERS[name]
    with pytest.raises(ValueError, match=words):
        read(text % value)


@each
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "{}", "[]"])
def test_no_value(name, value):
    """Of none of the fields."""
    read, text = READERS[name]
    with pytest.raises(ValueError, match=r"^\$"):
        read(text % value)


@each
@pytest.mark.parametrize("version", ["true", "1.0", '"1"', "null", "2", "1" * 15])
def test_other_versions(name, version):
    read, text = READERS[name]
    text = (text % "null").replace('"version": 1', f'"version": {version}')
    with pytest.raises(ValueError, match=r"^\$\.version: .*reads only version 1"):
        read(text)


@each
def test_nothing(name):
    read, _ = READERS[name]
    with pytest.raises(ValueError, match=r'^\$: there is no "version"'):
        read("{}")
    with pytest.raises(TypeError, match="needs a string, got bytes"):
        read(b"{}")


def test_a_config_of_calibrations_in_calibrations():
    with pytest.raises(ValueError, match=r"^\$: nested more than 100 levels deep"):
        config.from_json(NESTED)


@pytest.mark.parametrize("name", ["bool", "int4", "bfloat16", "float8_e8m0fnu"])
def test_names_of_dtypes(name):
    assert json_text.dtype(name).name == name


@pytest.mark.parametrize(
    "name", ["O", "object", "V8", "f4,f4", "(2,)f4", ">f4", "S3", "M8[s]", "", None, 3]
)
def test_what_is_no_name_of_a_dtype(name):
    with pytest.raises(ValueError, match="no name of a dtype"):
        json_text.dtype(name)
