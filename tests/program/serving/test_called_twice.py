"""Layers that are called twice, with a state for each call, are served as trained."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import aqtlite
from aqtlite import calibration, config, numerics
from aqtlite.flax import AqtDotGeneral, Call, convert, quantize_model
from aqtlite.flax import nnx as aqtlite_nnx
from aqtlite.flax.nnx import GradientStatistics
from aqtlite.program import injected
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization.state_collections import (
    OF_GRADIENTS,
    PARAMETERS,
    STATISTICS,
    collections_of,
)
from tests.common import mostly_slow, normal
from tests.flax.support import init

SIZE = 8
X = normal((6, SIZE))
RATE = 0.05
STEPS = 2
_STATIC_WEIGHTS = {
    "fwd.rhs.calibration": calibration.MaxOverBatches(),
    "fwd.rhs.calib_shared_axes": "per_tensor",
}
CONFIGS = {
    "smoothquant": config.smoothquant(),
    "lsq": config.lsq(8),
    "lsq_weight_only": config.lsq_weight_only(4),
    "static_int8": config.static_int8(),
    "static_affine": config.static_int8("max", affine=True),
    "static_weights": config.update(config.static_int8("max"), _STATIC_WEIGHTS),
    "fp8_delayed": config.fp8(delayed=True),
    "gptq": config.gptq(4),
    "gptq_static_weights": config.update(
        config.gptq(4),
        {
            **_STATIC_WEIGHTS,
            "fwd.rhs.blocks": None,
            "fwd.rhs.numerics": numerics.IntSymmetric(bits=4),
        },
    ),
}
WEIGHTS_OF_TWO_CALLS = {
    name: 1 if name in ("static_int8", "static_affine", "fp8_delayed", "gptq") else 2
    for name in CONFIGS
}


def between(x):
    """Makes the second call's inputs others than the first's, in each channel."""
    return 10 * jax.nn.relu(x) + jnp.arange(float(SIZE))


class Outcome(NamedTuple):
    """A model after training, and what serves it."""

    trained: Any
    served: Any
    weights: list[QTensor]


def weights_of(tree):
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, QTensor))
    return [x for x in leaves if isinstance(x, QTensor)]


def descended(params, gradient):
    return jax.tree.map(lambda x, g: x - RATE * g, params, gradient)


def loss_of(out):
    return jnp.mean(jnp.tanh(0.1 * out))


class LinenTwice(nn.Module):
    dot_general: Any = None

    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(SIZE, dot_general=self.dot_general, name="layer")
        return layer(between(layer(x)))


def linen(model, x=X) -> Outcome:
    variables = model.init(jax.random.key(0), x)
    variables = {**variables, **init(model, x)}

    @jax.jit
    def step(variables, x):
        trained = {
            k: v for k, v in variables.items() if k in (PARAMETERS, OF_GRADIENTS)
        }
        others = {k: v for k, v in variables.items() if k not in trained}

        def loss(trained):
            out, changed = model.apply({**others, **trained}, x, mutable=[STATISTICS])
            return loss_of(out), changed

        gradient, changed = jax.grad(loss, has_aux=True)(trained)
        params = descended(trained[PARAMETERS], gradient.pop(PARAMETERS))
        return {**others, **changed, **gradient, PARAMETERS: params}

    for number in range(STEPS):
        variables = step(variables, x * (1 + number))
    serving = convert(model, variables, x)
    run = jax.jit(model.apply)
    return Outcome(run(variables, x), run(serving, x), weights_of(serving["aqt"]))


def linen_by_rules(cfg):
    return linen(quantize_model(LinenTwice(), cfg))


def linen_injected(cfg):
    return linen(LinenTwice(AqtDotGeneral(cfg, name="shared")))


class NnxTwice(nnx.Module):
    def __init__(self, **kwargs):
        self.layer = nnx.Linear(SIZE, SIZE, rngs=nnx.Rngs(0), **kwargs)

    def __call__(self, x):
        return self.layer(between(self.layer(x)))


def nnx_model(model) -> Outcome:
    aqtlite_nnx.init_state(model, X)
    model.train()
    optimizer = nnx.Optimizer(model, optax.sgd(RATE), wrt=nnx.Param)
    wrt = nnx.DiffState(0, nnx.Any(nnx.Param, GradientStatistics))

    @nnx.jit
    def step(model, optimizer, x):
        gradient = nnx.grad(lambda model: loss_of(model(x)), argnums=wrt)(model)
        gradient = aqtlite_nnx.overwrite_with_gradient(model, gradient)
        optimizer.update(model, gradient)

    for number in range(STEPS):
        step(model, optimizer, X * (1 + number))
    model.eval()
    serving = aqtlite_nnx.convert(model, X)
    run = nnx.jit(lambda model, x: model(x))
    return Outcome(run(model, X), run(serving, X), weights_of(nnx.state(serving)))


def nnx_by_rules(cfg):
    return nnx_model(aqtlite_nnx.quantize_model(NnxTwice(), cfg))


def nnx_injected(cfg):
    model = NnxTwice(dot_general=aqtlite_nnx.AqtDotGeneral(cfg))
    return nnx_model(aqtlite_nnx.quantize_model(model))


def function(fn, cfg, params, x=X) -> Outcome:
    """Trains and serves a function by rules (cfg), or with injected functions."""
    fn_q = aqtlite.quantize_function(fn, () if cfg is None else cfg, params=0)
    state = fn_q.init_state(params, x)

    @jax.jit
    def step(state, params, x):
        def loss(learned, params):
            out, after = fn_q({**state, **learned}, params, x)
            return loss_of(out), after

        learned = {k: v for k, v in state.items() if k != STATISTICS}
        of_learned, of_params = jax.grad(loss, argnums=(0, 1), has_aux=True)(
            learned, params
        )[0]
        after = loss(learned, params)[1]
        if PARAMETERS in state:
            steps = descended(state[PARAMETERS], of_learned[PARAMETERS])
            after = {**after, PARAMETERS: steps}
        if OF_GRADIENTS in state:
            after = {**after, OF_GRADIENTS: of_learned[OF_GRADIENTS]}
        return after, descended(params, of_params)

    for number in range(STEPS):
        state, params = step(state, params, x * (1 + number))
    serve, serving = aqtlite.convert_function(fn_q, params, x, state=state)
    evaluate = jax.jit(lambda state, params, x: fn_q.evaluate(state, (params, x), {}))
    trained, served = evaluate(state, params, x), jax.jit(serve)(serving, x)
    return Outcome(trained, served, weights_of(serving["aqt"]))


def twice(params, x, dot=jnp.matmul):
    with jax.named_scope("layer"):
        x = dot(x, params["w"])
    with jax.named_scope("layer"):
        return dot(between(x), params["w"])


def function_by_rules(cfg):
    return function(twice, cfg, {"w": normal((SIZE, SIZE))})


def function_injected(cfg):
    dot_general = aqtlite_nnx.AqtDotGeneral(cfg)

    def fn(params, x):
        with injected.marking():
            dot = functools.partial(
                dot_general, dimension_numbers=(((1,), (0,)), ((), ()))
            )
            return twice(params, x, dot)

    return function(fn, None, {"w": normal((SIZE, SIZE))})


WAYS = {
    one.__name__: one
    for one in (
        linen_by_rules,
        linen_injected,
        nnx_by_rules,
        nnx_injected,
        function_by_rules,
        function_injected,
    )
}
CASES = {f"{way}-{name}": (way, name) for way in WAYS for name in CONFIGS}
# Calls that share a name share no statistics of gradients.
del CASES["linen_injected-fp8_delayed"]


@pytest.mark.parametrize(
    "case",
    mostly_slow(
        CASES,
        "linen_by_rules-smoothquant",
        "function_by_rules-lsq",
        "nnx_by_rules-static_weights",
    ),
)
def test_served_equals_trained(case):
    way, name = CASES[case]
    outcome = WAYS[way](CONFIGS[name])
    is_rounded = CONFIGS[name].fwd.rhs.rounding is not None
    if not is_rounded:  # GPTQ serves other integers than it trains.
        np.testing.assert_array_equal(outcome.served, outcome.trained)
    shares = way == "linen_injected"
    assert len(outcome.weights) == (1 if shares else WEIGHTS_OF_TWO_CALLS[name])
    if not shares and len(outcome.weights) == 2:
        one, other = (np.asarray(x.dequant()) for x in outcome.weights)
        assert (one != other).any()
