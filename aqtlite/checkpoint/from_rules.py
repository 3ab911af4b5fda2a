"""Freezing parameters by their path, without a model."""

import dataclasses
import fnmatch
import functools
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import aqtlite
from aqtlite import config
from aqtlite.checkpoint.arrays import ArrayInfo
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.job import Job, Task
from aqtlite.checkpoint.manifest import Frozen, Manifest, Node, Plain, Stored, Value
from aqtlite.checkpoint.names import plain
from aqtlite.checkpoint.sources import Source
from aqtlite.serving.conversion import FrozenWeight, signal_and_noise


@dataclasses.dataclass(frozen=True)
class Rule:
    """Which parameters to freeze, and how.

    >>> Rule("params/*/kernel", contracting=(0,)).tensor.numerics.bits
    8
    """

    pattern: str
    """Of the path, its steps joined by slashes, with the wildcards of a shell; ``*``
    matches slashes too."""

    contracting: tuple[int, ...]
    """The axes that contractions sum over, and that share a scale."""

    tensor: config.Tensor = config.weight_only(bits=8).fwd.rhs


def rules_from_json(text: str) -> tuple[Rule, ...]:
    """Reads rules: a list of objects, of which the first that matches counts.

    ``{"pattern": "params/*/kernel", "contracting": [0], "bits": 8}``, or with
    ``"tensor"``, a config as `config.to_json` writes it, in place of ``"bits"``.

    Raises:
        CheckpointError: if the text is anything else.

    >>> rules_from_json('[{"pattern": "*/kernel", "contracting": [0]}]')[0].contracting
    (0,)
    """
    try:
        entries = json.loads(text)
        if not isinstance(entries, list) or not entries:
            raise TypeError(f"it is {text.strip()[:40]!r}")
        return tuple(_rule(entry) for entry in entries)
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
    ) as error:
        raise CheckpointError(
            'rules are a JSON list of {"pattern": ..., "contracting": [...], '
            f'"bits": 8 or "tensor": ...}}: {type(error).__name__}: {error}'
        ) from error


def _rule(entry: Any) -> Rule:
    unknown = set(entry) - {"pattern", "contracting", "bits", "tensor"}
    if unknown:
        raise ValueError(f"unknown {', '.join(sorted(unknown))} in {entry}")
    if not all(type(axis) is int for axis in entry["contracting"]):
        raise TypeError(f"contracting is {entry['contracting']!r}")
    contracting = tuple(entry["contracting"])
    if "tensor" in entry:
        tensor = config.from_json(json.dumps(entry["tensor"]))
        if not isinstance(tensor, config.Tensor) or not tensor.is_quantized:
            raise ValueError(f"the tensor of {entry} is no Tensor that quantizes")
    else:
        tensor = config.weight_only(bits=entry.get("bits", 8)).fwd.rhs
    return Rule(str(entry["pattern"]), contracting, tensor)


def job_from_rules(source: Source, rules: Sequence[Rule]) -> Job:
    """Plans to freeze what the rules name, in place, and to copy the rest.

    Raises:
        CheckpointError: if a rule matches nothing, or nothing that it can freeze.
    """
    nodes: dict[str, Node] = {}
    arrays: dict[str, Stored] = {}
    tasks: list[Task] = []
    copies: dict[str, str] = {}
    used: set[Rule] = set()

    def rule_for(name: str) -> Rule | None:
        matching = (r for r in rules if fnmatch.fnmatchcase(plain(name), r.pattern))
        return next(matching, None)

    for name, value in source.values.items():
        if rule := rule_for(name):
            raise CheckpointError(
                f"the rule {rule.pattern!r} cannot freeze {name}, which is no array: "
                f"{value!r}"
            )
        nodes[name] = Value(value)
    for name, info in source.arrays.items():
        rule = rule_for(name)
        if rule is None:
            nodes[name], arrays[name], copies[name] = Plain(name), Stored(info), name
            continue
        used.add(rule)
        task, nodes[name] = _task(name, info, rule)
        tasks.append(task)
        arrays.update({n: Stored(i) for n, i in task.fields.values()})
    unused = [rule.pattern for rule in rules if rule not in used]
    if unused:
        raise CheckpointError(
            f"no array matches {', '.join(unused)}; there are "
            f"{', '.join(sorted(source.arrays)[:8])}, ..."
        )
    return Job(Manifest(nodes, arrays), tuple(tasks), copies)


def _task(name: str, info: ArrayInfo, rule: Rule) -> tuple[Task, Frozen]:
    axes = tuple(sorted(axis % max(len(info.shape), 1) for axis in rule.contracting))
    others = (axis for axis in range(len(info.shape)) if axis not in axes)
    make = jax.jit(
        functools.partial(
            _make, tensor=rule.tensor, axes=rule.contracting, order=(*others, *axes)
        )
    )
    shape = jax.ShapeDtypeStruct(info.shape, info.dtype)
    try:
        made = jax.eval_shape(make, shape)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the rule {rule.pattern!r} cannot freeze {name}, {info}: {error}"
        ) from error
    fields = {
        field: (f"{name}/{field}", ArrayInfo(tuple(x.shape), jnp.dtype(x.dtype)))
        for field, x in (("qvalue", made.qtensor.qvalue), ("scale", made.qtensor.scale))
    }
    node = Frozen(
        qvalue=fields["qvalue"][0],
        scale=fields["scale"][0],
        dtype=info.dtype,
        order=made.qtensor.order,
        origin={name: info},
        grid=grid_name(rule.tensor),
    )
    return Task(name, (name,), fields, make), node


def _make(x: jax.Array, *, tensor, axes, order) -> FrozenWeight:
    qtensor = aqtlite.quantize(x, tensor, axes).stored_in(order)
    return FrozenWeight(qtensor, *signal_and_noise(x, qtensor))


def grid_name(tensor: config.Tensor) -> str:
    """A grid in a word, such as "int8"."""
    bits = getattr(tensor.numerics, "bits", None)
    return f"int{bits}" if bits else type(tensor.numerics).__name__
