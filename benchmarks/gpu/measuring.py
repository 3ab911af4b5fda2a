"""Measurement of compiled programs on one device: call time, kernel time and memory."""

import collections
import concurrent.futures
import dataclasses
import functools
import pathlib
import re
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import jax

from benchmarks.harness import figures, timing
from benchmarks.harness.figures import Figure
from benchmarks.harness.options import Options
from benchmarks.harness.tables import PHASE

TRACED_CALLS = 5
"""Number of traced calls of each program, to time the kernels."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A function and its arguments."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    donated: tuple[int, ...] = ()
    """Arguments whose memory the results may take, where nothing is run."""

    def compile_for(self, chip: jax.Device, options: Mapping[str, str]) -> Any:
        """Compiles it for a device that need not be there."""
        sharding = jax.sharding.SingleDeviceSharding(chip)
        arguments = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            self.arguments,
        )
        jitted = jax.jit(self.function, donate_argnums=self.donated)
        return jitted.lower(*arguments).compile(compiler_options=dict(options))


def measure(
    name: str,
    case: Mapping[str, Any],
    programs: Mapping[str, Program],
    options: Options,
    folder: pathlib.Path | None = None,
) -> list[Figure]:
    """Figures of one case: call time, kernel time and temporary memory.

    Programs that XLA rejects, or that run out of memory, have no figures.

    Args:
        name: name of the workload.
        case: parameters of the case.
        programs: programs by contestant; the first one to run is the baseline.
        options: limits on repetition.
        folder: folder to write the programs and kernel times to.
    """
    compiled = _compiled(programs)
    calls = {
        key: functools.partial(one, *programs[key].arguments)
        for key, one in compiled.items()
    }
    spreads = timing.alternate(calls, repeats=options.repeats, seconds=options.seconds)
    measured = figures.compare(name, {**case, PHASE: "call"}, spreads)
    kernels = {key: kernel_seconds(call) for key, call in calls.items()}
    if all(kernels.values()):  # Traces on a CPU have no kernels.
        totals = {key: sum(times.values()) for key, times in kernels.items()}
        measured += figures.exact(name, {**case, PHASE: "kernels"}, totals, "s")
    held = {
        key: one.memory_analysis().temp_size_in_bytes for key, one in compiled.items()
    }
    measured += figures.exact(name, {**case, PHASE: "temporary"}, held, "bytes")
    if folder is not None:
        for key, one in compiled.items():
            label = "_".join((name, *(f"{k} {v}" for k, v in case.items()), key))
            _write(folder, label, one.as_text(), kernels[key])
    return measured


def _compiled(programs: Mapping[str, Program]) -> dict[str, Any]:
    """The programs that compile and run, compiled in parallel."""
    lowered = {
        name: jax.jit(program.function).lower(*program.arguments)
        for name, program in programs.items()
    }
    done = {}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        futures = {name: pool.submit(one.compile) for name, one in lowered.items()}
        for name, future in futures.items():
            try:
                compiled = future.result()
                jax.block_until_ready(compiled(*programs[name].arguments))
            except jax.errors.JaxRuntimeError as error:
                print(f"{name} does not run: {str(error)[:500]}", flush=True)
            else:
                done[name] = compiled
    return done


def kernel_seconds(call: Callable[[], Any]) -> dict[str, float]:
    """Device seconds per call, by kernel; copies count as kernels."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        for _ in range(TRACED_CALLS):
            jax.block_until_ready(call())
        jax.profiler.stop_trace()
        found = next(pathlib.Path(folder).rglob("*.xplane.pb"), None)
        planes = [] if found is None else _planes(found)
    totals: dict[str, float] = collections.defaultdict(float)
    for plane in planes:
        for line in plane.lines:
            if line.name.startswith("Stream"):
                for event in line.events:
                    totals[event.name] += event.duration_ns * 1e-9 / TRACED_CALLS
    return dict(totals)


def _planes(trace: pathlib.Path) -> list[Any]:
    """The GPU planes of a trace."""
    data = jax.profiler.ProfileData.from_file(str(trace))
    return [plane for plane in data.planes if plane.name.startswith("/device:GPU")]


def _write(
    folder: pathlib.Path, label: str, program: str, kernels: Mapping[str, float]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^\w.-]+", "_", label)
    by_time = sorted(kernels.items(), key=lambda item: -item[1])
    times = "\n".join(f"{1e6 * seconds:10.1f} us  {name}" for name, seconds in by_time)
    (folder / f"{stem}.hlo").write_text(program)
    (folder / f"{stem}.kernels").write_text(times + "\n")
