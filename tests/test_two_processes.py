"""Training, converting and loading where a mesh spans two processes."""

import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import time

import pytest

from aqtlite import checkpoint
from tests import two_processes
from tests.checkpoint.support import save

pytestmark = pytest.mark.slow

_TIMEOUT = 240  # seconds; it takes thirty
_PREAMBLE = """
    import os, sys
    import jax, numpy as np, pytest
    from jax.experimental import multihost_utils
    import aqtlite
    from flax import nnx
    from aqtlite import checkpoint, config
    from aqtlite.flax import *
    from aqtlite.flax import nnx as aqt_nnx
    from aqtlite.shapes import processes
    from tests import two_processes as two
    from tests.two_processes import X

    mesh = two.start(*sys.argv[1:3])
    model, variables = two.Mlp(), two.variables()
"""


def run(script: str, *args: str) -> tuple[list[int], list[str]]:
    """Exit codes and outputs of a script in two processes that know of one another.

    A port that is free may be taken before the processes are there: then once more.
    """
    for _ in range(3):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        codes, texts = _run_on(port, script, args)
        if not any("in use" in text or "Failed to bind" in text for text in texts):
            break
    return codes, texts


def _run_on(
    port: int, script: str, args: tuple[str, ...]
) -> tuple[list[int], list[str]]:
    """The exit codes of the processes, and what they print."""
    text = textwrap.dedent(_PREAMBLE) + script
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    with tempfile.TemporaryFile("w+") as first, tempfile.TemporaryFile("w+") as second:
        files = [first, second]
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", text, str(port), str(rank), *args],
                env=env,
                stdout=file,
                stderr=file,
            )
            for rank, file in enumerate(files)
        ]
        stop = time.monotonic() + _TIMEOUT
        codes: list[int | None] = [None, None]
        # One that fails leaves the other one waiting for it.
        while None in codes and set(codes) <= {None, 0} and time.monotonic() < stop:
            time.sleep(0.1)
            codes = [process.poll() for process in processes]
        for process in processes:
            process.kill()
        codes = [process.wait() for process in processes]
        for file in files:
            file.seek(0)
        return codes, [file.read() for file in files]


