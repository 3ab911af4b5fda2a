"""Rules: which contractions of a program are quantized, and with which config."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

from aqtlite import config, errors
from aqtlite.config.json import serialization
from aqtlite.jaxpr import registry
from aqtlite.program.rules import patterns, rules_json, rules_qwix
from aqtlite.program.rules.qwix_tensors import MxScales
from aqtlite.quantization.states.state_collections import collections_of

ANY_PATH = ".*"
"""Regular expression of any path."""

Operands = Literal["any", "weight", "activations"]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A config for the contractions of a program that meet some conditions.

    The first rule whose conditions a contraction meets decides. A contraction that no
    rule matches stays in float.

    >>> rules = (
    ...     Rule(path=".*/head", cfg=None),
    ...     Rule(operands="weight", cfg=config.fully_quantized()),
    ... )

    Raises:
        TypeError: if `cfg` is missing or neither a `config.DotGeneral` nor None, or a
            condition is of another type than declared.
        ValueError: if `path` is not a regular expression, if another condition has an
            invalid value, or if `cfg` quantizes results (``cfg.out``).
    """

    path: str = ANY_PATH
    """Regular expression for the whole path of a contraction: the path of its module of
    Flax, and the name scopes inside of the module (`jax.named_scope`; `jnp.einsum` adds
    its equation), joined by slashes; without any, the path of the parameter that it
    contracts. In models of Linen, the name of the class comes first. The second
    contraction with a path has ``#1`` at the end, the third ``#2``."""

    op: str | tuple[str, ...] | None = None
    """Function of `jax.lax` that contracts ("dot_general", "conv_general_dilated",
    "ragged_dot"), name of a kernel or function around it (`register_operation`), or a
    tuple of several; None for any. `jnp.matmul`, `jnp.einsum` and dense layers are
    "dot_general". "take", which must be named, is a lookup of rows in a matrix of
    parameters (``table[indices]``, `jnp.take`, `nn.Embed`): ``cfg.fwd.rhs`` quantizes
    the table, with a gradient straight through. A contraction to whose weight its rule
    gives the same ``fwd.rhs``, as that of tied logits, reads the same integers."""

    cfg: config.DotGeneral | None = dataclasses.field(kw_only=True)
    """Config for the matching contractions; None keeps them in float. ``fwd.rhs``
    applies to the weight, if there is one, on whichever side it is. There is no
    default, so that no contraction stays in float because a config was forgotten."""

    operands: Operands = "any"
    """"weight": exactly one operand depends only on parameters. "activations": neither
    does."""

    equation: str | None = None
    """Regular expression for the axes of a `dot_general`, written as an einsum equation
    with letters in the order of the axes of lhs, then rhs: ``"ab,bc->ac"`` is a matrix
    product, ``"abc,cd->abd"`` a dense layer with inputs of three axes. None for any."""

    min_size: int = 0
    """Minimum number of elements of the smaller operand. An operand of symbolic size
    (`jax.export`) counts as the larger one."""

    module: str | None = None
    """Regular expression for the whole path of the module of Flax that contracts, in
    its model: ``layers_0/mlp``, without the name of a class, scopes or equations. Of
    other functions, for the name scopes without equations. None for any."""

    parameter: str | None = dataclasses.field(default=None, kw_only=True)
    """Regular expression for the whole path of a parameter that the contraction reads
    as a weight: ``layers/0/up/lora_a``, in Linen without the collection. It tells apart
    contractions of one module. None for any."""

    adapter: config.Lora | None = dataclasses.field(default=None, kw_only=True)
    """Adapter of the weight, which is then frozen: asking for its gradient raises. Only
    contractions with exactly one weight meet the conditions. The adapter's parameters
    are in "params" of the states of calibrations; of NNX, `flax.nnx.LoRAParam`s."""

    is_required: bool = True
    """Whether it is an error if no contraction of a program meets the conditions, or if
    the rule has a `path`, a `module` or an `op`, and earlier rules decide about all
    that do."""

    group: str | None = None
    """Name that alternatives have in common, such as one rule for weights and one for
    activations: it is enough if one of a group is of use. None: it is by itself."""

    def __post_init__(self) -> None:
        if self.cfg is not None and not isinstance(self.cfg, config.DotGeneral):
            raise TypeError(
                f"Rule.cfg must be a config.DotGeneral or None, got "
                f"{errors.brief(self.cfg)}; "
                "presets such as config.fully_quantized() make one"
            )
        if not isinstance(self.adapter, config.Lora | None):
            raise TypeError(
                "Rule.adapter must be a config.Lora or None, got "
                f"{errors.brief(self.adapter)}"
            )
        if self.adapter is not None and self.operands == "activations":
            raise ValueError(
                'Rule.adapter is for a weight, and operands="activations" names '
                'contractions without one: leave it out, or set it to "weight"'
            )
        if self.adapter is not None and registry.LOOKUP in (self.ops or ()):
            raise ValueError(
                f"Rule.adapter is for contractions, and op={self.op!r} names lookups: "
                "give these a rule of their own"
            )
        if self.cfg is not None and self.cfg.out.is_quantized:
            raise ValueError(
                "Rule.cfg.out quantizes results, which other equations of the program "
                "take as arrays: leave out=config.Tensor()"
            )
        for name in ("path", "equation", "module", "parameter"):
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
        if self.group is not None and not isinstance(self.group, str):
            raise TypeError(f"Rule.group must be a string, got {self.group!r}")
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
    def has_state(self) -> bool:
        """Whether it has an adapter, or a calibration with statistics or parameters."""
        has_calibrations = self.cfg is not None and bool(collections_of(self.cfg))
        return has_calibrations or self.adapter is not None

    @property
    def ops(self) -> tuple[Any, ...] | None:
        """`op` as a tuple; None for any."""
        return self.op if isinstance(self.op, tuple | None) else (self.op,)


