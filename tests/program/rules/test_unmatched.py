"""Rules of which nothing, or a part, matches anything."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import aqtlite
import aqtlite.flax.nnx
from aqtlite import Rule, config
from aqtlite.errors import RulesError
from aqtlite.flax import quantize_model
from aqtlite.program.rules import patterns
from tests.common import nearest
from tests.program.test_plan import planned

pytestmark = pytest.mark.code("quick")

INT8 = nearest()


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("a", []),
        ("a|b", [("a", "a"), ("b", "b")]),
        ("x(a|b)?y", [("a", "x(a)?y"), ("b", "x(b)?y")]),
        (
            r"(?:a|[|]b\||)c",
            [("a", "(?:a)c"), (r"[|]b\|", r"(?:[|]b\|)c"), ("", "(?:)c")],
        ),
        ("(?!a|b)c", []),
        (
            "(a|(b|c))",
            [("b", "(a|(b))"), ("c", "(a|(c))"), ("a", "(a)"), ("(b|c)", "((b|c))")],
        ),
    ],
)
def test_alternatives(pattern, wanted):
    assert patterns.alternatives(pattern) == wanted


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"path": "first|secnd"}, "the alternative 'secnd' of path='first|secnd'"),
        ({"path": "(fist|first|second).*"}, "'fist' of path='(fist|first|second).*'"),
        ({"module": "first|secnd"}, "'secnd' of module='first|secnd'"),
        ({"path": "first|second.*"}, None),
        ({"path": "(?!third|fourth).*"}, None),
        ({"path": "first|third", "is_required": False}, None),
    ],
)
def test_an_alternative_that_matches_nothing_is_logged(fields, words, caplog):
    with caplog.at_level("WARNING", logger="absl"):
        planned([Rule(cfg=INT8, **fields)])
    assert (words or "") in caplog.text
    assert ("matches nothing; near it are" in caplog.text) == (words is not None)


def test_of_a_group_one_rule_of_use_is_enough():
    weights = Rule(path="first", operands="weight", cfg=INT8, group="first")
    others = dataclasses.replace(weights, operands="activations")
    assert len(planned([weights, others]).quantized()) == 1
    alone = dataclasses.replace(others, group=None)
    with pytest.raises(RulesError, match="rule 1 .*operands='activations'.* nothing"):
        planned([weights, alone])
    both = [dataclasses.replace(one, path="third") for one in (weights, others)]
    with pytest.raises(RulesError, match="rule 0 .* matches nothing") as caught:
        planned(both)
    assert "One rule of the group 'first' has to match: rules 0, 1." in str(
        caught.value
    )
    with pytest.raises(RulesError, match="rule 1 .* decides nothing: rule 0"):
        planned([Rule(cfg=INT8), weights, others])


class Linen(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        return nn.Dense(4, name="out")(nn.Embed(16, 8, name="embed")(tokens))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.out = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, tokens):
        return self.out(self.embed(tokens))


TOKENS = jnp.ones((2, 3), jnp.int32)
HINT = r"It names a lookup of rows \('.*embed'\).*Rule\(op=\"take\", cfg=...\)"


@pytest.mark.parametrize("fields", [{"path": ".*embed"}, {"module": "embed"}])
def test_a_rule_for_an_embedding(fields):
    rules = [Rule(cfg=INT8, **fields)]
    variables = jax.eval_shape(Linen().init, jax.random.key(0), TOKENS)
    with pytest.raises(RulesError, match=HINT):
        quantize_model(Linen(), rules).plan(variables, TOKENS)
    with pytest.raises(RulesError, match=HINT):
        aqtlite.plan(Linen().apply, variables, TOKENS, rules=rules, params=0)
    with pytest.raises(RulesError, match=HINT):
        model = aqtlite.flax.nnx.quantize_model(Nnx(nnx.Rngs(0)), rules)
        aqtlite.flax.nnx.plan(model, TOKENS)
    with pytest.raises(RulesError) as caught:
        rules = [Rule(path=".*head", cfg=config.weight_only(8))]
        quantize_model(Linen(), rules).plan(variables, TOKENS)
    assert "lookup" not in str(caught.value)
