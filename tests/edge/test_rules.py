import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from aqtlite import edge
from aqtlite.edge import rules

pytestmark = pytest.mark.code("quick")


def test_the_first_rule_that_fits_decides():
    chosen = (edge.Rule(path="a/.*", weights="int4"), edge.Rule(op="conv_2d"))
    assert rules.of(chosen, "a/b", "add").weights == "int4"
    assert rules.of(chosen, "b", "conv_2d") is chosen[1]
    assert rules.of(chosen, "b", "add") == rules.INT8


@pytest.mark.parametrize(
    "fields, error, message",
    [
        ({"weights": "int3"}, ValueError, "weights must be one of int8, int4, int2"),
        ({"activations": "int4"}, ValueError, "activations must be one of int8, int16"),
        ({"path": "*"}, ValueError, r"any text is written \.\*"),
        ({"path": 3}, TypeError, "path must be a string"),
        ({"op": 3}, TypeError, "op must be a string"),
        ({"is_float": 1}, TypeError, "is_float must be a bool"),
    ],
)
def test_fields_are_checked(fields, error, message):
    with pytest.raises(error, match=message):
        edge.Rule(**fields)


def test_rules_that_fit_nothing_are_refused():
    def function(w, x):
        with jax.named_scope("head"):
            return jnp.tanh(x @ w)

    w, x = jnp.ones((3, 2)), jnp.ones((4, 3))
    rule = edge.Rule(path="haed", weights="int4")
    with pytest.raises(ValueError, match=r"rules\[0\].*nearest are head .*is_required"):
        edge.calibrate(function, w, [x], [rule])
    optional = dataclasses.replace(rule, is_required=False)
    assert edge.calibrate(function, w, [x], [optional])


def test_a_rule_that_others_leave_nothing_is_refused():
    def function(w, x):
        with jax.named_scope("head"):
            y = x @ w
        return jnp.tanh(y)

    w, x = jnp.ones((3, 2)), jnp.ones((4, 3))
    everything, head = edge.Rule(weights="int4"), edge.Rule(path="head", is_float=True)
    with pytest.raises(ValueError) as caught:
        edge.calibrate(function, w, [x], [everything, head])
    assert "rule 1 (path='head') decides nothing: rule 0 (any operator)" in str(
        caught.value
    )
    assert edge.calibrate(function, w, [x], [head, everything]).of_values


def test_what_is_no_rule():
    with pytest.raises(TypeError, match="sequence of aqtlite.edge.Rule"):
        rules.check(["int8"])


EVERY_FIELD = edge.Rule(
    path=".*/head", op="softmax", activations="int16", weights="int4", is_float=True
)


def test_json_has_every_field():
    text = rules.to_json([EVERY_FIELD, edge.Rule()])
    assert rules.from_json(text) == (EVERY_FIELD, edge.Rule())
    first, second = json.loads(text)["rules"]
    assert set(first) == set(second) and first["weights"] == "int4"
    assert rules.to_json([], indent=2) == '{\n  "version": 1,\n  "rules": []\n}'


def test_fields_have_defaults():
    written = '{"version": 1, "rules": [{"op": "conv_2d"}]}'
    assert rules.from_json(written) == (edge.Rule(op="conv_2d"),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", r"\$: not valid JSON"),
        ("[]", 'an object with "version" and "rules"'),
        ('{"version": 2, "rules": []}', "reads only version 1"),
        ('{"version": 1, "rules": {}}', "and a list"),
        ('{"version": 1, "rules": [{"cfg": 1}]}', r"rules\[0\].*fields of path, op"),
        (
            '{"version": 1, "rules": [{}, {"weights": "int3"}]}',
            r"rules\[1\]: edge.Rule.weights must be one of int8",
        ),
    ],
)
def test_wrong_json_names_the_place(text, words):
    with pytest.raises(ValueError, match=words):
        rules.from_json(text)


def test_json_of_what_is_no_rule():
    with pytest.raises(TypeError, match="a sequence of aqtlite.edge.Rule"):
        rules.to_json(["int8"])
    with pytest.raises(TypeError, match="needs a string"):
        rules.from_json({})
