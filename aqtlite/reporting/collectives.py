"""What devices exchange in a compiled program."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence

from aqtlite.reporting import hlo
from aqtlite.reporting.hlo import Array, Instruction, Module, Run

_OPS = frozenset(
    {
        *("all-gather", "all-reduce", "all-to-all", "collective-broadcast"),
        *("collective-permute", "ragged-all-to-all", "reduce-scatter"),
    }
)
_GROUP_LIST = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_GROUP_IOTA = re.compile(r"replica_groups=\[\d+,(\d+)\]")
_GROUP_MESH = re.compile(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\S+)? \{(.*?)\}")
_MESH_AXIS = re.compile(r"'(\w+)'=(\d+)")
_AXIS_OF_GROUP = re.compile(r"'(\w+)'(?::\(\d+\)(\d+))?")
_CHANNEL = re.compile(r"channel_id=(\d+)")


@dataclasses.dataclass(frozen=True)
class Collective:
    """An exchange between devices."""

    op: str
    """As XLA names it: "all-gather", "all-reduce", ..."""

    dtype: str
    """Dtype of what travels: of its largest result."""

    bytes: int
    """Bytes of its results on one device, or of its operands if they have more."""

    times: int
    """How often it runs in a call, as far as trip counts are known."""

    path: str
    """Path of the contraction in whose scope it is; empty for none."""

    devices: int
    """Devices of a group, which exchange with each other."""

    sent: int
    """Bytes that one device sends in a call, with rings of devices."""

    results: tuple[Array, ...]
    """Its results on one device."""


def find(module: Module, path_of: Callable[[str], str]) -> list[Collective]:
    """Returns the collectives of a program, in its order.

    Of the branches of a conditional, those of the branch that sends least: sums of a
    large batch have another one, for what does not fit int32.

    Args:
        module: the program.
        path_of: function from what JAX calls an operation to the path of the
            contraction around it.
    """
    return list(_in_run(module, module.runs()[0], path_of, set()))


def of_text(text: str) -> list[Collective]:
    """Returns the collectives of a program, given as ``compiled.as_text()``.

    Raises:
        ValueError: if the text is not HLO.
    """
    return find(hlo.parse(text), lambda op_name: "")


def _in_run(
    module: Module, run: Run, path_of: Callable[[str], str], seen: set[str]
) -> Iterator[Collective]:
    """Yields the collectives of a computation, and of those that it calls.

    Args:
        module: the program.
        run: the computation.
        path_of: as for `find`.
        seen: channels of collectives that were yielded, of this loop. Programs for TPUs
            repeat an asynchronous collective in each kernel that overlaps with it.
    """
    for one in run.computation.instructions.values():
        if one.opcode.removesuffix("-start") in _OPS and one.types:
            channel = _CHANNEL.search(one.attributes)
            if channel is None or channel[1] not in seen:
                yield _of_instruction(one, run, path_of, module.devices)
            seen.update(channel.groups() if channel else ())
        elif one.opcode == "conditional":
            branches = [
                list(_in_run(module, inner, path_of, set(seen)))
                for inner in module.called_by(one, run)
            ]
            yield from min(branches, key=_sent, default=[])
        else:
            for inner in module.called_by(one, run):
                of_loop = set[str]() if one.opcode == "while" else seen
                yield from _in_run(module, inner, path_of, of_loop)


def _sent(found: Sequence[Collective]) -> int:
    return sum(one.sent for one in found)


def _of_instruction(
    one: Instruction, run: Run, path_of: Callable[[str], str], devices: int
) -> Collective:
    op = one.opcode.removesuffix("-start")
    results = _results(one, op)
    size = sum(x.bytes for x in results)
    given = [run.computation.operand(one, i) for i in range(len(one.operands))]
    group = _group(one.attributes, devices)
    return Collective(
        op=op,
        dtype=max(results, key=lambda x: x.bytes).dtype,
        bytes=max(size, sum(x.bytes for x in given if x is not None)),
        times=run.times,
        path=path_of(run.op_name(_named(one, run))) if one.op_name else "",
        devices=group,
        sent=_sent_by_one(op, size * run.times, group),
        results=results,
    )


def _named(one: Instruction, run: Run) -> Instruction:
    """Returns a collective, or what reads it if it is only named like an argument.

    JAX 0.12 names the gather of an argument so, whatever scope asked for it.
    """
    while "/" not in run.op_name(one):
        instructions = run.computation.instructions.values()
        reader = next((x for x in instructions if one.name in x.operands), None)
        if reader is None:
            break
        one = reader
    return one


def _results(one: Instruction, op: str) -> tuple[Array, ...]:
    """Returns the results; the start of an exchange returns its operands, too."""
    if one.opcode == op:
        return one.types
    if op in ("all-gather", "reduce-scatter"):
        return one.types[len(one.types) // 2 :]
    if op == "collective-permute":
        # Between the operand and the state of the transfer.
        return one.types[1:2] or one.types
    return one.types


def _sent_by_one(op: str, size: int, devices: int) -> int:
    """Returns the bytes that a device sends, given those of the results."""
    others = devices - 1
    if op == "all-reduce":  # A reduce-scatter, then an all-gather.
        return 2 * size * others // devices
    if op == "reduce-scatter":
        return size * others
    if op in ("all-gather", "all-to-all", "ragged-all-to-all"):
        return size * others // devices
    return size


def _group(attributes: str, devices: int) -> int:
    """Returns the number of devices of a group, among all `devices`."""
    if named := _GROUP_MESH.search(attributes):
        sizes = {axis: int(size) for axis, size in _MESH_AXIS.findall(named[1])}
        return math.prod(
            int(part) if part else sizes[axis]
            for axis, part in _AXIS_OF_GROUP.findall(named[2])
        )
    if iota := _GROUP_IOTA.search(attributes):
        return int(iota[1])
    if listed := _GROUP_LIST.search(attributes):
        return len(listed[1].split(","))
    return devices
