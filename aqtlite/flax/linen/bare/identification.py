"""The identities by which a bare call will find frozen weights."""

from collections.abc import Container, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from aqtlite.flax.linen.bare import fingerprints
from aqtlite.jaxpr import analysis, slicing
from aqtlite.program.serving.contraction import OperandKey
from aqtlite.program.serving.identity import Identity
from aqtlite.program.serving.model import FoundOperand, Parameter
from aqtlite.program.serving.weight import UNTOLD, Refusal, Weight


def made_of_weights(
    weights: Mapping[OperandKey, Sequence[FoundOperand]],
) -> set[OperandKey]:
    """Returns weights that may be the result of a contraction of weights.

    A function in a layer knows what is made of parameters by values that stand for
    them, and a contraction has none to give.

    Args:
        weights: operands of injected contractions of one call that are weights.
    """
    found = set()
    for rhs in weights:
        lhs = rhs._replace(side="lhs")
        # In float, the other operand is not among those found.
        is_alone = not any(one.cfg.fwd.lhs.is_quantized for one in weights[rhs])
        if rhs.side == "lhs" or not (lhs in weights or is_alone):
            continue
        pair = [*weights.get(lhs, ()), *weights[rhs]]
        made_of = {parameter for one in pair for parameter in one.parameters}
        found |= {
            key
            for key in weights
            if key not in (lhs, rhs)
            and any(_is_made_of_more(one, made_of, is_alone) for one in weights[key])
        }
    return found


def _is_made_of_more(
    one: FoundOperand, parameters: set[Parameter], is_alone: bool
) -> bool:
    """Whether an operand may be made of parameters; beside others if `is_alone`."""
    own = {*one.parameters}
    return parameters < own if is_alone else parameters <= own


def identities(
    weights: Sequence[Weight],
    jaxpr: core.ClosedJaxpr,
    outputs: Sequence[Sequence[int]],
    removed: Container[Parameter],
) -> list[Identity | Refusal | None]:
    """Returns the fingerprints that weights will have at serving time.

    Args:
        weights: weights of injected contractions of one call.
        jaxpr: the call, traced with placeholders, with fingerprints as outputs.
        outputs: indices of the outputs of each weight.
        removed: parameters that placeholders stand for.

    Returns:
        For each weight its fingerprint; None if all of its parameters stay in float,
        and it is identified by stored values; or why it cannot be told from others.
    """
    found = _evaluated(jaxpr, outputs)
    result: list[Identity | Refusal | None] = []
    for one, fingerprint in zip(weights, found, strict=True):
        gone = [parameter in removed for parameter in one.parameters]
        is_told = fingerprint is not None and all(gone)
        if any(gone) and not is_told:
            result.append(UNTOLD)
        else:
            result.append(fingerprint if any(gone) else None)
    return result


def _evaluated(
    jaxpr: core.ClosedJaxpr, outputs: Sequence[Sequence[int]]
) -> list[fingerprints.Fingerprint | None]:
    """Evaluates fingerprints; None if one depends on values that stay in float."""
    depends = analysis.output_dependencies(jaxpr)
    fixed = {
        i: list(ones)
        for i, ones in enumerate(outputs)
        if not any(depends[output] for output in ones)
    }
    evaluated = slicing.slice_outputs(jaxpr, fixed)
    # Compiled as a whole: evaluated eagerly, each equation would be a program.
    with jax.disable_jit(False), jax.debug_nans(False):
        program = jax.jit(core.jaxpr_as_fun(evaluated.jaxpr)).lower().compile()
        with jax.ensure_compile_time_eval():
            values: Any = evaluated.unflatten(program())
        return [
            fingerprints.from_values([np.asarray(value) for value in values[i]])
            if i in values
            else None
            for i in range(len(outputs))
        ]


def are_alike(weight: Weight, other: Weight) -> bool:
    """Whether a bare call cannot tell apart two weights of injected contractions."""
    if (weight.key.path, weight.operand, weight.found.cfg) != (
        other.key.path,
        other.operand,
        other.found.cfg,
    ):
        return False
    first, second = weight.record.identity, other.record.identity
    if not (isinstance(first, tuple) and isinstance(second, tuple)):
        return first is second
    return fingerprints.are_same(first, second, other.operand.dtype)
