"""The training step of an MLP block with each preset, beside float32's and int8's.

    python -m benchmarks --only presets

All presets that need no argument and no statistics, in one process, in turn.
"""

import functools
import inspect
from collections.abc import Callable

import jax

import aqtlite
from aqtlite import config
from aqtlite.config import presets
from benchmarks.harness import contestants, figures, phases, timing
from benchmarks.harness.contestants import Contestant
from benchmarks.harness.figures import Figure
from benchmarks.harness.options import Options
from benchmarks.workloads import mlp

WIDTH, TOKENS = 512, 1024
QUICK_WIDTH, QUICK_TOKENS = 64, 64
INT8 = "fully_quantized"


def configs() -> dict[str, config.DotGeneral]:
    """The presets by name, int8 first."""
    found = {INT8: config.fully_quantized()}
    for name, make in inspect.getmembers(presets, inspect.isfunction):
        is_preset = name in config.__all__ and make.__module__ == presets.__name__
        parameters = inspect.signature(make).parameters.values()
        if not is_preset or any(p.default is p.empty for p in parameters):
            continue
        cfg = make()
        operands = cfg.fwd.lhs, cfg.fwd.rhs
        has_state = any(operand.calibration.has_state for operand in operands)
        if cfg.is_quantized and not has_state:
            found.setdefault(name, cfg)
    return found


def run(options: Options, report: Callable[[str], None]) -> list[Figure]:
    """Forward and backward with each preset, relative to float32 and to int8."""
    width, tokens = (QUICK_WIDTH, QUICK_TOKENS) if options.quick else (WIDTH, TOKENS)
    report(f"width {width}")
    (float32,) = contestants.select([contestants.FLOAT32])
    compared = [float32] + [
        Contestant(name, aqtlite.make_dot_general(cfg), None)
        for name, cfg in configs().items()
    ]
    x = jax.random.normal(jax.random.key(2), (tokens, width))
    forwards = {c.name: functools.partial(mlp.block, c) for c in compared}
    phase = phases.PHASES[-1]
    programs = phases.programs(forwards, (x, *mlp.weights(width)), phase)
    spreads = timing.alternate(
        programs, repeats=options.repeats, seconds=options.seconds
    )
    case = {"width": width, "tokens": tokens, "beside": "float32", "phase": phase}
    measured = figures.compare("presets", case, spreads)
    of_int8 = {name: spreads[name] for name in configs()}
    return measured + figures.compare("presets", {**case, "beside": "int8"}, of_int8)
