"""Candidates: the configs among which each contraction can choose."""

from collections.abc import Mapping, Sequence
from typing import Any

from aqtlite import config, errors
from aqtlite.program.plan import Plan
from aqtlite.program.rules import rules as rules_lib
from aqtlite.program.rules.rules import Rule
from aqtlite.quantization.states.state_collections import PARAMETERS, collections_of

FLOAT = "float"
"""Name of the choice to leave a contraction in float."""

OWN = "own"
"""Name of the candidate that is what the model does by itself."""

Candidates = Mapping[str, tuple[Rule, ...]]
"""Rules by the name of the candidate."""


def candidates_of(given: Any) -> Candidates:
    """Returns candidates as rules by name.

    >>> list(candidates_of([config.weight_only(4), config.fully_quantized()]))
    ['float x int4', 'int8 x int8']
    >>> list(candidates_of([config.gptq(4, size=32)]))
    ['float x uint4 in blocks of 32, GPTQ']

    Args:
        given: a mapping of names to configs or rules, or a sequence of configs, which
            are named by their grids.

    Raises:
        TypeError: if it is neither.
        ValueError: if there is none, a candidate quantizes nothing, or a name is
            "float".
    """
    if isinstance(given, Mapping):
        named = dict(given)
    elif isinstance(given, config.DotGeneral):
        named = {_name(given): given}
    elif isinstance(given, Sequence) and all(
        isinstance(one, config.DotGeneral) for one in given
    ):
        named = {}
        for cfg in given:
            name, number = _name(cfg), 2
            while name in named:
                name, number = f"{_name(cfg)} ({number})", number + 1
            named[name] = cfg
    else:
        raise TypeError(
            "candidates must be a sequence of configs, such as [config.weight_only(4), "
            "config.weight_only(8)], or a mapping of names to configs or rules, got "
            f"{errors.brief(given)}"
        )
    if not named:
        raise ValueError("candidates has none: give at least one config")
    if FLOAT in named:
        raise ValueError(
            f"a candidate is called {FLOAT!r}, which is the name of the choice to "
            "leave a contraction in float: it is always there"
        )
    found = {str(name): rules_lib.check(rules) for name, rules in named.items()}
    for name, rules in found.items():
        if not any(rule.cfg is not None and rule.cfg.is_quantized for rule in rules):
            raise ValueError(f"the candidate {name!r} quantizes nothing: leave it out")
    return found


def check_not_learned(name: str, plan: Plan) -> None:
    """Checks that the configs of a plan learn no scales.

    Args:
        name: name of the candidate.
        plan: its plan.

    Raises:
        ValueError: if one does.
    """
    for one in plan.quantized():
        if PARAMETERS in collections_of(one.cfg):
            raise ValueError(
                f"the candidate {name!r} has learned scales for "
                f"{errors.quoted(one.path)}, which only training gives: measure one "
                "with scales of each call or from statistics, such as "
                "config.weight_only(bits) or config.static_int8()"
            )


def _name(cfg: config.DotGeneral) -> str:
    grids = [
        tensor.grid.name if tensor.is_quantized else FLOAT
        for tensor in (cfg.fwd.lhs, cfg.fwd.rhs)
    ]
    name, weights = " x ".join(grids), cfg.fwd.rhs
    if weights.blocks is not None and weights.blocks.size is not None:
        name += f" in blocks of {weights.blocks.size}"
    return name if weights.rounding is None else f"{name}, GPTQ"
