"""Manifests: what is written is read, and nothing else is."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite import checkpoint, config, numerics
from aqtlite.checkpoint import manifest_json
from aqtlite.checkpoint.arrays import ArrayInfo
from aqtlite.checkpoint.manifest import Frozen, Manifest, Plain, Stored, completed
from aqtlite.checkpoint.packing import packing_of
from aqtlite.flax.linen.frozen_kernel import FrozenKernel
from tests.checkpoint import support
from tests.flax import models
from tests.flax.support import X

pytestmark = pytest.mark.code("quick")

source = support.source
FLOAT32 = np.dtype("float32")
TERNARY = numerics.IntSymmetric(bits=2)


def stored(shape, dtype, grid=None):
    info = ArrayInfo(shape, jnp.dtype(dtype))
    return Stored(info, packing_of(info, grid), 0xABC)


FROZEN = Frozen(
    arrays={"qvalue": "aqt/w/rhs/qvalue", "scale": "aqt/w/rhs/scale"},
    dtype=FLOAT32,
    order=(1, 0),
    numerics=TERNARY,
    origin={"params/w": ArrayInfo((9, 3), FLOAT32)},
    decibels=12.25,
)
MANIFEST = Manifest(
    nodes={
        "aqt/w/rhs": FROZEN,
        "params/bias": Plain("params/bias"),
        "params/w": FrozenKernel((9, 3), FLOAT32, 1),
    },
    arrays={
        "aqt/w/rhs/qvalue": stored((3, 9), "int4", TERNARY),
        "aqt/w/rhs/scale": stored((3, 1), "float32"),
        "params/bias": stored((3,), "bfloat16"),
    },
    model="Model()",
)


def read(data):
    """Reads an edited manifest: without its checksum, as those of before had none."""
    data = {key: value for key, value in data.items() if key != "crc32"}
    return manifest_json.from_json(json.dumps(data), "here")


def damaged(change, match):
    data = json.loads(manifest_json.to_json(MANIFEST))
    change(data)
    with pytest.raises(checkpoint.CheckpointError, match=f"damaged: .*{match}"):
        read(data)


def test_round_trip():
    assert manifest_json.from_json(manifest_json.to_json(MANIFEST), "here") == MANIFEST


def test_a_zero_point():
    node = dataclasses.replace(
        FROZEN, arrays={**FROZEN.arrays, "zero_point": "aqt/w/rhs/zero_point"}
    )
    manifest = dataclasses.replace(
        MANIFEST,
        nodes={**MANIFEST.nodes, "aqt/w/rhs": node},
        arrays={**MANIFEST.arrays, "aqt/w/rhs/zero_point": stored((3, 1), "float32")},
    )
    text = manifest_json.to_json(manifest)
    assert manifest_json.from_json(text, "here") == manifest
    (row,) = checkpoint.report.report_of(manifest).weights
    assert row.bytes_after == 3 * 3 + 3 * 4 + 3 * 4


def test_it_says_the_grid_and_the_packing():
    data = json.loads(manifest_json.to_json(MANIFEST))
    grid = data["nodes"]["aqt/w/rhs"]["numerics"]
    assert grid["type"] == "IntSymmetric" and grid["bits"] == 2
    packed = data["arrays"]["aqt/w/rhs/qvalue"]["packed"]
    assert packed == {"bits": 2, "lowest": -1, "step": 1}
    assert "packed" not in data["arrays"]["aqt/w/rhs/scale"]


def test_it_says_the_axis_of_the_packing_unless_it_is_the_last():
    arrays = {**MANIFEST.arrays, "aqt/w/rhs/qvalue": stored((4, 3), "int4", TERNARY)}
    manifest = dataclasses.replace(MANIFEST, arrays=arrays)
    data = json.loads(manifest_json.to_json(manifest))
    packed = data["arrays"]["aqt/w/rhs/qvalue"]["packed"]
    assert packed["axis"] == 0
    assert read(data) == manifest
    del packed["axis"]  # As all manifests before there was an axis.
    assert read(data).arrays["aqt/w/rhs/qvalue"].packing.axis == -1
    packed["axis"] = 2
    with pytest.raises(checkpoint.CheckpointError, match="is packed as"):
        read(data)


def test_unsigned_grids_of_two_bits_were_once_packed_as_their_dtype():
    grid = numerics.IntAffine(bits=2)
    node = dataclasses.replace(FROZEN, numerics=grid)
    arrays = {**MANIFEST.arrays, "aqt/w/rhs/qvalue": stored((3, 9), "int4", grid)}
    manifest = dataclasses.replace(
        MANIFEST, nodes={**MANIFEST.nodes, "aqt/w/rhs": node}, arrays=arrays
    )
    data = json.loads(manifest_json.to_json(manifest))
    packed = data["arrays"]["aqt/w/rhs/qvalue"]["packed"]
    assert packed == {"bits": 2, "lowest": 0, "step": 1}
    packed.update(bits=4, lowest=-8)
    assert read(data).arrays["aqt/w/rhs/qvalue"].packing.bits == 4
    packed.update(bits=4, lowest=0)
    with pytest.raises(checkpoint.CheckpointError, match="is packed as"):
        read(data)


def test_zero_points_were_once_stored_as_they_are_in_memory():
    grid, name = numerics.IntAffine(bits=4), "aqt/w/rhs/zero_point"
    node = dataclasses.replace(
        FROZEN, numerics=grid, arrays={**FROZEN.arrays, "zero_point": name}
    )
    qvalue, zero_point = stored((3, 9), "uint4", grid), stored((3, 8), "int32", grid)
    arrays = {**MANIFEST.arrays, "aqt/w/rhs/qvalue": qvalue, name: zero_point}
    nodes = {**MANIFEST.nodes, "aqt/w/rhs": node}
    manifest = dataclasses.replace(MANIFEST, nodes=nodes, arrays=arrays)
    data = json.loads(manifest_json.to_json(manifest))
    packed = data["arrays"][name].pop("packed")
    assert packed == {"bits": 4, "lowest": 0, "step": 1}
    assert read(data).arrays[name].on_disk == ArrayInfo((3, 8), np.dtype("int32"))
    data["arrays"][name]["packed"] = {**packed, "bits": 8}
    with pytest.raises(checkpoint.CheckpointError, match="is packed as"):
        read(data)


def test_its_length_is_known_before_checksums_and_noise_are():
    nothing = completed(MANIFEST, {}, {})
    known = completed(
        MANIFEST, {name: 0xFFFFFFFF for name in MANIFEST.arrays}, {"aqt/w/rhs": -3.5}
    )
    assert known.nodes["aqt/w/rhs"].decibels == -3.5
    assert len(manifest_json.to_json(nothing)) == len(manifest_json.to_json(known))


@pytest.mark.parametrize("found, advice", [(2, "convert again"), (99, "upgrade it")])
def test_another_format(found, advice):
    data = json.loads(manifest_json.to_json(MANIFEST))
    with pytest.raises(checkpoint.CheckpointError, match=f"format {found} .*{advice}"):
        read({**data, "format": found})


@pytest.mark.parametrize(
    "packed",
    [
        {"bits": 4, "lowest": -7, "step": 1},
        {"bits": 2, "lowest": -2, "step": 1},
        {"bits": 2, "lowest": -1, "step": 2},
        {"bits": 3, "lowest": -1, "step": 1},
        {"bits": 2, "lowest": -1, "step": 0},
        {"bits": True, "lowest": -1, "step": 1},
        {"bits": 2},
        3,
    ],
)
def test_a_packing_that_is_not_the_grids(packed):
    def change(data):
        data["arrays"]["aqt/w/rhs/qvalue"]["packed"] = packed

    damaged(change, "")


def test_a_packed_array_of_floats():
    def change(data):
        packed = {"bits": 2, "lowest": -1, "step": 1}
        data["arrays"]["params/bias"]["packed"] = packed

    damaged(change, "params/bias, bfloat16")


@pytest.mark.parametrize("grid", [None, 3, {"type": "Tensor"}])
def test_a_grid_that_is_none(grid):
    def change(data):
        data["nodes"]["aqt/w/rhs"]["numerics"] = grid

    damaged(change, "")


def test_a_class_that_is_not_registered():
    data = json.loads(manifest_json.to_json(MANIFEST))
    data["nodes"]["aqt/w/rhs"]["numerics"] = {"type": "os.system"}
    with pytest.raises(checkpoint.CheckpointError, match="import the module that reg"):
        read(data)


def test_an_unknown_kind_of_node():
    def change(data):
        data["nodes"]["params/x"] = {"kind": "value", "value": 3}

    damaged(change, "unknown kind 'value'")


def test_the_grid_of_every_weight_is_recorded(source, tmp_path):
    cfg = config.update(
        config.weight_only(bits=8), {"fwd.rhs.numerics": numerics.IntSymmetric(bits=5)}
    )
    checkpoint.convert_checkpoint(source, tmp_path / "out", models.MlpBlock(cfg), X)
    text = (tmp_path / "out" / "aqtlite.json").read_text()
    nodes = manifest_json.from_json(text, "out").nodes.values()
    grids = [node.numerics for node in nodes if isinstance(node, Frozen)]
    assert grids == [numerics.IntSymmetric(bits=5)] * 3


def test_sizes_of_arrays_that_the_file_does_not_have(source, tmp_path):
    model = models.MlpBlock(config.weight_only(bits=4))
    checkpoint.convert_checkpoint(source, tmp_path / "out", model, X)

    def change(data):
        name = next(name for name, one in data["arrays"].items() if "packed" in one)
        data["arrays"][name]["shape"][-1] -= 2

    support.edit(tmp_path / "out", change)
    with pytest.raises(checkpoint.CheckpointError, match=r"is uint8\[.*manifest says"):
        checkpoint.load_serving(tmp_path / "out")


def test_sites_that_do_not_say_what_was_taken_away(source, tmp_path):
    """As those of older manifests: they load, with the model and without it."""
    target = tmp_path / "out"
    checkpoint.convert_checkpoint(source, target, support.MODEL, X)

    def change(data):
        sites = [node for node in data["nodes"].values() if node["kind"] == "site"]
        assert [node.pop("removed") for node in sites] == [
            [f"Dense_{i}/kernel"] for i in range(3)
        ]

    support.edit(target, change)
    expected = support.MODEL.apply(support.VARIABLES, X)
    for model in (None, support.MODEL):
        serving = checkpoint.load_serving(target, model)
        np.testing.assert_array_equal(support.MODEL.apply(serving, X), expected)
        mixed = {**serving, "params": support.VARIABLES["params"]}
        with pytest.raises(ValueError, match="'Dense_0/kernel' is a float, but"):
            support.MODEL.apply(mixed, X)
