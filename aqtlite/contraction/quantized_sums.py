"""The forward half of a contraction: both operands quantized, and the sums of products.

Before: `contraction/execution.py`, what runs in which form.
Next: `quantization/quantizer.py`, how each operand is quantized.

None of it is differentiated (`differentiation`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from aqtlite.contraction import (
    block_products,
    coded_products,
    packed_products,
    poison,
    remat,
    tapped,
    unit_blocks,
)
from aqtlite.contraction.execution import ContractionExecution
from aqtlite.jaxpr import inlined
from aqtlite.operations import Operation, Side
from aqtlite.qtensor.qtensor import Operand, QTensor
from aqtlite.qtensor.transposed_values import TransposedValues
from aqtlite.quantization import checks, quantizer
from aqtlite.quantization.seeds import Seeds
from aqtlite.quantization.states.statistics import States


class Quantized(NamedTuple):
    """An operand after quantization."""

    q: QTensor | None
    """None if it stays in floating point."""

    nan: jax.Array | None
    """Factor of the result, NaN where the operand hides a NaN; None for none."""


def quantize_and_sum(
    how: ContractionExecution,
    operation: Operation,
    lhs: Operand,
    rhs: Operand,
    seed: jax.Array | None,
    forward_scales: tuple[jax.Array, ...],
    states: States,
) -> tuple[Quantized, Quantized, jax.Array]:
    """Quantizes the operands that a config quantizes, and sums their products.

    Args:
        how: execution of the contraction.
        operation: the contraction.
        lhs: float array, or a `QTensor` in place of an array to quantize.
        rhs: like `lhs`.
        seed: seed of the noise, uint32 of shape ``(2,)``; None seeds from the operands.
        forward_scales: scales of the forward pass, in a shape that broadcasts with lhs.
        states: states of calibrations.

    Returns:
        The operands, and the sums without the scales that multiply the output.
    """
    seeds = Seeds(seed, forward_scales, how.lhs.salt), Seeds(seed, (), how.rhs.salt)
    lhs_q, lhs_nan = _quantize(how, operation, "lhs", lhs, seeds[0], states.lhs)
    rhs_q, rhs_nan = _quantize(how, operation, "rhs", rhs, seeds[1], states.rhs)
    if how.path == "fwd":
        lhs_q = None if lhs_q is None else remat.named("lhs", lhs_q)
        rhs_q = None if rhs_q is None else remat.named("rhs", rhs_q)
    # The values of a given operand are read as they are stored.
    stored = rhs if isinstance(rhs, QTensor) else rhs_q
    sums = _summed(how, operation, (lhs, rhs), (lhs_q, rhs_q), stored)
    if tapped.is_tapping():
        operands, quantized = (lhs, rhs), (lhs_q, rhs_q)
        sums = tapped.noted_sums(
            how, operation, operands, quantized, seeds, states[:2], sums
        )
    sums = checkpoint_name(sums, remat.SUMS)
    return Quantized(lhs_q, lhs_nan), Quantized(rhs_q, rhs_nan), sums


def _summed(
    how: ContractionExecution,
    operation: Operation,
    operands: tuple[Operand, Operand],
    quantized: tuple[QTensor | None, QTensor | None],
    stored: QTensor | None,
) -> jax.Array:
    """The sums of products, by a kernel of floats of few bits if one takes them.

    Args:
        how: execution of the contraction.
        operation: the contraction.
        operands: both operands.
        quantized: both operands quantized, None for floats.
        stored: rhs quantized, with values as they are stored.
    """
    (lhs, rhs), (lhs_q, rhs_q) = operands, quantized
    for kernel in (unit_blocks, coded_products) if stored is not None else ():
        if kernel.takes(how, operation, lhs, lhs_q, stored):
            return kernel.Sums.of(how, operation, lhs, rhs, lhs_q, stored)
    if packed_products.is_packed(lhs_q) or packed_products.is_packed(rhs_q):
        return packed_products.sum_products(how, operation, lhs, rhs, lhs_q, rhs_q)
    return block_products.sum_products(how, operation, lhs, rhs, lhs_q, rhs_q)


_traced_once = inlined.traced_once(quantize_and_sum, static_argnums=0)


def function_for(
    how: ContractionExecution, lhs: Operand, rhs: Operand, states: States
) -> Callable[..., tuple[Quantized, Quantized, jax.Array]]:
    """Returns `quantize_and_sum` for such arguments.

    Forward contractions of one shape share one trace, since a model has many layers of
    one shape. Gradients are traced once as a whole.
    """
    is_traced = inlined.are_tracers((lhs, rhs))
    is_shared = is_traced and how.path == "fwd" and not jax.tree.leaves(states)
    return _traced_once if is_shared else quantize_and_sum


def _quantize(
    how: ContractionExecution,
    operation: Operation,
    side: Side,
    x: Operand,
    seeds: Seeds,
    state: Any,
) -> Quantized:
    one = how.lhs if side == "lhs" else how.rhs
    axes = operation.axes(side)
    if isinstance(x, QTensor):
        checks.check_scale(x.scale.shape, one.tensor, axes, one.path)
        return Quantized(_with_array(x), None)
    if not one.tensor.is_quantized:
        return Quantized(None, None)
    q = quantizer.quantize_array(x, one.tensor, axes, one.path, seeds, state)
    checks.check_scale(q.scale.shape, one.tensor, axes, one.path)
    if not one.tensor.calibration.is_blind:
        return Quantized(q, None)
    return Quantized(*poison.marked(x, q, one.tensor, axes, one.path, state))


def _with_array(x: QTensor) -> QTensor:
    """A given operand with an array of values, unless they are packed."""
    return x.unpacked() if isinstance(x.qvalue, TransposedValues) else x
