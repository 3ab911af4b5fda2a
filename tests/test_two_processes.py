"""Training, converting and loading where a mesh spans two processes."""

import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import time

from aqtlite import checkpoint
from tests import two_processes
from tests.checkpoint.support import save

_TIMEOUT = 240  # seconds; it takes ten
_PREAMBLE = """
    import sys
    import jax, numpy as np
    from aqtlite import checkpoint
    from aqtlite.flax import convert
    from tests import two_processes as two
    from tests.two_processes import X

    mesh = two.start(*sys.argv[1:3])
    model, variables = two.Mlp(), two.variables()
"""


def run(script: str, *args: str) -> None:
    """Runs a script in two processes that know of one another.

    A port that is free may be taken before the processes are there: then once more.
    """
    for _ in range(3):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        codes, texts = _run_on(port, script, args)
        if not any("in use" in text or "Failed to bind" in text for text in texts):
            break
    assert codes == [0, 0], "\n".join(texts)
    assert all("done\n" in text for text in texts)


def _run_on(
    port: int, script: str, args: tuple[str, ...]
) -> tuple[list[int], list[str]]:
    """The exit codes of the processes, and what they print."""
    text = textwrap.dedent(_PREAMBLE) + textwrap.dedent(script) + "\nprint('done')"
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


def test_a_training_step():
    """The new parameters are those of one device, bit for bit."""
    run(
        """
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
        """
    )


def test_convert():
    """Integers and scales lie where the kernels did, and serve what one device does."""
    run(
        """
        wanted = convert(model, variables, X)
        serving = convert(model, two.sharded(mesh, variables), X)
        two.assert_sharded(serving)
        two.assert_equal(serving, wanted)
        apply = jax.jit(model.apply)
        x = two.put(mesh, X, "data", None)
        two.assert_equal(apply(serving, x), apply(wanted, X))
        """
    )


def test_load_serving(tmp_path):
    """Each process reads its shards of what one process converted."""
    model = two_processes.Mlp()
    source = save(tmp_path / "float", two_processes.variables(), "msgpack")
    targets = [str(tmp_path / name) for name in ("out", "out.safetensors")]
    for target in targets:
        checkpoint.convert_checkpoint(source, target, model, two_processes.X)
    run(
        """
        wanted = convert(model, variables, X)
        x = two.put(mesh, X, "data", None)
        apply = jax.jit(model.apply)
        for path in sys.argv[3:]:
            serving = checkpoint.load_serving(path, model, mesh=mesh)
            two.assert_sharded(serving)
            two.assert_equal(serving, wanted)
            two.assert_equal(apply(serving, x), apply(wanted, X))
        """,
        *targets,
    )
