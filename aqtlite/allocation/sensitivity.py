"""What quantizing each contraction alone costs a model."""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import rich.console
import rich.text

from aqtlite import errors
from aqtlite.allocation import measure as measuring
from aqtlite.allocation.candidates import candidates_of
from aqtlite.allocation.measure import CONTROL, Measured
from aqtlite.allocation.programs import Programs
from aqtlite.allocation.subject import subject_of
from aqtlite.allocation.switches import Switch
from aqtlite.output import plots, rich_tables


@dataclasses.dataclass(frozen=True)
class ContractionSensitivity:
    """What quantizing one contraction, by one candidate, costs."""

    path: str
    """Path of the contraction, as rules match it."""

    op: str
    """The contraction: its axes as an einsum equation, or its operation."""

    candidate: str
    """Name of the candidate."""

    snr: float
    """Signal-to-noise ratio of the contraction's result in dB, on the inputs that the
    float model gives it."""

    output_snr: float
    """Signal-to-noise ratio of the model's output in dB, with all other contractions in
    float."""

    loss_change: float | None
    """Change of the loss, with all other contractions in float; None without a loss."""


@dataclasses.dataclass(frozen=True, repr=False)
class Sensitivity:
    """What quantizing each contraction costs; prints as a table."""

    contractions: tuple[ContractionSensitivity, ...]
    """By contraction, in program order, and by candidate."""

    batches: int
    """Number of batches."""

    loss: float | None
    """Loss of the float model; None without a function for it."""

    control: float | None
    """Signal-to-noise ratio of the float model's output in dB, with noise of 40 dB on
    its inputs: what this model makes of any noise. None if no input is a float."""

    def to_json(self, *, indent: int | None = None) -> str:
        """Writes the sensitivity as JSON; None for what is not finite."""
        return json.dumps(rich_tables.finite(dataclasses.asdict(self)), indent=indent)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws a bar for each contraction and candidate into a file.

        The change of the loss, or without a loss the decibels of the output.

        Args:
            path: name of the file, which ends in ".png", ".svg" or ".pdf".

        Raises:
            ModuleNotFoundError: if Matplotlib is not installed.
        """
        bars: dict[str, dict[str, float]] = {}
        for one in self.contractions:
            value = one.output_snr if self.loss is None else one.loss_change
            of_candidate = bars.setdefault(one.candidate, {})
            of_candidate[errors.label(one.path)] = math.nan if value is None else value
        label = "change of the loss"
        if self.loss is None:
            label = "signal-to-noise ratio of the output, dB"
        plots.bars(bars, f"{label}, with this contraction alone quantized", path)

    def summary(self) -> str:
        """Returns the numbers that are not of a contraction as text."""
        count = len({one.path for one in self.contractions})
        parts = [f"{count} contractions, {self.batches} batches"]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.6g} in float")
        control = "no input is a float"
        if self.control is not None:
            control = f"{self.control:.1f} dB at the output"
        parts.append(f"control, {CONTROL:.0f} dB at the inputs: {control}")
        return "; ".join(parts)

    def _rows(self) -> list[Sequence[str]]:
        heads = ["path", "op", "candidate", "dB", "output dB"]
        rows = [heads + ["loss"] * (self.loss is not None)]
        for one in self.contractions:
            row = [errors.label(one.path), one.op, one.candidate]
            row += [f"{one.snr:.1f}", f"{one.output_snr:.1f}"]
            if one.loss_change is not None:
                row.append(f"{one.loss_change:+.3g}")
            rows.append(row)
        return list(rows)

    def __rich_console__(
        self, console: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> rich.console.RenderResult:
        yield rich.text.Text(self.summary())
        yield rich_tables.layout(self._rows(), num_texts=3)

    def _repr_html_(self) -> str:
        return rich_tables.as_html(self.summary(), self._rows())

    def __repr__(self) -> str:
        return rich_tables.as_text(self)


def sensitivity(
    model: Any,
    variables: Any,
    batches: Iterable[Any],
    *,
    candidates: Any = None,
    loss: Callable[..., Any] | None = None,
    num_inputs: int | None = None,
    **kwargs: Any,
) -> Sensitivity:
    """Measures what quantizing each contraction alone costs.

    The model is compiled once, with a switch for each contraction. On each batch it
    runs twice in float, once for each candidate, and once more for each contraction and
    candidate. A contraction in a scan is one contraction, whatever the number of steps.

    Statistics that candidates need are gathered first, in another pass of the float
    model, as `aqtlite.flax.calibrate_in_float` does, and weights rounded by GPTQ as
    `aqtlite.flax.convert` does.

    >>> import flax.linen as nn
    >>> import jax
    >>> from aqtlite import config
    >>> model = nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(4)])
    >>> x = jax.random.normal(jax.random.key(0), (32, 8))
    >>> variables = model.init(jax.random.key(1), x)
    >>> found = sensitivity(
    ...     model, variables, [x], candidates=[config.weight_only(bits=4)]
    ... )
    >>> [one.path for one in found.contractions]
    ['Sequential/layers_0', 'Sequential/layers_2']
    >>> all(15 < one.snr < 30 for one in found.contractions)
    True

    Args:
        model: a model of Linen or NNX or a function; or one that is quantized, by rules
            or by functions injected into its layers. Any other model with an `apply`
            counts as that function.
        variables: the model's variables, or the first argument of the function, with
            the parameters; None for an NNX model, which holds its own, and is called
            in its mode (``model.eval()``).
        batches: the inputs, each a tuple of positional arguments or a single argument.
            A mean over batches gives each the same weight, and another shape is
            another compilation. If candidates need statistics, all are held in memory.
            All of their elements count: there is no mask=.
        candidates: the configs to quantize each contraction with: a sequence of
            configs, or a mapping of names to configs or rules, without learned scales.
            They take the place of the model's rules. None: what a quantized model does
            by itself, with statistics of these batches.
        loss: function ``loss(outputs, *batch)`` of the model's output and the items of
            a batch, such as ``lambda logits, x, labels: ...``, which returns a scalar.
        num_inputs: number of items of a batch that are arguments of the model; the
            others, such as labels, are only for the loss. None: all.
        **kwargs: other arguments of all calls, such as ``train=False`` and `method`;
            constants of the compiled program.

    Returns:
        The sensitivity of each contraction, which prints as a table.

    Raises:
        TypeError: if `model`, `variables`, `candidates` or `batches` has another type.
        ValueError: if there is no batch, no contraction to quantize, or no candidate,
            if one has learned scales, if a contraction that needs statistics saw no
            batch, if the loss is not a scalar, or if the float model's loss or outputs
            are not finite.
    """
    programs = programs_of(model, variables, candidates, loss, num_inputs, kwargs)
    if programs.may_gather:
        batches = measuring.held(programs, batches)
        programs.calibrate(batches)
    found = measuring.measure(
        programs,
        batches,
        lambda switches: [choices for _, _, choices in _alone(switches)],
        "contractions alone",
        has_errors=True,
    )
    return Sensitivity(
        tuple(_contractions(programs, found)),
        found.batches,
        found.in_float.loss,
        None if found.control is None else found.control.snr,
    )


def programs_of(
    model: Any,
    variables: Any,
    candidates: Any,
    loss: Callable[..., Any] | None,
    num_inputs: int | None,
    kwargs: dict[str, Any],
    operands: Literal["any", "weight"] = "any",
) -> Programs:
    """Returns the program of a model.

    The arguments are those of `sensitivity`, and `operands` that of `Programs`.
    """
    subject = subject_of(model, variables, kwargs)
    given = None if candidates is None else candidates_of(candidates)
    return Programs(subject, given, loss, num_inputs, operands)


def _alone(switches: tuple[Switch, ...]) -> list[tuple[int, int, list[int]]]:
    """Returns indices of switches and candidates, and the choices of these alone."""
    found = []
    for place, switch in enumerate(switches):
        for i, is_quantized in enumerate(switch.is_quantized):
            if is_quantized:
                choices = [0] * len(switches)
                choices[place] = i + 1
                found.append((place, i, choices))
    return found


def _contractions(
    programs: Programs, found: Measured
) -> Iterable[ContractionSensitivity]:
    exact = found.in_float.loss
    alone = _alone(found.switches)
    for (place, i, _), result in zip(alone, found.results, strict=True):
        one = found.switches[place].forms[i]
        signal, noise = found.errors[i, place]
        loss = result.loss
        yield ContractionSensitivity(
            one.path,
            one.description,
            programs.names[i],
            measuring.decibels(signal, noise),
            result.snr,
            None if loss is None or exact is None else loss - exact,
        )