def _check_pattern(name: str, pattern: Any) -> None:
    if pattern == (ANY_PATH if name == "path" else None):
        return
    if not isinstance(pattern, str):
        raise TypeError(f"Rule.{name} must be a string, got {pattern!r}")
    patterns.check(pattern, f"Rule.{name}")


def check(rules: Any) -> tuple[Rule, ...]:
    """Returns rules as a tuple.

    Args:
        rules: a sequence of rules, a single rule, or a config for every contraction.

    Raises:
        TypeError: if it is none of these.
    """
    if isinstance(rules, config.DotGeneral):
        return (Rule(cfg=rules),)
    if isinstance(rules, Rule):
        return (rules,)
    if not isinstance(rules, Sequence) or not all(isinstance(r, Rule) for r in rules):
        remedy = "; aqtlite.rules.from_qwix reads rules of Qwix"
        raise TypeError(
            "rules must be a config.DotGeneral, such as config.fully_quantized(), an "
            "aqtlite.Rule, or a sequence of aqtlite.Rule, such as "
            f"[aqtlite.Rule(cfg=config.fully_quantized())], got {_brief(rules)}"
            f"{remedy if _are_of_qwix(rules) else ''}"
        )
    return tuple(rules)


def _brief(rules: Any) -> str:
    """Describes a wrong argument for a message; the repr of configs would be long."""
    if callable(rules) and hasattr(rules, "__name__"):
        return f"the function {rules.__name__!r}: call it"
    if isinstance(rules, Sequence) and not isinstance(rules, str):
        return f"a {type(rules).__name__} of {[errors.class_of(r) for r in rules]}"
    return errors.brief(rules)


def _are_of_qwix(rules: Any) -> bool:
    """Whether a wrong argument looks like rules, or a provider, of Qwix."""
    ones = rules if isinstance(rules, Sequence) else [rules]
    return any(
        type(rule).__module__.startswith("qwix.")
        or (isinstance(rule, Mapping) and {"module_path", "weight_qtype"} & {*rule})
        for rule in ones
    )


