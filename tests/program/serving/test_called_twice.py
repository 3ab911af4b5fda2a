"""Layers that are called twice, with a state for each call, are served as trained."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx, serialization
from jax import lax

import aqtlite
from aqtlite import calibration, checkpoint, config, numerics
from aqtlite.flax import AqtDotGeneral, Call, convert, quantize_model
from aqtlite.flax import nnx as aqtlite_nnx
from aqtlite.flax.nnx import GradientStatistics
from aqtlite.program import injected
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization.states.state_collections import (
    OF_GRADIENTS,
    PARAMETERS,
    STATISTICS,
)
from tests.common import mostly_slow, normal
from tests.flax.support import init

# Bits tell which of several weights a call was served with.
pytestmark = pytest.mark.code("quick")

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
    layer: Any = nn.Dense

    @nn.compact
    def __call__(self, x):
        layer = self.layer(SIZE, dot_general=self.dot_general, name="layer")
        return layer(between(layer(x)))


def linen(model, x=X) -> Outcome:
    variables = init(model, x)

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
        gradient = jax.grad(loss, argnums=(0, 1), has_aux=True)
        (of_learned, of_params), after = gradient(learned, params)
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
    # Both calls see one weight, whose static ranges are equal.
    if not shares and len(outcome.weights) == 2 and "static" not in name:
        one, other = (np.asarray(x.dequant()) for x in outcome.weights)
        assert (one != other).any()


@pytest.mark.parametrize("lift", mostly_slow([nn.remat, nn.jit], nn.remat))
def test_calls_that_flax_hides_share_their_state(lift):
    def twice(cfg, layer):
        return LinenTwice(AqtDotGeneral(cfg), layer)

    with pytest.raises(ValueError, match="makes two contractions of the same axes"):
        init(twice(CONFIGS["smoothquant"], nn.Dense), X)
    outcome = linen(twice(CONFIGS["smoothquant"], lift(nn.Dense)))
    np.testing.assert_array_equal(outcome.served, outcome.trained)
    assert len(outcome.weights) == 1

    # Statistics of gradients would be added up, which the next step finds.
    model = twice(CONFIGS["fp8_delayed"], lift(nn.Dense))
    variables = init(model, X)
    gradients = jax.jit(jax.grad(lambda variables: loss_of(model.apply(variables, X))))
    after = {**variables, OF_GRADIENTS: gradients(variables)[OF_GRADIENTS]}
    assert not jnp.isfinite(gradients(after)[PARAMETERS]["layer"]["kernel"]).any()


def test_each_call_has_its_static_range():
    fn_q = aqtlite.quantize_function(twice, CONFIGS["static_weights"], params=0)
    params = {"w": normal((SIZE, SIZE))}
    _, state = fn_q(fn_q.init_state(params, X), params, X)
    wider = fn_q(state, {"w": 3 * params["w"]}, X)[1][STATISTICS]["layer#1"]
    state = {STATISTICS: {**state[STATISTICS], "layer#1": wider}}
    serve, serving = aqtlite.convert_function(fn_q, params, X, state=state)
    one, other = (x.scale for x in weights_of(serving["aqt"]))
    assert (3 * one == other).all()
    trained = jax.jit(lambda *args: fn_q.evaluate(state, args, {}))(params, X)
    np.testing.assert_array_equal(jax.jit(serve)(serving, X), trained)


def scanned(params, x):
    """A scan whose steps have a layer each, and share one; called twice."""

    def step(x, own):
        with jax.named_scope("shared"):
            x = jnp.tanh(x @ params["shared"])
        with jax.named_scope("own"):
            return between(x @ own), None

    for _ in range(2):
        x, _ = lax.scan(step, x, params["own"])
    return x


def alone(params, x):
    """A scan whose steps share all parameters; called twice."""

    def step(x, _):
        with jax.named_scope("shared"):
            return between(jnp.tanh(x @ params["shared"])), None

    for _ in range(2):
        x, _ = lax.scan(step, x, length=3)
    return x


def tied(params, x):
    """A table that is looked up, and contracted twice."""
    table = params["table"]
    rows = table[jnp.argmax(x, -1)]
    for _ in range(2):
        with jax.named_scope("table"):
            rows = between(jnp.einsum("bk,nk->bn", x + rows, table))
    return rows


PARAMS = {
    "shared": normal((SIZE, SIZE)) / 3,
    "own": normal((3, SIZE, SIZE)) / 3,
    "table": normal((SIZE, SIZE)) / 3,
}
# For each function and config: the shapes of the frozen weights.
ONE, THREE = (SIZE, SIZE), (3, SIZE, SIZE)
SHAPES = {
    (scanned, "smoothquant"): [THREE] * 4,
    (scanned, "lsq"): [THREE] * 4,
    (scanned, "static_int8"): [THREE, ONE],
    (scanned, "gptq"): [THREE, ONE],
    (scanned, "gptq_static_weights"): [THREE] * 4,
    (alone, "smoothquant"): [ONE] * 2,
    (alone, "lsq_weight_only"): [ONE] * 2,
    (alone, "static_affine"): [ONE],
    (alone, "gptq"): [ONE],
    (tied, "smoothquant"): [ONE] * 2,
    (tied, "lsq"): [ONE] * 2,
    (tied, "static_weights"): [ONE] * 2,
    (tied, "gptq"): [ONE],
}
FUNCTIONS = {f"{fn.__name__}-{name}": (fn, name) for fn, name in SHAPES}


@pytest.mark.parametrize(
    "case", mostly_slow(FUNCTIONS, "scanned-smoothquant", "tied-lsq")
)
def test_scans_and_tables(case):
    fn, name = FUNCTIONS[case]
    read = {"scanned": ("shared", "own"), "alone": ("shared",), "tied": ("table",)}
    params = {key: PARAMS[key] for key in read[fn.__name__]}
    outcome = function(fn, CONFIGS[name], params)
    assert [x.shape for x in outcome.weights] == SHAPES[fn, name]
    if CONFIGS[name].fwd.rhs.rounding is None:
        np.testing.assert_array_equal(outcome.served, outcome.trained)


@pytest.mark.parametrize("fn", mostly_slow([twice, scanned, alone], twice))
def test_rounded_once_by_the_moment_of_all_calls(fn):
    """As a function that is called once, with the sum of the moments, rounds."""
    name = "w" if fn is twice else "shared"
    weight = normal((SIZE, SIZE)) / 3
    params = {name: weight, **({"own": PARAMS["own"]} if fn is scanned else {})}
    outcome, moments = rounded(fn, params)
    (found,) = (x for x in outcome if x.shape == ONE)

    def once(params, x):
        return x @ params["w"]

    fn_q = aqtlite.quantize_function(once, config.gptq(4), params=0)
    _, state = fn_q(fn_q.init_state({"w": weight}, X), {"w": weight}, X)
    (path,) = state[STATISTICS]
    (alone,) = weights_of(
        aqtlite.convert_function(fn_q, {"w": weight}, X, state=state)[1]
    )
    moment = state[STATISTICS][path]["moment"]
    summed = type(moment)(moment.batches, moments)
    state = {STATISTICS: {path: {"moment": summed}}}
    (expected,) = weights_of(
        aqtlite.convert_function(fn_q, {"w": weight}, X, state=state)[1]
    )
    np.testing.assert_array_equal(found.qvalue, expected.qvalue)
    assert (found.qvalue != alone.qvalue).any()


def rounded(fn, params):
    """The frozen weights of a function, and the sum of one weight's moments."""
    fn_q = aqtlite.quantize_function(fn, config.gptq(4), params=0)
    state = fn_q.gather(fn_q.init_state(params, X), params, X)
    gathered = [
        entry["moment"].moment.reshape(-1, 1, SIZE, SIZE).sum(0)
        for path, entry in state[STATISTICS].items()
        if not path.startswith("own")
    ]
    assert len(gathered) == 2
    serving = aqtlite.convert_function(fn_q, params, X, state=state)[1]
    return weights_of(serving["aqt"]), sum(gathered)


