"""Measures whether quantizing the contractions of a plan pays on this device."""

import collections
import dataclasses
import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import rich.console
import rich.progress

from aqtlite import config
from aqtlite.program import injected
from aqtlite.program.compiled import undivided
from aqtlite.program.convert import convert_function
from aqtlite.program.measuring import kept_times, measurement
from aqtlite.program.measuring.kept_times import Times
from aqtlite.program.measuring.measurement import MeasuredContraction, Measurement
from aqtlite.program.plan import Plan
from aqtlite.program.planned import PlannedContraction
from aqtlite.program.quantize import QuantizedFunction, quantize_function
from aqtlite.program.rules.rules import Rule
from aqtlite.shapes import processes
from aqtlite.shapes.processes import Devices

_MIN_ROUNDS, _MAX_ROUNDS = 5, 500

_NOTHING, _FLOAT, _QUANTIZED, _SERVED = "nothing", "float", "quantized", "served"

Calls = dict[str, functools.partial[Any]]
"""Functions with all of their arguments, by what they compute."""


def measure_serving(
    plan: Plan,
    *,
    seconds: float = 0.5,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Measurement:
    """Measures the quantized contractions of a plan against float ones, in serving.

    Each distinct contraction (operation, shapes, dtypes, config) is compiled by itself
    and timed in this process, on JAX's default device, with random operands: in float,
    quantized with its weight quantized in the call, and with a frozen weight. Their
    calls alternate. Times are medians, without the time in which a program that
    computes nothing is called. What they resolve is the range between the quartiles of
    such calls, and at least a tenth of one; shorter times count as that. Where the plan
    is of arrays that span processes, all of these have to call this, and get the times
    of the first. A terminal shows a progress bar. Of a plan of small contractions,
    loops are not divided among threads, as by `compile_serving` (docs/benchmarks.md
    says how to train so).

    >>> from aqtlite import Rule, config, plan
    >>> planned = plan(
    ...     lambda w, x: x @ w, jnp.ones((64, 8)), jnp.ones((2, 64)),
    ...     rules=Rule(cfg=config.fully_quantized()), params=0,
    ... )
    >>> measured = measure_serving(planned, seconds=0.01)
    >>> [one.served_seconds > 0 for one in measured.contractions]
    [True]

    Args:
        plan: the plan, of `aqtlite.plan` or of a quantized model's `plan`. Contractions
            that it leaves in float are not measured. Sharded ones are measured whole,
            on one device; weights rounded at conversion (`config.Gptq`) are rounded to
            nearest.
        seconds: time for the calls of one contraction, besides its compilation.
        cache_dir: folder that keeps the times, in a file for each kind of machine
            (device, processor, number of threads, version of JAX, code of aqtlite).
            Contractions that are in it, measured for at least `seconds`, are not
            measured again. None measures all, and keeps nothing.

    Returns:
        The times, their sums over the model, and rules that leave in float what is
        faster in float.

    Raises:
        TypeError: if `plan` is not a plan, or `seconds` no number.
        ValueError: if the plan quantizes nothing, if JAX traces the caller, if a
            contraction has a symbolic shape, or if `seconds` is not positive or not
            finite.
        OSError: if `cache_dir` cannot be written.
    """
    return _measure(plan, "serving", _serving_calls, seconds, cache_dir)


def measure_training(
    plan: Plan,
    *,
    seconds: float = 0.5,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Measurement:
    """Measures the quantized contractions of a plan against float ones, in training.

    As `measure_serving`, but times the contraction together with its gradients for both
    operands, and freezes no weight.

    >>> from aqtlite import Rule, config, plan
    >>> planned = plan(
    ...     lambda w, x: x @ w, jnp.ones((64, 8)), jnp.ones((2, 64)),
    ...     rules=Rule(cfg=config.fully_quantized()), params=0,
    ... )
    >>> measured = measure_training(planned, seconds=0.01)
    >>> [one.quantized_seconds > 0 for one in measured.contractions]
    [True]

    Args:
        plan: as in `measure_serving`.
        seconds: time for the calls of one contraction, besides its compilation.
        cache_dir: as in `measure_serving`.

    Returns:
        The times, their sums over the model, and rules that leave in float what is
        faster in float.

    Raises:
        TypeError: if `plan` is not a plan, or `seconds` no number.
        ValueError: if the plan quantizes nothing, if JAX traces the caller, if a
            contraction has a symbolic shape, or if `seconds` is not positive or not
            finite.
        OSError: if `cache_dir` cannot be written.
    """
    return _measure(plan, "training", _training_calls, seconds, cache_dir)


def _measure(
    plan: Plan,
    purpose: measurement.Purpose,
    calls_of: Callable[["_Alone"], Calls],
    seconds: float,
    cache_dir: str | os.PathLike[str] | None,
) -> Measurement:
    if not isinstance(plan, Plan):
        raise TypeError(
            f"measure_{purpose} takes a plan, such as that of model.plan(variables, x) "
            f"or aqtlite.plan(...), got {type(plan).__name__}"
        )
    if not isinstance(seconds, int | float):
        raise TypeError(f"seconds must be a number, got {seconds!r}")
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds must be positive and finite, got {seconds!r}")
    if not plan.quantized():
        raise ValueError(
            "nothing to measure: the plan quantizes no contraction" + plan.reasons()
        )
    if isinstance(jnp.zeros(()), jax.core.Tracer):
        raise ValueError(
            f"measure_{purpose} was called in a function that JAX traces, where "
            "nothing runs: call it outside of jax.jit"
        )
    alike = collections.defaultdict(list)
    for one in plan.quantized():
        one.check_has_sizes("measure")
        alike[_text(one), one.cfg].append(one)
    is_on_cpu = jax.default_backend() == "cpu"
    eqns = [one.site.eqn for one in plan.quantized()]
    options = undivided.options_for_equations(eqns) if is_on_cpu else {}
    kept = None if cache_dir is None else kept_times.in_folder(cache_dir)
    measured = []
    for several in _track(alike.values()):
        what = f"{purpose} {options} {_text(several[0])}"
        times = None if kept is None else kept.find(what, seconds)
        if times is None:
            with jax.disable_jit(False):
                times = _times(calls_of(_Alone(several[0])), options, seconds)
            if kept is not None:
                kept.keep(what, times)
        times = _of_first(times, plan.devices)
        measured.append(
            MeasuredContraction(
                tuple(several),
                times.in_float,
                times.quantized,
                times.served,
                times.resolution,
            )
        )
    device = jax.devices()[0].device_kind
    return Measurement(purpose, device, tuple(measured), plan)


def _of_first(times: Times, devices: Devices) -> Times:
    """Returns the times of the first process, by which all decide alike."""
    own = {k: v for k, v in dataclasses.asdict(times).items() if v is not None}
    firsts = processes.of_first(list(own.values()), devices)
    return Times(**dict(zip(own, firsts, strict=True)))


def _track(
    alike: Collection[list[PlannedContraction]],
) -> Iterable[list[PlannedContraction]]:
    """Iterates with a progress bar, on a terminal."""
    console = rich.console.Console(stderr=True)
    is_shown = console.is_terminal
    return rich.progress.track(
        alike, "measuring", console=console, disable=not is_shown
    )


def _text(one: PlannedContraction) -> str:
    """Returns text that contractions of equal programs share, in any process."""
    kinds = (one.lhs.kind, one.rhs.kind)
    return repr((one.op, *one.site.signature, kinds, one.is_injected, one.cfg))


class _Alone:
    """A contraction as a function by itself, with random operands."""

    def __init__(self, one: PlannedContraction):
        cfg = config.update(one.cfg, {"fwd.rhs.rounding": None})
        kinds = (one.lhs.kind, one.rhs.kind)
        eqn = one.site.eqn
        values = _values([atom.aval for atom in eqn.invars])
        weights = [i for i, kind in enumerate(kinds) if kind == "weight"]
        self.params = {i: values[i] for i in weights}
        self.others = {i: x for i, x in enumerate(values) if i not in weights}
        in_float = injected.Equation.of(eqn).with_params(out_sharding=None)
        self.in_float = _of_parts(in_float)
        self.quantized: QuantizedFunction = (
            quantize_function(_of_parts(injected.Injected(in_float, cfg)), (), params=0)
            if one.is_injected
            else quantize_function(self.in_float, Rule(cfg=cfg), params=0)
        )
        # Empty if the calibrations have no state.
        self.state = self.quantized.init_state(self.params, self.others)


def _of_parts(contract: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of operands as one of the weights and of the others."""

    def contracted(weights: Mapping[int, Any], others: Mapping[int, Any]) -> Any:
        given = {**weights, **others}
        return contract(*(given[i] for i in range(len(given))))

    return contracted


def _values(avals: Sequence[Any]) -> list[jax.Array]:
    """Returns random operands; the sizes of groups are equal."""
    keys = jax.random.split(jax.random.key(0), len(avals))
    values = []
    for key, aval in zip(keys, avals, strict=True):
        if jnp.issubdtype(aval.dtype, jnp.integer):
            rows, groups = avals[0].shape[0], aval.shape[0]
            values.append(jnp.full((groups,), rows // groups, aval.dtype))
        else:
            drawn = jax.random.normal(key, aval.shape, jnp.float32)
            values.append(drawn.astype(aval.dtype))
    return values


def _serving_calls(alone: _Alone) -> Calls:
    quantized, params, others = alone.quantized, alone.params, alone.others
    state = quantized.gather(alone.state, params, others) if alone.state else {}
    calls = {
        _NOTHING: functools.partial(_first_element, params, others),
        _FLOAT: functools.partial(alone.in_float, params, others),
        _QUANTIZED: functools.partial(
            lambda state, *operands: quantized.evaluate(state, operands, {}),
            *(state, params, others),
        ),
    }
    if not params:
        return calls
    serve, serving = convert_function(
        quantized, params, others, state=state if alone.state else None
    )
    return {**calls, _SERVED: functools.partial(serve, serving, others)}


def _training_calls(alone: _Alone) -> Calls:
    operands = (alone.params, alone.others)
    out = jax.eval_shape(alone.in_float, *operands)
    (cotangent,) = _values([out])

    def step_in_float(cotangent: Any, *operands: Any) -> Any:
        return _step(alone.in_float, cotangent, *operands)

    def step(cotangent: Any, state: Any, *operands: Any) -> Any:
        def run(*operands: Any) -> Any:
            out, updated = alone.quantized.run(state, operands, {})
            return out, updated

        out, pull_back, updated = jax.vjp(run, *operands, has_aux=True)
        return out, pull_back(cotangent), updated

    return {
        _NOTHING: functools.partial(_first_element, *operands),
        _FLOAT: functools.partial(step_in_float, cotangent, *operands),
        _QUANTIZED: functools.partial(step, cotangent, alone.state, *operands),
    }


def _step(function: Callable[..., Any], cotangent: Any, *operands: Any) -> Any:
    out, pull_back = jax.vjp(function, *operands)
    return out, pull_back(cotangent)


def _first_element(*operands: Any) -> jax.Array:
    return jax.tree.leaves(operands)[0].reshape(-1)[:1]


def _compiled(
    call: functools.partial[Any], options: dict[str, str]
) -> Callable[[], Any]:
    """Returns a call of a compiled function, with arguments that need no flattening."""
    leaves, structure = jax.tree.flatten(call.args)

    def run(*leaves: Any) -> Any:
        return jax.tree.leaves(call.func(*jax.tree.unflatten(structure, leaves)))

    jitted = jax.jit(run, keep_unused=True, compiler_options=options)
    return functools.partial(jitted, *leaves)


def _times(calls: Calls, options: dict[str, str], seconds: float) -> Times:
    """Returns the median time of each call, less that of `_NOTHING`.

    Args:
        calls: result of `_serving_calls` or `_training_calls`.
        options: options for the compiler.
        seconds: time after which no further round starts.
    """
    programs = {name: _compiled(call, options) for name, call in calls.items()}
    for program in programs.values():
        jax.block_until_ready(program())
    taken: dict[str, list[float]] = {name: [] for name in programs}
    total = 0.0
    for done in range(_MAX_ROUNDS):
        if done >= _MIN_ROUNDS and total > seconds:
            break
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program())
            taken[name].append(time.perf_counter() - start)
            total += taken[name][-1]
    medians = {name: statistics.median(times) for name, times in taken.items()}
    calling = medians.pop(_NOTHING)
    lower, _, upper = statistics.quantiles(taken[_NOTHING], n=4)
    resolution = max(upper - lower, calling / 10)
    own = {name: max(x - calling, resolution) for name, x in medians.items()}
    return Times(
        float(seconds), resolution, own[_FLOAT], own[_QUANTIZED], own.get(_SERVED)
    )
