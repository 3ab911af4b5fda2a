"""The contractions of a compiled program: where it multiplies and adds, and in what."""

import dataclasses
import math
import re

from aqtlite.reporting.hlo import Array, Computation, Instruction, Module, Run

_KERNELS = re.compile(r"gemm|matmul|conv|_dot\b", re.I)
_OWN = re.compile(r"^aqtlite_(?:panels_\d+_(\d+)|planes_[A-Za-z]+)_")
"""Target of one of this library's own kernels (`lowering.forms`), with the number of
digits of the other operand if it may have several."""

_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_FUSION_KIND = re.compile(r'"kind":"([^"]*)"')
_CONTRACTING = re.compile(r'"lhs_contracting_dimensions":\[((?:"\d+",?)*)\]')
_LABELS = re.compile(r"dim_labels=\w+_(\w+)->\w+")
_DILATION = re.compile(r"\blhs_dilate=([\dx]+)")
_OWN_PRODUCTS = re.compile(r"/aqtlite/mul$")
_OF_CONTRACTION = re.compile(r"(dot_general|conv_general_dilated|ragged_dot\w*)$")


@dataclasses.dataclass(frozen=True)
class Product:
    """An instruction that sums products, or that computes them."""

    op_name: str
    """What JAX calls it; empty where the compiler forgot."""

    instruction: str
    """Name of the instruction of the program that computes it: a fusion around it."""

    opcode: str
    """"dot", "convolution", "custom-call", "ragged-dot", "reduce", "multiply"."""

    kernel: str
    """What runs it, as far as the program says: a library, or "" for XLA's own code."""

    lhs: Array
    rhs: Array
    out: Array
    macs: int
    """Multiply-accumulates of one run; products with the zeros of a dilation, which a
    strided convolution has in its gradient, do not count."""

    times: int
    """How often it runs."""

    is_known: bool
    """Whether `times` is known; if not, loops count once."""

    @property
    def dtype(self) -> str:
        """The dtype of its operands; of both if they differ: "int8 x float32"."""
        return both(self.lhs.dtype, self.rhs.dtype)

    @property
    def is_sum(self) -> bool:
        """Whether it is a contraction to the compiler, and not arithmetic."""
        return self.opcode not in ("reduce", "multiply")


def both(lhs: str, rhs: str) -> str:
    """Returns the dtypes of two operands as text.

    >>> both("int8", "int8"), both("int8", "float32")
    ('int8', 'int8 x float32')
    """
    return lhs if lhs == rhs else f"{lhs} x {rhs}"


def find(module: Module) -> list[Product]:
    """Returns the products of a module, in the order of its text."""
    found = []
    for run in module.runs():
        for one in run.computation.instructions.values():
            operands = [run.computation.operand(one, i) for i in (0, 1)]
            arrays = [x.types[0] if x and x.types else None for x in operands]
            macs = _macs(one, run)
            if macs is None or arrays[0] is None or not one.types:
                continue
            lhs, rhs = arrays[0], arrays[1] or arrays[0]
            if _OWN.match(_target(one)):
                # It takes what it widens in registers first.
                lhs, rhs = (dataclasses.replace(x, dtype="int8") for x in (rhs, lhs))
            if one.opcode == "reduce":
                lhs, rhs = _factors(one, run.computation, lhs)
            kernel = _kernel(one if run.fusion is None else run.fusion)
            op_name = run.op_name(one) or (run.fusion.op_name if run.fusion else "")
            found.append(
                Product(
                    op_name,
                    one.name if run.fusion is None else run.fusion.name,
                    one.opcode,
                    kernel,
                    lhs,
                    rhs,
                    one.types[0],
                    macs,
                    run.times,
                    run.is_known,
                )
            )
    return found


def _macs(one: Instruction, run: Run) -> int | None:
    """Returns the multiply-accumulates of an instruction; None if it has none."""
    if not one.types or not one.operands:
        return None
    where, op_name = run.computation, run.op_name(one)
    lhs = where.operand(one, 0)
    out, shape = one.types[0], lhs.types[0].shape if lhs and lhs.types else ()
    if one.opcode in ("dot", "ragged-dot", "scaled-dot"):
        return out.size * math.prod(shape[i] for i in one.dims("lhs_contracting_dims"))
    labels = _LABELS.search(one.attributes)
    if one.opcode in ("convolution", "custom-call") and labels is not None:
        kernel = where.operand(one, 1)
        if kernel is None or not kernel.types:
            return None
        dilation = _DILATION.search(one.attributes)
        zeros = math.prod(map(int, dilation[1].split("x"))) if dilation else 1
        sizes = kernel.types[0]
        outputs = sizes.shape[labels[1].index("o")]
        return out.size * (sizes.size // max(outputs, 1)) // zeros
    own = _OWN.match(_target(one))
    if own is not None and (rows := where.operand(one, 1)) is not None:
        x = rows.types[0]
        if own[1] is None:
            return out.size * x.shape[-1]
        # Products come first if the kernel transposes the rows.
        return int(own[1]) * out.shape[-1] * x.size
    if one.opcode == "custom-call" and _KERNELS.search(_target(one)):
        axes = _CONTRACTING.search(one.attributes)
        numbers = re.findall(r"\d+", axes[1]) if axes else [len(shape) - 1]
        return out.size * math.prod(shape[int(i)] for i in numbers)
    is_ours = _OF_CONTRACTION.search(op_name) is not None
    if one.opcode == "reduce" and is_ours:
        return math.prod(shape)
    # Convolutions of few channels are sums of products of integers, written out.
    is_written = _OWN_PRODUCTS.search(op_name) and out.dtype == "int32"
    return out.size if one.opcode == "multiply" and (is_ours or is_written) else None


def _factors(
    one: Instruction, where: Computation, summed: Array
) -> tuple[Array, Array]:
    """Returns the types of what is multiplied before a sum."""
    product = where.operand(one, 0)
    if product is None or product.opcode != "multiply":
        return summed, summed
    factors = (where.operand(product, i) for i in (0, 1))
    lhs, rhs = (x.types[0] if x and x.types else summed for x in factors)
    return lhs, rhs


def _target(one: Instruction) -> str:
    found = _TARGET.search(one.attributes)
    return found[1] if found else ""


def _kernel(one: Instruction) -> str:
    """Returns the library or code generator that an instruction names."""
    kind = _FUSION_KIND.search(one.attributes)
    return _target(one) or (kind[1].strip("_") if kind else "")
