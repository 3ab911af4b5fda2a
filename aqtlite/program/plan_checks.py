"""Checks of plans, and what is logged of them."""

import functools
from typing import Any

import jax.numpy as jnp
from absl import logging

from aqtlite import config, errors
from aqtlite.operations import SIDES
from aqtlite.program import plan_table
from aqtlite.program.plan import Plan
from aqtlite.program.planned import PlannedContraction
from aqtlite.program.planned_lookup import Planned
from aqtlite.program.rules import matching, unmatched
from aqtlite.quantization import granularity
from aqtlite.quantization.states.state_collections import OF_GRADIENTS, PARAMETERS


def report(planned: Plan, *, strict: bool) -> None:
    """Logs contractions that a rule quantizes but that stay in float or unsmoothed.

    And alternatives of rules that match nothing.

    Raises:
        ValueError: if a contraction with an injected config stays in float; with
            `strict`, if any float contraction does without a rule with ``cfg=None``;
            if the size of a rotation does not divide the channels, or blocks do not
            divide an operand; if a state would not get its gradient.
    """
    for given in planned.every():
        if given.is_injected and not given.is_quantized:
            raise ValueError(
                f"the contraction {errors.quoted(given.path)} was given a config where "
                f"it is called, and cannot be quantized: {given.why_float}"
            )
    left: list[Planned] = [
        one
        for one in planned.left_float()
        if _is_float(one) and not one.is_left_alone and not _is_left(planned, one)
    ]
    left += [
        one
        for one in planned.lookups
        if not one.is_quantized and not _is_left(planned, one)
    ]
    lines = [f"  {errors.label(one.path)}: {one.why_float}" for one in left]
    lines += [
        f"  {errors.label(one.path)}: its gradient is that of a {why}"
        for one in planned.quantized()
        if (why := one.why_gradients_float) is not None
        and (one.cfg.dlhs.lhs.is_quantized or one.cfg.drhs.lhs.is_quantized)
    ]
    unseen = [one for one in planned.unseen if not one.is_left(planned.rules)]
    lines += map(str, unseen)
    if strict and lines:
        raise ValueError(
            f"strict=True, and {len(lines)} contractions stay in float:\n"
            + "\n".join(lines)
            + "\nName those that are to stay so with Rule(path=..., cfg=None)"
            + (', of lookups Rule(op="take", ...)' if planned.lookups else "")
        )
    for other in unseen:
        if other.rule is not None:
            text = f"({other.op}) stays in float: {other.why_float}"
            _warn_once(planned.rules, other.path, (), text)
    for one in left:
        if one.rule is not None:
            _warn(planned, one, f"stays in float: {one.why_float}")
    for text in unmatched.alternatives(planned.rules, planned.every()):
        _log_once(planned.rules, text)
    for replaced in planned.replaced():
        if not replaced.is_injected:
            _check_gradients(replaced)
    for contraction in planned.quantized():
        _check_blocks(contraction)
        if contraction.why_not_smoothed is not None:
            why = f"is not smoothed: {contraction.why_not_smoothed}"
            _warn(planned, contraction, why)
        if contraction.mixed_channels == 1:
            _warn(planned, contraction, f"is not rotated: {plan_table.NO_MATRIX}")


def _is_left(planned: Plan, one: Planned) -> bool:
    """Whether a rule leaves an operation in float."""
    return one.rule is not None and planned.rules[one.rule].cfg is None


def _check_blocks(one: PlannedContraction) -> None:
    """Raises ValueError if blocks of the forward contraction divide no operand."""
    operation, *shapes = one.types()
    for side, x in zip(SIDES, shapes, strict=True):
        tensor: config.Tensor = getattr(one.cfg.fwd, side)
        if tensor.blocks is not None and not tensor.blocks.pad and 0 not in x.shape:
            with errors.naming(one.path):
                granularity.layout(tensor, x.shape, operation.axes(side), f"fwd.{side}")


def _check_gradients(one: PlannedContraction) -> None:
    """Raises ValueError if a state of a contraction would not get its gradient."""
    has = {PARAMETERS, OF_GRADIENTS} & set(one.collections)
    around = one.site.around
    if has and {"custom_jvp_call", "custom_vjp_call"} & set(around):
        where = "a function with a derivative of its own, which gives them none"
    elif OF_GRADIENTS in has and "cond" in around:
        where = "a branch, which gives zeros for them where it is not taken"
    elif OF_GRADIENTS in has and not all(one.site.per_step):
        where = "a scan whose steps share parameters, which adds theirs up"
    else:
        return
    raise ValueError(
        f"the rule of {errors.quoted(one.path)} has an adapter, or its config a "
        "learned calibration or statistics of gradients, and the contraction is "
        f"inside {where}: name it in a rule before the others that has none"
    )


def _warn(planned: Plan, one: Planned, text: str) -> None:
    """Logs something about an operation, at the first of its traces."""
    _warn_once(planned.rules, one.path, one.rhs.shape, text)


@functools.lru_cache(maxsize=4096)
def _warn_once(rules: Any, path: str, rhs_shape: tuple[int, ...], text: str) -> None:
    del rules, rhs_shape
    logging.warning("%r %s", path, text)


@functools.lru_cache(maxsize=4096)
def _log_once(rules: Any, text: str) -> None:
    del rules
    logging.warning("%s", text)


def check_quantizes(planned: Plan) -> None:
    """Checks that rules quantize something of a program.

    Rules with ``cfg=None``, and rules that match nothing and are not required, may
    leave all of it in float. Contractions of empty operands, and those that sum
    nothing, do not count.

    Raises:
        ValueError: if no contraction is quantized, there are some, and either there are
            no rules or a contraction meets the conditions of a rule that quantizes.
    """
    contractions: list[Planned] = [
        one
        for one in planned.contractions
        if 0 not in one.lhs.shape + one.rhs.shape and not one.is_left_alone
    ]
    contractions += planned.lookups
    if planned.every_replaced() or not contractions:
        return
    quantizing = [
        rule for rule in planned.rules if rule.cfg is not None and rule.cfg.is_quantized
    ]
    names_some = any(
        matching.fulfils(one, rule) for rule in quantizing for one in contractions
    )
    if planned.rules and not names_some:
        return
    advice = (
        "\nName those to quantize with Rule(path=..., cfg=...), and those that are to "
        "stay in float with Rule(path=..., cfg=None)"
    )
    all_are_named = all(
        one.rule is not None and planned.rules[one.rule] in quantizing
        for one in contractions
    )
    raise ValueError(
        "the rules quantize nothing: every contraction stays in float"
        f"{planned.reasons()}{'' if all_are_named else advice}"
    )


def _is_float(one: PlannedContraction) -> bool:
    return all(jnp.issubdtype(x.dtype, jnp.floating) for x in (one.lhs, one.rhs))
