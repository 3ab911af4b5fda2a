"""Copies that a compiled program makes of operands: in float, transposed, twice."""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from aqtlite.reporting.hlo import Array, Computation, Instruction, Module, Run

Kind = Literal["float copy", "transposed copy", "quantized again"]

_MOVES = frozenset(
    {
        *("bitcast", "copy", "reshape", "transpose", "dynamic-slice", "slice"),
        *("bitcast-convert", "get-tuple-element", "optimization-barrier"),
    }
)
_SMALL = 64
"""Number of elements up to which copies are not worth mentioning."""


@dataclasses.dataclass(frozen=True)
class Copy:
    """A value in memory that is another value in another form."""

    kind: Kind
    """"float copy": floats computed from an argument of at most 8 bits, such as a
    frozen weight, of the same size. "transposed copy": another order of axes.
    "quantized again": a second array of at most 8 bits computed from the same floats,
    as of a gradient whose two contractions have scales along other axes.
    """

    path: str
    """Path of the contraction in whose scope it is; empty for none."""

    argument: str
    """Name of the argument that is copied in float; empty for the other kinds."""

    type: str
    """Its dtype and shape."""

    bytes: int
    """Its bytes in memory."""

    times: int
    """How often it is made in a call."""


def find(module: Module, path_of: Callable[[str], str]) -> list[Copy]:
    """Returns the copies that a program makes in memory.

    Args:
        module: the program.
        path_of: function from what JAX calls an operation to the path of the
            contraction around it.
    """
    return list(_in_run(module, module.runs()[0], {}, path_of))


def _in_run(
    module: Module,
    run: Run,
    given: Mapping[int, str],
    path_of: Callable[[str], str],
) -> Iterator[Copy]:
    """Yields the copies in a computation, and in the loops that it calls.

    Args:
        module: the program.
        run: the computation.
        given: names of the arguments that elements of its parameter are, by index.
        path_of: as for `find`.
    """
    where = run.computation
    arguments: dict[str, str] = {}
    tuples: dict[str, dict[int, str]] = {}
    quantized: dict[str, list[Instruction]] = collections.defaultdict(list)
    for one in where.instructions.values():
        if one.opcode == "parameter":
            if run.computation is module.entry:
                if one.types and one.types[0].is_narrow and len(one.types) == 1:
                    arguments[one.name] = one.op_name or one.name
            else:
                tuples[one.name] = dict(given)
        elif one.opcode == "tuple":
            tuples[one.name] = {
                i: arguments[name]
                for i, name in enumerate(one.operands)
                if name in arguments
            }
        elif one.opcode == "get-tuple-element":
            of = tuples.get(one.operands[0], {})
            if one.index in of:
                arguments[one.name] = of[one.index]
        elif one.opcode == "while":
            passed = tuples.get(one.operands[0], {})
            tuples[one.name] = passed
            for inner in module.called_by(one, run):
                yield from _in_run(module, inner, passed, path_of)
        elif one.opcode == "call":
            continue
        else:
            yield from _made(one, run, arguments, quantized, module, path_of)
    for name, several in quantized.items():
        for again in several[1:]:
            if where.instructions[name].opcode != "constant":
                array = next(x for x in again.types if x.is_narrow)
                yield _copy("quantized again", again, array, run, "", path_of)


def _made(
    one: Instruction,
    run: Run,
    arguments: dict[str, str],
    quantized: dict[str, list[Instruction]],
    module: Module,
    path_of: Callable[[str], str],
) -> Iterator[Copy]:
    """Yields what an instruction copies, and notes what it makes of arguments."""
    operands = {
        name: run.computation.instructions[name].types[0]
        for name in dict.fromkeys(one.operands)
        if name in run.computation.instructions
        and run.computation.instructions[name].types
    }
    for array in one.types:
        if array.size <= _SMALL:
            continue
        for name, before in operands.items():
            if name in arguments and _is_alike(array, before):
                if array.is_narrow:
                    arguments[one.name] = arguments[name]
                elif array.is_float and not _sums(one, module):
                    yield _copy("float copy", one, array, run, arguments[name], path_of)
                    break
            elif array.is_narrow and before.is_float and before.size == array.size:
                quantized[name].append(one)
    if _is_transposition(one, module) and one.types and one.types[0].size > _SMALL:
        yield _copy("transposed copy", one, one.types[0], run, "", path_of)


def _copy(
    kind: Kind,
    one: Instruction,
    array: Array,
    run: Run,
    argument: str,
    path_of: Callable[[str], str],
) -> Copy:
    path = path_of(run.op_name(one)) if one.op_name else ""
    return Copy(kind, path, argument, str(array), array.bytes, run.times)


def _is_alike(array: Array, before: Array) -> bool:
    """Whether an array has the elements of another one, or of one of its slices."""
    sizes = sorted(n for n in array.shape if n > 1)
    slices = (before.shape, before.shape[1:])
    halves = 2 * before.size == array.size and before.dtype == "uint8"
    return halves or any(sizes == sorted(n for n in x if n > 1) for x in slices)


def _sums(one: Instruction, module: Module) -> bool:
    """Whether a fusion contracts what it reads, so that its result is no copy."""
    return any(
        inner.opcode in ("dot", "convolution", "custom-call", "reduce")
        for name in one.called.get("calls", ())
        for inner in module.computations[name].instructions.values()
    ) or one.opcode in ("dot", "convolution", "custom-call", "reduce")


def _is_transposition(one: Instruction, module: Module) -> bool:
    """Whether an instruction moves axes in memory, and computes nothing."""
    if one.opcode in ("transpose", "copy"):
        return one.opcode == "transpose" or "transpose" in one.op_name
    if one.opcode != "fusion":
        return False
    inside = [module.computations[x] for x in one.called.get("calls", ())]
    return bool(inside) and all(map(_only_moves, inside))


def _only_moves(computation: Computation) -> bool:
    opcodes = {one.opcode for one in computation.instructions.values()}
    moves = opcodes & {"transpose", "copy"}
    return bool(moves) and opcodes <= _MOVES | {"parameter", "constant"}