class Times(nn.Module):
    """A layer that is called as often as is wanted."""

    @nn.compact
    def __call__(self, x, times):
        layer = nn.Dense(SIZE, use_bias=False, name="layer")
        for _ in range(times):
            x = between(layer(x))
        return x


@pytest.mark.parametrize("name", ["smoothquant", "gptq"])
def test_calls_that_contract_it_more_often(name):
    model = quantize_model(Times(), CONFIGS[name])
    variables = init(model, X, 2)
    _, changed = model.apply(variables, X, 2, mutable=[STATISTICS])
    variables = {**variables, **changed}
    serving = convert(model, variables, calls=[Call(X, 1), Call(X, 2)])
    assert len(weights_of(serving["aqt"])) == WEIGHTS_OF_TWO_CALLS[name]
    both = convert(model, variables, X, 2)
    jax.tree.map(np.testing.assert_array_equal, serving["aqt"], both["aqt"])
    if name == "gptq":
        return
    for times in (1, 2):
        run = jax.jit(lambda v, x, times=times: model.apply(v, x, times))
        np.testing.assert_array_equal(run(serving, X), run(variables, X))
    once = convert(model, variables, X, 1)
    with pytest.raises(ValueError, match="with another state, than in the calls"):
        model.apply(once, X, 2)


