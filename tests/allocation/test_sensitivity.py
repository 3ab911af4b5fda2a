import functools
import json
import logging
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
from aqtlite.flax import AqtDotGeneral, quantize_model
from aqtlite.flax import nnx as aqt_nnx
from tests.allocation.models import (
    BATCHES,
    CANDIDATES,
    INT4,
    INT8,
    LABELS,
    Mlp,
    X,
    loss,
)
from tests.common import normal, quick_jit
from tests.flax.nnx import models as nnx_models
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

MODEL = Mlp()
VARIABLES = init(MODEL, X)
PATHS = ["Mlp/Dense_0", "Mlp/Dense_1", "Mlp/Dense_2"]


def decibels(exact, other):
    return 10 * math.log10(jnp.sum(exact**2) / jnp.sum((other - exact) ** 2))


def matmul(w, x):
    return x @ w


def measured(model=MODEL, variables=VARIABLES, batches=(X,), **kwargs):
    return aqtlite.sensitivity(model, variables, batches, **kwargs)


def by_contraction(found):
    return {(one.path, one.candidate): one for one in found.contractions}


def close(got, wanted, tolerance=1e-3):
    return abs(got - wanted) <= tolerance * max(1.0, abs(wanted))


def assert_like_a_loop_over_rules(found, run_in_float, run_by_rules, of_own=None):
    """Compares with the output of the model by a rule for each contraction alone."""
    exact = run_in_float()
    assert found.contractions
    for one in found.contractions:
        cfg = of_own or CANDIDATES[one.candidate]
        wanted = decibels(exact, run_by_rules([Rule(path=one.path, cfg=cfg)]))
        assert close(one.output_snr, wanted), (one, wanted)


@pytest.fixture(scope="module")
def found():
    return measured(batches=BATCHES, candidates=CANDIDATES, loss=loss, num_inputs=1)


# --- What is measured ----------------------------------------------------------------


def test_a_linen_model_is_measured_like_a_loop_over_rules(found):
    assert [one.path for one in found.contractions] == np.repeat(PATHS, 2).tolist()
    assert [one.candidate for one in found.contractions] == [*CANDIDATES] * 3

    def losses(run):
        return np.mean([loss(run(x), x, labels) for x, labels in BATCHES])

    exact = losses(quick_jit(functools.partial(MODEL.apply, VARIABLES)))
    assert close(found.loss, exact)
    for one in found.contractions:
        rules = [Rule(path=one.path, cfg=CANDIDATES[one.candidate])]
        model = quantize_model(MODEL, rules)
        alone = losses(quick_jit(functools.partial(model.apply, VARIABLES)))
        assert abs(one.loss_change - (alone - exact)) < 1e-5


def test_the_error_of_a_contraction_is_on_inputs_of_the_float_model(found):
    one = by_contraction(found)["Mlp/Dense_1", "w8a8"]
    first, second, _ = (VARIABLES["params"][f"Dense_{i}"] for i in range(3))
    inputs = [nn.relu(x @ first["kernel"] + first["bias"]) for x, _ in BATCHES]
    exact = jnp.stack([x @ second["kernel"] for x in inputs])
    dot_general = aqtlite.make_dot_general(INT8)
    dims = (((1,), (0,)), ((), ()))
    other = jnp.stack([dot_general(x, second["kernel"], dims) for x in inputs])
    assert close(one.snr, decibels(exact, other))


def test_the_control_is_what_noise_on_the_inputs_does():
    def conditioned(w, x):
        # The mean of the inputs, 100, carries most of the signal and no information.
        return (x - 100) @ w

    w, x = normal((8, 4)), 100 + X
    found = measured(conditioned, w, [x], candidates=[INT4])
    assert -4 < found.control < 4  # 40 dB of noise are as large as what is left.
    assert 38 < measured(matmul, w, [X], candidates=[INT4]).control < 42


def test_without_a_float_input_there_is_no_control():
    table = normal((10, 8)), normal((8, 4))
    found = measured(
        lambda tables, tokens: tables[0][tokens] @ tables[1],
        table,
        [jnp.arange(10)],
        candidates=[INT4],
    )
    assert found.control is None
    assert "no input is a float" in str(found)


