"""``aqtlite presets``, as a user runs it."""

import json

import pytest

from aqtlite import cli, config
from aqtlite.cli import shared_options

pytestmark = pytest.mark.code("quick")


def test_they_are_those_of_the_library():
    assert {"unquantized", *shared_options.PRESETS} == set(config.presets())


def test_the_list(capsys):
    assert cli.main(["presets"]) == 0
    shown = capsys.readouterr().out
    for name, one in config.presets().items():
        assert name in shown and one.purpose in shown and one.audience in shown
    assert "(needs statistics of activations)" in shown


@pytest.mark.parametrize("name", sorted(config.presets()))
def test_one(name, capsys):
    assert cli.main(["presets", name]) == 0
    shown = capsys.readouterr().out
    made = config.presets()[name].make()
    assert shown.startswith(f"config.{name}(")
    assert str(config.describe(made)) in shown
    assert ("--calibrate data.npz" in shown) == (name in shared_options.STATIC)


def test_json(capsys):
    assert cli.main(["presets", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data.keys() == config.presets().keys()
    assert cli.main(["presets", "nvfp4", "--json"]) == 0
    assert config.from_json(capsys.readouterr().out) == config.nvfp4()
