import dataclasses
import functools
import io
import json
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
import rich.console
from flax import nnx
from jax import lax

import aqtlite
import aqtlite.flax.nnx
from aqtlite import Rule, config, errors, quantize_function
from aqtlite.flax import AqtDotGeneral, quantize_model
from tests.common import MATMUL, nearest

pytestmark = pytest.mark.code("quick")

INT8, INT4 = nearest(), config.weight_only(bits=4)
X, W = jnp.ones((3, 8)), jnp.ones((8, 8))


def mlp(w, x):
    for name in ("first", "second"):
        with jax.named_scope(name):
            x = jnp.tanh(x @ w)
    with jax.named_scope("second"):
        return x @ w


def planned(rules, function=mlp, params=0, args=(W, X), **kwargs):
    return aqtlite.plan(function, *args, rules=rules, params=params, **kwargs)


def paths(contractions):
    return [one.path for one in contractions]


# --- Which rule decides --------------------------------------------------------------


def test_the_first_rule_that_fits_decides():
    plan = planned(
        [
            Rule(path="second", cfg=None),
            Rule(path="second.*", cfg=INT4),
            Rule(cfg=INT8),
        ]
    )
    assert paths(plan.contractions) == ["first", "second", "second#1"]
    assert [one.rule for one in plan.contractions] == [2, 0, 1]
    assert [one.cfg for one in plan.contractions] == [INT8, config.unquantized(), INT4]
    assert paths(plan.quantized()) == ["first", "second#1"]
    assert paths(plan.left_float()) == ["second"]
    assert plan.left_float()[0].why_float == "rule 0 leaves it so"


def test_what_no_rule_names_stays_in_float():
    plan = planned([Rule(path="first", cfg=INT8)])
    assert [one.why_float for one in plan.contractions] == [
        None,
        "no rule names it",
        "no rule names it",
    ]
    assert planned([]).quantized() == ()


def test_a_path_is_matched_as_a_whole():
    with pytest.raises(ValueError, match=r"write \.\* for any text"):
        planned([Rule(path="sec", cfg=INT8)])
    assert len(planned([Rule(path="sec.*", cfg=INT8)]).quantized()) == 2


def many(w, x):
    image = x[None, :, :, None]
    kernel = jnp.ones((2, 1, 1, 1))
    numbers = ("NHWC", "HWIO", "NHWC")
    with jax.named_scope("conv"):
        image = lax.conv_general_dilated(
            image, kernel, (1, 1), "SAME", dimension_numbers=numbers
        )
    with jax.named_scope("ragged"):
        x = lax.ragged_dot(image[0, :, :, 0], w[None], jnp.array([3]))
    with jax.named_scope("scores"):
        scores = lax.dot_general(x, x, (((1,), (1,)), ((), ())))
    with jax.named_scope("batched"):
        return scores, x[None] @ w


@pytest.mark.parametrize(
    ("conditions", "wanted"),
    [
        ({}, ["conv", "ragged", "scores", "batched"]),
        ({"op": "conv_general_dilated"}, ["conv"]),
        ({"op": "ragged_dot"}, ["ragged"]),
        ({"op": "dot_general"}, ["scores", "batched"]),
        ({"op": ("ragged_dot", "conv_general_dilated")}, ["conv", "ragged"]),
        ({"operands": "weight"}, ["ragged", "batched"]),
        ({"operands": "activations"}, ["conv", "scores"]),
        ({"equation": "abc,cd->abd"}, ["batched"]),
        ({"equation": "ab,c?b->ac"}, ["scores"]),
        ({"equation": ".*"}, ["conv", "ragged", "scores", "batched"]),
        ({"min_size": 24}, ["ragged", "scores", "batched"]),
        ({"path": ".*s.*", "operands": "weight"}, None),
    ],
)
def test_conditions(conditions, wanted):
    rules = [Rule(cfg=INT8, **conditions)]
    if wanted is None:
        with pytest.raises(ValueError, match="matches nothing"):
            planned(rules, many)
    else:
        assert paths(planned(rules, many).quantized()) == wanted


def test_an_einsum_has_its_equation_in_its_path():
    def function(w, x):
        with jax.named_scope("attention"):
            return jnp.einsum("qd,kd->qk", x, x)

    (one,) = planned([], function).contractions
    assert one.path == "attention/qd,kd->qk"


# --- What a rule that matches nothing says -------------------------------------------


def test_near_misses():
    with pytest.raises(ValueError) as caught:
        planned([Rule(cfg=INT8), Rule(path="frist", cfg=INT8, operands="activations")])
    text = str(caught.value)
    assert "rule 1 (path='frist', operands='activations') matches nothing" in text
    assert "first: path='first', operands: activation, weight" in text
    assert "3 contractions" in text
    assert "is_required=False" in text


