"""A contraction of a report."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from aqtlite.reporting.products import Product
from aqtlite.reporting.scales import Scale
from aqtlite.reporting.surroundings import Around
from aqtlite.reporting.traced import Role, TracedContraction

NOT_FOUND = "not found"


@dataclasses.dataclass(frozen=True)
class ReportedContraction:
    """A contraction, as a function asks for it and as its compiled program runs it."""

    path: str
    """Its path in plans: scopes around it, or the path of its parameter."""

    role: Role
    """"forward"; "gradient": of the backward pass, two for each forward one;
    "recomputed": the forward one again, for `jax.checkpoint`."""

    op: str
    """The function of `jax.lax`, the registered kernel, or the primitive."""

    equation: str
    """Its axes, as in `jnp.einsum`; empty for other operations."""

    lhs: str
    """Dtype and shape of an operand as the function contracts it: "int8[8,64]"."""

    rhs: str

    out_size: int
    """Number of elements of the result, of one run."""

    asked: str
    """Dtypes that the function, or its config, asks for: "int8", "int8 x int4"."""

    runs_in: str
    """Dtypes in which the compiled program multiplies, several joined by "and";
    "int8" also where one of two int8 is offset to uint8, as VNNI needs.
    "not found": it has no such product, as nothing needs its result, it was merged with
    an equal one, or is computed in another way."""

    kernels: tuple[str, ...]
    """Libraries and code generators that the compiled program names for it."""

    macs: int | None
    """Multiply-accumulates of a call, by its shapes; None where they do not tell."""

    compiled_macs: int
    """Those that the compiled program runs: more for digits, for all experts, for
    padding, or for what an offset to uint8 adds."""

    in_dtypes: dict[str, float]
    """Share of `compiled_macs` in each dtype."""

    times: int
    """How often it runs in a call; loops without a known length count once."""

    is_frozen: bool
    """Whether an operand is a frozen weight: made of integers of at most 16 bits, or
    floats of 8, that the function takes."""

    weight_bytes: int
    """Bytes of operands that are made of parameters alone."""

    why_float: str
    """Why rules cannot quantize it; empty for all that they can."""

    scales: tuple[Scale, ...]
    """Scales of operands that are quantized in the call, and what they see."""

    range_reductions: int
    """Passes in its scope that find a maximum or a minimum, as calibrations do; of all
    contractions of one role in this scope, such as the two gradients of a layer."""

    transpositions: int
    """Passes in its scope that move axes, counted alike."""

    seconds: float | None
    """Measured time in a call; None if it was not measured, or the profile does not
    name it. What the compiler fused with it is in it."""

    @property
    def is_float(self) -> bool:
        """Whether some of it runs in float of 16 bits or more."""
        return any(is_float(dtype) for dtype in self.in_dtypes)

    @property
    def fell_back(self) -> bool:
        """Whether it runs in other dtypes than the function asks for."""
        return self.runs_in not in (NOT_FOUND, self.asked)


def is_float(dtype: str) -> bool:
    """Whether products in a dtype, or in two, are of floats of at least 16 bits.

    >>> is_float("bfloat16"), is_float("int8 x float32"), is_float("float8_e4m3fn")
    (True, True, False)
    """
    names = dtype.split(" x ")
    return any(name in ("bfloat16", "float16", "float32", "float64") for name in names)


def _runs_in(dtype: str, asked: str) -> str:
    """Returns the dtype of products, without the offset of an operand of int8.

    Processors with VNNI multiply uint8 by int8: 128 is added to one operand, and what
    that adds is taken off the sums.
    """
    is_offset = dtype in ("uint8 x int8", "int8 x uint8") and "uint8" not in asked
    return "int8" if is_offset else dtype


def of(
    one: TracedContraction,
    products: Sequence[Product],
    around: Around,
    seconds: Mapping[str, float],
) -> ReportedContraction:
    """Returns the record of a contraction.

    Args:
        one: the contraction of the traced program.
        products: its products in the compiled one.
        around: what surrounds it there.
        seconds: measured times of instructions, by name; empty without a profile.
    """
    counts: collections.Counter[str] = collections.Counter()
    for product in products:
        counts[_runs_in(product.dtype, one.asked)] += product.macs * product.times
    if not products and (one.why_float or one.is_in_kernel):
        counts[one.asked] = one.macs or 1
    total = sum(counts.values())
    kernels = dict.fromkeys(x.kernel for x in products if x.kernel)
    timed = {x.instruction for x in products} & seconds.keys()
    times = one.times
    if not one.is_known and products:
        # The compiler may know how often a loop runs that JAX does not.
        times = max(times, max(x.times for x in products))
    return ReportedContraction(
        path=one.path,
        role=one.role,
        op=one.op,
        equation=one.equation,
        lhs=one.lhs,
        rhs=one.rhs,
        out_size=one.out_size,
        asked=one.asked,
        runs_in=" and ".join(counts) or NOT_FOUND,
        kernels=tuple(kernels),
        macs=None if one.macs is None else one.macs * times // max(one.times, 1),
        compiled_macs=sum(x.macs * x.times for x in products),
        in_dtypes={x: n / total if total else 1.0 for x, n in counts.items()},
        times=times,
        is_frozen=one.is_frozen,
        weight_bytes=one.weight_bytes,
        why_float=one.why_float,
        scales=one.scales,
        range_reductions=around.range_reductions,
        transpositions=around.transpositions,
        seconds=sum(seconds[x] for x in timed) if timed else None,
    )
