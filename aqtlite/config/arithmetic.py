"""The arithmetic of a contraction, as far as the config determines it.

Which scales can move depends on the operands too: see `aqtlite.contraction.execution`.
"""

import dataclasses
import functools
from typing import Literal

import numpy as np

from aqtlite import numerics
from aqtlite.config.dot_general import DotGeneral, DotGeneralRaw
from aqtlite.config.tensor import Tensor

Form = Literal["float", "stored", "narrow", "in blocks", "decoded", "dequantized"]
"""How an operand enters the dot:

- "float": unquantized;
- "stored": stored integers, with the scale applied to the sums;
- "narrow": stored 8-bit floats, if both operands are, with the scale applied to the
  sums;
- "in blocks": stored 8-bit floats with a scale per block, if both operands are;
- "decoded": unscaled floats, with the scale applied to the sums;
- "dequantized": floats with the scale applied (fake quantization).
"""

Kind = Literal["integers", "integers in float", "mixed", "narrow", "in blocks", "float"]
"""The arithmetic in which the dot runs."""

Reuse = Literal["stored", "blocks", "dequantized"]
"""How a backward contraction takes an operand that the forward pass quantized:

- "stored": stored values, with the scale moved onto the gradient;
- "blocks": stored values in two-dimensional blocks, with their scales;
- "dequantized": the dequantized array.
"""

FORWARD_SIDE = {"dlhs": "rhs", "drhs": "lhs"}
"""The operand of the forward pass that a gradient may reuse."""


@functools.cache
def forms_of(lhs: Tensor, rhs: Tensor, in_dtype: np.dtype | None) -> tuple[Form, Form]:
    """Returns the forms in which operands with these configs enter the dot."""
    forms = _form_of(lhs), _form_of(rhs)
    is_narrow = forms in (("narrow", "narrow"), ("in blocks", "in blocks"))
    if is_narrow and in_dtype is None:
        return forms
    # With any other operand, 8-bit floats are widened.
    wide: dict[Form, Form] = {"narrow": "decoded", "in blocks": "dequantized"}
    left, right = (wide.get(form, form) for form in forms)
    return left, right


def _form_of(tensor: Tensor) -> Form:
    if not tensor.is_quantized:
        return "float"
    if tensor.use_fake_quant:
        return "dequantized"
    if tensor.is_integer:
        return "stored"
    grid = tensor.grid
    is_narrow = grid.arithmetic == "float" and grid.storage_dtype.itemsize == 1
    if tensor.blocks is not None:
        has_bits = is_narrow and isinstance(grid, numerics.Float)
        return "in blocks" if has_bits else "dequantized"
    return "narrow" if is_narrow else "decoded"


def kind_of(lhs: Form, rhs: Form, in_dtype: np.dtype | None) -> Kind:
    """Returns the kind of dot for operands in the given forms."""
    if lhs == rhs == "narrow":
        return "narrow"
    if lhs == rhs == "in blocks":
        return "in blocks"
    if "stored" not in (lhs, rhs):
        return "float"
    if lhs != rhs:
        return "mixed"
    return "integers" if in_dtype is None else "integers in float"


@functools.cache
def sums_integers(raw: DotGeneralRaw) -> bool:
    """True if a CPU contracts integers, whose sum does not depend on the order.

    Sums of floats depend on the order, and thus on the memory layout of the operands.
    """
    forms = forms_of(raw.lhs, raw.rhs, raw.dg_in_dtype)
    kind = kind_of(*forms, raw.dg_in_dtype)
    return kind in ("integers", "integers in float", "mixed")


@functools.cache
def reused(
    raw: DotGeneralRaw, forward: Tensor, *, scale_moves: bool
) -> tuple[Reuse, Tensor]:
    """Resolves the reuse of an operand that the forward pass quantized.

    Args:
        raw: config of the backward contraction.
        forward: how the forward pass quantized the operand.
        scale_moves: whether the operand's scale can multiply the gradient instead,
            because it does not vary along remaining axes.

    Returns:
        The kind of reuse, and the operand's config in the backward contraction.
    """
    if scale_moves and raw.lhs.is_quantized:
        fake = raw.lhs.use_fake_quant
        return "stored", Tensor(numerics=forward.grid, use_fake_quant=fake)
    blocks = forward.blocks
    are_integers = raw.lhs.is_integer and forward.is_integer
    if blocks is not None and blocks.remaining_size > 1 and are_integers:
        return "blocks", forward
    if not scale_moves:
        # There are no stored values to take, and nothing to simulate.
        return "dequantized", dataclasses.replace(raw.rhs, use_fwd_quant=False)
    return "dequantized", Tensor()


def reused_rhs(cfg: DotGeneral, name: str) -> tuple[Reuse, Tensor] | None:
    """Calls `reused` for a contraction; None if the contraction reuses no operand.

    Args:
        cfg: the config.
        name: name of the contraction, "fwd", "dlhs" or "drhs".
    """
    raw: DotGeneralRaw = getattr(cfg, name)
    if name == "fwd" or not raw.rhs.use_fwd_quant:
        return None
    forward = getattr(cfg.fwd, FORWARD_SIDE[name])
    # Scales move if shared along the contracting axes.
    moves = forward.blocks is None
    return reused(raw, forward, scale_moves=moves)


@functools.cache
def contracts_floats(cfg: DotGeneral) -> bool:
    """Whether any contraction, forward or backward, has a floating operand."""
    for name in ("fwd", "dlhs", "drhs"):
        raw: DotGeneralRaw = getattr(cfg, name)
        reuse = reused_rhs(cfg, name)
        rhs = raw.rhs if reuse is None else reuse[1]
        forms = forms_of(raw.lhs, rhs, raw.dg_in_dtype)
        if kind_of(*forms, raw.dg_in_dtype) in ("mixed", "in blocks", "float"):
            return True
    return False
