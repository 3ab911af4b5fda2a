"""The kernels of a program compiled for a GPU, and what each of them moves."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from aqtlite.reporting import hlo
from aqtlite.reporting.hlo import Instruction


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
    """Dtype of the operands of the product; None without one."""

    is_supported: bool = True
    """False for a product of int8 matrices that cuBLASLt does not multiply: it takes
    them with their contracting axis last in memory (NVIDIA, "cublasLtMatmul", "TN
    format")."""


_CONTRACTING = {
    side: re.compile(
        rf"{side}_contracting_dims=\{{([\d,]*)\}}|"
        rf'"{side}_contracting_dimensions":\[([\d,"]*)\]'
    )
    for side in ("lhs", "rhs")
}
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
    module = hlo.parse(program)
    return list(_executed(module, hlo.Run(module.entry, 1, True, None)))


def _executed(module: hlo.Module, run: hlo.Run) -> Iterator[Kernel]:
    instructions = run.computation.instructions
    for one in instructions.values():
        if one.opcode in _FREE or one.opcode.endswith("-done"):
            continue
        called = module.called_by(one, run)
        if one.opcode == "while":
            (body,) = one.called["body"]
            yield from _executed(
                module, next(x for x in called if x.computation.name == body)
            )
        elif one.opcode in ("call", "async-start"):
            yield from _executed(module, called[0])
        elif one.opcode == "conditional":
            branches = [list(_executed(module, inner)) for inner in called]
            yield from min(branches, key=_bytes_moved)
        else:
            is_fusion = one.opcode == "fusion"
            inside = called[0].computation.instructions if is_fusion else {}
            yield _kernel(one, instructions, inside, run.times)


def _bytes_moved(found: Sequence[Kernel]) -> int:
    return sum(one.times * one.bytes for one in found)


def _kernel(
    one: Instruction,
    around: Mapping[str, Instruction],
    inside: Mapping[str, Instruction],
    times: int,
) -> Kernel:
    """A kernel, from its instruction, those around it, and those fused into it."""
    written = [array.bytes for array in one.types]
    if _GEMM in one.attributes and one.opcode == "custom-call":
        written = written[:1]  # The workspace behind it is not traffic.
    read = [around[name].bytes if name in around else 0 for name in one.operands]
    for index, parameter in _parameters(inside):
        users = [x for x in inside.values() if parameter.name in x.operands]
        if not all(user.operands[0] == parameter.name for user in users):
            continue
        if all(user.opcode in _SLICES for user in users):
            read[index] = sum(user.bytes for user in users)
        elif all(user.opcode == _UPDATE for user in users):
            read[index] = 0  # Parts of it are written in place.
    for index, root in enumerate(_roots(inside)):
        if root.opcode == _UPDATE:
            written[index] = inside[root.operands[1]].bytes
    unique = dict(zip(one.operands, read, strict=True))
    kernel = Kernel(one.name, times, sum(unique.values()) + sum(written))
    for product, scope in [(one, around), *((x, inside) for x in inside.values())]:
        axes = [_contracting(product, side) for side in ("lhs", "rhs")]
        if product.opcode in ("dot", "custom-call") and axes[0]:
            kernel = _with_product(kernel, product, scope, axes)
    return kernel


def _with_product(
    kernel: Kernel,
    product: Instruction,
    scope: Mapping[str, Instruction],
    axes: Sequence[Sequence[int]],
) -> Kernel:
    """A kernel with the operations of its matrix product."""
    operands = [scope[name] for name in product.operands[:2]]
    lhs, *_ = operands[0].types
    result, *_ = product.types
    products = math.prod(lhs.shape[axis] for axis in axes[0])
    is_last = [
        bool(set(one.types[0].layout[:1]).intersection(contracting))
        for one, contracting in zip(operands, axes, strict=True)
    ]
    is_int8_gemm = lhs.dtype == "int8" and product.opcode == "custom-call"
    return dataclasses.replace(
        kernel,
        operations=kernel.operations + 2 * result.size * products,
        dtype=lhs.dtype,
        is_supported=all(is_last) or not is_int8_gemm,
    )


def _contracting(one: Instruction, side: str) -> list[int]:
    match = _CONTRACTING[side].search(one.attributes)
    found = "".join(filter(None, match.groups())) if match else ""
    return [int(axis) for axis in re.findall(r"\d+", found)]


def _parameters(
    inside: Mapping[str, Instruction],
) -> Iterator[tuple[int, Instruction]]:
    for one in inside.values():
        if one.opcode == "parameter":
            yield int(one.literal), one


def _roots(inside: Mapping[str, Instruction]) -> list[Instruction]:
    """What a fusion writes; bitcasts are looked through."""

    def computed(one: Instruction) -> Instruction:
        while one.opcode == "bitcast":
            one = inside[one.operands[0]]
        return one

    for one in inside.values():
        if one.is_root:
            outputs = one.operands if one.opcode == "tuple" else (one.name,)
            return [computed(inside[name]) for name in outputs]
    return []
