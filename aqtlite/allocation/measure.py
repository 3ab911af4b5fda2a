"""Runs the program of a subject over batches, and sums up what it returns."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import rich.console
import rich.progress
from absl import logging

from aqtlite.allocation import programs as programs_lib
from aqtlite.allocation import switches
from aqtlite.allocation.programs import Programs
from aqtlite.allocation.switched import Pass
from aqtlite.allocation.switches import Switch

CONTROL = 40.0
"""Signal-to-noise ratio, in dB, of noise on the inputs that shows what the model makes
of any noise."""


@dataclasses.dataclass
class Result:
    """What a run of the program gives, over all batches."""

    losses: list[float] = dataclasses.field(default_factory=list)
    noise: float = 0.0
    """Sum of squares of the difference from the float outputs."""

    signal: float = 0.0
    """Sum of squares of the float outputs."""

    @property
    def loss(self) -> float | None:
        """Mean of the losses of the batches; None if there is no function for it."""
        return float(np.mean(self.losses)) if self.losses else None

    @property
    def relative_noise(self) -> float:
        """Power of the error by that of the float outputs; NaN if there are none."""
        return self.noise / self.signal if self.signal else math.nan

    @property
    def snr(self) -> float:
        """Signal-to-noise ratio of the model's output in dB; infinite without noise."""
        return decibels(self.signal, self.noise)


def decibels(signal: float, noise: float) -> float:
    """Returns a ratio of powers in dB: infinite without noise, NaN if one is NaN."""
    if noise == 0:
        return math.inf
    if signal == 0:
        return -math.inf
    return 10 * float(np.log10(signal / noise))


@dataclasses.dataclass
class Measured:
    """The results of a measurement."""

    switches: tuple[Switch, ...] = ()
    batches: int = 0
    in_float: Result = dataclasses.field(default_factory=Result)
    control: Result | None = None
    """With noise of `CONTROL` on the inputs; None if there are no floats in them."""

    results: list[Result] = dataclasses.field(default_factory=list)
    """With each of the given choices."""

    errors: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(()))
    """Sums of squares of each contraction's float result and of its error on float
    inputs: ``(candidates, switches, 2)``; empty if not measured."""


_squares_of_difference = jax.jit(
    lambda one, other: switches.squares_of(switches.difference(one, other))
)
_squares = jax.jit(switches.squares_of)


def held(programs: Programs, batches: Iterable[Any]) -> list[Any]:
    """Returns batches as a list.

    Raises:
        TypeError: as `Programs.checked`.
        ValueError: if there is none, and as `Programs.checked`.
    """
    found = list(programs.checked(batches))
    if not found:
        raise ValueError(_NO_BATCH)
    return found


def measure(
    programs: Programs,
    batches: Iterable[Any],
    choices_of: Callable[[tuple[Switch, ...]], Sequence[Sequence[int]]],
    what: str,
    *,
    has_errors: bool = False,
) -> Measured:
    """Runs the program with each of several choices on each batch.

    Args:
        programs: the compiled programs.
        batches: the batches.
        choices_of: function from the switches to the choices to measure.
        what: what the choices are, for the progress bar.
        has_errors: whether to measure the error of each contraction, and the control.

    Raises:
        TypeError: as `Programs.checked`.
        ValueError: as `Programs.checked`; if there is no batch, or the float model has
            no finite loss or outputs, or outputs that are all zero and no loss.
    """
    found = Measured()
    choices: Sequence[Sequence[int]] = ()
    with _progress(batches, what) as advance:
        for batch in programs.checked(batches):
            switched = programs.of(batch)
            if not found.batches:
                found.switches = switched.switches
                choices = choices_of(found.switches)
                found.results = [Result() for _ in choices]
            passes = _passes(programs, batch, found, choices, has_errors=has_errors)
            count = 1 + len(choices) + has_errors * (len(switched.plans) + 1)
            for done, _ in enumerate(passes, 1):
                advance(done / count)
            found.batches += 1
    if not found.batches:
        raise ValueError(_NO_BATCH)
    if found.in_float.loss is None and not found.in_float.signal:
        raise ValueError(
            "the outputs of the float model hold no floats, or zeros alone, on all "
            "batches: give a loss, or other batches"
        )
    logging.info("measured %s: %d on %d batches", what, len(choices), found.batches)
    return found


def _passes(
    programs: Programs,
    batch: Any,
    found: Measured,
    choices: Sequence[Sequence[int]],
    *,
    has_errors: bool,
) -> Iterator[None]:
    """Runs all that is measured on a batch, and adds the results; yields after each."""
    values = programs.values(batch)
    num_switches = len(found.switches)
    exact = programs.run(batch, values, [0] * num_switches, is_measured=False)
    signal = float(_squares(exact.outputs))
    _check_finite(exact, signal, found.batches)

    def add(result: Result, one: Pass) -> None:
        result.noise += float(_squares_of_difference(one.outputs, exact.outputs))
        result.signal += signal
        if one.loss is not None:
            result.losses.append(float(one.loss))

    add(found.in_float, exact)
    yield
    if has_errors:
        if programs_lib.has_floats(programs.inputs(batch)):
            noisy = programs.values(batch, noise=CONTROL)
            found.control = found.control or Result()
            one = programs.run(batch, noisy, [0] * num_switches, is_measured=False)
            add(found.control, one)
        yield
        errors = []
        for i in range(len(found.switches[0].forms)):
            one = programs.run(batch, values, [i + 1] * num_switches, is_measured=True)
            errors.append(np.stack([one.signals, one.noises], axis=-1))
            yield
        found.errors = found.errors + np.stack(errors).astype(np.float64)
    for result, chosen in zip(found.results, choices, strict=True):
        add(result, programs.run(batch, values, chosen, is_measured=False))
        yield


_NO_BATCH = "there is no batch to measure with: batches is empty"


def _check_finite(exact: Pass, signal: float, number: int) -> None:
    if exact.loss is not None and not math.isfinite(float(exact.loss)):
        raise ValueError(
            f"the loss of the float model is {float(exact.loss)} on batch {number}: "
            "check the variables, the batch and the function"
        )
    if not math.isfinite(signal):
        raise ValueError(
            f"the outputs of the float model hold NaN or infinities on batch {number}: "
            "check the variables and the batch"
        )


@contextlib.contextmanager
def _progress(batches: Any, what: str) -> Iterator[Callable[[float], None]]:
    """Shows a progress bar in a terminal; yields a function of a batch's progress."""
    console = rich.console.Console(stderr=True)
    total = len(batches) if hasattr(batches, "__len__") else None
    with rich.progress.Progress(
        console=console, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(f"measuring {what}", total=total)
        whole = 0

        def advance(part: float) -> None:
            nonlocal whole
            progress.update(task, completed=whole + part)
            whole += part >= 1

        yield advance
