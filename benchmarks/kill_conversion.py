"""Kill conversions at random moments, and check the files they leave.

    python -m benchmarks.kill_conversion [--kills 50]

Each conversion is sent SIGKILL at a random moment within the time of a whole
conversion. Afterwards, the source must be unchanged and the target absent or complete.
Finally, the same command must finish the conversion. A conversion that finishes before
the kill is discarded. Each kill takes about six seconds, mostly to start Python.
"""

import argparse
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np

from aqtlite import checkpoint
from aqtlite.checkpoint.staging import remove
from benchmarks import convert_checkpoint

LAYERS, WIDTH = 12, 512


def begin(source: pathlib.Path, target: pathlib.Path) -> subprocess.Popen:
    """Start a conversion in a separate process, and return once it is converting."""
    module = "benchmarks.convert_checkpoint"
    arguments = ["--child", str(source), str(target)]
    sizes = ["--layers", str(LAYERS), "--width", str(WIDTH)]
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments, *sizes],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def contents(path: pathlib.Path) -> dict[str, bytes]:
    """Contents of every file of a folder, by path."""
    return {str(f): f.read_bytes() for f in path.rglob("*") if f.is_file()}


def is_complete(target: pathlib.Path, wanted: list[np.ndarray]) -> bool:
    """True if a target loads and has the expected arrays."""
    found = jax.tree.leaves(checkpoint.load_serving(target))
    pairs = zip(found, wanted, strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def main() -> None:
    """Kill conversions, and print how many left an absent or a complete target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    kills = parser.parse_args().kills
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        source, target = pathlib.Path(folder, "source"), pathlib.Path(folder, "target")
        convert_checkpoint.write_source(source, LAYERS, WIDTH)
        before = contents(source)
        process = begin(source, target)
        start = time.perf_counter()
        assert process.wait() == 0
        seconds = time.perf_counter() - start
        wanted = [
            np.asarray(x) for x in jax.tree.leaves(checkpoint.load_serving(target))
        ]
        remove(target)
        absent = whole = resumed = 0
        for count in range(kills):
            staged = pathlib.Path(folder, ".target.converting")
            resumed += any(staged.glob("*.json"))
            process = begin(source, target)
            time.sleep(rng.uniform(0, seconds))
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert contents(source) == before, f"kill {count}: the source changed"
            if target.exists():
                assert is_complete(target, wanted), f"kill {count}: a partial target"
                whole += 1
                remove(target)
            else:
                absent += 1
        assert begin(source, target).wait() == 0
        assert is_complete(target, wanted)
    print(
        f"{kills} kills within {seconds:.1f} s: the target was absent {absent} times "
        f"and complete {whole} times, never partial; {resumed} conversions resumed "
        "from finished weights; the source never changed"
    )


if __name__ == "__main__":
    main()
