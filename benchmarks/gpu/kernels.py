"""The kernels of a program compiled for a GPU, and what each of them moves."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.collectives import loops
from benchmarks.harness import programs


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel of a compiled program."""

    name: str
    times: int
    """Executions: the product of the trip counts of the enclosing loops."""

    bytes: int
    """Bytes that an execution reads and writes, each array once."""

    operations: int = 0
    """Multiplications and additions of matrix products in an execution."""

    dtype: str | None = None
    """Dtype of the operands of the product, as HLO calls it; None without one."""

    is_supported: bool = True
    """False for a product of int8 matrices that cuBLASLt does not multiply: it takes
    them with their contracting axis last in memory (NVIDIA, "cublasLtMatmul", "TN
    format")."""


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    types: tuple[programs.Array, ...]
    opcode: str
    operands: tuple[str, ...]
    line: str
    is_root: bool


_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\(([^()]*)\)")
_CONTRACTING = {
    side: re.compile(
        rf"{side}_contracting_dims=\{{([\d,]*)\}}|"
        rf'"{side}_contracting_dimensions":\[([\d,"]*)\]'
    )
    for side in ("lhs", "rhs")
}
_LAYOUT = re.compile(r"\]\{(\d+)")
_GEMM = "__cublas"
_FREE = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all")
)
_SLICES = frozenset(("slice", "dynamic-slice", "gather"))
_UPDATE = "dynamic-update-slice"


def kernels(program: str) -> list[Kernel]:
    """The kernels of a program, given as `compiled.as_text()`.

    Of the branches of a conditional, those of the one that moves least.
    """
    text = programs.computations(program)
    entry = next(
        match[1] for match in re.finditer(r"^ENTRY %?([\w.\-]+)", program, re.MULTILINE)
    )
    return list(_executed(entry, text))


def _executed(
    computation: str, text: Mapping[str, Sequence[str]], times: int = 1
) -> Iterator[Kernel]:
    instructions = _instructions(text[computation])
    for one in instructions.values():
        if one.opcode in _FREE or one.opcode.endswith("-done"):
            continue
        called = loops.called(one.line)
        if one.opcode == "while":
            _, body = called
            trips = loops.trip_count(one.line, computation, text)
            yield from _executed(body, text, times * trips)
        elif one.opcode in ("call", "async-start"):
            yield from _executed(called[0], text, times)
        elif one.opcode == "conditional":
            branches = [list(_executed(name, text, times)) for name in called]
            yield from min(branches, key=_bytes_moved)
        else:
            inside = _instructions(text[called[0]]) if one.opcode == "fusion" else {}
            yield _kernel(one, instructions, inside, times)


def _bytes_moved(found: Sequence[Kernel]) -> int:
    return sum(one.times * one.bytes for one in found)


def _instructions(lines: Sequence[str]) -> dict[str, _Instruction]:
    found = {}
    for line in lines:
        if match := _INSTRUCTION.match(line):
            is_root, name, types, opcode, operands = match.groups()
            names = re.sub(r"/\*.*?\*/|[%\s]", "", operands).split(",")
            found[name] = _Instruction(
                name, programs.arrays(types), opcode, tuple(names), line, bool(is_root)
            )
    return found


def _kernel(
    one: _Instruction,
    around: Mapping[str, _Instruction],
    inside: Mapping[str, _Instruction],
    times: int,
) -> Kernel:
    """A kernel, from its instruction, those around it, and those fused into it."""
    written = [programs.bytes_of(array) for array in one.types]
    if _GEMM in one.line and one.opcode == "custom-call":
        written = written[:1]  # The workspace behind it is not traffic.
    read = [
        sum(map(programs.bytes_of, around[name].types)) if name in around else 0
        for name in one.operands
    ]
    for index, parameter in _parameters(inside):
        users = [x for x in inside.values() if parameter.name in x.operands]
        if not all(user.operands[0] == parameter.name for user in users):
            continue
        if all(user.opcode in _SLICES for user in users):
            read[index] = sum(map(_result_bytes, users))
        elif all(user.opcode == _UPDATE for user in users):
            read[index] = 0  # Parts of it are written in place.
    for index, root in enumerate(_roots(inside)):
        if root.opcode == _UPDATE:
            written[index] = _result_bytes(inside[root.operands[1]])
    unique = dict(zip(one.operands, read, strict=True))
    kernel = Kernel(one.name, times, sum(unique.values()) + sum(written))
    for product, scope in [(one, around), *((x, inside) for x in inside.values())]:
        axes = [_contracting(product, side) for side in ("lhs", "rhs")]
        if product.opcode in ("dot", "custom-call") and axes[0]:
            kernel = _with_product(kernel, product, scope, axes)
    return kernel


def _with_product(
    kernel: Kernel,
    product: _Instruction,
    scope: Mapping[str, _Instruction],
    axes: Sequence[Sequence[int]],
) -> Kernel:
    """A kernel with the operations of its matrix product."""
    operands = [scope[name] for name in product.operands[:2]]
    (dtype, shape), *_ = operands[0].types
    (_, result), *_ = product.types
    products = math.prod(shape[axis] for axis in axes[0])
    is_last = [
        (match := _LAYOUT.search(one.line)) and int(match[1]) in contracting
        for one, contracting in zip(operands, axes, strict=True)
    ]
    is_int8_gemm = dtype == "s8" and product.opcode == "custom-call"
    return dataclasses.replace(
        kernel,
        operations=kernel.operations + 2 * math.prod(result) * products,
        dtype=dtype,
        is_supported=all(is_last) or not is_int8_gemm,
    )


def _contracting(one: _Instruction, side: str) -> list[int]:
    match = _CONTRACTING[side].search(one.line)
    found = "".join(filter(None, match.groups())) if match else ""
    return [int(axis) for axis in re.findall(r"\d+", found)]


def _parameters(
    inside: Mapping[str, _Instruction],
) -> Iterator[tuple[int, _Instruction]]:
    for one in inside.values():
        if one.opcode == "parameter":
            yield int(one.operands[0]), one


def _roots(inside: Mapping[str, _Instruction]) -> list[_Instruction]:
    """What a fusion writes; bitcasts are looked through."""

    def computed(one: _Instruction) -> _Instruction:
        while one.opcode == "bitcast":
            one = inside[one.operands[0]]
        return one

    for one in inside.values():
        if one.is_root:
            outputs = one.operands if one.opcode == "tuple" else (one.name,)
            return [computed(inside[name]) for name in outputs]
    return []


def _result_bytes(one: _Instruction) -> int:
    return sum(map(programs.bytes_of, one.types))
