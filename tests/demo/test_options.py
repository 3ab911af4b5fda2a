"""What the user of the demo can choose."""

import argparse

import pytest

from aqtlite.errors import UserError
from aqtlite_demo import options as options_lib

pytestmark = pytest.mark.code("quick")


def _parse(*argv):
    parser = argparse.ArgumentParser()
    options_lib.add_arguments(parser)
    return options_lib.from_arguments(parser.parse_args(argv))


def test_no_arguments_give_the_defaults():
    assert _parse() == options_lib.Options()


def test_smoke_is_small_and_yields_to_what_the_user_sets():
    smoke = _parse("--smoke", "--width", "32")
    assert smoke.width == 32
    assert smoke.steps == options_lib.SMOKE["steps"]
    assert smoke.layers == options_lib.SMOKE["layers"]


def test_sample_fills_the_context_unless_told():
    assert _parse("--length", "64").generated_tokens == 48
    assert _parse("--length", "64", "--new-tokens", "5").generated_tokens == 5


def test_sample_must_fit_the_context():
    with pytest.raises(UserError, match="--new-tokens must be between 2 and 48"):
        _parse("--length", "64", "--new-tokens", "49")


def test_quantized_name():
    assert _parse().quantized_name == "int8"
    assert _parse("--fwd-bits", "4").quantized_name == "int4-int8"


@pytest.mark.parametrize(
    "changes",
    [
        dict(layers=0),
        dict(width=10, heads=4),
        dict(length=4),
        dict(lr=0.0),
        dict(lr=float("inf")),
        dict(seed=-1),
        dict(bwd_bits=1),
    ],
)
def test_senseless_values_are_refused(changes):
    with pytest.raises(UserError, match="--"):
        options_lib.Options(**changes)


def test_the_cache_is_one_of_those_there_are():
    assert _parse().cache == "int8"
    assert _parse("--cache", "int4").cache == "int4"
    with pytest.raises(UserError, match="--cache must be one of float32, int8, int4"):
        options_lib.Options(cache="int2")
