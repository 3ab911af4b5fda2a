"""Wrong arguments in messages: what they are, without the elements of arrays."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import config, edge, errors
from tests.common import normal
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

MODEL, X = nn.Dense(4), normal((2, 3))
VARIABLES = init(MODEL, X)
CFG = config.w4a8()


def apply(params, x):
    return MODEL.apply(params, x)


@pytest.mark.parametrize(
    "call",
    [
        lambda: aqtlite.quantize_function((apply, VARIABLES), CFG),
        lambda: aqtlite.quantize_function(apply, VARIABLES),
        lambda: aqtlite.quantize_function(apply, CFG, params=VARIABLES),
        lambda: edge.calibrate(VARIABLES, MODEL, [X]),
        lambda: edge.calibrate(MODEL, VARIABLES, [X], calibration=VARIABLES),
        lambda: aqtlite.sensitivity(MODEL, VARIABLES, [X], candidates=[VARIABLES]),
        lambda: aqtlite.choose_bits(
            MODEL, VARIABLES, [X], candidates=[CFG], budget=VARIABLES
        ),
        lambda: aqtlite.flax.AqtDotGeneral(VARIABLES),
        lambda: aqtlite.Rule(cfg=VARIABLES),
    ],
)
def test_arguments_in_another_order_are_described_by_shape(call):
    with pytest.raises(TypeError) as raised:
        call()
    assert "'kernel': float32[3,4]" in str(raised.value)
    assert "Array(" not in str(raised.value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (jax.ShapeDtypeStruct((2,), jnp.bfloat16), "bfloat16[2]"),
        ([X] * 5, "list(float32[2,3], float32[2,3], float32[2,3], ...)"),
        ({"a": {"b": {"c": X}}}, "dict('a': dict('b': dict('c': float32[2,3])))"),
        ([[[[X]]]], "list(list(list(list(...))))"),
        ((), "()"),
        (MODEL, "Dense of flax"),
        (nn.Dense, "class Dense"),
        (np.float32, "class float32"),
        (apply, "function apply"),
        (0.5, "0.5"),
        (None, "None"),
    ],
)
def test_brief(value, text):
    assert errors.brief(value) == text