def test_the_nearest_comes_first():
    with pytest.raises(ValueError) as caught:
        planned([Rule(path="ragged", cfg=INT8, op="dot_general")], many)
    lines = [line for line in str(caught.value).splitlines() if line.startswith("  ")]
    assert lines[0] == "  ragged: op='ragged_dot'"


def test_a_rule_that_need_not_match():
    plan = planned([Rule(path="head", cfg=INT8, is_required=False)])
    assert plan.quantized() == ()


def test_a_program_without_contractions():
    text = "the program has no contractions, .*calls of lax.dot_general"
    with pytest.raises(errors.RulesError, match=text):
        planned([Rule(cfg=INT8)], lambda w, x: x)
    shown = planned([], lambda w, x: x)
    assert re.search(text, repr(shown)) and re.search(text, shown._repr_html_())


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (
            [Rule(cfg=INT8), Rule(path="first", cfg=None)],
            "rule 1 (path='first') decides nothing: rule 0 (any contraction) matches "
            "all that it matches, and the first rule that matches decides: put rule 1 "
            "before rule 0, or set is_required=False",
        ),
        (
            [
                Rule(path="first", cfg=INT8),
                Rule(path="second.*", cfg=INT8),
                Rule(op="dot_general", cfg=None),
            ],
            "rule 2 (op='dot_general') decides nothing: rule 0 (path='first') and rule "
            "1 (path='second.*') match all",
        ),
    ],
)
def test_a_rule_that_others_leave_nothing_is_refused(rules, words):
    with pytest.raises(ValueError) as caught:
        planned(rules)
    assert words in str(caught.value)
    optional = dataclasses.replace(rules[-1], is_required=False)
    assert len(planned([*rules[:-1], optional]).quantized()) == 3


def test_a_fallback_that_nothing_is_left_for_is_fine():
    fallbacks = [Rule(operands="weight", cfg=INT4), Rule(cfg=None)]
    plan = planned([Rule(path=".*", cfg=INT8), *fallbacks])
    assert {one.rule for one in plan.contractions} == {0}
    assert planned([Rule(path="first", cfg=INT8), Rule(path=".*", cfg=None)])


# --- What is no function, nor a model with variables ---------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nnx.Linear(8, 2, rngs=nnx.Rngs(0)), r"NNX model Linear: .*nnx\.plan"),
        (lambda: nn.Dense(2), r"variables of a Linen .* plan\(Dense\(...\), variables"),
    ],
    ids=["nnx", "linen"],
)
def test_a_model_without_variables(make, words):
    with pytest.raises(TypeError, match=words):
        planned(INT8, make(), args=(X,))


# --- Operands ------------------------------------------------------------------------


def kinds(function, params=0, args=(W, X)):
    (one,) = planned([], function, params, args).contractions
    return one.lhs.kind, one.rhs.kind


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda w, x: x @ w, ("activation", "weight")),
        (lambda w, x: w.T @ x.T, ("weight", "activation")),
        (lambda w, x: w @ w, ("weight", "weight")),
        (lambda w, x: x @ jnp.ones((8, 2)), ("activation", "constant")),
        (lambda w, x: w @ jnp.ones((8, 2)), ("weight", "constant")),
        (lambda w, x: x @ (w + x[0]), ("activation", "activation")),
        (
            lambda w, x: lax.scan(lambda x, w: (x @ w, None), x, w[None])[0],
            ("activation", "weight"),
        ),
        (
            lambda w, x: lax.scan(lambda c, _: (c * 2, x @ c), w, None, length=2),
            ("activation", "activation"),
        ),
    ],
)
def test_kinds(function, wanted):
    assert kinds(function) == wanted


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        (None, ("activation", "activation")),
        (0, ("activation", "weight")),
        (-2, ("activation", "weight")),
        ([0, 1], ("weight", "weight")),
        (1, ("weight", "activation")),
        (lambda path: path.startswith("0/a"), ("activation", "weight")),
        (lambda path: path == "0/b", ("activation", "activation")),
    ],
)
def test_which_arguments_are_parameters(params, wanted):
    args = {"a": W, "b": W}, X
    assert kinds(lambda p, x: x @ p["a"], params, args) == wanted


def test_parameters_by_keyword():
    def function(x, kernel):
        return x @ kernel

    plan = planned([], function, lambda path: path == "kernel", (X,), kernel=W)
    assert plan.contractions[0].rhs.kind == "weight"


def test_an_argument_that_is_not_there():
    with pytest.raises(ValueError, match="names the argument 2.*2 positional"):
        planned([], params=[0, 2])


