"""Rules for lookups: one quantized table for lookups and logits."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import aqtlite
import aqtlite.flax.nnx
from aqtlite import Rule, calibration, checkpoint, config
from aqtlite.checkpoint import contents
from aqtlite.errors import RulesError
from aqtlite.flax import convert, quantize_model
from tests.checkpoint.support import save
from tests.common import left_in_float, nearest, normal
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

INT8 = nearest()
TOKENS = jnp.array([[3, 1, 19], [0, 7, 7]])
TABLE = normal((20, 8))


def both(cfg: config.DotGeneral = INT8) -> list[Rule]:
    return [Rule(op="take", cfg=cfg), Rule(cfg=cfg)]


def tied(params, tokens):
    with jax.named_scope("embed"):
        x = params["table"][tokens]
    with jax.named_scope("head"):
        return jnp.tanh(x) @ params["table"].T


class Tied(nn.Module):
    """A tied embedding, with positions in a table of their own."""

    dtype: object = None

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(20, 8, dtype=self.dtype, name="embed")
        positions = nn.Embed(3, 8, dtype=self.dtype, name="positions")
        x = embed(tokens) + positions(jnp.arange(tokens.shape[-1]))
        return embed.attend(nn.relu(x))


class TiedNnx(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(20, 8, rngs=rngs)

    def __call__(self, tokens):
        return self.embed.attend(jnp.tanh(self.embed(tokens)))


def same(one, other):
    np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.code("users")
@pytest.mark.parametrize("cfg", [INT8, config.weight_only(4)], ids=["int8", "int4"])
def test_one_table_of_a_function(cfg):
    params = {"table": TABLE}
    fn = aqtlite.quantize_function(tied, both(cfg), params=0, strict=True)
    plan = fn.plan(params, TOKENS)
    assert "of the table of head" in str(plan) and "1 lookups: 1 quant" in str(plan)
    assert [one.path for one in plan.lookups] == ["embed"]
    assert '"table_of": "head"' in plan.to_json()
    reports = []
    serve, serving = aqtlite.convert_function(
        fn, params, TOKENS, strict=True, report=reports.append
    )
    assert not left_in_float(serving["params"])
    (entry,) = serving["aqt"]["head"].values()
    size = TABLE.size * cfg.fwd.rhs.grid.bits // 8 + 20 * 4
    assert (len(serving["aqt"]), reports[0].bytes_after) == (1, size)
    assert (
        entry["rhs"].scale.shape == (1, 20)[:: 1 if entry["rhs"].order is None else -1]
    )
    same(jax.jit(fn)(params, TOKENS), jax.jit(serve)(serving, TOKENS))
    same(fn(params, TOKENS), serve(serving, TOKENS))
    compiled = aqtlite.compile_serving(serve, serving, TOKENS)
    same(jax.jit(fn)(params, TOKENS), compiled(TOKENS))


@pytest.mark.code("users")
def test_one_table_of_a_linen_model_on_disk(tmp_path):
    model = quantize_model(Tied(jnp.bfloat16), both(), strict=True)
    variables = init(model, TOKENS)
    reports = []
    serving = convert(model, variables, TOKENS, report=reports.append)
    assert not left_in_float(serving["params"])
    assert set(serving["aqt"]) == {"embed", "positions"}
    run = jax.jit(model.apply)
    same(run(variables, TOKENS), run(serving, TOKENS))
    source = save(tmp_path / "float", variables, "msgpack")
    checkpoint.convert_checkpoint(source, tmp_path / "out", model, TOKENS)
    same(
        run(serving, TOKENS),
        run(checkpoint.load_serving(tmp_path / "out", model), TOKENS),
    )
    shown = contents.contents(tmp_path / "out").to_dict()
    assert shown["bytes"] == reports[0].bytes_after


@pytest.mark.code("users")
def test_one_table_of_an_nnx_model_and_of_one_inside_another():
    model = TiedNnx(nnx.Rngs(0))
    quantized = aqtlite.flax.nnx.quantize_model(model, both(), strict=True)
    serving = aqtlite.flax.nnx.convert(quantized, TOKENS, strict=True)
    assert aqtlite.is_frozen(serving.embed.embedding)
    wanted = nnx.jit(lambda model: model(TOKENS))(quantized)
    same(wanted, nnx.jit(lambda model: model(TOKENS))(serving))

    class Outer(nnx.Module):
        def __init__(self):
            self.inner = quantized

        def __call__(self, tokens):
            return self.inner(tokens) + 1.0

    rules = Rule(cfg=INT8, is_required=False)
    outer = aqtlite.flax.nnx.quantize_model(Outer(), rules)
    (lookup,) = aqtlite.flax.nnx.plan(outer, TOKENS).lookups
    assert lookup.is_quantized and lookup.is_injected
    served = aqtlite.flax.nnx.convert(outer, TOKENS)
    assert aqtlite.is_frozen(served.inner.embed.embedding)
    same(wanted + 1.0, nnx.jit(lambda model: model(TOKENS))(served))


def test_values_and_gradients_straight_through():
    fn = aqtlite.quantize_function(lambda x, i: x[i], both()[0], params=0)
    rows, pull = jax.vjp(lambda x: fn(x, TOKENS), TABLE)
    steps = np.abs(TABLE).max(1)[TOKENS][..., None] / 127
    assert (np.abs(rows - TABLE[TOKENS]) <= 0.501 * steps).all()
    cotangent = normal(rows.shape, 3)
    _, wanted = jax.vjp(lambda x: x[TOKENS], TABLE)
    same(pull(cotangent)[0], wanted(cotangent)[0])


def test_tables_that_are_quantized_otherwise_are_two():
    rules = [Rule(op="take", cfg=config.weight_only(4)), Rule(cfg=INT8)]
    params = {"table": TABLE}
    fn = aqtlite.quantize_function(tied, rules, params=0)
    assert "int4 rows " in str(fn.plan(params, TOKENS))
    serve, serving = aqtlite.convert_function(fn, params, TOKENS)
    assert set(serving["aqt"]) == {"embed", "head"}
    assert not left_in_float(serving["params"])
    same(fn(params, TOKENS), serve(serving, TOKENS))


@jax.custom_jvp
def rows_with_a_rule(table, indices):
    return table[indices]


@rows_with_a_rule.defjvp
def _of_rows(primals, tangents):
    return rows_with_a_rule(*primals), 2 * tangents[0][primals[1]]


OUT = jnp.array([3, 20, -1, -21])
PER_TENSOR = config.update(
    config.weight_only(8), {"fwd.rhs.calib_shared_axes": "per_tensor"}
)
FORMS = {
    "take": (lambda x, i: jnp.take(x, i, axis=0), TABLE, OUT, INT8),
    "columns": (lambda x, i: jnp.take(x, i, axis=1), TABLE.T, OUT, INT8),
    "clip": (lambda x, i: jnp.take(x, i, axis=0, mode="clip"), TABLE, OUT, INT8),
    "one scale": (lambda x, i: jnp.take(x, i, axis=0), TABLE, OUT, PER_TENSOR),
    "one row": (lambda x, i: x[i[0]], TABLE, OUT, INT8),
    "mapped": (lambda x, i: jax.vmap(lambda j: x[j])(i[:1]), TABLE, OUT, INT8),
    "blocks": (lambda x, i: x[i], TABLE, OUT[:1], config.mxfp4()),
    "bfloat16": (lambda x, i: x[i], TABLE.astype(jnp.bfloat16), OUT[:1], INT8),
    "steps of a scan": (
        lambda x, i: jax.lax.scan(lambda c, t: (c + t[i], None), 0.0 * x[0, i], x)[0],
        normal((3, 20, 8)),
        OUT[:1],
        INT8,
    ),
    "of constants": (lambda x, i: x[jnp.arange(4)] + i[0], TABLE, OUT, INT8),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name):
    fn, table, indices, cfg = FORMS[name]
    if name == "blocks":
        table = normal((20, 32))
    rules = [Rule(op="take", cfg=cfg), Rule(cfg=cfg, is_required=False)]
    quantized = aqtlite.quantize_function(fn, rules, params=0)
    serve, serving = aqtlite.convert_function(quantized, table, indices)
    got, wanted = quantized(table, indices), fn(table, indices)
    assert got.dtype == wanted.dtype
    same(got, serve(serving, indices))
    same(np.isnan(got), np.isnan(wanted))
    largest = float(np.abs(np.asarray(table, np.float32)).max())
    limit = 0.3 * largest if name == "blocks" else 0.03 * largest
    assert np.nanmax(np.abs(np.asarray(got - wanted, np.float32))) < limit
    if name != "steps of a scan":
        assert not left_in_float(serving["params"])


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (lambda x, i: x[i, 2:5], r"parts of rows, of shape \(1, 3\), .*\(20, 8\)"),
        (
            lambda x, i: x.at[i].get(mode="fill", fill_value=0),
            r"fills rows out of range of a table of shape \(20, 8\) with 0",
        ),
        (
            lambda x, i: jax.vmap(lambda r, j: r[j])(x, jnp.zeros(20, int)) + i[0],
            r"each row of shape \(20, 8\) in itself",
        ),
        (lambda x, i: x.reshape(4, 5, 8)[i], r"shape \(4, 5, 8\), and tables have two"),
        (
            lambda x, i: rows_with_a_rule(x, i),
            "inside of a custom_jvp_call",
        ),
    ],
    ids=["parts", "fill", "batch", "three axes", "custom_jvp"],
)
def test_what_is_no_lookup_stays_in_float_and_strict_says_so(fn, why):
    rules = Rule(path="here.*", op="take", cfg=INT8)
    quantized = aqtlite.quantize_function(
        jax.named_call(fn, name="here"), rules, params=0, strict=True
    )
    with pytest.raises(ValueError, match=f"strict=True, and 1 .*\n  here.*{why}"):
        quantized.plan(TABLE, TOKENS[0])
    lenient = dataclasses.replace(quantized, strict=False)
    (lookup,) = lenient.plan(TABLE, TOKENS[0]).lookups
    assert not lookup.is_quantized
    with pytest.raises(ValueError, match="quantize nothing.*\n.*here"):
        lenient(TABLE, TOKENS[0])


def test_a_lookup_that_no_rule_names():
    def two(params, tokens):
        with jax.named_scope("a"):
            x = params["a"][tokens]
        with jax.named_scope("b"):
            return x + params["b"][tokens]

    params = {"a": TABLE, "b": TABLE}
    rules = [Rule(path="a", op="take", cfg=INT8)]
    with pytest.raises(ValueError, match="strict=True, and 1 .*\n  b: no rule"):
        aqtlite.quantize_function(two, rules, params=0, strict=True)(params, TOKENS)
    rules.append(Rule(op="take", cfg=None))
    fn = aqtlite.quantize_function(two, rules, params=0, strict=True)
    _, serving = aqtlite.convert_function(fn, params, TOKENS)
    assert [x.shape for x in left_in_float(serving["params"])] == [(20, 8)]


def test_rules_for_contractions_leave_lookups_alone():
    fn = aqtlite.quantize_function(tied, INT8, params=0, strict=True)
    assert fn.plan({"table": TABLE}, TOKENS).lookups == ()
    same(
        jax.make_jaxpr(lambda p: fn(p, TOKENS))({"table": TABLE})
        .eqns[-1]
        .outvars[0]
        .aval.shape,
        (2, 3, 20),
    )


def test_a_rule_that_matches_no_lookup():
    rules = Rule(op="take", cfg=INT8)
    with pytest.raises(RulesError, match=r"Lookups are table\[indices\].*params="):
        aqtlite.plan(lambda w, x: x @ w, TABLE, TABLE.T, rules=rules, params=0)
    with pytest.raises(RulesError, match="params="):
        aqtlite.plan(lambda w, i: w[i], TABLE, TOKENS, rules=rules)
    with pytest.raises(ValueError, match="'take' cannot be registered"):
        aqtlite.register_operation("take", jnp.matmul)


@pytest.mark.parametrize(
    ("update", "words"),
    [
        ({"fwd.rhs.calibration": calibration.LSQ()}, "a lookup has neither"),
        ({"fwd.rotation": config.Hadamard()}, "would return rotated rows"),
        ({"fwd.rhs.rounding": config.Gptq()}, "rounds weights by the inputs"),
        ({"fwd.rhs.blocks": config.Blocks(size=3)}, "3"),
    ],
)
def test_configs_that_a_lookup_cannot_have(update, words):
    cfg = config.update(config.weight_only(8), update)
    fn = aqtlite.quantize_function(tied, Rule(op="take", cfg=cfg), params=0)
    with pytest.raises(ValueError, match=f"(?s)embed.*{words}|{words}.*embed"):
        fn.plan({"table": TABLE}, TOKENS)


def test_values_that_are_not_finite_stay_in_their_rows():
    table = TABLE.at[1, 2].set(jnp.nan).at[7, 0].set(jnp.inf)
    fn = aqtlite.quantize_function(lambda x, i: x[i], both()[0], params=0)
    serve, serving = aqtlite.convert_function(fn, table, TOKENS)
    for rows in (fn(table, TOKENS), serve(serving, TOKENS)):
        is_finite = np.isfinite(rows).all(-1)
        same(is_finite, ~np.isin(TOKENS, (1, 7)))
        assert not np.isfinite(rows).any(-1)[~is_finite].any()


def test_static_ranges_of_the_logits():
    rules = Rule(op=("take", "dot_general"), cfg=config.static_int8())
    fn, params = aqtlite.quantize_function(tied, rules, params=0), {"table": TABLE}
    state = fn.gather(fn.init_state(params, TOKENS), params, TOKENS)
    assert list(state["aqt_stats"]) == ["head"]
    serve, serving = aqtlite.convert_function(fn, params, TOKENS, state=state)
    assert not left_in_float(serving["params"])
    same(fn.evaluate(state, (params, TOKENS), {}), serve(serving, TOKENS))


def test_choose_bits_counts_the_bytes_that_conversions_report():
    params = {"table": TABLE}
    candidates = {str(bits): both(config.weight_only(bits)) for bits in (4, 8)}
    found = aqtlite.choose_bits(
        tied, params, [TOKENS], candidates=candidates, budget=0.35
    )
    assert [one.paths for one in found.choices] == [("head", "embed")]
    reports = []
    fn = aqtlite.quantize_function(tied, found.rules, params=0, strict=True)
    aqtlite.convert_function(fn, params, TOKENS, report=reports.append)
    assert reports[0].bytes_after == found.chosen.nbytes == TABLE.size // 2 + 20 * 4
