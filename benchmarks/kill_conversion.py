"""Kills a conversion with kill -9, again and again, and looks at what is left.

    python -m benchmarks.kill_conversion [--kills 50]

Each kill comes a random time after the conversion began, up to what a whole one takes.
After it the source is as it was, and the target is not there or whole. In the end the
same command finishes what is left to do. A conversion that was not killed in time is
thrown away. Some six seconds a kill, most of them for starting Python.
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
    """Starts a conversion in a process of its own; returns when it begins."""
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
    """Every file of a folder."""
    return {str(f): f.read_bytes() for f in path.rglob("*") if f.is_file()}


def is_whole(target: pathlib.Path, wanted: list[np.ndarray]) -> bool:
    """Whether a target loads, and holds what it should."""
    found = jax.tree.leaves(checkpoint.load_serving(target))
    pairs = zip(found, wanted, strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def main() -> None:
    """Prints how many kills found what."""
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
                assert is_whole(target, wanted), f"kill {count}: half a target"
                whole += 1
                remove(target)
            else:
                absent += 1
        assert begin(source, target).wait() == 0
        assert is_whole(target, wanted)
    print(
        f"{kills} kills within {seconds:.1f} s: the target was absent {absent} times "
        f"and whole {whole} times, half never; {resumed} conversions went on from "
        "finished weights; the source never changed"
    )


if __name__ == "__main__":
    main()