@pytest.mark.parametrize(
    ("function", "is_exchanged"),
    [
        (lambda w, x: w.T @ x.T, True),
        (lambda w, x: w @ jnp.ones((8, 2)), True),
        (lambda w, x: x @ w, False),
        (lambda w, x: w @ w, False),
        (lambda w, x: x @ x.T, False),
    ],
)
def test_the_weight_takes_the_part_of_rhs(function, is_exchanged):
    (one,) = planned([Rule(cfg=INT4)], function).contractions
    assert one.is_exchanged == is_exchanged
    assert one.in_order(["l", "r", "more"]) == (
        ["r", "l", "more"] if is_exchanged else ["l", "r", "more"]
    )


# --- What stays in float, whatever rules say -----------------------------------------


def why(function, args=(W, X), params=0):
    rules = [Rule(cfg=INT8)]
    return [
        one.why_float for one in planned(rules, function, params, args).contractions
    ]


def test_a_gradient_that_the_function_takes():
    def function(w, x):
        outside = x @ w
        return outside, jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)

    first, *others = why(function)
    assert first is None
    assert len(others) == 2
    assert all("quantize the function that is differentiated" in one for one in others)


def test_integers_and_complex_numbers():
    assert why(lambda w, x: x.astype(int) @ w.astype(int)) == [
        "it contracts int32, and only floats are quantized"
    ]
    assert "complex64" in why(lambda w, x: x @ (w * 1j))[0]


def test_empty_operands():
    assert why(lambda w, x: x[:, :0] @ w[:0]) == ["an operand is empty"]


def test_other_ragged_contractions():
    def function(w, x):
        dims = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
        return lax.ragged_dot_general(x, x, jnp.array([1, 2]), dims)

    assert "lax.ragged_dot's" in why(function)[0]


def test_places_out_of_reach():
    def function(w, x):
        return lax.while_loop(lambda x: jnp.sum(x @ w) < 9, lambda x: x + 1, x)

    assert why(function) == ["it is in the condition of a while loop"]


def test_injected_contractions_are_left_alone():
    dot_general = aqtlite.make_dot_general(INT4)

    def function(w, x):
        x = dot_general(x, w, MATMUL)
        with jax.named_scope("mine"):
            return x @ w

    assert paths(planned([Rule(cfg=INT8)], function).contractions) == ["mine"]
    message = "has no contractions, beside.* is_required=False may match nothing"
    with pytest.raises(errors.RulesError, match=message):
        planned([Rule(cfg=INT8)], lambda w, x: dot_general(x, w, MATMUL))


def test_a_quantized_function_is_left_alone():
    quantized = quantize_function(mlp, INT8, params=0)
    assert planned([], quantized).contractions == ()


# --- Rules that quantize nothing -----------------------------------------------------

SHADOWED = [Rule(cfg=None), Rule(path="first", cfg=INT8)]


@pytest.mark.parametrize("rules", [[], SHADOWED], ids=["none", "shadowed"])
@pytest.mark.parametrize("of", ["function", "linen", "nnx"])
def test_rules_that_quantize_nothing(rules, of):
    rules = [dataclasses.replace(rule, path=".*") for rule in rules]
    if of == "linen":
        quantized = aqtlite.flax.quantize_model(nn.Dense(2), rules)
        args = quantized.model.init(jax.random.key(0), X), X
        call, plan = quantized.apply, quantized.plan
    elif of == "nnx":
        model = nnx.Linear(8, 2, rngs=nnx.Rngs(0))
        call = aqtlite.flax.nnx.quantize_model(model, rules)
        plan = functools.partial(aqtlite.flax.nnx.plan, call)
        args = (X,)
    else:
        call = quantize_function(mlp, rules, params=0)
        args, plan = (W, X), call.plan
    with pytest.raises(ValueError, match=r"quantize nothing.*(\n.*)*Rule\(path="):
        call(*args)
    assert plan(*args).quantized() == ()


def test_rules_that_cannot_quantize_what_they_name():
    def function(w, x):
        with jax.named_scope("there"):
            return lax.while_loop(lambda x: jnp.sum(x @ w) < 9, lambda x: x + 1, x)

    match = "nothing.*(\n.*)*there: .*of a while loop"
    with pytest.raises(ValueError, match=match) as found:
        quantize_function(function, INT8)(W, X)
    assert "Rule(path=" not in str(found.value)  # A rule names it already.


@pytest.mark.parametrize(
    "rule",
    [
        Rule(cfg=None),
        Rule(cfg=config.unquantized()),
        Rule(path="head", cfg=INT8, is_required=False),
    ],
    ids=["none", "unquantized", "not required"],
)
def test_rules_that_are_to_quantize_nothing(rule):
    assert (quantize_function(mlp, rule)(W, X) == mlp(W, X)).all()


# --- strict --------------------------------------------------------------------------


