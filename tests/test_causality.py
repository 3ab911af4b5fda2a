"""Quantized models depend on nothing on which they do not depend in float.

Positions on no later ones, examples on no others, and none on those that do not count:
a grid of models by all presets. ``python -m tests.causality_grid`` shows by how much.
"""

import jax
import pytest

from aqtlite.testing import assert_causal, assert_independent
from tests import causality_grid
from tests.causal_models import MODELS
from tests.common import mostly_slow

pytestmark = pytest.mark.code("quick")

# A convolution's channels do not pair up: an injected one refuses smoothing.
REFUSED = {"injected convolution, smoothquant"}
CASES = {
    f"{name}, {preset}": (name, preset)
    for name in causality_grid.NAMES
    for preset in causality_grid.PRESETS
}
QUICK = (
    "decoder, fully_quantized",
    "experts, nvfp4",
    "injected decoder, fully_quantized",
)


def check(name, preset):
    case = causality_grid.case(name, preset)
    assert_causal(case.apply, *case.args, argnums=0)
    assert_independent(case.apply, *case.args)
    assert causality_grid.padding_leak(case, jax.jit(case.apply)) == 0


@pytest.mark.parametrize("name", MODELS)
def test_in_float(name):
    check(name, None)


@pytest.mark.parametrize("case", mostly_slow(sorted(CASES.keys() - REFUSED), *QUICK))
def test_quantized(case):
    check(*CASES[case])
