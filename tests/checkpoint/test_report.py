"""Sizes in reports are those of what lies on disk."""

import flax.linen as nn
import jax.numpy as jnp
import pytest

from aqtlite import calibration, checkpoint, config, numerics
from aqtlite.flax import AqtDotGeneral, convert
from aqtlite.qtensor.codes import stored_bytes
from tests.checkpoint.support import assert_same, save
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

X = jnp.ones((1, 512))


def size(path):
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


@pytest.mark.parametrize("target", ["out", "out.safetensors"])
@pytest.mark.parametrize(
    "bits, grid",
    [
        (3, 4),
        (2, 2),
        *(pytest.param(bits, bits, marks=pytest.mark.slow) for bits in (8, 4, 1)),
    ],
)
def test_size_by_bits(bits, grid, target, tmp_path):
    """Of a 512 x 512 float32 kernel: its integers packed, a scale a column, a bias."""
    model = nn.Dense(512, dot_general=AqtDotGeneral(config.weight_only(bits=bits)))
    variables = init(model, X)
    source = save(tmp_path / "float", variables, "msgpack")
    args = (source, tmp_path / target, model, X)
    plan = checkpoint.convert_checkpoint(*args, dry_run=True)
    report = checkpoint.convert_checkpoint(*args)
    assert report.bytes_after == 512 * 512 * grid // 8 + 2 * 4 * 512
    assert (plan.bytes_after, plan.bytes_on_disk) == (report.bytes_after, None)
    assert report.bytes_on_disk == size(tmp_path / target)
    assert report.bytes_on_disk < report.bytes_after + 10_000
    shown = checkpoint.summarize(tmp_path / target)
    assert shown.bytes_on_disk == report.bytes_on_disk
    assert shown.weights == report.weights
    for loaded in (
        checkpoint.load_serving(tmp_path / target),
        checkpoint.load_serving(tmp_path / target, model),
    ):
        assert_same(loaded, convert(model, variables, X))


def test_zero_points_take_as_many_bits_as_values(tmp_path):
    cfg = config.update(
        config.weight_only(),
        {
            "fwd.rhs.blocks": config.Blocks(size=32),
            "fwd.rhs.numerics": numerics.IntAffine(bits=4),
            "fwd.rhs.calibration": calibration.MinMax(),
        },
    )
    model = nn.Dense(512, dot_general=AqtDotGeneral(cfg))
    variables, target = init(model, X), tmp_path / "out.safetensors"
    source = save(tmp_path / "float", variables, "msgpack")
    (row,) = checkpoint.convert_checkpoint(source, target, model, X).weights
    assert row.bytes_after == 512 * 512 // 2 + 16 * 512 * 4 + 16 * 512 // 2
    loaded = checkpoint.load_serving(target, model)
    assert_same(loaded, convert(model, variables, X))
    assert row.bytes_after == stored_bytes(loaded["aqt"]["kernel"]["rhs"])


@pytest.mark.parametrize("target", ["out", "out.safetensors"])
def test_odd_sizes(target, tmp_path):
    model = nn.Dense(5, dot_general=AqtDotGeneral(config.weight_only(bits=2)))
    x = jnp.ones((1, 7))
    variables = init(model, x)
    source = save(tmp_path / "float", variables, "msgpack")
    report = checkpoint.convert_checkpoint(source, tmp_path / target, model, x)
    assert report.weights[0].bytes_after == 5 * 2 + 5 * 4
    loaded = checkpoint.load_serving(tmp_path / target, model)
    assert_same(loaded, convert(model, variables, x))


def test_natural_order(tmp_path):
    dot_general = AqtDotGeneral(config.weight_only(bits=8))
    model = nn.Sequential([nn.Dense(8, dot_general=dot_general) for _ in range(11)])
    x = jnp.ones((1, 8))
    source = save(tmp_path / "float", init(model, x), "msgpack")
    report = checkpoint.convert_checkpoint(
        source, tmp_path / "out", model, x, dry_run=True
    )
    wanted = [f"params/layers_{i}/kernel" for i in range(11)]
    assert [row.origin for row in report.weights] == [(name,) for name in wanted]
