"""What would mend a finding: Python to paste.

In it, `cfg` is the config of the contraction. Each changes all that has to change
together, so that the config stays valid, and changes something. None lets results see
more than they did: where nothing tells whether positions are contracted, a static
range does not become one of each call, and nothing mixes them.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from aqtlite import calibration, config
from aqtlite.config import of_activations
from aqtlite.program.rules import patterns
from aqtlite.quantization.granularity import LocalBlocks
from aqtlite.taps.records import TappedOperand

_BLOCK = 32
"""Size of the blocks that are proposed."""

_SMOOTHING = "config.smoothquant().fwd.smoothing"

_FULL_RANGES = (calibration.AbsMax(), calibration.MinMax())
"""Calibrations that clip nothing."""


def one_of(*remedies: str | None) -> str:
    """Joins alternatives, the first one first; None for those that do not apply."""
    return ", or ".join(filter(None, remedies))


def in_float(one: TappedOperand) -> str:
    """Returns what leaves the contraction of an operand in float."""
    if not one.is_forward:
        return _gradient_in_float(one)
    return _rule(one, "None") if one.by_rule else "config.DotGeneral()"


def range_of_each_call(one: TappedOperand) -> str:
    """Returns the remedy for a range that does not fit."""
    return _updated(one, _dynamic(one)) or in_float(one)


def unclipped(one: TappedOperand) -> str:
    """Returns the remedy for a range that clips, where a wider one is not coarser."""
    if one.bits < 8:
        return _updated(one, _dynamic(one), _in_8_bits(one)) or in_float(one)
    return range_of_each_call(one)


def finer(one: TappedOperand) -> str:
    """Returns what makes the rounding of an operand finer."""
    if not one.is_forward:
        return _gradient_in_float(one)
    shares_all = one.cfg.blocks is None and one.cfg.calib_shared_axes == "per_tensor"
    smaller = _with_own_scales(one) if shares_all else _in_blocks(one)
    return one_of(_with_8_bits(one), smaller) or in_float(one)


def wider(one: TappedOperand) -> str:
    """Returns what rounds fewer small elements of an operand to zero."""
    if not one.is_forward:
        return _gradient_in_float(one)
    # Grids of floats would round the largest elements, and the result, more coarsely.
    return _with_8_bits(one) or in_float(one)


def without_outlier(one: TappedOperand) -> str:
    """Returns what keeps an outlying channel from the scale of the others."""
    if int(one.axis) not in one.contracting:
        return _with_own_scales(one) or wider(one)
    rotated = _around(one, '"fwd.rotation": config.Hadamard()')
    if not one.can_rotate or _may_mix_positions(one):
        rotated = None
    if one.operand != "fwd.lhs":
        return one_of(_in_blocks(one), rotated) or wider(one)
    smoothed = None
    if one.can_smooth and not one.is_float and one.cfg.blocks is None:
        smoothed = _around(one, f'"fwd.smoothing": {_SMOOTHING}')
    return one_of(smoothed, rotated) or _in_blocks(one) or wider(one)


def _rule(one: TappedOperand, cfg: str) -> str:
    """Returns a rule for the contraction of an operand."""
    return f"aqtlite.Rule(path={patterns.of_text(one.path)!r}, cfg={cfg})"


def _fields(one: TappedOperand, *changes: Mapping[str, str]) -> list[str]:
    """Returns changes of an operand as text, those that change nothing left out."""
    is_as_lhs = one.is_of_activations and one.is_forward
    operand = "fwd.lhs" if is_as_lhs else one.operand
    merged = {name: x for several in changes for name, x in several.items()}
    present = {
        name: "None"
        for name in ("calib_shared_axes", "scale_dtype", "scale_shared_axes")
        if getattr(one.cfg, name) is None
    }
    kept = {name: x for name, x in merged.items() if present.get(name) != x}
    return [f'"{operand}.{name}": {x}' for name, x in kept.items()]


def _updated(
    one: TappedOperand, *changes: Mapping[str, str] | None, beside: Sequence[str] = ()
) -> str | None:
    """Returns changes of an operand; None if one of them is None, or none changes.

    Args:
        one: the operand.
        *changes: texts of its fields, by name.
        beside: changes of other fields of the config, which these need.
    """
    known = [several for several in changes if several is not None]
    # What the forward has quantized is configured there.
    is_of_forward = one.is_of_activations and one.operand in ("dlhs.rhs", "drhs.rhs")
    if len(known) < len(changes) or is_of_forward:
        return None
    fields = _fields(one, *known)
    return _update(*fields, *beside) if fields else None


def _update(*changes: str) -> str:
    return f"config.update(cfg, {{{', '.join(changes)}}})"


def _around(one: TappedOperand, change: str) -> str | None:
    """Returns a change of the contraction, with a range that fits what it makes."""
    if not one.cfg.calibration.is_blind or one.cfg.calibration.needs_state:
        return _update(change)
    changes = _dynamic(one)
    return None if changes is None else _update(change, *_fields(one, changes))


def _gradient_in_float(one: TappedOperand) -> str:
    return _update(f'"{_contraction(one)}": config.DotGeneralRaw()')


def _contraction(one: TappedOperand) -> str:
    """Returns "fwd", "dlhs" or "drhs"."""
    return one.operand.partition(".")[0]


def _may_mix_positions(one: TappedOperand) -> bool:
    """Whether a mix of the contracted elements could let results see more than before.

    Ranges of earlier batches see nothing of this one. If rules find that ranges of each
    call see too much, they change the config or leave the contraction in float.
    """
    if one.by_rule or one.is_of_activations:
        return one.is_of_activations and not of_activations.is_found(one.cfg)
    return one.has_batch


def _dynamic(one: TappedOperand) -> dict[str, str] | None:
    """Returns the changes by which the range is that of each call, and of each row.

    None if the present range is known before the call, and nothing tells whether one of
    each call would see later positions.
    """
    is_told = one.by_rule or one.is_of_activations or not one.has_batch
    is_found = of_activations.is_found(one.cfg) or one.cfg.scale_moves
    if one.is_forward and not is_told and not is_found:
        return None
    changes = {} if one.cfg.scale_moves else {"calib_shared_axes": "None"}
    if one.cfg.calibration not in _FULL_RANGES:
        has_zero_point = one.cfg.grid.zero_point_range is not None
        how = "MinMax" if has_zero_point else "AbsMax"
        changes["calibration"] = f"calibration.{how}()"
    return changes


def _with_8_bits(one: TappedOperand) -> str | None:
    """Returns the remedy of 8 bits; None if there are as many."""
    if one.bits >= 8:
        return None
    how = one.cfg.calibration
    fits = how.has_state or how in _FULL_RANGES  # Others are for the grid.
    return _updated(one, {} if fits else _dynamic(one), _in_8_bits(one))


def _in_8_bits(one: TappedOperand) -> dict[str, str]:
    affine = one.cfg.grid.zero_point_range is not None
    grid = "IntAffine" if affine else "IntSymmetric"
    changes = {"numerics": f"numerics.{grid}(bits=8)"}
    if one.cfg.noise_shared_axes is not None:  # It rounds to nearest.
        changes["noise_shared_axes"] = "None"
    return changes


def _alone(one: TappedOperand) -> dict[str, str] | None:
    """Returns the changes by which no axes beside the contracting ones share a scale.

    Statistics, and learned scales of activations, are of axes that mean the same in
    each batch; a constant is the same for all.
    """
    if not of_activations.is_found(one.cfg):
        return _dynamic(one)
    return {} if one.cfg.scale_moves else {"calib_shared_axes": "None"}


def _with_own_scales(one: TappedOperand) -> str | None:
    """Returns the remedy for axes that share a scale and are not contracted."""
    blocks = one.cfg.blocks
    if one.cfg.scale_moves or isinstance(blocks, LocalBlocks):
        # Positions of values would share scales; tiles have one for each row.
        return None
    if blocks is not None and blocks.remaining_size > 1:
        rows = dataclasses.replace(blocks, remaining_size=1)
        return _updated(one, {"blocks": f"config.{rows!r}"})
    changes = _alone(one)
    if changes is not None and one.cfg.has_relative_scales:
        changes |= {"scale_dtype": "None", "scale_shared_axes": "None"}
    return _updated(one, changes)


def _in_blocks(one: TappedOperand) -> str | None:
    """Returns the remedy of smaller blocks; None if there would be none."""
    present, channels = one.cfg.blocks, one.channels
    proposed = config.Blocks(size=_BLOCK)
    if channels % _BLOCK:
        proposed = dataclasses.replace(proposed, fit=True)
    before = 1 if present is None else present.count_of(channels)
    if proposed.count_of(channels) <= before:
        return None
    changes = {"blocks": f"config.{proposed!r}"}
    if one.cfg.noise_shared_axes is not None:
        changes["noise_shared_axes"] = "None"
    is_local = isinstance(present, LocalBlocks)
    others = [f'"{_contraction(one)}.local_aqt": None'] if is_local else []
    return _updated(one, changes, _alone(one), beside=others)
