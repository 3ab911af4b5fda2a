"""A checkpoint converted on one device, loaded onto a mesh."""

import os
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from aqtlite import checkpoint
from aqtlite.flax import convert
from tests.checkpoint.support import FORMATS, assert_same, save
from tests.flax.support import DG, NORMAL, X, init

MODEL = nn.Dense(
    24, dot_general=DG, kernel_init=nn.with_partitioning(NORMAL, (None, "model"))
)


def converted(tmp_path, name, how="orbax"):
    variables = init(MODEL, X)
    source = save(tmp_path / "float", variables, how)
    checkpoint.convert_checkpoint(source, tmp_path / name, MODEL, X)
    return tmp_path / name, convert(MODEL, variables, X)


@pytest.mark.parametrize("name", ["out", "out.safetensors"])
def test_metadata_comes_from_the_model(name, tmp_path):
    path, wanted = converted(tmp_path, name)
    assert_same(checkpoint.load_serving(path, MODEL), wanted)
    without_names = jax.tree.map(
        lambda x: x.value if isinstance(x, nn.Partitioned) else x,
        wanted,
        is_leaf=lambda x: isinstance(x, nn.Partitioned),
    )
    assert_same(checkpoint.load_serving(path), without_names)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("how", FORMATS)
def test_a_source_without_metadata(how, alone, tmp_path):
    """As `nn.meta.unbox` leaves it; the names of the axes come from the model."""
    variables = init(MODEL, X)
    unboxed = nn.meta.unbox(variables)
    source = save(tmp_path / "float", unboxed["params"] if alone else unboxed, how)
    report = checkpoint.convert_checkpoint(source, tmp_path / "out", MODEL, X)
    assert len(report.weights) == 1
    loaded = checkpoint.load_serving(tmp_path / "out", MODEL)
    assert_same(loaded, convert(MODEL, variables, X))
    assert_same(checkpoint.load_serving(tmp_path / "out"), convert(MODEL, unboxed, X))


def test_a_source_with_some_metadata(tmp_path):
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_partitioning(NORMAL, (None, "model"))
            x = nn.Dense(24, dot_general=DG, kernel_init=init)(x)
            return nn.Dense(24, dot_general=DG, kernel_init=init)(x)

    variables = init(Two(), X)
    params = variables["params"]
    mixed = {"params": {**params, "Dense_1": nn.meta.unbox(params["Dense_1"])}}
    source = save(tmp_path / "float", mixed, "orbax")
    checkpoint.convert_checkpoint(source, tmp_path / "out", Two(), X)
    loaded = checkpoint.load_serving(tmp_path / "out", Two())
    assert_same(loaded, convert(Two(), variables, X))


def test_a_weight_that_is_missing_is_named_as_the_source_would(tmp_path):
    params = nn.meta.unbox(init(MODEL, X))["params"]
    source = save(tmp_path / "float", {"params": {"bias": params["bias"]}}, "msgpack")
    with pytest.raises(checkpoint.CheckpointError, match="params/kernel is missing"):
        checkpoint.convert_checkpoint(source, tmp_path / "out", MODEL, X)


def test_mesh_needs_the_model(tmp_path):
    path, _ = converted(tmp_path, "out")
    mesh = jax.make_mesh((1,), ("model",))
    with pytest.raises(checkpoint.CheckpointError, match="needs model="):
        checkpoint.load_serving(path, mesh=mesh)


def test_logical_names(tmp_path):
    kernel_init = nn.with_logical_partitioning(NORMAL, ("embed", "mlp"))
    model = nn.Dense(24, dot_general=DG, kernel_init=kernel_init)
    variables = init(model, X)
    source = save(tmp_path / "float", variables, "orbax")
    checkpoint.convert_checkpoint(source, tmp_path / "out", model, X)
    mesh = jax.make_mesh((1,), ("model",))
    rules = (("embed", None), ("mlp", "model"))
    loaded = checkpoint.load_serving(tmp_path / "out", model, mesh=mesh, rules=rules)
    assert_same(loaded, convert(model, variables, X))
    rhs = nn.meta.unbox(loaded["aqt"]["kernel"]["rhs"])
    assert rhs.qvalue.sharding.spec == P("model", None)
    assert rhs.scale.sharding.spec == P("model", None)


def test_four_devices(tmp_path):
    """Integers and scales are sharded as the kernel is; serving gives the same."""
    expected = {}
    for name in ("out", "out.safetensors"):
        folder = tmp_path / name.replace(".", "_")
        folder.mkdir()
        path, serving = converted(folder, name)
        expected[str(path)] = serving
    out = np.asarray(jax.jit(MODEL.apply)(serving, X))
    np.save(tmp_path / "expected.npy", out)
    script = """
        import sys
        import jax, numpy as np
        from flax import linen as nn
        from aqtlite import checkpoint
        from tests.checkpoint.test_mesh import MODEL
        from tests.flax.support import X

        mesh = jax.make_mesh((4,), ("model",))
        for path in sys.argv[2:]:
            serving = checkpoint.load_serving(path, MODEL, mesh=mesh)
            rhs = nn.meta.unbox(serving["aqt"]["kernel"]["rhs"])
            for leaf, shape in ((rhs.qvalue, (6, 8)), (rhs.scale, (6, 1))):
                shapes = [shard.data.shape for shard in leaf.addressable_shards]
                assert shapes == [shape] * 4, (leaf.shape, shapes)
            out = np.asarray(jax.jit(MODEL.apply)(serving, X))
            np.testing.assert_array_equal(out, np.load(sys.argv[1]))
        print("loaded")
    """
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(script),
            tmp_path / "expected.npy",
            *list(expected),
        ],
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "loaded\n"
