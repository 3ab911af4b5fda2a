"""Collectives of a compiled program, read from its HLO text."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from benchmarks.collectives import loops
from benchmarks.harness import programs
from benchmarks.harness.programs import Array


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled program."""

    kind: str
    results: tuple[Array, ...]
    """Dtype and shape of each result."""
    times: int = 1
    """Executions: the product of the trip counts of the enclosing loops."""
    devices: int = 2
    """Devices of a group, which exchange with each other."""

    @property
    def largest(self) -> Array:
        """Dtype and shape of the largest result."""
        return max(self.results, key=programs.bytes_of)

    @property
    def bytes(self) -> int:
        """Bytes of the results on one device, over all executions."""
        return self.times * sum(map(programs.bytes_of, self.results))

    @property
    def sent(self) -> int:
        """Bytes that one device sends over all executions, with rings of devices."""
        others = self.devices - 1
        if self.kind == "all-reduce":  # A reduce-scatter, then an all-gather.
            return 2 * self.bytes * others // self.devices
        if self.kind == "reduce-scatter":
            return self.bytes * others
        if self.kind in ("all-gather", "all-to-all", "ragged-all-to-all"):
            return self.bytes * others // self.devices
        return self.bytes


_KINDS = (
    "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|"
    "collective-broadcast|ragged-all-to-all"
)
_COLLECTIVE = re.compile(rf" = (.*?) ({_KINDS})(-start)?\(")
_PARTITIONS = re.compile(r"num_partitions=(\d+)")
_GROUP_LIST = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_GROUP_IOTA = re.compile(r"replica_groups=\[\d+,(\d+)\]")
_GROUP_MESH = re.compile(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}")
_MESH_AXIS = re.compile(r"'(\w+)'=(\d+)")
_AXIS_OF_GROUP = re.compile(r"'(\w+)'(?::\(\d+\)(\d+))?")
_CHANNEL = re.compile(r"channel_id=(\d+)")


def count(hlo: str) -> list[Collective]:
    """Collectives of a compiled program, given as `compiled.as_text()`.

    Of the branches of a conditional, those of the one that sends least: aqtlite's sums
    of a large batch have another one, for sums that do not fit int32.
    """
    computations = programs.computations(hlo)
    callers = loops.callers(computations)
    conditionals = [
        loops.called(line)
        for lines in computations.values()
        for line in lines
        if " conditional(" in line
    ]
    found: dict[tuple[str, str], tuple[str, Collective]] = {}
    devices = int(match[1]) if (match := _PARTITIONS.search(hlo)) else 1
    for inside, lines in computations.items():
        for number, line in enumerate(lines):
            if (match := _COLLECTIVE.search(line)) is None:
                continue
            # TPU programs repeat an asynchronous collective in each kernel that
            # overlaps with it.
            channel = _CHANNEL.search(line)
            name = channel[1] if channel else f"{inside} {number}"
            one = Collective(
                match[2],
                _results(match),
                devices=_group(line, devices),
            )
            found.setdefault((_loop(inside, callers), name), (inside, one))
    counted = [
        (computation, dataclasses.replace(one, times=loops.times(computation, callers)))
        for computation, one in found.values()
    ]
    for branches in conditionals:
        counted = _without_dear_branches(branches, counted, callers)
    return [one for _, one in counted]


def _without_dear_branches(
    branches: Sequence[str],
    counted: Sequence[tuple[str, Collective]],
    callers: Mapping[str, loops.Caller],
) -> list[tuple[str, Collective]]:
    """Leaves out the branches of a conditional but the one that sends least."""

    def branch_of(computation: str) -> str | None:
        while computation not in branches:
            if computation not in callers:
                return None
            computation, _ = callers[computation]
        return computation

    sent = dict.fromkeys(branches, 0)
    for computation, one in counted:
        if (branch := branch_of(computation)) is not None:
            sent[branch] += one.sent
    taken = min(branches, key=lambda name: sent[name])
    return [pair for pair in counted if branch_of(pair[0]) in (None, taken)]


def _results(match: re.Match[str]) -> tuple[Array, ...]:
    results = programs.arrays(match[1])
    _, kind, is_start = match.groups()
    if is_start and kind in ("all-gather", "reduce-scatter"):
        return results[len(results) // 2 :]  # After the operands.
    if is_start and kind == "collective-permute":
        return results[1:2]  # Between the operand and the state of the transfer.
    return results


def _group(line: str, devices: int) -> int:
    """Devices of a group of a collective, among all `devices`."""
    if named := _GROUP_MESH.search(line):
        sizes = {axis: int(size) for axis, size in _MESH_AXIS.findall(named[1])}
        return math.prod(
            int(part) if part else sizes[axis]
            for axis, part in _AXIS_OF_GROUP.findall(named[2])
        )
    if iota := _GROUP_IOTA.search(line):
        return int(iota[1])
    if listed := _GROUP_LIST.search(line):
        return len(listed[1].split(","))
    return devices


def _loop(computation: str, callers: Mapping[str, loops.Caller]) -> str:
    """The innermost body of a loop around a computation, or the program itself."""
    while computation in callers:
        caller, trips = callers[computation]
        if trips > 1:
            return computation
        computation = caller
    return computation
