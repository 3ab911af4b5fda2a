import dataclasses

import pytest
from hypothesis import given, settings

from aqtlite import config, numerics
from tests.config import strategies

pytestmark = pytest.mark.code("quick")


@settings(max_examples=15, deadline=None)
@given(strategies.dot_generals())
def test_none_between_equal_configs(cfg):
    assert config.differences(cfg, config.from_json(config.to_json(cfg))) == []


def test_names_every_path():
    first = config.fully_quantized(bwd_bits=None)
    second = config.update(
        first,
        {
            "fwd.lhs.numerics": numerics.NoNumerics(),
            "drhs.rhs.use_fwd_quant": False,
            "fwd.rhs.po2_scale": True,
        },
    )
    assert config.differences(first, second) == [
        f"fwd.lhs.numerics: {first.fwd.lhs.numerics!r} against NoNumerics()",
        "fwd.rhs.po2_scale: False against True",
        "drhs.rhs.use_fwd_quant: True against False",
    ]


def test_a_dtype_that_numpy_takes_for_none():
    first = config.DotGeneralRaw(dg_in_dtype="float64", lhs=config.qat(8).fwd.lhs)
    second = dataclasses.replace(first, dg_in_dtype=None)
    (line,) = config.differences(first, second)
    assert line == "dg_in_dtype: dtype('float64') against None"
    assert config.differences(second, first)
