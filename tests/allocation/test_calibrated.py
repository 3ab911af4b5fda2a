"""Candidates with statistics of activations, and weights rounded at conversion."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import aqtlite
from aqtlite import Rule, config, quantize_function
from aqtlite.allocation import gathering
from aqtlite.flax import calibrate_in_float, convert, quantize_model
from aqtlite.flax import nnx as aqt_nnx
from aqtlite.program.serving.placeholder import without_markers
from aqtlite.qtensor import codes
from tests.allocation.models import X, loss
from tests.common import normal, quick_jit
from tests.flax.nnx import models as nnx_models
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

GPTQ, NEAREST = config.gptq(3), config.weight_only(8)
STATIC = config.update(config.static_int8(), {"fwd.rhs.rounding": config.Gptq()})
CANDIDATES = {"gptq": GPTQ, "static": STATIC, "w8": NEAREST}
INPUTS = [normal((16, 8), seed) @ normal((8, 8), 9) for seed in (1, 2)]


class Layers(nn.Module):
    """A layer, three layers in a scan, and one that makes the output."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(12)(x))
        scan = nn.scan(
            Step, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        )
        x, _ = scan(name="scanned")(x, None)
        return nn.Dense(4, use_bias=False)(x)


class Step(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return jnp.tanh(nn.Dense(12)(x)), None


MODEL = Layers()
VARIABLES = init(MODEL, X)
BATCHES = [(x, quick_jit(MODEL.apply)(VARIABLES, x).argmax(-1)) for x in INPUTS]


def has_statistics(rules):
    return any(rule.cfg is not None and gathering.gathers(rule.cfg) for rule in rules)


def served(rules):
    """Returns the serving variables by rules, and the function of inputs."""
    model = quantize_model(MODEL, rules)
    variables = VARIABLES
    if has_statistics(rules):
        variables = calibrate_in_float(model, variables, INPUTS)
    serving = convert(model, variables, X)
    run = quick_jit(model.apply)
    return serving, lambda x: run(serving, x)


def decibels(exact, other):
    pairs = zip(exact, other, strict=True)
    noise = sum(np.sum(np.square(y - x), dtype=np.float64) for x, y in pairs)
    return 10 * math.log10(sum(np.sum(np.square(x)) for x in exact) / noise)


@pytest.fixture(scope="module")
def found():
    return aqtlite.choose_bits(
        MODEL,
        VARIABLES,
        BATCHES,
        candidates=CANDIDATES,
        budget=1_000,
        loss=loss,
        num_inputs=1,
    )


@pytest.mark.slow
def test_it_measures_what_calibration_and_conversion_serve(found):
    assert [one.name for one in found.uniform] == ["float", *CANDIDATES]
    assert {one.candidate for one in found.choices} & {"gptq", "static"}
    exact = [quick_jit(MODEL.apply)(VARIABLES, x) for x in INPUTS]
    for one in (found.chosen, *found.uniform[1:3]):
        serving, run = served(one.rules)
        losses = [loss(run(x), x, labels) for x, labels in BATCHES]
        assert abs(np.mean(losses) - one.loss) < 1e-5
        assert abs(decibels(exact, map(run, INPUTS)) - one.snr) < 0.01
        assert codes.stored_bytes(without_markers(serving)) == one.nbytes


def test_gptq_is_measured_and_not_rounding_to_nearest(found):
    nearest = config.update(GPTQ, {"fwd.rhs.rounding": None})
    exact = [quick_jit(MODEL.apply)(VARIABLES, x) for x in INPUTS]
    _, run = served([Rule(cfg=nearest)])
    (point,) = (one for one in found.uniform if one.name == "gptq")
    assert point.snr > decibels(exact, map(run, INPUTS)) + 1


def test_sensitivity_measures_each_contraction_as_it_is_served():
    measured = aqtlite.sensitivity(
        MODEL, VARIABLES, iter(INPUTS), candidates={"gptq": GPTQ}
    )
    exact = [quick_jit(MODEL.apply)(VARIABLES, x) for x in INPUTS]
    assert len(measured.contractions) == 3
    for one in measured.contractions:
        _, run = served([Rule(path=one.path, cfg=GPTQ)])
        assert abs(decibels(exact, map(run, INPUTS)) - one.output_snr) < 0.01
    # The last contraction makes the output: its own error is that of the output.
    last = measured.contractions[-1]
    assert abs(last.snr - last.output_snr) < 0.01


@pytest.mark.slow
def test_functions_and_nnx_models():
    def by_hand(params, x):
        x = jnp.tanh(jnp.einsum("bk,nk->bn", x, params["first"]))
        return x @ params["second"]

    params = {"first": normal((16, 8)), "second": normal((16, 4))}
    candidates = {"gptq": GPTQ}
    found = aqtlite.choose_bits(
        by_hand, params, INPUTS, candidates=candidates, budget=0.5
    )
    fn_q = quantize_function(by_hand, found.rules, params=0)
    state = fn_q.init_state(params, X)
    for x in INPUTS:
        state = jax.jit(fn_q.gather)(state, params, x)
    serve, serving = aqtlite.convert_function(fn_q, params, X, state=state)
    exact = [by_hand(params, x) for x in INPUTS]
    out = [jax.jit(serve)(serving, x) for x in INPUTS]
    assert abs(decibels(exact, out) - found.chosen.snr) < 0.01
    assert codes.stored_bytes(without_markers(serving)) == found.chosen.nbytes

    model = nnx_models.Mlp(nnx.Rngs(0))
    found = aqtlite.choose_bits(model, None, INPUTS, candidates=candidates, budget=0.5)
    quantized = aqt_nnx.quantize_model(model, found.rules)
    aqt_nnx.calibrate_in_float(quantized, INPUTS)
    serving = aqt_nnx.convert(quantized, X)
    exact, out = ([nnx_models.call(one, x) for x in INPUTS] for one in (model, serving))
    assert abs(decibels(exact, out) - found.chosen.snr) < 0.01


def test_a_quantized_model_is_measured_with_its_own_statistics():
    model = quantize_model(MODEL, GPTQ)
    own = aqtlite.sensitivity(model, VARIABLES, INPUTS)
    given = aqtlite.sensitivity(MODEL, VARIABLES, INPUTS, candidates={"own": GPTQ})
    assert [one.output_snr for one in own.contractions] == [
        one.output_snr for one in given.contractions
    ]


def test_statistics_among_the_variables_are_no_bytes_of_the_model():
    calibrated = calibrate_in_float(quantize_model(MODEL, GPTQ), VARIABLES, INPUTS)
    nnx_model = nnx_models.Mlp(nnx.Rngs(0))
    nnx_calibrated = aqt_nnx.quantize_model(nnx_models.Mlp(nnx.Rngs(0)), GPTQ)
    aqt_nnx.calibrate_in_float(nnx_calibrated, INPUTS)

    def found(model, variables):
        return aqtlite.choose_bits(
            model, variables, INPUTS, candidates={"w4": NEAREST}, budget=0.5
        )

    for before, after in (
        (found(MODEL, VARIABLES), found(MODEL, calibrated)),
        (found(nnx_model, None), found(nnx_calibrated, None)),
    ):
        assert before.budget == after.budget
        assert [one.nbytes for one in before.uniform] == [
            one.nbytes for one in after.uniform
        ]


def test_candidates_share_the_second_moments_of_their_inputs():
    def gathered(*cfgs):
        found = []

        def model(w, x):
            return x @ w

        from aqtlite.allocation.sensitivity import programs_of

        programs = programs_of(model, normal((8, 4)), cfgs, None, None, {})
        found = gathering.first(programs.of(X).switches)
        return [len(states) for states in found.values()]

    nearest = config.weight_only(4)
    assert gathered(GPTQ, config.gptq(4, 8), nearest) == [1]
    assert gathered(GPTQ, STATIC) == [2]
    assert gathered(nearest) == []


def test_a_contraction_that_no_batch_reaches_has_no_statistics():
    def model(w, x):
        return lax.cond(x.sum() > 1e9, lambda: x @ w, lambda: x[:, :4])

    with pytest.raises(ValueError, match="seen no batch: give batches with which"):
        aqtlite.sensitivity(model, normal((8, 4)), [X], candidates=[STATIC])
