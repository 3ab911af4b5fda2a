"""Sums of products of int4 weights by a kernel, where there is one (`int4_kernel`).

The kernel reads weights as XLA stores them, so that nothing has to be packed. Sums of
integers are exact, and scales are applied in the order of the forms of XLA: results are
equal bit for bit. Without the kernel, `pairs` and loops over tiles compute them.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.lowering import digits, exact
from aqtlite.lowering.forms import custom_call, int4_kernel, pairs, processor
from aqtlite.lowering.forms.int4_kernel import LANES, Kernel
from aqtlite.lowering.forms.int4_rows import BLOCK
from aqtlite.lowering.packing import Packing
from aqtlite.lowering.target import Target, TargetDependent
from aqtlite.shapes import dimension_numbers as dn

# Up to this number of rows, int4 take less time than weights that are widened at once.
_ROWS = 512

# Sums of more products might leave int32.
_PRODUCTS = 2**20

_Typed = jax.Array | jax.ShapeDtypeStruct


def is_available(target: Target) -> bool:
    """Returns True if programs for a target may call the kernel.

    A program that is exported, or divided among devices, may not.
    """
    is_whole = target.partitions == 1 and not target.is_exported
    return target.platform == "cpu" and is_whole and runs_here()


def runs_here() -> bool:
    """Returns True if the kernel is installed and this processor runs it."""
    return processor.multiplies_bytes() and custom_call.is_available()


def takes(lhs: _Typed, rhs: _Typed, dims: dn.DimensionNumbers) -> bool:
    """Returns True if the kernel contracts operands: their last axes, rhs of int4."""
    (lhs_ca, rhs_ca), (batch, _) = dims
    is_last = lhs_ca == (lhs.ndim - 1,) and rhs_ca == (rhs.ndim - 1,)
    if rhs.dtype != jnp.int4 or batch or not is_last or 0 in lhs.shape:
        return False
    *columns, products = rhs.shape
    is_whole = products % BLOCK == 0 and 0 < products <= _PRODUCTS
    return is_whole and math.prod(columns) >= LANES


def has_fast_sums(lhs: _Typed, rhs: _Typed, dims: dn.DimensionNumbers) -> bool:
    """Returns True if `sums` takes operands, and less time than products of int8."""
    return takes(lhs, rhs, dims) and math.prod(lhs.shape[:-1]) <= _ROWS


def sums(lhs: jax.Array, rhs: jax.Array, dims: dn.DimensionNumbers) -> jax.Array:
    """Contracts int4 or int8 with int4, both along their last axis, to int32."""
    products = rhs.shape[-1]
    out = of_matrices(lhs.reshape(-1, products), rhs.reshape(-1, products))
    return out.reshape(dn.output_shape(dims, lhs.shape, rhs.shape))


def of_matrices(x: jax.Array, weights: jax.Array) -> jax.Array:
    """Contracts rows of integers with rows of weights, int4 or `pairs.as_bytes`."""
    kernel = Kernel(1, False, False, processor.adds_products_of_bytes())
    return _call(kernel, weights, x.astype(jnp.int8))


def sums_of_floats(
    lhs: jax.Array, rhs: jax.Array, dims: dn.DimensionNumbers, out_dtype: np.dtype
) -> jax.Array:
    """Contracts floats with int4, both along their last axis, to float32.

    Args:
        lhs: floating.
        rhs: int4.
        dims: dimension numbers, as `takes` takes them.
        out_dtype: final dtype of the contraction.
    """
    x, weights = (one.reshape(-1, one.shape[-1]) for one in (lhs, rhs))
    scales = jnp.ones((weights.shape[0], 1), jnp.float32)
    out = scaled_sums_of_floats(x, weights, scales, out_dtype)
    return out.reshape(dn.output_shape(dims, lhs.shape, rhs.shape))


def scaled_sums(
    lhs: jax.Array, rhs: jax.Array, factors: jax.Array, scales: jax.Array
) -> jax.Array:
    """Contracts rows of integers with rows of weights, and adds scaled sums of tiles.

    Args:
        lhs: int8, ``(rows, products)``.
        rhs: int4, ``(columns, products)``.
        factors: float32, ``(rows, tiles)``, the scales of lhs.
        scales: float32, ``(columns, tiles)``.

    Returns:
        float32, ``(rows, columns)``.
    """
    return _ScaledSums(1)(rhs, lhs, factors, scales)


def scaled_sums_of_floats(
    lhs: jax.Array, rhs: jax.Array, scales: jax.Array, out_dtype: np.dtype
) -> jax.Array:
    """Like `scaled_sums`, for rows of floats, which have a unit for each tile.

    Args:
        lhs: floating, ``(rows, products)``.
        rhs: int4, ``(columns, products)``.
        scales: float32, ``(columns, tiles)``.
        out_dtype: final dtype of the contraction.
    """
    count = digits.count_of_floats(lhs.dtype, out_dtype)
    return _ScaledSums(count)(rhs, exact.float32(lhs), scales)


@dataclasses.dataclass(frozen=True)
class _ScaledSums(TargetDependent):
    """The scaled sums of tiles, called only where `is_available`."""

    digits: int
    """Number of digits of an element of lhs, of floats if there are several."""

    def reference(self, rhs, lhs, *scales):
        *_, of_columns = scales
        tiles = of_columns.shape[1]
        x, weights = (x.reshape(x.shape[0], tiles, -1) for x in (lhs, rhs))
        if self.digits > 1:
            values, unit = digits.of_floats(x, (2,), self.digits)
            factors = unit[..., 0]
        else:
            values, factors = x[None], scales[0]
        values, weights = values.astype(jnp.int32), weights.astype(jnp.int32)
        sums = jnp.einsum("drtk,ntk->dtrn", values, weights).astype(jnp.float32)
        total = digits.combine(list(sums))
        return (total * factors.T[:, :, None] * of_columns.T[:, None]).sum(0)

    def lowered(self, target, rhs, lhs, *scales):
        del target
        kernel = Kernel(
            self.digits,
            is_scaled=True,
            is_single=lhs.shape[1] == scales[-1].shape[1] * BLOCK,
            has_dots=processor.adds_products_of_bytes(),
        )
        return _call(kernel, rhs, lhs, *scales)

    def packing(self, known, types):
        return _Bytes(self) if 0 in known else None


@dataclasses.dataclass(frozen=True)
class _Bytes(Packing):
    """The same memory as bytes of two weights: XLA copies int4 one by one, in loops."""

    function: _ScaledSums
    argument = 0

    @property
    def layout(self):
        return type(self)

    def pack(self, x):
        return (pairs.as_bytes(x),)

    def run(self, packed, args):
        return self.function.lowered(None, *packed, *args[1:])


def _call(kernel: Kernel, rhs: jax.Array, lhs: jax.Array, *scales: jax.Array) -> Any:
    dtype = jnp.float32 if kernel.is_scaled else jnp.int32
    out = jax.ShapeDtypeStruct((lhs.shape[0], rhs.shape[0]), dtype)
    name = int4_kernel.registered(kernel)
    return jax.ffi.ffi_call(name, out, vmap_method="sequential")(rhs, lhs, *scales)
