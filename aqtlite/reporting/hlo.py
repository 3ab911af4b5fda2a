"""Reads the text of HLO modules: instructions, their types, and how often they run.

XLA prints programs as text for people, in a form that differs a little between what JAX
lowers and what a compiler returns; both are read. What is not understood is skipped: an
instruction has an opcode, types and operands, and its other attributes stay text.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](\{[^{}]*\})?")
_COMMENT = re.compile(r"/\*.*?\*/")
_OP_NAME = re.compile(r'metadata=\{[^{}]*?op_name="((?:[^"\\]|\\.)*)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(
    r"\b(calls|to_apply|condition|body|true_computation|false_computation|"
    r"branch_computations|called_computations)=(\{[^{}]*\}|%?[\w.\-]+)"
)
_INDEX = re.compile(r"\bindex=(\d+)")
_INTEGER = re.compile(r"-?\d+")
_NAME = re.compile(r"^HloModule ([\w.\-]+)", re.MULTILINE)
_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")
_PREFIXES = {"s": "int", "u": "uint", "f": "float", "bf": "bfloat", "c": "complex"}


@dataclasses.dataclass(frozen=True)
class Array:
    """The type of an array."""

    dtype: str
    """As JAX names it: "int8", "float8_e4m3fn"."""

    shape: tuple[int, ...]
    bits: int
    """Bits of an element in memory."""

    layout: tuple[int, ...] = dataclasses.field(default=(), compare=False)
    """Its axes, beginning with the one along which neighbours in memory lie; empty if
    the text does not say."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes in memory, without padding."""
        return -(-self.size * self.bits // 8)

    @property
    def is_float(self) -> bool:
        """Whether it holds floats of at least 16 bits."""
        return self.bits >= 16 and self.dtype.startswith(("float", "bfloat"))

    @property
    def is_narrow(self) -> bool:
        """Whether it holds numbers of at most 8 bits."""
        return self.bits <= 8 and self.dtype != "bool"

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction."""

    name: str
    opcode: str
    types: tuple[Array, ...]
    """Types of the arrays of its result, several of a tuple."""

    operands: tuple[str, ...]
    """Names of its operands."""

    literal: str
    """The text in the place of the operands."""

    attributes: str
    is_root: bool

    @functools.cached_property
    def op_name(self) -> str:
        """What JAX calls the operation: its functions, scopes and primitive."""
        found = _OP_NAME.search(self.attributes)
        return found[1] if found else ""

    @functools.cached_property
    def called(self) -> dict[str, tuple[str, ...]]:
        """Names of the computations that it calls, by attribute."""
        return {
            how: tuple(x.strip(" %") for x in names.strip("{}").split(","))
            for how, names in _CALLED.findall(self.attributes)
        }

    @property
    def trips(self) -> int | None:
        """Number of iterations of a loop; None if the compiler does not know it."""
        found = _TRIPS.search(self.attributes)
        return int(found[1]) if found else None

    @property
    def bytes(self) -> int:
        """Bytes of its result."""
        return sum(one.bytes for one in self.types)

    @property
    def index(self) -> int | None:
        """The element of a tuple that it takes; None for other instructions."""
        found = _INDEX.search(self.attributes)
        return int(found[1]) if found else None

    def dims(self, attribute: str) -> tuple[int, ...]:
        """Returns a list of axes among the attributes, as ``dimensions={0,1}``."""
        found = re.search(rf"\b{attribute}=\{{([\d,]*)\}}", self.attributes)
        return tuple(map(int, found[1].split(","))) if found and found[1] else ()


@dataclasses.dataclass(frozen=True)
class Computation:
    """A computation: the program, the body of a loop, a fusion."""

    name: str
    instructions: Mapping[str, Instruction]

    def operand(self, one: Instruction, index: int) -> Instruction | None:
        """Returns the instruction that makes an operand; None if it is not here."""
        if index >= len(one.operands):
            return None
        return self.instructions.get(one.operands[index])

    def constant(self, one: Instruction, index: int) -> int | None:
        """Returns the integer that an operand is; None for other values."""
        found = self.operand(one, index)
        while found is not None and found.opcode == "copy":
            found = self.operand(found, 0)
        if found is None or found.opcode != "constant":
            return None
        return int(found.literal) if _INTEGER.fullmatch(found.literal) else None

    @functools.cached_property
    def root(self) -> Instruction | None:
        """The instruction that gives the result."""
        return next((x for x in self.instructions.values() if x.is_root), None)


@dataclasses.dataclass(frozen=True)
class Run:
    """A computation that the program runs."""

    computation: Computation
    times: int
    """How often, as far as trip counts are known; branches count as taken."""

    is_known: bool
    """Whether all trip counts around it are known."""

    fusion: Instruction | None
    """The fusion that it is the inside of, whose values are not in memory."""

    scope: str = ""
    """What JAX calls the call that it is the body of."""

    def op_name(self, one: Instruction) -> str:
        """Returns what JAX calls an instruction, from the outermost function on.

        In a program that is only lowered, the body of a function names what it does by
        itself, as one body may be called in several scopes.
        """
        outermost = self.scope.partition("/")[0]
        if not one.op_name or one.op_name.partition("/")[0] == outermost:
            return one.op_name
        return "/".join(filter(None, (self.scope, one.op_name)))


@dataclasses.dataclass(frozen=True)
class Module:
    """A module of HLO."""

    computations: Mapping[str, Computation]
    entry: Computation
    name: str
    devices: int
    """Number of devices that it is partitioned for."""

    def runs(self) -> list[Run]:
        """Returns the computations that the program runs, each in each place."""
        return list(self._runs(Run(self.entry, 1, True, None)))

    def _runs(self, run: Run) -> Iterator[Run]:
        yield run
        for one in run.computation.instructions.values():
            for inner in self.called_by(one, run):
                yield from self._runs(inner)

    def called_by(self, one: Instruction, run: Run) -> list[Run]:
        """Returns the computations that an instruction runs.

        Args:
            one: the instruction.
            run: the computation that contains it.
        """
        times, is_known = run.times, run.is_known
        if one.opcode == "while":
            trips = self._trips(one, run.computation)
            is_known = is_known and trips is not None
            times *= 1 if trips is None else trips
        fusion = one if one.opcode == "fusion" else run.fusion
        scope = run.op_name(one) if one.opcode == "call" else run.scope
        return [
            Run(self.computations[name], times, is_known, fusion, scope)
            for how, names in one.called.items()
            # Others apply a scalar function, as reductions do.
            if how != "to_apply" or one.opcode in ("call", "async-start")
            for name in names
            if name in self.computations
        ]

    def _trips(self, loop: Instruction, around: Computation) -> int | None:
        """Returns the number of iterations of a loop; None if it is not known."""
        if loop.trips is not None:
            return loop.trips
        condition, body = (
            self.computations.get(loop.called.get(name, ("",))[0])
            for name in ("condition", "body")
        )
        if condition is None or body is None:
            return None
        return _counted(loop, around, condition, body)


def _counted(
    loop: Instruction, around: Computation, condition: Computation, body: Computation
) -> int | None:
    """Returns the iterations of a loop, from its counter; None without one.

    Compilers for TPUs do not state them. The counter is an element of the loop's state
    that starts at a constant, grows by a constant, and ends at one.
    """
    before, after = around.operand(loop, 0), body.root
    compared = condition.root
    if compared is None or before is None or after is None:
        return None
    counter = condition.operand(compared, 0)
    index = None if counter is None else counter.index
    if index is None or index >= min(len(before.operands), len(after.operands)):
        return None
    step = body.operand(after, index)
    stop = condition.constant(compared, 1)
    start = around.constant(before, index)
    if step is None or stop is None or start is None:
        return None
    steps = (body.constant(step, i) for i in range(len(step.operands)))
    by = next((one for one in steps if one), None)
    return None if by is None else -(-(stop - start) // by)


def parse(text: str) -> Module:
    """Parses the text of a module.

    >>> module = parse('''HloModule jit_f
    ...
    ... ENTRY %main (x: f32[2,3]) -> f32[2,3] {
    ...   %x = f32[2,3]{1,0} parameter(0)
    ...   ROOT %y = f32[2,3]{1,0} negate(%x), metadata={op_name="jit(f)/neg"}
    ... }
    ... ''')
    >>> module.entry.root.op_name, str(module.entry.root.types[0])
    ('jit(f)/neg', 'float32[2,3]')

    Raises:
        ValueError: if the text has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry = None
    name, instructions = "", dict[str, Instruction]()
    for line in text.splitlines():
        if line.startswith("}"):
            computations[name] = Computation(name, instructions)
        elif not line.startswith((" ", "HloModule")):
            head = _HEAD.match(line)
            if head is not None:
                name, instructions = head[2], {}
                entry = name if head[1] else entry
        else:
            one = _instruction(line)
            if one is not None:
                instructions[one.name] = one
    if entry is None:
        raise ValueError("the text has no entry computation, so it is not HLO")
    devices, title = _PARTITIONS.search(text), _NAME.search(text)
    number = int(devices[1]) if devices else 1
    return Module(computations, computations[entry], title[1] if title else "", number)


def _instruction(line: str) -> Instruction | None:
    found = _INSTRUCTION.match(line)
    if found is None:
        return None
    text = found[3]
    end = _closing(text, 0) if text.startswith("(") else text.find(" ") - 1
    types, rest = text[: end + 1], text[end + 1 :].strip()
    opcode, _, _ = rest.partition("(")
    last = _closing(rest, len(opcode)) if "(" in rest else len(rest)
    literal = rest[len(opcode) + 1 : last]
    return Instruction(
        name=found[2],
        opcode=opcode,
        types=tuple(_arrays(types)),
        operands=() if opcode == "constant" else tuple(_operands(literal)),
        literal=literal,
        attributes=rest[last + 1 :],
        is_root=bool(found[1]),
    )


def _closing(text: str, start: int) -> int:
    """Returns the index of the parenthesis that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    return len(text)


def _arrays(text: str) -> Iterator[Array]:
    for element, dims, layout in _ARRAY.findall(text):
        sizes = [size.lstrip("<=") for size in dims.split(",") if size]
        dtype, bits = _dtype_of(element)
        if bits:
            stored = re.search(r"E\((\d+)\)", layout)
            bits = int(stored[1]) if stored else max(bits, 8)
            axes = layout.strip("{}").partition(":")[0]
            order = tuple(map(int, filter(None, axes.split(","))))
            yield Array(dtype, tuple(map(int, sizes)), bits, order)


def _operands(text: str) -> Iterator[str]:
    depth, start = 0, 0
    text = _COMMENT.sub("", text)
    for index, letter in enumerate(text + ","):
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            part = text[start:index].split()
            if part:
                yield part[-1].lstrip("%")
            start = index + 1


@functools.cache
def _dtype_of(element: str) -> tuple[str, int]:
    """Returns JAX's name of an element type, and its bits; 0 if it has none."""
    if element == "pred":
        return "bool", 8
    found = re.fullmatch(r"(s|u|f|bf|c)(\d+)(\w*)", element)
    if found is None:
        return element, 0
    suffix = f"_{found[3]}" if found[3] else ""
    return f"{_PREFIXES[found[1]]}{found[2]}{suffix}", int(found[2])
