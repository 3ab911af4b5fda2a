"""What would mend a finding: Python to paste.

In it, `cfg` is the config of the contraction. Each changes all that has to change
together, so that the config stays valid.
"""

import dataclasses
from collections.abc import Mapping

from aqtlite import config
from aqtlite.program.rules import patterns
from aqtlite.quantization.granularity import LocalBlocks
from aqtlite.taps.records import TappedOperand

_BLOCK = 32
"""Size of the blocks that are proposed."""

_ABS_MAX = "calibration.AbsMax()"

_SMOOTHING = "config.smoothquant().fwd.smoothing"


def one_of(*remedies: str | None) -> str:
    """Joins alternatives, the first one first; None for those that do not apply."""
    return ", or ".join(filter(None, remedies))


def rule(one: TappedOperand, cfg: str) -> str:
    """Returns a rule for the contraction of an operand."""
    return f"aqtlite.Rule(path={patterns.of_text(one.path)!r}, cfg={cfg})"


def range_of_each_call(one: TappedOperand) -> str:
    """Returns the remedy for a range that does not fit."""
    return _update(one, {"calibration": _ABS_MAX})


def unclipped(one: TappedOperand) -> str:
    """Returns the remedy for a range that clips, where a wider one is not coarser."""
    if one.bits < 8:
        return _update(one, {**_in_8_bits(one), "calibration": _ABS_MAX})
    return range_of_each_call(one)


def finer(one: TappedOperand) -> str:
    """Returns what makes the rounding of an operand finer."""
    if not one.is_forward:
        return _gradient_in_float(one)
    shares_all = one.cfg.blocks is None and one.cfg.calib_shared_axes == "per_tensor"
    smaller = _with_own_scales(one) if shares_all else _in_blocks(one)
    more = _update(one, _in_8_bits(one)) if one.bits < 8 else None
    return one_of(more, smaller) or _in_float(one)


def wider(one: TappedOperand) -> str:
    """Returns what rounds fewer small elements of an operand to zero."""
    if not one.is_forward:
        return _gradient_in_float(one)
    if one.bits < 8:
        return _update(one, _in_8_bits(one))
    if not one.is_float:
        return rule(one, "config.fp8()")
    return _in_float(one)


def without_outlier(one: TappedOperand) -> str:
    """Returns what keeps an outlying channel from the scale of the others."""
    if int(one.axis) not in one.contracting:
        return _with_own_scales(one)
    rotation = 'config.update(cfg, {"fwd.rotation": config.Hadamard()})'
    rotated = rotation if one.can_rotate else None
    if one.operand != "fwd.lhs":
        return one_of(_in_blocks(one), rotated) or wider(one)
    smoothed = None
    if one.can_smooth and not one.is_float and one.cfg.blocks is None:
        smoothed = f'config.update(cfg, {{"fwd.smoothing": {_SMOOTHING}}})'
    return one_of(smoothed, rotated) or _in_blocks(one) or wider(one)


def _update(one: TappedOperand, changes: Mapping[str, str]) -> str:
    """Returns a change of fields of an operand, given as text."""
    is_as_lhs = one.is_of_activations and one.is_forward
    operand = "fwd.lhs" if is_as_lhs else one.operand
    text = ", ".join(f'"{operand}.{name}": {x}' for name, x in changes.items())
    return f"config.update(cfg, {{{text}}})"


def _in_float(one: TappedOperand) -> str:
    return rule(one, "None")


def _gradient_in_float(one: TappedOperand) -> str:
    gradient, _, _ = one.operand.partition(".")
    return f'config.update(cfg, {{"{gradient}": config.DotGeneralRaw()}})'


def _in_8_bits(one: TappedOperand) -> dict[str, str]:
    changes = {"numerics": "numerics.IntSymmetric(bits=8)"}
    if one.cfg.noise_shared_axes is not None:  # It rounds to nearest.
        changes["noise_shared_axes"] = "None"
    if one.cfg.calibration.is_learned:  # Of another grid.
        changes["calibration"] = _ABS_MAX
    return changes


def _alone(one: TappedOperand) -> dict[str, str]:
    """Returns the changes by which no axes beside the contracting ones share a scale.

    Statistics, and learned scales of activations, are of axes that mean the same in
    each batch.
    """
    changes = {}
    if one.cfg.calib_shared_axes is not None:
        changes["calib_shared_axes"] = "None"
    if one.cfg.calibration.needs_state:
        changes["calibration"] = _ABS_MAX
    return changes


def _with_own_scales(one: TappedOperand) -> str:
    """Returns the remedy for axes that share a scale and are not contracted."""
    blocks = one.cfg.blocks
    if blocks is not None:
        rows = dataclasses.replace(blocks, remaining_size=1)
        return _update(one, {"blocks": f"config.{rows!r}"})
    changes = _alone(one)
    if one.cfg.has_relative_scales:
        changes |= {"scale_dtype": "None", "scale_shared_axes": "None"}
    return _update(one, changes or {"calib_shared_axes": "None"})


def _in_blocks(one: TappedOperand) -> str | None:
    """Returns the remedy of smaller blocks; None if there would be none."""
    present, channels = one.cfg.blocks, one.channels
    proposed = config.Blocks(size=_BLOCK)
    if channels % _BLOCK:
        proposed = dataclasses.replace(proposed, fit=True)
    before = 1 if present is None else present.count_of(channels)
    if proposed.count_of(channels) <= before:
        return None
    changes = {"blocks": f"config.{proposed!r}", **_alone(one)}
    if one.cfg.noise_shared_axes is not None:
        changes["noise_shared_axes"] = "None"
    text = _update(one, changes)
    if isinstance(present, LocalBlocks):
        gradient, _, _ = one.operand.partition(".")
        text = f'{text.removesuffix("})")}, "{gradient}.local_aqt": None}})'
    return text