# One program after the other, each of which says that it is done.
SCRIPTS = {
    "a_training_step": """
        def step(variables, x, y):
            def loss(variables):
                return ((model.apply(variables, x) - y) ** 2).sum()

            value, gradients = jax.value_and_grad(loss)(variables)
            new = jax.tree.map(lambda a, b: a - 0.125 * b, variables, gradients)
            return new, value

        y = X[::-1].copy()
        wanted, wanted_loss = jax.jit(step)(variables, X, y)
        x, y = (two.put(mesh, a, "data", None) for a in (X, y))
        got, loss = jax.jit(step)(two.sharded(mesh, variables), x, y)
        two.assert_equal(got, wanted)
        np.testing.assert_allclose(float(loss), float(wanted_loss), rtol=1e-6)
    """,
    "convert": """
        wanted = convert(model, variables, X)
        serving = convert(model, two.sharded(mesh, variables), X)
        two.assert_sharded(serving)
        two.assert_equal(serving, wanted)
        apply = jax.jit(model.apply)
        served = apply(wanted, X)
        two.assert_equal(apply(serving, x), served)
    """,
    "calibrate": """
        static = two.Mlp(config.static_int8())
        sharded = two.sharded(mesh, variables)
        number = 1 + jax.process_index()
        own = X * number
        for gather in (calibrate, calibrate_in_float):
            for batches in ([X, own], [X] * number):
                with pytest.raises(ValueError, match="array_from_process_local_data"):
                    gather(static, sharded, batches)
            with pytest.raises(ValueError, match="or of its mask, differ"):
                gather(static, sharded, [X], mask=[np.arange(8) < number])
            two.assert_equal(
                gather(static, sharded, [X])["aqt_stats"],
                gather(static, variables, [X])["aqt_stats"],
            )
        alone = calibrate(static, variables, [own])["aqt_stats"]
        assert jax.tree.leaves(alone)[0].is_fully_addressable

        module = nnx.Linear(16, 4, rngs=nnx.Rngs(0))
        module.kernel.set_value(two.put(mesh, np.asarray(module.kernel), "model", None))
        with pytest.raises(ValueError, match="differ between processes"):
            aqt_nnx.calibrate(aqt_nnx.quantize_model(module, static.cfg), [own])
        with pytest.raises(ValueError, match="differ between processes"):
            correct_biases(model, sharded, serving, [own])
        with pytest.raises(ValueError, match="differ between processes"):
            aqtlite.sensitivity(
                two.Mlp(None), sharded, [own], candidates=[config.weight_only(4)]
            )
    """,
    "check_beside_a_call": """
        @jax.jit
        def call(weight, y):
            for _ in range(12):
                y = jax.numpy.tanh(y @ weight)
            return y

        weight = two.put(mesh, np.full((512, 512), 0.01, "float32"), "model", "data")
        y = two.put(mesh, np.ones((256, 512), "float32"), "model", None)
        for _ in processes.alike([X] * 20, weight):
            y = call(weight, y)
        jax.block_until_ready(y)
    """,
    "measured_times": """
        by_rules = quantize_model(two.Mlp(None), model.cfg)
        measured = aqtlite.measure_training(by_rules.plan(sharded, x), seconds=0.01)
        two.assert_alike(measured.to_json())
        chosen = aqtlite.choose_bits(
            two.Mlp(None), sharded, [x], candidates=[model.cfg], budget=1.0,
            unit="seconds",
        )
        two.assert_alike(str(chosen))
        if jax.process_index() == 0:  # It waits for no other one.
            aqtlite.measure_training(by_rules.plan(variables, X), seconds=0.01)
    """,
    "merge_adapters": """
        rule = aqtlite.Rule(path=".*first.*", cfg=None, adapter=config.Lora(2, 4))
        stacked, base = quantize_model(two.Stack(), [rule]), two.variables(two.Stack())
        adapters = stacked.init_adapters(base, X)
        adapters = jax.tree.map(lambda a: np.asarray(a) + 0.5, adapters)
        merged = [
            merge_adapters(stacked, with_adapters(one, adapters), inputs)
            for one, inputs in ((two.sharded(mesh, base), x), (base, X))
        ]
        two.assert_equal(*merged)
    """,
    "assertions": """
        aqtlite.testing.assert_served_equals_trained(model, sharded, x)
        aqtlite.testing.assert_same_integers(model.apply, model.apply, sharded, x)
        assert aqtlite.testing.digest(sharded) == aqtlite.testing.digest(variables)
    """,
    "load_serving": """
        def assert_loaded(path):
            serving = checkpoint.load_serving(path, model, mesh=mesh)
            two.assert_sharded(serving)
            two.assert_equal(serving, wanted)
            two.assert_equal(apply(serving, x), served)

        source, *targets = sys.argv[3:]
        for path in targets:
            assert_loaded(path)
    """,
    "convert_checkpoint": """
        for path in (target.replace("out", "by_one") for target in targets):
            if jax.process_index() == 0:
                checkpoint.convert_checkpoint(source, path, model, X)
            elif not path.endswith(".safetensors"):
                with pytest.raises(checkpoint.CheckpointError, match="process 1 of a"):
                    checkpoint.convert_checkpoint(source, path + "1", model, X)
            multihost_utils.sync_global_devices(path)
            assert_loaded(path)
        if jax.process_index() == 1:
            with pytest.raises(checkpoint.CheckpointError, match="exists.*process 1"):
                checkpoint.convert_checkpoint(source, path, model, X)
    """,
    "files_of_one_process": """
        lora, path = config.Lora(rank=2, alpha=4), source + "_of_one"
        made = {
            "a batch": lambda: checkpoint.convert_checkpoint(
                source, path, static, X, calibrate=[x]
            ),
            r"adapters\\['a'\\]": lambda: checkpoint.save_peft(path, {"a": x}, lora),
            "of_folder": lambda: checkpoint.save_quantized(
                path, {"of_folder": x}, format="gptq"
            ),
            "of_file": lambda: checkpoint.save_quantized(
                path, {"of_file": x}, format="gguf"
            ),
        }
        if jax.process_index() == 0:
            for name, make in made.items():
                with pytest.raises(
                    checkpoint.CheckpointError, match=f"{name} has parts in other"
                ):
                    make()
            assert not os.path.exists(path)
    """,
}


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Exit codes and outputs of two processes that run all scripts."""
    folder = tmp_path_factory.mktemp("two_processes")
    model = two_processes.Mlp()
    source = save(folder / "float", two_processes.variables(), "orbax")
    targets = [str(folder / name) for name in ("out", "out.safetensors")]
    for target in targets:
        checkpoint.convert_checkpoint(source, target, model, two_processes.X)
    script = "".join(
        f"{textwrap.dedent(text)}\nprint('done: {name}', flush=True)\n"
        for name, text in SCRIPTS.items()
    )
    return run(script, str(source), *targets)


def assert_done(name, processes):
    _, texts = processes
    assert len(texts) == 2
    assert all(f"done: {name}\n" in text for text in texts), "\n".join(texts)


def test_a_training_step(processes):
    """The new parameters are those of one device, bit for bit."""
    assert_done("a_training_step", processes)


def test_convert(processes):
    """Integers and scales lie where the kernels did, and serve what one device does."""
    assert_done("convert", processes)


def test_calibrate(processes):
    """Batches that each process has for itself are refused, unless they are equal."""
    assert_done("calibrate", processes)


def test_check_beside_a_call(processes):
    """Batches are compared while the call with the one before still runs."""
    assert_done("check_beside_a_call", processes)


def test_measured_times(processes):
    """All decide by the times of the first process."""
    assert_done("measured_times", processes)


def test_merge_adapters(processes):
    """What changes with a merged weight is found of arrays of both processes."""
    assert_done("merge_adapters", processes)


def test_assertions(processes):
    """Those of aqtlite.testing gather arrays of both processes."""
    assert_done("assertions", processes)


def test_load_serving(processes):
    """Each process reads its shards of what one process converted."""
    assert_done("load_serving", processes)


def test_convert_checkpoint(processes):
    """One process converts while the other waits, from and to Orbax, too."""
    assert_done("convert_checkpoint", processes)


def test_files_of_one_process(processes):
    """Arrays of which it has parts alone are refused before anything runs."""
    assert_done("files_of_one_process", processes)


def test_the_processes_end_well(processes):
    codes, texts = processes
    assert codes == [0, 0], "\n".join(texts)
