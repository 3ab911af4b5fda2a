"""A checkpoint converted on one device, loaded onto a mesh."""

import os
import socket
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from aqtlite import checkpoint, config
from aqtlite.flax import AqtDotGeneral, convert
from tests.checkpoint.support import FORMATS, assert_same, save
from tests.common import mostly_slow
from tests.flax.support import DG, NORMAL, X, init

pytestmark = pytest.mark.code("quick")


def dense(dot_general, axes=(None, "model")):
    kernel_init = nn.with_partitioning(NORMAL, axes)
    return nn.Dense(24, dot_general=dot_general, kernel_init=kernel_init)


MODEL = dense(DG)
MODELS = {
    "int8": MODEL,
    "int4": dense(AqtDotGeneral(config.weight_only(bits=4))),
    "ternary along the rows": dense(
        AqtDotGeneral(config.weight_only(bits=2)), ("model", None)
    ),
}
STORED = [
    ("int8", "out"),
    ("int8", "out.safetensors"),
    ("int4", "out.safetensors"),
    ("ternary along the rows", "out"),
]


def converted(tmp_path, name, model=MODEL):
    variables = init(model, X)
    source = save(tmp_path / "float", variables, "orbax")
    checkpoint.convert_checkpoint(source, tmp_path / name, model, X)
    return tmp_path / name, convert(model, variables, X)


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
@pytest.mark.parametrize("how", mostly_slow(FORMATS, "msgpack"))
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


@pytest.mark.slow
def test_four_devices(tmp_path):
    """Integers and scales are sharded as the kernel is; serving gives the same."""
    paths = []
    for i, (key, name) in enumerate(STORED):
        folder, model = tmp_path / str(i), MODELS[key]
        folder.mkdir()
        path, serving = converted(folder, name, model)
        np.save(folder / "expected.npy", jax.jit(model.apply)(serving, X))
        paths += [key, str(path)]
    script = """
        import pathlib, sys
        import jax, numpy as np
        from flax import linen as nn
        from aqtlite import checkpoint
        from tests.checkpoint.test_mesh import MODELS
        from tests.flax.support import X

        mesh = jax.make_mesh((4,), ("model",))
        for key, path in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
            model = MODELS[key]
            serving = checkpoint.load_serving(path, model, mesh=mesh)
            rhs = nn.meta.unbox(serving["aqt"]["kernel"]["rhs"])
            along_rows = key.endswith("rows")
            assert rhs.qvalue.dtype == ("int8" if key == "int8" else "int4")
            for leaf, shape in (
                (rhs.qvalue, (24, 2) if along_rows else (6, 8)),
                (rhs.scale, (24, 1) if along_rows else (6, 1)),
            ):
                shapes = [shard.data.shape for shard in leaf.addressable_shards]
                assert shapes == [shape] * 4, (leaf.shape, shapes)
            out = np.asarray(jax.jit(model.apply)(serving, X))
            expected = np.load(pathlib.Path(path).parent / "expected.npy")
            np.testing.assert_array_equal(out, expected)
        print("loaded")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *paths],
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "loaded\n"


@pytest.mark.slow
def test_two_hosts_read_slices(tmp_path):
    """Each reads the slices of its own devices, packed ones too."""
    paths = []
    for i, (key, name) in enumerate(STORED[2:]):
        folder = tmp_path / str(i)
        folder.mkdir()
        path, serving = converted(folder, name, MODELS[key])
        rhs = nn.meta.unbox(serving["aqt"]["kernel"]["rhs"])
        np.save(folder / "expected.npy", np.asarray(rhs.qvalue).astype(np.int8))
        paths += [key, str(path)]
    script = """
        import pathlib, sys
        import jax, numpy as np
        from flax import linen as nn
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
        from aqtlite import checkpoint
        from tests.checkpoint.test_mesh import MODELS

        mesh = jax.make_mesh((4,), ("model",))
        for key, path in zip(sys.argv[3::2], sys.argv[4::2], strict=True):
            serving = checkpoint.load_serving(path, MODELS[key], mesh=mesh)
            x = nn.meta.unbox(serving["aqt"]["kernel"]["rhs"]).qvalue
            expected = np.load(pathlib.Path(path).parent / "expected.npy")
            assert not x.is_fully_addressable and len(x.addressable_shards) == 2
            for shard in x.addressable_shards:
                got = np.asarray(shard.data).astype(np.int8)
                np.testing.assert_array_equal(got, expected[shard.index])
        print("loaded")
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), address, str(i), *paths],
            env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert all("loaded" in out for out, _ in outputs)
