"""Measured times of the instructions of a compiled program, from a profile."""

import collections
import gzip
import json
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import jax


def seconds(call: Callable[[], Any], module: str, runs: int) -> dict[str, float]:
    """Returns the seconds of each instruction in one run, by its name.

    Reads the trace of `jax.profiler`. Instructions that run at the same time on several
    threads count in full; those that a trace does not name are missing.

    Args:
        call: runs the program. It is called once before, and then `runs` times.
        module: name of the module of the program, which the trace has.
        runs: number of runs, of which the mean is taken.
    """
    jax.block_until_ready(call())
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level, options.python_tracer_level = 3, 0
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            for _ in range(runs):
                jax.block_until_ready(call())
        paths = list(pathlib.Path(directory).rglob("*.trace.json.gz"))
        events = [
            event
            for path in paths
            for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        ]
    total: collections.Counter[str] = collections.Counter()
    for event in events:
        of = event.get("args", {})
        if event.get("ph") == "X" and of.get("hlo_module") == module:
            total[of.get("hlo_op", "")] += event["dur"] / 1e6 / runs
    return dict(total)
