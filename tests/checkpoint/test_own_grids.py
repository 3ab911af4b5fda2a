"""Checkpoints of models whose grids and calibrations are the user's own."""

import dataclasses
import json

import pytest

from aqtlite import checkpoint, config
from aqtlite.flax import convert
from tests.checkpoint.support import VARIABLES, assert_same, edit, refuses, save
from tests.extensions import affine, e4m3, ternary
from tests.flax import models
from tests.flax.support import X, apply, assert_equal

pytestmark = pytest.mark.code("quick")


@config.register
@dataclasses.dataclass(frozen=True)
class AffineUint4(affine.AffineUint8):
    """0 to 15."""

    @property
    def bound(self):
        return 15.0

    @property
    def zero_point_range(self):
        return 0, 15


@dataclasses.dataclass(frozen=True)
class Unregistered(affine.AffineUint8):
    """Nobody can read it from a file."""


UINT4 = dataclasses.replace(affine.TENSOR, numerics=AffineUint4())
TENSORS = {
    "affine": (affine.TENSOR, 8),
    "affine, 4 bits": (UINT4, 4),
    "float": (e4m3.TENSOR, 8),
    "table": (ternary.TENSOR, 8),
}


def model_of(tensor):
    return models.MlpBlock(config.update(config.weight_only(), {"fwd.rhs": tensor}))


@pytest.mark.parametrize(
    "name, target",
    [(name, "out") for name in TENSORS]
    + [
        pytest.param(name, "out.safetensors", marks=pytest.mark.slow)
        for name in TENSORS
        if name != "float"
    ],
)
def test_served_as_converted_in_memory(name, target, tmp_path):
    tensor, bits = TENSORS[name]
    model = model_of(tensor)
    source = save(tmp_path / "float", VARIABLES, "msgpack")
    report = checkpoint.convert_checkpoint(source, tmp_path / target, model, X)
    wanted = convert(model, VARIABLES, X)
    for loaded in (
        checkpoint.load_serving(tmp_path / target),
        checkpoint.load_serving(tmp_path / target, model),
    ):
        assert_same(loaded, wanted)
    assert_equal(apply(model, loaded, X), apply(model, VARIABLES, X))
    row = report.weights[0]
    assert row.grid == tensor.numerics.name
    zero_point = wanted["aqt"]["Dense_0"]["kernel"]["rhs"].zero_point
    on_grid = 64 if zero_point is None else 64 + row.scales
    assert row.bytes_after == on_grid * bits // 8 + row.scales * 4


def test_float8_in_safetensors(tmp_path):
    source = save(tmp_path / "float", VARIABLES, "msgpack")
    target, model = tmp_path / "out.safetensors", model_of(e4m3.TENSOR)
    checkpoint.convert_checkpoint(source, target, model, X)
    assert_same(checkpoint.load_serving(target, model), convert(model, VARIABLES, X))


def test_a_model_of_another_grid(tmp_path):
    source = save(tmp_path / "float", VARIABLES, "msgpack")
    args = (source, tmp_path / "out", model_of(UINT4), X)
    checkpoint.convert_checkpoint(*args)
    other = model_of(affine.TENSOR)
    match = "fwd.rhs.numerics.*AffineUint4.*AffineUint8"
    refuses(match, checkpoint.load_serving, tmp_path / "out", other)


def test_a_grid_that_is_not_registered(tmp_path):
    source = save(tmp_path / "float", VARIABLES, "msgpack")
    model = model_of(dataclasses.replace(affine.TENSOR, numerics=Unregistered()))
    with pytest.raises(TypeError, match=r"Unregistered.*register"):
        checkpoint.convert_checkpoint(source, tmp_path / "out", model, X)
    assert not (tmp_path / "out").exists()


def test_a_grid_that_the_reader_does_not_know(tmp_path):
    source = save(tmp_path / "float", VARIABLES, "msgpack")
    model = model_of(UINT4)
    checkpoint.convert_checkpoint(source, tmp_path / "out", model, X)

    def rename(data):
        data.update(json.loads(json.dumps(data).replace("AffineUint4", "Unheard")))

    edit(tmp_path / "out", rename)
    refuses("Unheard", checkpoint.load_serving, tmp_path / "out")


def test_the_manifest_names_the_zero_point(tmp_path):
    source = save(tmp_path / "float", VARIABLES, "msgpack")
    checkpoint.convert_checkpoint(source, tmp_path / "out", model_of(UINT4), X)
    data = json.loads((tmp_path / "out" / "aqtlite.json").read_text())
    name = "aqt/Dense_0/kernel/rhs"
    assert data["nodes"][name]["zero_point"] == f"{name}/zero_point"
    assert data["arrays"][f"{name}/zero_point"]["dtype"] == "int32"
    assert data["arrays"][f"{name}/qvalue"]["packed"] == {
        "bits": 4,
        "lowest": 0,
        "step": 1,
    }
