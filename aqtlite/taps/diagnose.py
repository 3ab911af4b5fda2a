"""What stands out in the numbers of quantized contractions, in sentences.

Each kind of finding is a function of the taps, with its threshold beside it. A remedy
is text to paste.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np

from aqtlite import errors
from aqtlite.taps import records, remedies
from aqtlite.taps.records import TappedOperand, Taps
from aqtlite.taps.tap import tap

Severity = Literal["error", "warning", "note"]

_ORDER: dict[str, int] = {"error": 0, "warning": 1, "note": 2}

NOISY, LOUD, FEW_BITS = 5.0, 8 / 3, 4
"""Decibels for each bit beside the sign, of the first few bits, below which an
operand's rounding is a warning, and an error: of 4 and more bits 15 and 8, of 2 bits 5
and 3. On Gaussian data 2-bit grids give 5 to 8 dB, 4-bit grids 16 to 22, float8 25 to
32, and int8 40 and more."""

BELOW_OTHERS = 12.0
"""Decibels below the median of operands of the same grid."""

OUTLIER = 50.0
"""Times that a channel is above its neighbours."""

SATURATED, UNUSED = 1.25, 1 / 16
"""Largest value by what a scale from earlier batches, or a fixed range, reaches."""

CLIPPED = 0.001
"""Share of clipped elements."""

ZEROED, ZEROED_BESIDE = 0.5, 0.1
"""Share of elements that are rounded to zero; beside a channel far above the others, or
in a range that is hardly used."""

DRIFT = 8.0
"""Factor of the largest magnitude between calls."""

FEW_PRODUCTS, FEW_ELEMENTS = 16, 1024
"""Products in a sum, and elements of the smaller operand, below which quantizing takes
longer than it saves."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that stands out; prints as sentences."""

    path: str
    """Path of the contraction, as rules match it; empty outside of name scopes."""

    operand: str
    """Operand of the config, such as ``"fwd.lhs"``; empty for the whole contraction."""

    what: str
    """What stands out, in a sentence."""

    remedy: str
    """What would mend it: text to paste, in which ``cfg`` is the present config of the
    contraction. Alternatives come after ``", or "``."""

    severity: Severity

    def __str__(self) -> str:
        place = f"{errors.label(self.path)} {self.operand}".strip()
        return f"{self.severity}: {place}: {self.what}\n    {self.remedy}"


def diagnose(
    taps: Taps | Mapping[int, Taps] | Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Finding, ...]:
    """Says what stands out in the numbers of quantized contractions.

    Values that are not finite, calibrations without statistics, ranges that saturate,
    drift or are hardly used, operands with a low signal-to-noise ratio, channels far
    above their neighbours, elements rounded to zero, operands with the same noise, and
    contractions that are too small to gain. Each with a remedy to paste.

    >>> import jax.numpy as jnp
    >>> import aqtlite
    >>> from aqtlite import config
    >>> x = jnp.cos(jnp.arange(4096.0)).reshape(64, 64)
    >>> found = diagnose(
    ...     lambda w, x: aqtlite.einsum("bk,kn->bn", x, w, cfg=config.qat(8)),
    ...     x, x.at[:, 7].mul(1000.0),
    ... )
    >>> print(*found, sep="\\n")
    warning: (no name scope) fwd.lhs: channel 7 of axis 1 is ...

    Args:
        taps: the result of `aqtlite.tap`; those of several steps, by step; or a
            function, which is called with the other arguments.
        *args: arguments of the function.
        **kwargs: keyword arguments of the function.

    Returns:
        The findings, errors first. Empty if nothing stands out.

    Raises:
        TypeError: if `taps` is none of these.
        ValueError: if there are no steps, or a function quantizes nothing.
    """
    if callable(taps):
        _, taps = tap(taps)(*args, **kwargs)
    if isinstance(taps, Taps):
        taps = {0: taps}
    if not isinstance(taps, Mapping) or not all(
        isinstance(one, Taps) for one in taps.values()
    ):
        raise TypeError(
            "diagnose takes the taps of aqtlite.tap, those of several steps as "
            f"{{step: taps}}, or a function and arguments; got {type(taps).__name__}"
        )
    if not taps:
        raise ValueError("diagnose was given the taps of no step")
    last = taps[max(taps)]
    worst = [records.worst(one) for one in last.operands]
    found = [*_of_each(worst), *_below_others(worst), *_same_noise(worst)]
    found += [*_drifting(taps), *_too_small(worst)]
    return tuple(sorted(found, key=lambda one: _ORDER[one.severity]))