def to_json(rules: Sequence[Rule], *, indent: int | None = None) -> str:
    """Writes rules as JSON with all their fields, including defaults.

    >>> rules = (Rule(path=".*/mlp/.*", cfg=config.fully_quantized()),)
    >>> from_json(to_json(rules)) == rules
    True

    Args:
        rules: the rules.
        indent: spaces per level of indentation; None for a single line.

    Raises:
        TypeError: if a config holds an object of an unregistered class, as in
            `config.to_json`.
    """
    written = []
    for rule in check(rules):
        fields = rules_json.fields_of(rule)
        if rule.cfg is not None:
            fields["cfg"] = json.loads(config.to_json(rule.cfg))
        if rule.adapter is not None:
            fields["adapter"] = json.loads(config.to_json(rule.adapter))
        written.append(fields)
    return rules_json.write(written, indent)


def from_json(text: str) -> tuple[Rule, ...]:
    """Reads rules from the JSON of `to_json`. Missing conditions take their defaults.

    Raises:
        TypeError: if `text` is not a string.
        ValueError: if it is not JSON, not of version 1, or does not describe rules; the
            message names the place.
    """
    return rules_json.read(text, Rule, _arguments)


def from_qwix(
    rules: Any, *, root: str = "", mx_scales: MxScales = "overflow_aware"
) -> tuple[Rule, ...]:
    """Converts rules of Qwix to rules for the same contractions and integers.

    Each rule becomes two, one for weights and one for pairs of activations; or one that
    keeps floats, if it has no `weight_qtype`. As in Qwix, the first match decides, and
    `module_path` is the path of a module (`Rule.module`). Unlike there, a rule that is
    of no use is an error. The differences in results:

    - The smallest integer (-128 of int8) is not used: a negative element of the largest
      magnitude becomes -127.
    - `bwd_stochastic_rounding` draws noise for each element, and maps the largest
      magnitude to 127, not 127.5, so that rounding is unbiased.
    - Where a calibration clips, the gradient is zero from 127 on, not from 127.5.
    - `lora_a_initializer` of a `qwix.LoraRule` is not read: see `config.Lora`.

    >>> (weight, activations) = from_qwix([{"weight_qtype": "int4"}])
    >>> weight.cfg.fwd.rhs, weight.operands
    (Tensor(numerics=IntSymmetric(bits=4)), 'weight')

    Args:
        rules: objects such as `qwix.QuantizationRule` and `qwix.QtRule`, or mappings of
            their fields; a sequence or a single one. Qwix itself is not imported.
        root: name of the class of the Linen model that they are for; with another one
            they match nothing. Empty for any model.
        mx_scales: scales of mxfp8 and mxfp4. "overflow_aware": as Qwix has them since
            August 2026 (`calibration.OverflowAware`). "ceil": as in the release 0.1.8
            and before, which clip nothing.

    Raises:
        TypeError: if a rule is neither.
        ValueError: if a field has no equivalent; the message names the field and a
            remedy. If `mx_scales` is unknown.
    """
    if mx_scales not in get_args(MxScales):
        raise ValueError(
            f"from_qwix: mx_scales must be one of {', '.join(get_args(MxScales))}, got "
            f"{mx_scales!r}"
        )
    is_one = isinstance(rules, Mapping | str) or not isinstance(rules, Iterable)
    several = [rules] if is_one else rules
    return tuple(
        Rule(**fields, group=f"rule {number} of Qwix")
        for number, one in enumerate(several)
        for fields in rules_qwix.read(one, root, mx_scales)
    )


def _arguments(fields: dict[str, Any]) -> dict[str, Any]:
    decoded = dict(fields)
    if isinstance(fields.get("op"), list):
        decoded["op"] = tuple(fields["op"])
    if fields.get("cfg") is not None:
        decoded["cfg"] = serialization.from_data(fields["cfg"], "cfg")
    if fields.get("adapter") is not None:
        adapter = serialization.from_data(fields["adapter"], "adapter")
        decoded["adapter"] = adapter
    return decoded
