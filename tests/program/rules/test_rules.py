import dataclasses
import json

import pytest

from aqtlite import Rule, calibration, config, numerics
from aqtlite.program.rules import rules as rules_lib

pytestmark = pytest.mark.code("quick")

INT8 = config.fully_quantized()

EVERY_FIELD = Rule(
    path=r"a/b#\d",
    op="dot_general",
    cfg=config.update(
        INT8, {"fwd.rhs.calibration": calibration.AbsMax(clipping_scale=0.5)}
    ),
    operands="weight",
    equation="ab,bc->ac",
    min_size=16,
    module="a/b",
    is_required=False,
    group="of a/b",
)


FLOAT = Rule(cfg=None)


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"cfg": "int8"}, TypeError, r"Rule.cfg.*config.fully_quantized\(\)"),
        ({"cfg": INT8.fwd}, TypeError, "Rule.cfg"),
        ({"path": None}, TypeError, "Rule.path must be a string, got None"),
        ({"path": "*mlp"}, ValueError, r"Rule.path='\*mlp'.*any text is written .\*"),
        ({"path": "(mlp"}, ValueError, "Rule.path='.mlp' is no regular expression"),
        ({"equation": 3}, TypeError, "Rule.equation must be a string, got 3"),
        ({"equation": "ab,bc->(ac"}, ValueError, "Rule.equation"),
        ({"op": "matmul"}, ValueError, "Rule.op.*dot_general.*'matmul'"),
        ({"op": ["dot_general"]}, ValueError, "Rule.op.*a tuple of these or None"),
        ({"op": ("dot_general", "dot")}, ValueError, "Rule.op.*ragged_dot.*'dot'"),
        ({"op": ()}, ValueError, r"Rule.op.*got \(\)"),
        ({"operands": "weights"}, ValueError, "any, weight, activations.*'weights'"),
        ({"operands": None}, ValueError, "Rule.operands"),
        ({"min_size": -1}, ValueError, "Rule.min_size"),
        ({"min_size": 1.5}, ValueError, "Rule.min_size"),
        ({"min_size": True}, ValueError, "Rule.min_size"),
        ({"module": "(mlp"}, ValueError, "Rule.module='.mlp' is no regular"),
        ({"group": 1}, TypeError, "Rule.group must be a string, got 1"),
        ({"is_required": "no"}, TypeError, "Rule.is_required must be a bool"),
    ],
)
def test_validation(fields, error, words):
    with pytest.raises(error, match=words):
        Rule(**{"cfg": INT8, **fields})


def test_a_rule_without_a_config():
    with pytest.raises(TypeError, match="missing.*'cfg'"):
        Rule(path="head")
    assert Rule(path="head", cfg=None).cfg is None


def test_no_quantized_results():
    out = config.Tensor(
        numerics=numerics.IntSymmetric(bits=8), calibration=calibration.MaxOverBatches()
    )
    with pytest.raises(ValueError, match="Rule.cfg.out"):
        Rule(cfg=dataclasses.replace(INT8, out=out))


def test_rules_are_data():
    again = dataclasses.replace(EVERY_FIELD)
    assert again == EVERY_FIELD
    assert hash(again) == hash(EVERY_FIELD)
    with pytest.raises(dataclasses.FrozenInstanceError):
        EVERY_FIELD.path = "b"


def test_what_stands_for_rules():
    assert rules_lib.check(INT8) == (Rule(cfg=INT8),)
    assert rules_lib.check(EVERY_FIELD) == (EVERY_FIELD,)
    assert rules_lib.check([EVERY_FIELD, FLOAT]) == (EVERY_FIELD, FLOAT)
    assert rules_lib.check([]) == ()


@pytest.mark.parametrize("wrong", [None, "int8", {"path": ".*"}, [INT8], [None], 8])
def test_what_does_not(wrong):
    with pytest.raises(TypeError, match="a sequence of aqtlite.Rule"):
        rules_lib.check(wrong)


# --- JSON ----------------------------------------------------------------------------


@pytest.mark.parametrize("indent", [None, 2])
def test_json_there_and_back(indent):
    ops = ("dot_general", "ragged_dot")
    rules = (EVERY_FIELD, FLOAT, Rule(op=ops, cfg=config.fp8(delayed=True)))
    text = rules_lib.to_json(rules, indent=indent)
    assert rules_lib.from_json(text) == rules
    assert ("\n" in text) == (indent is not None)


def test_json_has_every_field():
    (fields,) = json.loads(rules_lib.to_json([FLOAT]))["rules"]
    assert set(fields) == {field.name for field in dataclasses.fields(Rule)}


def test_fields_that_are_not_there():
    text = '{"version": 1, "rules": [{"cfg": null}, {"path": "a", "cfg": null}]}'
    assert rules_lib.from_json(text) == (FLOAT, Rule(path="a", cfg=None))


def one(**fields):
    rules = [{"cfg": None}, {"cfg": None, **fields}]
    return json.dumps({"version": 1, "rules": rules})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", r"^\$: not valid JSON"),
        ("[]", r"^\$: expected an object"),
        ('{"rules": []}', r'^\$: there is no "version"'),
        ('{"version": 1, "rules": [], "more": 1}', r"^\$: expected"),
        ('{"version": 2, "rules": []}', "version 1"),
        ('{"version": 1, "rules": {}}', "and a list"),
        ('{"version": 1, "rules": [3]}', r"\$.rules\[0\]: expected an object"),
        ('{"version": 1, "rules": [{"path": "a"}]}', r"\$.rules\[0\].*'cfg'"),
        (one(pathh="a"), r"\$.rules\[1\].*pathh"),
        (one(path="*"), r"\$.rules\[1\].*no regular expression"),
        (one(path=3), r"\$.rules\[1\].*must be a string"),
        (one(op="matmul"), r"\$.rules\[1\].*Rule.op"),
        (one(op=["dot_general", 3]), r"\$.rules\[1\].*Rule.op"),
        (one(op=[]), r"\$.rules\[1\].*Rule.op"),
        (one(is_required="no"), r"\$.rules\[1\].*Rule.is_required"),
        (one(cfg={"a": 1}), r"\$.rules\[1\]"),
        (one(cfg=3), r"\$.rules\[1\]"),
    ],
)
def test_json_that_describes_no_rules(text, words):
    with pytest.raises(ValueError, match=words):
        rules_lib.from_json(text)


def test_json_is_text():
    with pytest.raises(TypeError, match="got bytes"):
        rules_lib.from_json(b"{}")
    with pytest.raises(TypeError, match="a sequence of aqtlite.Rule"):
        rules_lib.to_json(None)