def test_it_compiles_the_model_once(caplog):
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        measured(batches=BATCHES, candidates=CANDIDATES, loss=loss, num_inputs=1)
    compiled = [x for x in caplog.messages if x.startswith("Compiling jit(switched)")]
    assert len(compiled) == 1


def test_batches_of_another_shape_are_compiled_once_more():
    w = normal((8, 4))
    found = measured(matmul, w, [X, X[:5]], candidates=[INT4])
    assert found.batches == 2
    exact = jnp.concatenate([X, X[:5]])
    (one,) = measured(matmul, w, [exact], candidates=[INT4]).contractions
    assert close(found.contractions[0].output_snr, one.output_snr)


# --- Models --------------------------------------------------------------------------


def test_functions_and_functions_by_rules():
    def mlp(params, x):
        for name, w in params.items():
            with jax.named_scope(name):
                x = jnp.tanh(x @ w)
        return x

    params = {"first": normal((8, 16)), "second": normal((16, 4))}

    def by_rules(rules):
        return quick_jit(quantize_function(mlp, rules, params=0))(params, X)

    found = measured(mlp, params, candidates=CANDIDATES)
    assert_like_a_loop_over_rules(found, lambda: mlp(params, X), by_rules)
    own = quantize_function(mlp, [Rule(path="first", cfg=INT4)], params=0)
    (one,) = measured(own, params).contractions
    assert (one.path, one.candidate) == ("first", "own")
    assert close(one.output_snr, by_contraction(found)["first", "w4"].output_snr)


def test_nnx_models_by_rules_and_injected():
    model = nnx_models.Mlp(nnx.Rngs(0))

    def by_rules(rules):
        return nnx_models.call(aqt_nnx.quantize_model(model, rules), X)

    found = measured(model, None, candidates=CANDIDATES)
    assert_like_a_loop_over_rules(found, lambda: model(X), by_rules)
    own = measured(aqt_nnx.quantize_model(model, INT4), None)
    w4 = [one for one in found.contractions if one.candidate == "w4"]
    for one, wanted in zip(own.contractions, w4, strict=True):
        assert (one.path, one.candidate) == (wanted.path, "own")
        assert close(one.output_snr, wanted.output_snr)
    dot_general = aqt_nnx.AqtDotGeneral(INT4)
    injected = nnx_models.Mlp(nnx.Rngs(0), dot_general=dot_general)
    of_injected = measured(injected, None).contractions
    for one, wanted in zip(of_injected, w4, strict=True):
        assert close(one.output_snr, wanted.output_snr)


def test_linen_models_by_rules_and_injected(found):
    w4 = [one for one in found.contractions if one.candidate == "w4"]
    for model in (quantize_model(MODEL, INT4), Mlp(INT4)):
        own = measured(model, batches=BATCHES, loss=loss, num_inputs=1)
        assert [one.candidate for one in own.contractions] == ["own"] * 3
        for one, wanted in zip(own.contractions, w4, strict=True):
            assert one.path == wanted.path
            assert close(one.output_snr, wanted.output_snr)
            assert abs(one.loss_change - wanted.loss_change) < 1e-6


class Loops(nn.Module):
    """Contractions in a scan, a checkpoint and a branch; one of activations."""

    @nn.compact
    def __call__(self, x):
        block = nn.scan(
            nn.remat(Block),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
        )
        x, _ = block(name="blocks")(x, None)
        w = self.param("w", nn.initializers.normal(0.3), (8, 8))
        with jax.named_scope("branch"):
            x = lax.cond(x.sum() > 1e6, lambda x: x, lambda x: jnp.tanh(x @ w), x)
        with jax.named_scope("gram"):
            return x @ x.T


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return jnp.tanh(nn.Dense(8)(x)), None


def test_a_contraction_in_a_scan_is_one_switch():
    model = Loops()
    variables = init(model, X)

    def by_rules(rules):
        return quick_jit(quantize_model(model, rules).apply)(variables, X)

    found = measured(model, variables, candidates=CANDIDATES)
    # Weights of 4 bits are none of the candidates of two activations.
    assert len(found.contractions) == 2 * 3 - 1
    exact = quick_jit(model.apply)
    assert_like_a_loop_over_rules(found, lambda: exact(variables, X), by_rules)
    assert all(math.isfinite(one.snr) for one in found.contractions)


