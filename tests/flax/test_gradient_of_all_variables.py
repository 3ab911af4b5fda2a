"""Gradients with respect to all variables that `init` returned, statistics included."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

from aqtlite import config
from aqtlite.flax import AqtDotGeneral, quantize_model
from tests.common import normal, quick_jit
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

X = normal((8, 16))
CONFIGS = {
    "fp8": config.fp8(delayed=True),
    "static_int8": config.static_int8(),
    "smoothquant": config.smoothquant(),
}
BUILDS = {
    "injected": lambda cfg: nn.Dense(4, dot_general=AqtDotGeneral(cfg)),
    "rules": lambda cfg: quantize_model(nn.Dense(4), cfg),
}
every_model = pytest.mark.parametrize(
    ("build", "cfg"),
    [(build, cfg) for build in BUILDS.values() for cfg in CONFIGS.values()],
    ids=[f"{build}-{cfg}" for build in BUILDS for cfg in CONFIGS],
)


def gathered(model, variables):
    update = quick_jit(lambda v: model.apply(v, X, mutable=["aqt_stats"])[1])
    changed = update(variables)
    return {**variables, **changed}


def gradient(model, variables):
    return jax.grad(lambda v: model.apply(v, X).sum())(variables)


@every_model
def test_statistics_have_a_gradient_of_zero(build, cfg):
    model = build(cfg)
    variables = gathered(model, init(model, X))
    found = quick_jit(lambda v: gradient(model, v))(variables)
    of_statistics = jax.tree.leaves(found["aqt_stats"])
    assert of_statistics and not any(leaf.any() for leaf in of_statistics)
    assert found["params"]["kernel"].any()


@every_model
def test_statistics_that_are_missing_are_named(build, cfg):
    model = build(cfg)
    variables = init(model, X)
    with pytest.raises(ValueError, match=r"no statistics yet.*mutable=\['aqt_stats'\]"):
        gradient(model, variables)


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_statistics_that_an_optimizer_changed_are_refused(build):
    model = build(CONFIGS["static_int8"])
    variables = gathered(model, init(model, X))
    decay = optax.adamw(1e-3, weight_decay=1e-2)
    updates, _ = decay.update(
        gradient(model, variables), decay.init(variables), variables
    )
    changed = optax.apply_updates(variables, updates)
    with pytest.raises(ValueError, match="weight decay or a mean changed"):
        model.apply(changed, X)
    assert jnp.isnan(jax.jit(model.apply)(changed, X)).all()
