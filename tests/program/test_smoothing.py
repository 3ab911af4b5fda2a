"""Smoothing of the contractions of a function that it is for."""

import jax
import pytest
from jax import lax

import aqtlite
from aqtlite import config
from tests.common import normal

pytestmark = pytest.mark.code("quick")

_X = normal((2, 4, 4, 3))
_PARAMS = {"conv": normal((3, 3, 3, 4)), "head": normal((64, 5))}


def _network(params, x):
    with jax.named_scope("stem"):
        x = lax.conv_general_dilated(
            x,
            params["conv"],
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
    with jax.named_scope("head"):
        return x.reshape(x.shape[0], -1) @ params["head"]


def test_a_network_with_convolutions_is_smoothed_where_it_can_be(caplog):
    quantized = aqtlite.quantize_function(_network, config.smoothquant(), params=0)
    with caplog.at_level("WARNING", logger="absl"):
        state = quantized.init_state(_PARAMS, _X)
    assert "'stem' is not smoothed: the channels of a conv_general_dilated" in (
        caplog.text
    )
    assert list(state["aqt_stats"]) == ["head"]
    plan = quantized.plan(_PARAMS, _X)
    assert [one.is_quantized for one in plan.contractions] == [True, True]
    assert "int8 x int8, not smoothed" in str(plan)
    # The convolution is that of the config without a smoothing.
    rules = [
        aqtlite.Rule(
            path="stem",
            cfg=config.update(config.smoothquant(), {"fwd.smoothing": None}),
        ),
        aqtlite.Rule(path="head", cfg=config.smoothquant()),
    ]
    apart = aqtlite.quantize_function(_network, rules, params=0)
    wanted = apart.init_state(_PARAMS, _X)
    assert jax.tree.structure(state) == jax.tree.structure(wanted)
