"""Rules: which contractions of a program are quantized, and by which config."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

from aqtlite import config
from aqtlite.config import serialization
from aqtlite.jaxpr import registry
from aqtlite.program import patterns, rules_json, rules_qwix

Operands = Literal["any", "weight", "activations"]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A config for the contractions of a program that fulfil some conditions.

    Of several rules, the first one whose conditions a contraction fulfils decides. One
    that fulfils those of none stays in float.

    >>> rules = (
    ...     Rule(path=".*/head", cfg=None),
    ...     Rule(operands="weight", cfg=config.fully_quantized()),
    ... )

    Raises:
        TypeError: if `cfg` is missing or neither a `config.DotGeneral` nor None, or a
            condition is of another type than declared.
        ValueError: if `path` is no regular expression, if another condition has a value
            that it cannot have, or if `cfg` quantizes results, which are arrays.
    """

    path: str = ".*"
    """A regular expression for all of the path of a contraction: the name scopes around
    it (`jax.named_scope`; Flax modules leave their names), joined by slashes; without
    any, the path of the parameter that it contracts. The second contraction of a path
    has ``#1`` at the end, the third ``#2``."""

    op: str | tuple[str, ...] | None = None
    """The function of `jax.lax` that contracts ("dot_general", "conv_general_dilated",
    "ragged_dot"), the name of a kernel or function around it (`register_operation`), or
    a tuple of several; None for any. `jnp.matmul`, `jnp.einsum` and dense layers are
    "dot_general"."""

    cfg: config.DotGeneral | None = dataclasses.field(kw_only=True)
    """How to quantize. ``fwd.rhs`` is the weight of a contraction that has one, on
    whichever side it is. None: not at all. There is no default: a rule without a config
    would leave in float what it names."""

    operands: Operands = "any"
    """"weight": one of the operands, and one alone, depends on nothing but parameters.
    "activations": both depend on more than that."""

    equation: str | None = None
    """A regular expression for the axes of a `dot_general`, written as an einsum's
    equation with letters in the order of the axes of lhs, then rhs: ``"ab,bc->ac"`` is
    a matrix product, ``"abc,cd->abd"`` a dense layer of three axes. None for any."""

    min_size: int = 0
    """How many elements the smaller operand has at least. An operand of a symbolic size
    (`jax.export`) is taken for the larger one."""

    is_required: bool = True
    """A program without any contraction that fulfils the conditions is an error."""

    def __post_init__(self) -> None:
        if self.cfg is not None and not isinstance(self.cfg, config.DotGeneral):
            raise TypeError(
                f"Rule.cfg must be a config.DotGeneral or None, got {self.cfg!r}; "
                "presets such as config.fully_quantized() make one"
            )
        if self.cfg is not None and self.cfg.out.is_quantized:
            raise ValueError(
                "Rule.cfg.out quantizes results, which other equations of the program "
                "take as arrays: leave out=config.Tensor()"
            )
        for name in ("path", "equation"):
            _check_pattern(name, getattr(self, name))
        self._check_op()
        if self.operands not in get_args(Operands):
            raise ValueError(
                f"Rule.operands must be one of {', '.join(get_args(Operands))}, got "
                f"{self.operands!r}"
            )
        if type(self.min_size) is not int or self.min_size < 0:
            raise ValueError(
                f"Rule.min_size must be an integer, not negative, got {self.min_size!r}"
            )
        if not isinstance(self.is_required, bool):
            raise TypeError(
                f"Rule.is_required must be a bool, got {self.is_required!r}"
            )

    def _check_op(self) -> None:
        known = registry.names()
        if self.ops == () or any(one not in known for one in self.ops or ()):
            raise ValueError(
                f"Rule.op must be one of {', '.join(known)}, a tuple of these or None, "
                f"got {self.op!r}; a kernel has to be registered first, by "
                "aqtlite.register_operation"
            )

    @property
    def ops(self) -> tuple[Any, ...] | None:
        """The operations as a tuple; None for any."""
        return self.op if isinstance(self.op, tuple | None) else (self.op,)


def _check_pattern(name: str, pattern: Any) -> None:
    if pattern is None and name != "path":
        return
    if not isinstance(pattern, str):
        raise TypeError(f"Rule.{name} must be a string, got {pattern!r}")
    patterns.check(pattern, f"Rule.{name}")


