"""Budgets of time. No time is asserted: what contractions take is given here."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import aqtlite
from aqtlite import config, numerics
from aqtlite.program.measuring import measure
from tests.common import normal

pytestmark = pytest.mark.code("quick")

CANDIDATES = {
    "w4": config.weight_only(4),
    "gptq": config.gptq(4),
    "w8a8": config.fully_quantized(),
}
X = normal((4, 8))


def model(params, x):
    """A layer, three in a scan, and a product of activations."""
    with jax.named_scope("first"):
        x = x @ params["first"]
    with jax.named_scope("scanned"):
        x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["scanned"])
    with jax.named_scope("scores"):
        return x @ x.T


PARAMS = {"first": normal((8, 8), 1), "scanned": normal((3, 8, 8), 2)}

GAIN = {4: 2.0, 8: 4.0}
"""Time in float, of a second, over that of weights of each width."""


SLOWER = {4: 2.0, 8: 0.5}


def measured_as(gain, monkeypatch):
    """Lets contractions take a second in float, and as the gains say quantized."""

    def measured(plan, *, seconds):
        real = measure_serving(plan, seconds=1e-4)
        changed = [
            dataclasses.replace(
                one,
                float_seconds=1.0,
                quantized_seconds=9.0,
                served_seconds=1 / gain[one.alike[0].cfg.fwd.rhs.grid.bits],
            )
            for one in real.contractions
        ]
        return dataclasses.replace(real, contractions=tuple(changed))

    measure_serving = measure.measure_serving
    monkeypatch.setattr(measure, "measure_serving", measured)


@pytest.fixture
def found(monkeypatch):
    measured_as(GAIN, monkeypatch)

    def choose(budget):
        return aqtlite.choose_bits(
            model, PARAMS, [X], candidates=CANDIDATES, budget=budget, unit="seconds"
        )

    return choose


@pytest.mark.slow
def test_the_choice_is_within_the_budget_of_time(found, tmp_path):
    # In float 4 seconds: one of the first layer, and three of the steps.
    one = found(2.2)
    assert [point.seconds for point in one.uniform] == [4.0, 2.0, 2.0, 1.0]
    assert one.chosen.seconds <= one.budget == 2.2
    assert one.unit == "seconds"
    assert sum(choice.seconds for choice in one.choices) == one.chosen.seconds
    assert [choice.float_seconds for choice in one.choices] == [1.0, 3.0]
    for point in (*one.uniform, *one.curve):
        assert point.seconds > 2.2 or point.snr <= one.chosen.snr
    times = [point.seconds for point in one.curve]
    assert times == sorted(times)
    text = str(one)
    assert "of at most 2,200,000.0 microseconds" in text
    assert "us" in text.split("weight of")[1].split()
    assert json.loads(one.to_json())["chosen"]["seconds"] == one.chosen.seconds
    one.plot(tmp_path / "curve.svg")
    assert "microseconds" in (tmp_path / "curve.svg").read_text()
    assert {choice.candidate for choice in found(5.0).choices} == {"float"}
    assert {choice.candidate for choice in found(1.0).choices} == {"w8a8"}
    with pytest.raises(ValueError, match="of 900,000.0 microseconds is too small: the"):
        found(0.9)


def test_no_weight_gets_what_is_slower_than_float(monkeypatch):
    measured_as(SLOWER, monkeypatch)
    exact = model(PARAMS, X)
    coarse = {"fwd.lhs.numerics": numerics.IntSymmetric(bits=2)}
    slower = config.update(config.fully_quantized(), coarse)

    def loss(out, x):  # The larger the error, the less.
        return -jnp.square(out - exact).mean()

    found = aqtlite.choose_bits(
        model,
        PARAMS,
        [X],
        candidates={"w4": config.weight_only(4), "slower": slower},
        budget=100.0,
        unit="seconds",
        loss=loss,
        num_inputs=1,
    )
    in_float, four_bits, uniform = found.uniform
    assert uniform.seconds == 8.0 and uniform.loss < four_bits.loss < in_float.loss
    assert {choice.candidate for choice in found.choices} == {"w4"}
    assert all(one.seconds <= one.float_seconds for one in found.choices)