def test_convolutions_and_experts():
    def model(params, x):
        image = x.reshape(2, 4, 8, 2)
        with jax.named_scope("conv"):
            y = lax.conv_general_dilated(
                image,
                params["conv"],
                (1, 1),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
        with jax.named_scope("experts"):
            rows = y.reshape(16, 8)
            return lax.ragged_dot(rows, params["experts"], jnp.array([10, 6]))

    params = {"conv": normal((3, 3, 2, 2)), "experts": normal((2, 8, 4))}

    def by_rules(rules):
        return quick_jit(quantize_function(model, rules, params=0))(params, X)

    found = measured(model, params, candidates=CANDIDATES)
    assert [one.path for one in found.contractions[::2]] == ["conv", "experts"]
    assert_like_a_loop_over_rules(found, lambda: model(params, X), by_rules)


def test_candidates_are_named_by_their_grids():
    candidates = [INT4, config.w4a8(), config.update(INT4, {"fwd.rhs.po2_scale": True})]
    found = measured(candidates=candidates)
    names = [one.candidate for one in found.contractions[:3]]
    assert names == ["float x int4", "int8 x int4", "float x int4 (2)"]


def test_candidates_may_be_rules():
    rules = [Rule(path=".*/Dense_0", cfg=None), Rule(cfg=INT8)]
    found = measured(candidates={"all but the first": rules})
    assert [one.path for one in found.contractions] == PATHS[1:]


def test_other_arguments_are_constants():
    class Dropping(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            return nn.Dense(4)(nn.Dropout(0.5, deterministic=not train)(x))

    model = Dropping()
    variables = init(model, X, train=False)
    found = measured(model, variables, candidates=[INT4], train=False)
    assert [one.path for one in found.contractions] == ["Dropping/Dense_0"]


# --- What is shown -------------------------------------------------------------------


def test_it_prints_as_a_table(found):
    text = str(found)
    assert "3 contractions, 2 batches; loss" in text
    assert "40 dB at the inputs" in text
    assert all(path in text for path in PATHS)
    assert "<td>Mlp/Dense_0</td>" in found._repr_html_()


def test_json_has_no_infinities():
    def model(w, x):
        return lax.cond(x.sum() > 1e6, lambda x: x @ w, lambda x: x, x)

    found = measured(model, normal((8, 8)), candidates={"not taken": INT4})
    assert found.contractions[0].output_snr == math.inf
    data = json.loads(found.to_json(indent=1), parse_constant=pytest.fail)
    assert data["contractions"][0]["output_snr"] is None
    assert data["contractions"][0]["candidate"] == "not taken"


def test_it_draws_a_plot(found, tmp_path, monkeypatch):
    path = tmp_path / "sensitivity.png"
    found.plot(path)
    assert path.stat().st_size > 1000
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"aqtlite\[demo\]"):
        found.plot(path)


# --- Errors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("candidates", "text"),
    [
        ([], "candidates has none"),
        ({"float": INT4}, "'float', which is the name of the choice"),
        ({"off": Rule(cfg=None)}, "'off' quantizes nothing"),
        ([config.lsq()], "has learned scales for 'Mlp/Dense_0', which only training"),
    ],
)
def test_candidates_that_cannot_be_measured(candidates, text):
    with pytest.raises(ValueError, match=text):
        measured(candidates=candidates)


