"""The arithmetic of a contraction, as far as its config determines it.

Which scales can move depends on the operands; `aqtlite.execution` adds that.
"""

import dataclasses
import functools
from typing import Literal

import jax.numpy as jnp
import numpy as np

from aqtlite.config.dot_general import DotGeneralRaw
from aqtlite.config.tensor import Tensor

Form = Literal["float", "stored", "decoded", "dequantized"]
"""How an operand enters the dot:

- "float": as it is;
- "stored": as stored integers, the scale applied to the sums;
- "decoded": as unscaled floats, the scale applied to the sums;
- "dequantized": as floats with the scale applied (fake quantization).
"""

Kind = Literal["integers", "integers in float", "mixed", "float"]
"""The kind of dot."""

Reuse = Literal["stored", "blocks", "dequantized"]
"""What a backward contraction takes of an operand that the forward pass quantized: its
stored values, with the scale moved onto the gradient or, in two-dimensional blocks, as
it is; or the array that they stand for."""


@functools.cache
def form_of(tensor: Tensor) -> Form:
    """Returns the form in which an operand with this config enters the dot."""
    if not tensor.is_quantized:
        return "float"
    if tensor.use_fake_quant:
        return "dequantized"
    if tensor.is_integer:
        return "stored"
    return "decoded" if tensor.blocks is None else "dequantized"


def kind_of(lhs: Form, rhs: Form, in_dtype: np.dtype | None) -> Kind:
    """The kind of dot of operands that enter so."""
    if "stored" not in (lhs, rhs):
        return "float"
    if lhs != rhs:
        return "mixed"
    return "integers" if in_dtype is None else "integers in float"


def float_accumulator(raw: DotGeneralRaw) -> np.dtype | None:
    """The float dtype to which the sums are cast, None for none."""
    dtype = raw.dg_accumulator_dtype
    return dtype if dtype is not None and jnp.issubdtype(dtype, jnp.floating) else None


def reused(
    raw: DotGeneralRaw, forward: Tensor, *, scale_moves: bool
) -> tuple[Reuse, Tensor]:
    """Resolves the reuse of an operand that the forward pass quantized.

    Args:
        raw: of the backward contraction.
        forward: how the forward pass quantized the operand.
        scale_moves: whether its scale can multiply the gradient instead: it does not
            vary along axes that remain.

    Returns:
        The kind of reuse, and how the operand is quantized in the contraction.
    """
    if scale_moves and raw.lhs.is_quantized:
        fake = raw.lhs.use_fake_quant
        return "stored", Tensor(numerics=forward.grid, use_fake_quant=fake)
    blocks = forward.blocks
    are_integers = raw.lhs.is_integer and forward.is_integer
    if blocks is not None and blocks.remaining_size > 1 and are_integers:
        return "blocks", forward
    is_fake = forward.use_fake_quant
    if not scale_moves and (is_fake or (blocks is not None and forward.is_integer)):
        # There are no integers to take, and nothing to simulate.
        return "dequantized", dataclasses.replace(raw.rhs, use_fwd_quant=False)
    return "dequantized", Tensor()
