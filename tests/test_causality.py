"""Quantized models depend on nothing on which they do not depend in float.

Positions on no later ones, examples on no others, and none on those that do not count:
all models with scales per row and in blocks, and a decoder with all presets.
``python -m tests.causality_grid`` tries all models with all presets.
"""

import jax
import pytest

from aqtlite.testing import assert_causal, assert_independent
from tests import causality_grid
from tests.causal_models import MODELS
from tests.common import mostly_slow

pytestmark = pytest.mark.code("quick")

# An injected convolution does not see the padding before it, and has a scale for each
# example (docs/visibility.md).
CASES = {
    f"{name}, {preset}": (name, preset)
    for name in causality_grid.NAMES
    for preset in causality_grid.PRESETS
    if name != "injected convolution"
    and (name == "decoder" or preset in ("fully_quantized", "nvfp4"))
}
QUICK = (
    "decoder, fully_quantized",
    "experts, nvfp4",
    "injected decoder, fully_quantized",
)


def check(name, preset):
    case = causality_grid.case(name, preset)
    apply = jax.jit(case.apply)  # One program for all.
    assert_causal(apply, *case.args, argnums=0)
    assert_independent(apply, *case.args)
    assert causality_grid.padding_leak(case, apply) == 0


@pytest.mark.parametrize("name", MODELS)
def test_in_float(name):
    check(name, None)


@pytest.mark.parametrize("case", mostly_slow(CASES, *QUICK))
def test_quantized(case):
    check(*CASES[case])
