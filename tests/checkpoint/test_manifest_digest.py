"""A manifest that is not what was written is not read."""

import json

import flax.linen as nn
import jax
import pytest

from aqtlite import checkpoint, config
from aqtlite.flax import quantize_model
from tests.checkpoint import support
from tests.checkpoint.support import assert_same, refuses, save
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")


@pytest.fixture
def converted(tmp_path):
    """Of a square weight of 4 bits, whose shape says nothing of its axes."""
    model = quantize_model(nn.Dense(8), config.weight_only(bits=4))
    x = jax.ShapeDtypeStruct((1, 8), "float32")
    source = save(
        tmp_path / "float", init(nn.Dense(8), jax.numpy.ones(x.shape)), "msgpack"
    )
    checkpoint.convert_checkpoint(source, tmp_path / "out", model, x)
    return tmp_path / "out"


def lowest(data):
    (packed,) = [one["packed"] for one in data["arrays"].values() if "packed" in one]
    assert packed["lowest"] == -7
    packed["lowest"] = -8


def order(data):
    (frozen,) = [one for one in data["nodes"].values() if one["kind"] == "frozen"]
    frozen["order"] = [0, 1] if frozen["order"] == [1, 0] else [1, 0]


def decibels(data):
    (frozen,) = [one for one in data["nodes"].values() if one["kind"] == "frozen"]
    frozen["decibels"] = "   99.00"


def its_own(data):
    data["crc32"] = None


@pytest.mark.parametrize("change", [lowest, order, decibels, its_own])
def test_one_entry_that_changed(change, converted):
    file = converted / "aqtlite.json"
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    match = f"the manifest of {converted} is damaged: its checksum is"
    refuses(match, checkpoint.load_serving, converted)
    refuses(match, checkpoint.summarize, converted)


def test_another_layout_of_the_text(converted):
    wanted = checkpoint.load_serving(converted)
    file = converted / "aqtlite.json"
    data = json.loads(file.read_text())
    file.write_text(json.dumps(dict(reversed(data.items())), indent=2))
    assert_same(checkpoint.load_serving(converted), wanted)


def test_manifests_of_before_have_no_checksum(converted):
    wanted = checkpoint.load_serving(converted)
    support.edit(converted, lambda data: None)
    assert_same(checkpoint.load_serving(converted), wanted)