def test_calls_of_other_ranks_stay_in_float_in_a_layer():
    """An injected function has a state for each rank, which it sees not in serving."""

    class Ranks(nn.Module):
        @nn.compact
        def __call__(self, x):
            dot_general = AqtDotGeneral(config.smoothquant())
            layer = nn.Dense(SIZE, dot_general=dot_general)
            return layer(between(layer(x))[None])

    reports = []
    model = Ranks()
    variables = init(model, X)
    _, changed = model.apply(variables, X, mutable=[STATISTICS])
    variables = {**variables, **changed}
    serving = convert(model, variables, X, report=reports.append)
    assert "calls of its layer have calibration states of their own" in str(reports[0])
    run = jax.jit(model.apply)
    np.testing.assert_array_equal(run(serving, X), run(variables, X))


def test_a_weight_made_by_contractions_with_states():
    """A product of parameters that is quantized by states of its own, twice."""
    inner = config.lsq_weight_only(4)

    def fn(params, x):
        for _ in range(2):
            with jax.named_scope("inner"):
                w = params["a"] @ params["b"]
            with jax.named_scope("outer"):
                x = between(x @ w)
        return x

    rules = [
        aqtlite.Rule("inner.*", cfg=inner),
        aqtlite.Rule("outer.*", cfg=config.fully_quantized()),
    ]
    params = {"a": PARAMS["shared"], "b": PARAMS["table"]}
    fn_q = aqtlite.quantize_function(fn, rules, params=0)
    state = fn_q.init_state(params, X)
    steps = jax.tree.map(lambda x: 2 * x, state[PARAMETERS]["inner#1"])
    state = {PARAMETERS: {**state[PARAMETERS], "inner#1": steps}}
    reports = []
    serve, serving = aqtlite.convert_function(
        fn_q, params, X, state=state, report=reports.append
    )
    assert "states of their own in each call" in str(reports[0])
    trained = jax.jit(lambda *args: fn_q.evaluate(state, args, {}))(params, X)
    np.testing.assert_array_equal(jax.jit(serve)(serving, X), trained)


def test_a_checkpoint_has_the_weights_of_all_calls(tmp_path):
    model = quantize_model(LinenTwice(), config.smoothquant())
    variables = init(model, X)
    _, changed = model.apply(variables, X, mutable=[STATISTICS])
    variables = {**variables, **changed}
    source = tmp_path / "float.msgpack"
    source.write_bytes(serialization.to_bytes(variables))
    checkpoint.convert_checkpoint(source, tmp_path / "out", model, X)
    serving = checkpoint.load_serving(tmp_path / "out", model)
    run = jax.jit(model.apply)
    np.testing.assert_array_equal(run(serving, X), run(variables, X))
