"""Trip counts of the loops of a compiled program."""

import re
from collections.abc import Mapping, Sequence

Caller = tuple[str, int]
"""Name of the computation that calls another one, and how often it does."""

_CALLED = re.compile(
    r"(?:to_apply|body|condition|calls|branch_computations|true_computation|"
    r"false_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)
_KNOWN = re.compile(r'known_trip_count.*?"n":"(\d+)"')
_WHILE = re.compile(
    r" while\(%?([\w.\-]+)\), condition=%?([\w.\-]+), body=%?([\w.\-]+)"
)
_INSTRUCTION = re.compile(
    r"^\s*(ROOT )?%?([\w.\-]+) = .*? ([\w\-]+)\(([^()]*)\)(?:, index=(\d+))?"
)


def called(line: str) -> list[str]:
    """Names of the computations that an instruction calls."""
    return [
        name
        for match in _CALLED.finditer(line)
        for name in re.findall(r"[\w.\-]+", match[1])
    ]


def callers(program: Mapping[str, Sequence[str]]) -> dict[str, Caller]:
    """The caller of each computation; a loop calls its body for each trip."""
    found: dict[str, Caller] = {}
    for inside, lines in program.items():
        for line in lines:
            trips = trip_count(line, inside, program)
            found.update(dict.fromkeys(called(line), (inside, trips)))
    return found


def times(computation: str, callers: Mapping[str, Caller]) -> int:
    """Executions of a computation: the product of the trips of the loops around it."""
    result = 1
    while computation in callers:
        computation, trips = callers[computation]
        result *= trips
    return result


def trip_count(
    line: str, computation: str, program: Mapping[str, Sequence[str]]
) -> int:
    """Trip count of a while loop; 1 for other instructions.

    XLA states it, except for TPUs. There it follows from a counter: an element of the
    loop's state that starts at a constant, grows by a constant, and ends at one.

    Args:
        line: the instruction.
        computation: name of the computation that contains it.
        program: lines of each computation.

    Raises:
        ValueError: if the loop has no such counter.
    """
    if known := _KNOWN.search(line):
        return int(known[1])
    if (loop := _WHILE.search(line)) is None:
        return 1
    condition, body = (_Computation(program[name]) for name in loop.groups()[1:])
    before = _Computation(program[computation])
    _, compared = condition.root
    counter, limit = compared
    index = condition.index(counter)
    _, after = body.root
    _, step = body.instructions[after[index]]
    _, start = before.instructions[loop[1]]
    stop = condition.constant(limit)
    by = next(body.constant(one) for one in step if body.is_constant(one))
    return -(-(stop - before.constant(start[index])) // by)


class _Computation:
    """Instructions of a computation: operation and operands, by name."""

    def __init__(self, lines: Sequence[str]):
        self.instructions: dict[str, tuple[str, list[str]]] = {}
        self._indices: dict[str, int] = {}
        for line in lines:
            if match := _INSTRUCTION.match(line):
                is_root, name, operation, operands, index = match.groups()
                arguments = re.sub(r"/\*.*?\*/|[%\s]", "", operands).split(",")
                self.instructions[name] = operation, arguments
                if index is not None:
                    self._indices[name] = int(index)
                if is_root:
                    self.root = self.instructions[name]

    def index(self, name: str) -> int:
        """Element of a tuple that an instruction takes."""
        return self._indices[name]

    def is_constant(self, name: str) -> bool:
        """Whether an instruction is a constant, or a copy of one."""
        operation, (first, *_) = self.instructions[name]
        if operation == "copy":
            return self.is_constant(first)
        return operation == "constant"

    def constant(self, name: str) -> int:
        """Value of a constant."""
        operation, (first, *_) = self.instructions[name]
        if operation == "copy":
            return self.constant(first)
        if operation != "constant":
            raise ValueError(f"the counter of a loop depends on {operation} {name}")
        return int(first)
