"""Decides what a conversion freezes, how it is found again, and what it is called."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from aqtlite.flax import discovery, identity, recording
from aqtlite.flax.discovery import Discovery, Refusal
from aqtlite.flax.observing import Key
from aqtlite.flax.placeholder import FrozenKernel, sliced_axes
from aqtlite.flax.recording import Record
from aqtlite.flax.site import Site
from aqtlite.flax.tracing import Call

KeepFloat = Callable[[tuple[str, ...], tuple[int, ...]], bool]
"""Takes a weight's path in the collection "aqt" and the leaves of "params" that it is
made of, and says whether to leave it in float."""

_Frozen = list[frozenset[Key]]
"""For each call, the operands to freeze."""

_Refusals = dict[tuple[int, Key], Refusal]
"""By call and operand."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A weight to freeze."""

    path: tuple[str, ...]
    """Of the module that contracts it."""

    name: str
    site: Site
    record: Record
    """One of those that it was found by."""

    def outputs(self) -> list[int]:
        """The outputs of the record's trace that are its leaves."""
        return jax.tree.leaves(self._outputs())

    def unflatten(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """What lies in the collection "aqt": the site, the integers, ...

        Args:
            leaves: of the entry, as its `outputs`.
        """
        treedef = jax.tree.structure(self._outputs())
        return {"site": self.site, **jax.tree.unflatten(treedef, leaves)}

    def _outputs(self) -> dict[str, Any]:
        outputs = {self.site.operand.side: self.record.qtensor}
        if self.site.identity is None:
            outputs["identity"] = self.record.corners
        return outputs


@dataclasses.dataclass(frozen=True)
class Decision:
    """What to freeze."""

    discoveries: list[Discovery]
    entries: list[Entry]
    removed: frozenset[int]
    """The leaves of "params" that nothing reads but frozen weights."""

    refusals: _Refusals


@dataclasses.dataclass(frozen=True)
class _Group:
    """Records of one weight of one module."""

    members: tuple[tuple[int, Key], ...]
    record: Record
    identity: identity.Identity | None


def decide(
    model: nn.Module,
    variables: Mapping[str, Any],
    calls: Sequence[Call],
    keep_float: KeepFloat,
) -> Decision:
    """Decides what to freeze, from traces alone.

    Args:
        model: the model.
        variables: its float variables, or their shapes.
        calls: the calls that will be served.
        keep_float: which weights not to freeze.

    Raises:
        ValueError: if there is no quantized contraction, or as `discovery.weights`.
    """
    discoveries = [discovery.discover(model, variables, call) for call in calls]
    if not any(one.operands for one in discoveries):
        raise ValueError(
            "nothing to freeze: the method that was called has no AqtDotGeneral or "
            "AqtEinsum with a config that quantizes"
        )
    frozen: _Frozen = []
    refusals: _Refusals = {}
    for i, one in enumerate(discoveries):
        keys, not_weights = discovery.weights(one.operands.values())
        frozen.append(keys)
        refusals.update({(i, key): why for key, why in not_weights.items()})
    sizes = [leaf.size for leaf in jax.tree.leaves(variables["params"])]
    records = [
        recording.record_weights(model, variables, call, keys) if keys else []
        for call, keys in zip(calls, frozen, strict=True)
    ]
    frozen = _refuse(frozen, refusals, _copies(records, sizes))
    names: dict[int, str] = {}
    while True:
        removed = _removed(discoveries, records, frozen)
        identities = _identities(model, variables, calls, records, frozen, removed)
        groups, refused = _grouped(discoveries, records, frozen, removed, identities)
        if not refused:
            # Named and asked for once: what is dropped renames nothing else.
            is_first, names = not names, names or _names(groups, variables["params"])
            entries = _entries(groups, names, discoveries, frozen, variables["params"])
            refused = _kept(groups, entries, keep_float) if is_first else {}
            if not refused:
                return Decision(discoveries, entries, removed, refusals)
        frozen = _refuse(frozen, refusals, refused)


def _refuse(frozen: _Frozen, refusals: _Refusals, refused: _Refusals) -> _Frozen:
    refusals.update(refused)
    return [
        frozenset(key for key in keys if (i, key) not in refused)
        for i, keys in enumerate(frozen)
    ]


def _copies(records: list[list[Record]], sizes: list[int]) -> _Refusals:
    """Weights larger than what they are made of."""
    return {
        (i, record.key): Refusal(
            f"as {record.shape} it is larger than the parameters that it is made of: "
            "they were broadcast, perhaps to a batch"
        )
        for i, of_call in enumerate(records)
        for record in of_call
        if np.prod(record.shape) > sum(sizes[j] for j in record.params)
    }


def _removed(
    discoveries: list[Discovery], records: list[list[Record]], frozen: _Frozen
) -> frozenset[int]:
    made_of = {
        param
        for of_call, keys in zip(records, frozen, strict=True)
        for record in of_call
        if record.key in keys
        for param in record.params
    }
    read = [one.read_params(k) for one, k in zip(discoveries, frozen, strict=True)]
    return frozenset(made_of).difference(*read)


def with_placeholders(
    params: Any, removed: frozenset[int], records: Sequence[Record]
) -> Any:
    """Parameters with a `FrozenKernel` in place of those that are removed.

    Args:
        params: the parameters, boxed or not.
        removed: which of their leaves.
        records: the weights that are frozen.
    """
    nodes, treedef = jax.tree.flatten(params, is_leaf=nn.meta.is_axis_metadata)
    position = 0
    for i, node in enumerate(nodes):
        leaves = jax.tree.leaves(node)
        if len(leaves) == 1 and position in removed:
            shape = tuple(leaves[0].shape)
            made = [record.shape for record in records if position in record.params]
            nodes[i] = FrozenKernel(
                shape, np.dtype(leaves[0].dtype), position, sliced_axes(shape, made)
            )
        position += len(leaves)
    return jax.tree.unflatten(treedef, nodes)


def _identities(
    model: nn.Module,
    variables: Mapping[str, Any],
    calls: Sequence[Call],
    records: list[list[Record]],
    frozen: _Frozen,
    removed: frozenset[int],
) -> list[list[identity.Identity | None]]:
    """For each call, the identities of the records that are frozen."""
    kept = [
        record
        for of_call, keys in zip(records, frozen, strict=True)
        for record in of_call
        if record.key in keys
    ]
    params = with_placeholders(variables["params"], removed, kept)
    serving = {**variables, "params": params}
    return [
        recording.identities(model, serving, call, keys) if keys else []
        for call, keys in zip(calls, frozen, strict=True)
    ]


def _grouped(
    discoveries: list[Discovery],
    records: list[list[Record]],
    frozen: _Frozen,
    removed: frozenset[int],
    identities: list[list[identity.Identity | None]],
) -> tuple[list[_Group], _Refusals]:
    """The distinct weights of each module; and operands that cannot be told apart."""
    groups: list[_Group] = []
    refused: _Refusals = {}
    for i, of_call in enumerate(records):
        kept = [record for record in of_call if record.key in frozen[i]]
        for record, corners in zip(kept, identities[i], strict=True):
            member = i, record.key
            gone = record.params & removed
            if gone and (corners is None or gone != record.params):
                refused[member] = Refusal(
                    "what it is made of could not be told at a call: it mixes elements "
                    "(by a sum or a contraction), differs between the steps of a scan, "
                    "or is partly made of a parameter that stays in float"
                )
                continue
            corners = corners if gone else None
            for index, group in enumerate(groups):
                if _alike(group, record, corners):
                    if not group.record.made_like(record):
                        for one in (*group.members, member):
                            refused[one] = Refusal(
                                "another weight of its module looks the same"
                            )
                    members = (*group.members, member)
                    groups[index] = dataclasses.replace(group, members=members)
                    break
            else:
                groups.append(_Group((member,), record, corners))
    for group in groups:
        if group.identity is None and (
            _is_beside_floats(group.record, discoveries, frozen)
            or any(
                other is not group and _place(other.record) == _place(group.record)
                for other in groups
            )
        ):
            why = Refusal(
                "its parameter is read elsewhere, too, and its module contracts other "
                "operands of this shape"
            )
            refused.update(dict.fromkeys(group.members, why))
    return groups, refused


def _place(record: Record) -> tuple[Any, ...]:
    operand = record.operand
    return record.key.path, operand.side, operand.shape, operand.contracting


def _alike(group: _Group, record: Record, corners: identity.Identity | None) -> bool:
    """Whether serving could not tell a weight from those of a group."""
    first = group.record
    if (first.key.path, first.operand, first.cfg) != (
        record.key.path,
        record.operand,
        record.cfg,
    ):
        return False
    if group.identity is None or corners is None:
        return group.identity is corners
    return identity.same(group.identity, corners, record.operand.dtype)


def _is_beside_floats(
    record: Record, discoveries: list[Discovery], frozen: _Frozen
) -> bool:
    """Whether its module also contracts operands of its shape that are not frozen."""
    return any(
        (one.key.path, one.operand[:3]) == (record.key.path, record.operand[:3])
        for i, found in enumerate(discoveries)
        for one in found.operands.values()
        if one.key not in frozen[i]
    )


def _kept(
    groups: list[_Group], entries: list[Entry], keep_float: KeepFloat
) -> _Refusals:
    refused: _Refusals = {}
    for group, entry in zip(groups, entries, strict=True):
        path = (*entry.path, entry.name, entry.site.operand.side)
        if keep_float(path, tuple(sorted(entry.record.params))):
            why = Refusal("it was to be kept in float", is_expected=True)
            refused.update(dict.fromkeys(group.members, why))
    return refused


def _entries(
    groups: list[_Group],
    names: Mapping[int, str],
    discoveries: list[Discovery],
    frozen: _Frozen,
    params: Any,
) -> list[Entry]:
    paths = param_paths(params)
    entries = []
    for group in groups:
        record = group.record
        made_of = [_relative(paths[i], record.key.path) for i in sorted(record.params)]
        site = Site(
            cfg=record.cfg,
            operand=record.operand,
            identity=group.identity,
            made_of=tuple(".".join(path) for path in made_of),
            beside_floats=_is_beside_floats(record, discoveries, frozen),
        )
        entries.append(Entry(record.key.path, names[id(record)], site, record))
    return entries


def _names(groups: list[_Group], params: Any) -> dict[int, str]:
    """Names every weight, by the id of its record, after what it is made of."""
    paths = param_paths(params)
    taken = {
        path[: i + 1]
        for path in (group.record.key.path for group in groups)
        for i in range(len(path))
    }
    names = {}
    for group in groups:
        record = group.record
        made_of = [_relative(paths[i], record.key.path) for i in sorted(record.params)]
        base = record.name or "+".join(".".join(path) for path in made_of)
        name, repeat = base, 0
        while (*record.key.path, name) in taken:
            repeat += 1
            name = f"{base}_{repeat}"
        taken.add((*record.key.path, name))
        names[id(record)] = name
    return names


def _relative(path: tuple[str, ...], module: tuple[str, ...]) -> tuple[str, ...]:
    return path[len(module) :] if path[: len(module)] == module else path


def param_paths(params: Any) -> list[tuple[str, ...]]:
    """For each leaf of the parameters, its path."""
    nodes = jax.tree_util.tree_flatten_with_path(
        params, is_leaf=nn.meta.is_axis_metadata
    )[0]
    return [
        tuple(str(getattr(key, "key", key)) for key in path)
        for path, node in nodes
        for _ in jax.tree.leaves(node)
    ]