def test_strict_names_what_stays_in_float():
    rules = [Rule(path="first", cfg=INT8)]
    with pytest.raises(ValueError) as caught:
        quantize_function(mlp, rules, strict=True)(W, X)
    text = str(caught.value)
    assert "2 contractions stay in float" in text
    assert "  second#1: no rule names it" in text
    rules.append(Rule(path="second.*", cfg=None))
    quantize_function(mlp, rules, strict=True).plan(W, X)


def test_strict_is_not_about_integers():
    def function(w, x):
        return x @ w, x.astype(int) @ w.astype(int)

    quantize_function(function, INT8, strict=True).plan(W, X)


def test_strict_is_about_what_rules_cannot_do():
    def function(w, x):
        return lax.while_loop(lambda x: jnp.sum(x @ w) < 9, lambda x: x @ w, x)

    with pytest.raises(ValueError, match="condition of a while loop"):
        quantize_function(function, INT8, strict=True).plan(W, X)


def test_what_rules_cannot_do_is_logged(caplog):
    def function(w, x):
        with jax.named_scope("there"):
            return x[:, :0] @ w[:0]

    # Commands that other tests run set another level.
    with caplog.at_level("WARNING", logger="absl"):
        quantize_function(function, INT8).plan(W, X)
    assert "'there' stays in float: an operand is empty" in caplog.text


# --- As text -------------------------------------------------------------------------


def test_table():
    text = str(planned([Rule(path="first", cfg=INT8)]))
    lines = text.splitlines()
    assert "3 contractions: 1 quantized, 2 in float" in lines[0]
    (first,) = [line for line in lines if " first " in line]
    assert "ab,bc->ac" in first
    assert "activation float32[3,8]" in first
    assert "weight float32[8,8]" in first
    assert "int8 x int8" in first
    assert "float: no rule names it" in text
    assert all(line == line.rstrip() for line in lines)


def test_json():
    rows = json.loads(planned([Rule(path="second#1", cfg=INT4)]).to_json(indent=1))
    assert [row["path"] for row in rows] == ["first", "second", "second#1"]
    last = rows[-1]
    assert last["rule"] == 0
    assert last["why_float"] is None
    assert last["rhs"] == {"shape": [8, 8], "dtype": "float32", "kind": "weight"}
    assert config.from_json(json.dumps(last["cfg"])) == INT4


# --- What is planned -----------------------------------------------------------------


def test_nothing_runs():
    shapes = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in (W, X)]
    plan = planned(INT8, args=shapes)
    assert len(plan.quantized()) == 3
    assert plan.contractions[0].lhs.dtype == "bfloat16"


def test_linen_models():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4)(nn.relu(nn.Dense(4)(x)))

    model = Model()
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    plan = aqtlite.plan(model, variables, X, rules=[Rule(path=".*Dense_1", cfg=INT8)])
    assert paths(plan.quantized()) == ["Model/Dense_1"]
    assert {one.rhs.kind for one in plan.contractions} == {"weight"}


def test_a_plan_is_a_table_in_notebooks_and_paragraphs_where_it_is_narrow():
    plan = planned([Rule(path="first", cfg=INT8)])
    assert repr(plan) == str(plan)
    html = plan._repr_html_()
    assert "<p>3 contractions: 1 quantized, 2 in float</p>" in html
    assert html.count("<tr>") == 4 and "<td>int8 x int8</td>" in html
    console = rich.console.Console(width=60, file=io.StringIO())
    console.print(plan)
    shown = console.file.getvalue()
    assert "\nfirst\n    int8 x int8, rule 0\n" in shown
    assert "\n    float: no rule names it\n" in shown


# --- Blocks that do not divide -------------------------------------------------------

IN_32 = config.update(INT4, {"fwd.rhs.blocks": config.Blocks(size=32)})


class TwoLayers(nn.Module):
    cfg: config.DotGeneral | None = None

    @nn.compact
    def __call__(self, x):
        dot_general = AqtDotGeneral(self.cfg)
        x = nn.Dense(48, dot_general=dot_general, name="up")(x)
        return nn.Dense(8, dot_general=dot_general, name="down")(x)


def test_blocks_that_do_not_divide_name_the_contraction():
    x, words = jnp.ones((4, 64)), r"'{}': fwd.rhs.blocks.size=32 does not divide .* 48"
    with pytest.raises(ValueError, match=words.format("down")):
        TwoLayers(IN_32).init(jax.random.key(0), x)
    model = quantize_model(TwoLayers(), IN_32)
    with pytest.raises(ValueError, match=words.format("TwoLayers/down")):
        model.init(jax.random.key(0), x)

    def function(w, x):
        with jax.named_scope("layer"):
            return x @ w

    with pytest.raises(ValueError, match=words.format("layer")):
        planned(IN_32, function, args=(jnp.ones((48, 8)), jnp.ones((2, 48))))