def _of_each(worst: list[TappedOperand]) -> Iterator[Finding]:
    for one in worst:
        # The first that applies is the cause of those that follow.
        found = next(filter(None, (check(one) for check in _CHECKS)), None)
        if found is not None:
            yield found


def _finding(one: TappedOperand, severity: Severity, what: str, remedy: str) -> Finding:
    return Finding(one.path, one.operand, what, remedy, severity)


def _place(one: TappedOperand) -> str:
    return f"channel {int(one.channel)} of axis {int(one.axis)}"


def _not_finite(one: TappedOperand) -> Finding | None:
    if not one.not_finite > 0:
        return None
    what = (
        f"{int(one.not_finite)} of {math.prod(one.shape)} elements are NaN or "
        f"infinite, first in {_place(one)}: their scales are NaN, and so is the result."
    )
    remedy = (
        "They come from what computes this operand: jax.config.update("
        '"jax_debug_nans", True) stops where.'
    )
    return _finding(one, "error", what, remedy)


def _without_scale(one: TappedOperand) -> Finding | None:
    if not one.lost > 0:
        return None
    remedy = remedies.range_of_each_call(one)
    if one.cfg.gathers_statistics:
        what = "the scale is not finite, because its calibration has no statistics."
        remedy = "variables = aqtlite.flax.calibrate(model, variables, batches)"
    elif one.cfg.is_learned:
        what = "the learned scale is not finite."
    else:
        what = (
            f"{int(one.lost)} finite elements are not finite after rounding: their "
            f"scale overflows, with magnitudes up to {one.largest:.3g}."
        )
    return _finding(one, "error", what, remedy)


def _saturated(one: TappedOperand) -> Finding | None:
    severity: Severity = "error" if _is_noisy(one) else "warning"
    if one.cfg.gathers_statistics:
        of, again = "the scale of earlier batches", "  # or gather the statistics again"
    elif one.cfg.is_learned:
        of, again = "the learned scale", ""
    elif one.cfg.calibration.is_blind:
        of, again = "the fixed range", ""
    else:
        return None
    # Learned ranges, and those of few bits, clip by design: what counts is the error.
    counts = _is_noisy(one) or (one.bits >= 8 and not one.cfg.is_learned)
    if one.reach > SATURATED and one.clipped > CLIPPED and counts:
        remedy = remedies.unclipped(one)
        what = (
            f"the range is saturated: {100 * one.clipped:.1f} % of the elements are "
            f"clipped, and the largest is {one.reach:.3g} times what {of} reaches."
        )
    elif one.reach < UNUSED and _loses_small_values(one):
        severity, remedy = "warning", remedies.range_of_each_call(one)
        what = (
            f"{of} reaches {1 / max(one.reach, 1e-9):.3g} times the largest magnitude: "
            "most of the grid is not used."
        )
    else:
        return None
    return _finding(one, severity, what, remedy + again)


def _decibels_of(one: TappedOperand, per_bit: float) -> float:
    return per_bit * max(min(one.bits, FEW_BITS) - 1, 0)


def _is_noisy(one: TappedOperand) -> bool:
    return bool(one.snr < _decibels_of(one, NOISY))


def _loses_small_values(one: TappedOperand) -> bool:
    """Whether a scale is too large for most elements.

    Grids of floats round these as well as large ones, down to their smallest value.
    """
    return bool(one.flushed > ZEROED_BESIDE) or _is_noisy(one)


def _noisy(one: TappedOperand) -> Finding | None:
    if not _is_noisy(one):
        return None
    what = f"its rounding has a signal-to-noise ratio of {one.snr:.1f} dB."
    severity: Severity = "error" if one.snr < _decibels_of(one, LOUD) else "warning"
    return _finding(one, severity, what, remedies.finer(one))