def check(rules: Any) -> tuple[Rule, ...]:
    """Returns rules as a tuple.

    Args:
        rules: a sequence of rules; one alone; or a config, for every contraction.

    Raises:
        TypeError: if they are none.
    """
    if isinstance(rules, config.DotGeneral):
        return (Rule(cfg=rules),)
    if isinstance(rules, Rule):
        return (rules,)
    if not isinstance(rules, Sequence) or not all(isinstance(r, Rule) for r in rules):
        raise TypeError(
            "rules must be a config.DotGeneral, such as config.fully_quantized(), an "
            "aqtlite.Rule, or a sequence of aqtlite.Rule, such as "
            f"[aqtlite.Rule(cfg=config.fully_quantized())], got {_brief(rules)}"
        )
    return tuple(rules)


def _brief(rules: Any) -> str:
    """What was given, for an error; a config in a list fills a screen."""
    if callable(rules):
        return f"the function {getattr(rules, '__name__', rules)!r}: call it"
    if isinstance(rules, Sequence) and not isinstance(rules, str):
        return f"a {type(rules).__name__} of {[type(r).__name__ for r in rules]}"
    return repr(rules)


def to_json(rules: Sequence[Rule], *, indent: int | None = None) -> str:
    """Writes rules as JSON, every field of them, defaults included.

    >>> rules = (Rule(path=".*/mlp/.*", cfg=config.fully_quantized()),)
    >>> from_json(to_json(rules)) == rules
    True

    Args:
        rules: the rules.
        indent: spaces by which each level is indented; None for a single line.

    Raises:
        TypeError: as `config.to_json`, for a config that holds an object of a class
            that is not registered.
    """
    written = []
    for rule in check(rules):
        fields = rules_json.fields_of(rule)
        if rule.cfg is not None:
            fields["cfg"] = json.loads(config.to_json(rule.cfg))
        written.append(fields)
    return rules_json.write(written, indent)


def from_json(text: str) -> tuple[Rule, ...]:
    """Reads what `to_json` wrote. A condition that is not there takes its default.

    Raises:
        TypeError: if `text` is not a string.
        ValueError: if it is not JSON, not of version 1, or does not describe rules; the
            message names the place.
    """
    return rules_json.read(text, Rule, _arguments)


def from_qwix(rules: Any, *, root: str = "") -> tuple[Rule, ...]:
    """Reads the rules of Qwix, for the same contractions and the same integers.

    Each becomes two, for weights and for two activations, or one that leaves floats, if
    it has no `weight_qtype`. As in Qwix, the first that fits decides, and one that
    matches nothing is none the worse. What differs: the smallest integer (-128 of int8)
    is not used, so that the element with the largest magnitude is -127 where it is
    negative; `bwd_stochastic_rounding` draws noise for each element, and maps the
    largest magnitude to 127, not to 127.5, so that none is biased; and where a
    calibration clips, an integer gets no gradient from 127 on, not from 127.5 on.

    >>> (weight, activations) = from_qwix([{"weight_qtype": "int4"}])
    >>> weight.cfg.fwd.rhs, weight.operands
    (Tensor(numerics=IntSymmetric(bits=4)), 'weight')
    >>> from_qwix([{"module_path": "mlp/.*", "weight_qtype": "int8"}], root="Model")[
    ...     0
    ... ].path.startswith("Model")
    True

    Args:
        rules: objects such as `qwix.QuantizationRule` and `qwix.QtRule`, or mappings of
            their fields; one alone will do. Qwix itself is not imported.
        root: what paths begin with, and `module_path` does not name: for a Linen model
            the name of its class; for an NNX model nothing.

    Raises:
        TypeError: if one is neither.
        ValueError: if a field has no equivalent; the message names it, and what to do.
    """
    is_one = isinstance(rules, Mapping | str) or not isinstance(rules, Iterable)
    several = [rules] if is_one else rules
    return tuple(
        Rule(**fields) for one in several for fields in rules_qwix.read(one, root)
    )


def _arguments(fields: dict[str, Any]) -> dict[str, Any]:
    decoded = dict(fields)
    if isinstance(fields.get("op"), list):
        decoded["op"] = tuple(fields["op"])
    if fields.get("cfg") is not None:
        decoded["cfg"] = serialization.from_data(fields["cfg"], "cfg")
    return decoded
