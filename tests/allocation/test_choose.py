import json
import logging
import math
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import aqtlite
from aqtlite import Rule, checkpoint, config, quantize_function, rules
from aqtlite.flax import FrozenKernel, convert, quantize_model
from aqtlite.flax import nnx as aqt_nnx
from tests.allocation.models import (
    CANDIDATES,
    INT4,
    INT8,
    Mlp,
    X,
    loss,
)
from tests.checkpoint.support import save
from tests.common import normal, quick_jit
from tests.flax.nnx import models as nnx_models
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

MODEL = Mlp()
VARIABLES = init(MODEL, X)
# As if the model had been trained on them.
BATCHES = [(x, quick_jit(MODEL.apply)(VARIABLES, x).argmax(-1)) for x in (X, 2 * X)]


def choose(model=MODEL, variables=VARIABLES, batches=(X,), budget=0.5, **kwargs):
    kwargs.setdefault("candidates", CANDIDATES)
    return aqtlite.choose_bits(model, variables, batches, budget=budget, **kwargs)


@pytest.fixture(scope="module")
def found():
    return choose(batches=BATCHES, loss=loss, num_inputs=1, budget=500)


# --- The choice ----------------------------------------------------------------------


def test_the_choice_is_within_the_budget_and_no_uniform_one_is_better(found):
    assert found.chosen.nbytes <= found.budget == 500
    assert choose(budget=np.int64(500)).chosen.nbytes <= 500
    assert [one.paths for one in found.choices] == [
        ("Mlp/Dense_0",),
        ("Mlp/Dense_1",),
        ("Mlp/Dense_2",),
    ]
    names = [one.name for one in found.uniform]
    assert names == ["float", "w4", "w8a8"]
    for one in (*found.uniform, *found.curve):
        assert one.nbytes > 500 or one.loss >= found.chosen.loss
    sizes = [one.nbytes for one in found.curve]
    assert sizes == sorted(sizes)


def test_the_rules_make_what_was_measured(found):
    for one in (found.chosen, *found.uniform[1:], *found.curve):
        model = quantize_model(MODEL, one.rules, strict=True)
        run = quick_jit(model.apply)
        losses = [loss(run(VARIABLES, x), x, labels) for x, labels in BATCHES]
        assert abs(np.mean(losses) - one.loss) < 1e-5
    assert found.rules == found.chosen.rules
    assert rules.from_json(rules.to_json(found.rules)) == found.rules


def test_the_cost_is_the_change_of_the_loss_alone(found):
    measured = aqtlite.sensitivity(
        MODEL, VARIABLES, BATCHES, candidates=CANDIDATES, loss=loss, num_inputs=1
    )
    changes = {(o.path, o.candidate): o.loss_change for o in measured.contractions}
    for one in found.choices:
        if one.candidate == "float":
            assert one.cost == 0
        else:
            assert abs(one.cost - changes[one.paths[0], one.candidate]) < 1e-6


def test_the_bytes_are_those_of_a_converted_checkpoint(found, tmp_path):
    source = save(tmp_path / "float", VARIABLES, "msgpack")
    for i, one in enumerate((found.uniform[1], found.uniform[2], found.chosen)):
        report = checkpoint.convert_checkpoint(
            source,
            tmp_path / str(i),
            quantize_model(MODEL, one.rules),
            X,
        )
        assert report.bytes_after == one.nbytes
    assert sum(x.nbytes for x in jax.tree.leaves(VARIABLES)) == found.uniform[0].nbytes


def test_sensitive_layers_get_more_bits():
    def model(params, x):
        for name, w in params.items():
            with jax.named_scope(name):
                x = x @ w
        return x

    # Rounding signs to 4 bits only scales them.
    signs = {"easy": jnp.sign(normal((8, 8), 1)), "last": jnp.sign(normal((8, 8), 3))}
    params = {**signs, "hard": normal((8, 8), 2)}
    uniform = choose(model, params, budget=1.0).uniform
    budget = uniform[1].nbytes + 40
    found = choose(model, params, budget=budget)
    by_path = {one.paths[0]: one.candidate for one in found.choices}
    assert by_path == {"easy": "w4", "hard": "w8a8", "last": "w4"}
    assert found.chosen.snr > uniform[1].snr + 1


def test_a_large_budget_leaves_all_in_float_and_a_small_one_nothing():
    found = choose(budget=1.0)
    assert {one.candidate for one in found.choices} == {"float"}
    assert found.chosen.snr == math.inf
    least = min(one.nbytes for one in found.uniform)
    assert {one.candidate for one in choose(budget=least).choices} == {"w4"}
    with pytest.raises(ValueError, match=rf"need at least {least:,}, of which 128"):
        choose(budget=least - 1)