def test_wrong_arguments():
    with pytest.raises(TypeError, match="candidates must be a sequence of configs"):
        measured(candidates="weight_only")
    with pytest.raises(TypeError, match="the first argument is a Linen or NNX model"):
        measured(3, candidates=[INT4])
    with pytest.raises(TypeError, match="give variables=None"):
        measured(nnx_models.Mlp(nnx.Rngs(0)), {}, candidates=[INT4])
    with pytest.raises(TypeError, match="give those of the Mlp"):
        measured(MODEL, None, candidates=[INT4])
    with pytest.raises(TypeError, match="batches must be an iterable"):
        measured(batches=X, candidates=[INT4])
    with pytest.raises(ValueError, match="there is no batch to measure with"):
        measured(batches=[], candidates=[INT4])
    with pytest.raises(ValueError, match="num_inputs=3, and a batch has 2 items"):
        measured(batches=BATCHES, candidates=[INT4], num_inputs=3)
    with pytest.raises(TypeError, match="num_inputs must be an integer"):
        measured(batches=BATCHES, candidates=[INT4], num_inputs="1")
    with pytest.raises(TypeError, match="all 2 items of a batch.*give num_inputs="):
        measured(batches=BATCHES, candidates=[INT4], loss=loss)
    with pytest.raises(TypeError, match="loss must be a function or None, got 'mse'"):
        measured(candidates=[INT4], loss="mse")
    quantized = quantize_function(jnp.matmul, INT4, params=1)
    with pytest.raises(ValueError, match="quantize it with params=0"):
        measured(quantized, X, [X.T])


def test_nothing_to_quantize():
    for candidates in ([INT4], None):
        with pytest.raises(ValueError, match="the program has no contractions"):
            measured(lambda w, x: x + w, jnp.ones(8), candidates=candidates)
    with pytest.raises(ValueError, match="by itself: give candidates="):
        measured()  # A float model, without candidates.


def test_candidates_do_not_change_injected_functions():
    with pytest.raises(ValueError, match="Mlp/Dense_0, Mlp/Dense_1"):
        measured(Mlp(INT4), candidates=[INT8])


def test_converted_variables_are_refused():
    model = quantize_model(MODEL, INT4)
    serving = aqtlite.flax.convert(model, VARIABLES, X)
    with pytest.raises(ValueError, match="the model is converted already"):
        measured(model, serving)
    of_nnx = aqt_nnx.convert(
        aqt_nnx.quantize_model(nnx_models.Mlp(nnx.Rngs(0)), INT4), X
    )
    with pytest.raises(ValueError, match="the model is converted already"):
        measured(of_nnx, None)


def test_losses_that_are_no_scalar_or_not_finite():
    batches = [(X, LABELS)]
    with pytest.raises(ValueError, match=r"scalar float, got float32\[16,4\]"):
        measured(candidates=[INT4], loss=lambda out, x: out)
    with pytest.raises(ValueError, match="loss of the float model is nan on batch 0"):
        measured(
            batches=batches,
            candidates=[INT4],
            loss=lambda out, x, labels: jnp.log(-1.0 - labels.mean()),
            num_inputs=1,
        )
    with pytest.raises(ValueError, match="hold NaN or infinities on batch 1"):
        measured(batches=[X, jnp.inf * X], candidates=[INT4])
    with pytest.raises(ValueError, match="on inputs without NaN or infinities"):
        measured(batches=[jnp.nan * X], candidates=[config.gptq(4)])
    with pytest.raises(ValueError, match="or zeros alone, on all batches"):
        measured(matmul, jnp.zeros((X.shape[1], 4)), candidates=[INT4])


def test_a_contraction_in_shard_map_is_left_out(caplog):
    mesh = jax.make_mesh((1,), ("x",))
    spec = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=spec, out_specs=spec)
    w = normal((8, 8))
    with pytest.raises(ValueError, match="every contraction is inside of jax.shard_ma"):
        measured(lambda w, x: mapped(x, w), w, candidates=[INT4])
    # Commands that other tests run set another level.
    with caplog.at_level("WARNING", logger="absl"):
        found = measured(lambda w, x: mapped(x @ w, w), w, candidates=[INT4])
    (one,) = found.contractions
    assert one.op == "ab,bc->ac"
    assert "is inside of jax.shard_map" in caplog.text


def test_shared_functions_are_one_contraction_for_each_call():
    dot_general = AqtDotGeneral(None)

    def twice(params, x):
        dims = (((1,), (0,)), ((), ()))
        return dot_general(dot_general(x, params, dims), params, dims)

    found = measured(twice, normal((8, 8)), candidates=[INT4])
    assert len({one.path for one in found.contractions}) == 2
