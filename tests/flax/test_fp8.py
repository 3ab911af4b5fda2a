"""Floats of 8 bits, trained and served."""

import flax.linen as nn
import jax
import pytest

from aqtlite import config
from aqtlite.flax import AqtDotGeneral
from aqtlite.lowering.forms import processor
from aqtlite.testing import assert_served_equals_trained
from tests.common import normal, quick_jit
from tests.flax.support import init


@pytest.mark.parametrize(
    "per_tensor", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_few_rows_are_summed_in_one_order(per_tensor, monkeypatch):
    """XLA:CPU's kernels for few rows sum by the layout of the weights."""
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: True)
    dot_general = AqtDotGeneral(config.fp8(per_tensor=per_tensor))
    model = nn.Sequential([nn.Dense(100, dot_general=dot_general) for _ in range(2)])
    x = normal((2, 1, 300), 1)
    variables = init(model, x)
    assert_served_equals_trained(model, variables, x)
    loss = quick_jit(jax.grad(lambda v: (model.apply(v, x) ** 2).sum()))
    gradients = jax.tree.leaves(loss(variables))
    assert all(bool((abs(g) > 0).any()) for g in gradients)