def test_it_compiles_the_model_once(caplog):
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        choose(batches=BATCHES, loss=loss, num_inputs=1)
    compiled = [x for x in caplog.messages if x.startswith("Compiling jit(switched)")]
    assert len(compiled) == 1


# --- Models --------------------------------------------------------------------------


def test_functions_and_nnx_models():
    def by_hand(params, x):
        for name, w in params.items():
            with jax.named_scope(name):
                x = jnp.tanh(x @ w)
        return x

    params = {"first": normal((8, 16)), "second": normal((16, 4))}
    found = choose(by_hand, params)
    fn_q = quantize_function(by_hand, found.rules, params=0)
    assert len(fn_q.plan(params, X).contractions) == len(found.choices) == 2
    model = nnx_models.Mlp(nnx.Rngs(0))
    found = choose(model, None, budget=0.4)
    quantized = aqt_nnx.quantize_model(model, found.rules)
    exact, out = nnx_models.call(model, X), nnx_models.call(quantized, X)
    snr = 10 * math.log10(jnp.sum(exact**2) / jnp.sum((out - exact) ** 2))
    assert abs(snr - found.chosen.snr) < 0.01


def test_invariant_models_are_measured_as_such():
    def function(w, x):
        return jnp.tanh(x @ w)

    w = normal((8, 4))
    quantized = quantize_function(function, INT8, params=0, invariant=True)
    found = choose(quantized, w, budget=0.4)
    again = quantize_function(function, found.rules, params=0, invariant=True)
    exact, out = aqtlite.invariant(function)(w, X), again(w, X)
    snr = 10 * math.log10(jnp.sum(exact**2) / jnp.sum((out - exact) ** 2))
    assert abs(snr - found.chosen.snr) < 1e-4

    class Refused(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jax.scipy.special.digamma(nn.Dense(4)(x))

    model = quantize_model(Refused(), INT8, invariant=True)
    with pytest.raises(ValueError, match="digamma has no such form"):
        choose(model, init(Refused(), X))


def test_other_models_and_paths_of_parameters():
    def apply(params, x):
        return jnp.tanh(x @ params["first"]) @ params["second"]

    params = {"first": normal((8, 16)), "second": normal((16, 4))}
    found = choose(types.SimpleNamespace(apply=apply), params)
    assert [one.paths for one in found.choices] == [("first",), ("second",)]

    def by_parameters(rules):
        return quantize_function(apply, rules, params=0, paths="parameters")

    with_scopes = jax.named_scope("all")(apply)
    fn_q = quantize_function(with_scopes, INT4, params=0, paths="parameters")
    found = choose(fn_q, params)
    assert [one.paths for one in found.choices] == [("first",), ("second",)]
    by_parameters(found.rules).plan(params, X)  # Raises if a rule matches nothing.


def test_contractions_of_one_weight_get_one_choice():
    class Tied(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.normal(0.3), (8, 8))
            with jax.named_scope("encode"):
                x = jnp.tanh(x @ w)
            with jax.named_scope("between"):
                x = nn.Dense(8)(x)
            with jax.named_scope("decode"):
                return x @ w.T

    model = Tied()
    variables = init(model, X)
    found = choose(model, variables, budget=0.5)
    assert [one.paths for one in found.choices] == [
        ("Tied/encode", "Tied/decode"),
        ("Tied/Dense_0",),
    ]
    serving = convert(quantize_model(model, found.rules), variables, X)
    assert isinstance(serving["params"]["w"], FrozenKernel)
    assert found.choices[0].float_bytes == 256


def test_weights_in_scans_and_of_experts_and_convolutions():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = nn.scan(
                Step, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
            )
            x, _ = dense(name="scanned")(x, None)
            experts = self.param("experts", nn.initializers.normal(), (2, 8, 8))
            with jax.named_scope("experts"):
                x = lax.ragged_dot(x, experts, jnp.array([10, 6]))
            return nn.Conv(4, (3, 3), name="conv")(x.reshape(2, 4, 8, 2))

    model = Model()
    variables = init(model, X)
    candidates = {"w8": config.weight_only(8)}
    found = choose(model, variables, candidates=candidates, budget=584)
    scanned, experts, conv = found.choices
    assert (scanned.float_bytes, scanned.nbytes) == (3 * 256, 3 * (64 + 8 * 4))
    assert (experts.float_bytes, experts.nbytes) == (512, 2 * (64 + 8 * 4))
    assert (conv.float_bytes, conv.nbytes) == (288, 72 + 4 * 4)


class Step(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return jnp.tanh(nn.Dense(8, use_bias=False)(x)), None


def test_a_weight_that_something_else_reads_is_kept_in_float():
    def tied(params, tokens):
        x = params[tokens]
        with jax.named_scope("gram"):
            x = x @ x.T @ x  # Contractions of activations.
        with jax.named_scope("logits"):
            return x @ params.T

    table = normal((10, 8))
    found = choose(tied, table, [jnp.arange(6)], budget=2 * table.nbytes)
    (one,) = found.choices
    assert one.paths == ("logits",)
    assert found.uniform[1].nbytes > found.uniform[0].nbytes == table.nbytes
    # Also where a loss, as by chance, is lower with integers beside the floats.
    in_float = tied(table, jnp.arange(6))
    found = choose(
        tied,
        table,
        [jnp.arange(6)],
        budget=3 * table.nbytes,
        loss=lambda outputs, tokens: -jnp.square(outputs - in_float).sum(),
    )
    assert found.chosen.nbytes == table.nbytes


def test_a_candidate_leaves_in_float_what_its_rules_do_not_name():
    candidates = {
        "last": [Rule(path=".*Dense_2", cfg=INT4)],
        "any": [Rule(cfg=INT8)],
    }
    found = choose(candidates=candidates, budget=1500)
    names = {one.paths[0]: one.candidate for one in found.choices}
    assert names["Mlp/Dense_0"] != "last"
    assert names["Mlp/Dense_1"] != "last"


# --- What is shown -------------------------------------------------------------------


def test_it_prints_as_tables(found):
    text = str(found)
    assert "bytes of at most 500 bytes; 3 weights" in text
    for one in found.choices:
        assert one.paths[0] in text
    assert all(name in text for name in ("chosen", "w4", "w8a8", "float"))
    assert "<td>Mlp/Dense_0</td>" in found._repr_html_()


def test_json_has_the_rules_and_the_curve(found):
    data = json.loads(found.to_json(indent=1), parse_constant=pytest.fail)
    assert rules.from_json(json.dumps(data["rules"])) == found.rules
    assert data["budget"] == 500
    assert len(data["curve"]) == len(found.curve)
    assert data["uniform"][0] == {
        "name": "float",
        "nbytes": found.uniform[0].nbytes,
        "seconds": None,
        "loss": found.uniform[0].loss,
        "snr": None,
    }


@pytest.mark.parametrize("with_loss", [True, False])
def test_it_draws_the_curve(found, with_loss, tmp_path):
    one = found if with_loss else choose(budget=500)
    one.plot(tmp_path / "curve.svg")
    assert "</svg>" in (tmp_path / "curve.svg").read_text()


# --- Errors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "error", "text"),
    [
        (0, ValueError, "budget must be a positive integer"),
        (-5, ValueError, "budget must be a positive integer"),
        (1.5, ValueError, "a float up to 1"),
        (math.nan, ValueError, "budget must be a positive integer"),
        (True, TypeError, "budget must be a number of bytes"),
        ("1 MB", TypeError, "budget must be a number of bytes"),
    ],
)
def test_budgets_that_are_none(budget, error, text):
    with pytest.raises(error, match=text):
        choose(budget=budget)


@pytest.mark.parametrize("budget", [0, -1.0, math.nan, math.inf])
def test_budgets_of_time_that_are_none(budget):
    with pytest.raises(ValueError, match="budget must be positive, of seconds"):
        choose(budget=budget, unit="seconds")


def test_units_that_are_none():
    with pytest.raises(ValueError, match="unit must be 'bytes' or 'seconds', got 'ms'"):
        choose(budget=1, unit="ms")


def test_candidates_are_needed():
    with pytest.raises(TypeError, match="candidates is None"):
        choose(quantize_model(MODEL, INT4), candidates=None)


def test_there_has_to_be_a_weight():
    with pytest.raises(ValueError, match="there are no bytes to save"):
        choose(lambda scale, x: x @ x.T * scale, jnp.ones(()))
    with pytest.raises(ValueError, match="there is no batch to measure with"):
        choose(batches=[])


def test_a_batch_without_rows():
    with pytest.raises(
        ValueError, match=r"float32\[0,8\], which has an axis of size 0"
    ):
        choose(MODEL, VARIABLES, [X[:0]], budget=0.5)


def test_a_candidate_that_a_contraction_does_not_take_is_named():
    blocks = config.update(INT4, {"fwd.rhs.blocks": config.Blocks(size=16)})
    with pytest.raises(
        ValueError, match="'blocks' cannot quantize 'Mlp/Dense_0': fwd.rhs.blocks.size"
    ):
        choose(candidates={"blocks": blocks})


def test_a_candidate_that_gives_nan_is_not_chosen():
    w = normal((8, 4))
    exact = X @ w

    def model(w, x):
        return jnp.where(jnp.abs(x @ w - exact) > 1e-3, jnp.nan, 1.0)

    found = choose(model, w, candidates={"w4": INT4}, budget=1.0)
    assert math.isnan(found.uniform[1].snr)
    assert found.choices[0].candidate == "float"
    with pytest.raises(ValueError, match="no choice within the budget has a finite"):
        choose(model, w, candidates={"w4": INT4}, budget=0.5)