def _zeroed(one: TappedOperand) -> Finding | None:
    # Zero is one of three values on grids of 2 bits.
    if one.bits <= 2 or not one.flushed > ZEROED:
        return None
    what = f"{100 * one.flushed:.0f} % of the elements are rounded to zero."
    return _finding(one, "warning", what, remedies.wider(one))


def _outlier(one: TappedOperand) -> Finding | None:
    if not (one.axis >= 0 and one.ratio >= OUTLIER):
        return None
    if not _loses_small_values(one):
        return None
    what = (
        f"{_place(one)} is {one.ratio:.0f} times its neighbours, and shares a scale "
        f"with them: {100 * one.flushed:.0f} % of the elements are rounded to zero "
        f"({one.snr:.1f} dB)."
    )
    # Rows of gradients differ by nature, and cost little.
    severity: Severity = "warning" if one.is_forward or one.snr < 25 else "note"
    return _finding(one, severity, what, remedies.without_outlier(one))


_CHECKS = (_not_finite, _without_scale, _saturated, _outlier, _noisy, _zeroed)


def _below_others(worst: list[TappedOperand]) -> Iterator[Finding]:
    alike = collections.defaultdict(list)
    for one in worst:
        # The decibels of an operand with an outlying channel are those of the channel.
        if math.isfinite(one.snr) and one.ratio < OUTLIER:
            alike[one.operand, one.grid].append(one)
    for several in alike.values():
        middle = float(np.median([one.snr for one in several]))
        for one in several:
            if one.snr < middle - BELOW_OTHERS and not _is_noisy(one):
                what = (
                    f"{one.snr:.1f} dB, where the same operand of other contractions "
                    f"has {middle:.1f} dB."
                )
                yield _finding(one, "warning", what, remedies.finer(one))


def _same_noise(worst: list[TappedOperand]) -> Iterator[Finding]:
    alike = collections.defaultdict(list)
    for one in worst:
        if one.noise not in (0, -1):
            alike[int(one.noise), one.operand.partition(".")[2]].append(one)
    for first, *others in alike.values():
        for one in others:
            what = (
                f"it is rounded with the same noise as {errors.label(first.path)} "
                f"{first.operand}: their errors do not average out."
            )
            remedy = (
                "give each contraction a key of its own, as "
                "jax.random.fold_in(key, layer)"
            )
            yield _finding(one, "warning", what, remedy)


def _drifting(history: Mapping[int, Taps]) -> Iterator[Finding]:
    first, last = min(history), max(history)
    if first == last:
        return
    before = {(x.path, x.operand): records.worst(x) for x in history[first].operands}
    for one in map(records.worst, history[last].operands):
        old = before.get((one.path, one.operand))
        if old is None or not (old.largest > 0 and one.largest > 0):
            continue
        factor = float(one.largest) / float(old.largest)
        if max(factor, 1 / factor) < DRIFT:
            continue
        what = (
            f"its range drifts: the largest magnitude is {old.largest:.3g} at step "
            f"{first} and {one.largest:.3g} at step {last}."
        )
        severity: Severity = "note"
        if one.cfg.gathers_statistics:
            severity, remedy = "warning", remedies.range_of_each_call(one)
        elif one.cfg.is_learned:
            remedy = "the scale is learned, and training moves it: nothing to do"
        elif one.cfg.calibration.is_blind:
            severity, remedy = "warning", remedies.range_of_each_call(one)
        else:
            remedy = "the scale is of each batch: nothing to do"
        yield _finding(one, severity, what, remedy)


def _too_small(worst: list[TappedOperand]) -> Iterator[Finding]:
    seen = set()
    for one in worst:
        if one.path in seen or not one.is_forward:
            continue
        seen.add(one.path)
        smaller = min(map(math.prod, one.shapes))
        products = math.prod(one.shape[axis] for axis in one.contracting)
        if products >= FEW_PRODUCTS and smaller >= FEW_ELEMENTS:
            continue
        what = (
            f"too small to gain: {products} products in a sum, and {smaller} elements "
            "in the smaller operand."
        )
        remedy = remedies.in_float(one)
        if one.by_rule:
            remedy += f"  # or min_size={FEW_ELEMENTS} in the rule of others"
        yield Finding(one.path, "", what, remedy, "note")
