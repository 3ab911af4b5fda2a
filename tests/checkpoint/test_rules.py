"""Freezing parameters by rules, without a model."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import checkpoint, config, numerics
from tests.checkpoint.support import assert_same, save

INT4 = config.Tensor(numerics=numerics.IntSymmetric(bits=4))
KEYS = jax.random.split(jax.random.key(0), 3)
VARIABLES = {
    "encoder": {"kernel": jax.random.normal(KEYS[0], (8, 12)), "bias": jnp.ones(12)},
    "decoder": {"kernel": jax.random.normal(KEYS[1], (12, 4), jnp.bfloat16)},
    "steps": jnp.int32(7),
}
RULES = [
    {"pattern": "decoder/*", "contracting": [-2], "tensor": None},
    {"pattern": "*/kernel", "contracting": [0], "bits": 8},
]
RULES[0]["tensor"] = json.loads(config.to_json(INT4))


@pytest.mark.parametrize("target", ["out", "out.safetensors"])
def test_the_first_rule_that_matches_counts(target, tmp_path):
    source = save(tmp_path / "float", VARIABLES, "msgpack")
    rules = checkpoint.rules_from_json(json.dumps(RULES))
    report = checkpoint.convert_by_rules(source, tmp_path / target, rules)
    loaded = checkpoint.load_serving(tmp_path / target)
    int8 = config.weight_only(bits=8).fwd.rhs
    for name, tensor in (("encoder", int8), ("decoder", INT4)):
        kernel = VARIABLES[name]["kernel"]
        wanted = aqtlite.quantize(kernel, tensor, 0).stored_in((1, 0))
        assert_same(loaded[name]["kernel"], wanted)
    assert_same(loaded["encoder"]["bias"], VARIABLES["encoder"]["bias"])
    assert int(loaded["steps"]) == 7
    assert {row.grid for row in report.weights} == {"int8", "int4"}
    assert report.kept == 2


def test_what_comes_out_is_an_operand(tmp_path):
    source = save(tmp_path / "float", VARIABLES, "orbax")
    rules = [checkpoint.Rule("encoder/kernel", (0,))]
    checkpoint.convert_by_rules(source, tmp_path / "out", rules)
    kernel = checkpoint.load_serving(tmp_path / "out")["encoder"]["kernel"]
    dot = aqtlite.make_dot_general(config.fully_quantized())
    x = jax.random.normal(KEYS[2], (3, 8))
    dims = (((1,), (0,)), ((), ()))
    np.testing.assert_array_equal(
        dot(x, kernel, dims), dot(x, VARIABLES["encoder"]["kernel"], dims)
    )


@pytest.mark.parametrize(
    "text, match",
    [
        ("[", "JSONDecodeError"),
        ("3", "TypeError"),
        ('[{"contracting": [0]}]', "pattern"),
        ('[{"pattern": "*"}]', "contracting"),
        ('[{"pattern": "*", "contracting": [0], "bit": 8}]', "unknown bit"),
        ('[{"pattern": "*", "contracting": [0], "bits": 9}]', "from 1 to 8"),
        ('[{"pattern": "*", "contracting": [0], "tensor": {}}]', "Error"),
    ],
)
def test_wrong_rules(text, match):
    with pytest.raises(checkpoint.CheckpointError, match=match):
        checkpoint.rules_from_json(text)


@pytest.mark.parametrize(
    "rule, match",
    [
        (checkpoint.Rule("nothing", (0,)), "no array matches nothing"),
        (checkpoint.Rule("steps", ()), "cannot freeze steps, int32"),
        (checkpoint.Rule("*/kernel", (2,)), "does not have"),
        (checkpoint.Rule("*/kernel", (0, 0)), "twice"),
    ],
)
def test_rules_that_do_not_fit(rule, match, tmp_path):
    source = save(tmp_path / "float", VARIABLES, "msgpack")
    with pytest.raises(checkpoint.CheckpointError, match=match):
        checkpoint.convert_by_rules(source, tmp_path / "out", [rule])
    assert [path.name for path in tmp_path.iterdir()] == ["float.msgpack"]


def test_it_loads_without_a_model_only(tmp_path):
    source = save(tmp_path / "float", VARIABLES, "msgpack")
    rules = [checkpoint.Rule("encoder/kernel", (0,))]
    checkpoint.convert_by_rules(source, tmp_path / "out", rules)
    import flax.linen as nn

    with pytest.raises(checkpoint.CheckpointError, match="without a model"):
        checkpoint.load_serving(tmp_path / "out", nn.Dense(4))
