"""Sums of products of int4 weights by a kernel, where there is one (`int4_kernel`).

The kernel reads weights as XLA stores them, so that nothing has to be packed. Sums of
integers are exact, and scales are applied in the order of the forms of XLA: results are
equal bit for bit. Without the kernel, `pairs` and loops over tiles compute them.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering import custom_call, digits, int4_kernel, pairs, processor
from aqtlite.lowering.int4_kernel import BLOCK, LANES, Kernel
from aqtlite.lowering.packing import Packing
from aqtlite.lowering.target import Target, TargetDependent
from aqtlite.shapes import dimension_numbers as dn

# Up to this number of rows, int4 take less time than weights that are widened at once.
_ROWS = 512

# Sums of more products might leave int32.
_PRODUCTS = 2**20

_RAISED_BY = np.int32(8)

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
    return _call(kernel, x.astype(jnp.int8)[None], weights, 1)


def scaled_sums(
    lhs: jax.Array, rhs: jax.Array, factors: jax.Array, scales: jax.Array
) -> jax.Array:
    """Contracts rows of integers with rows of weights, and adds scaled sums of tiles.

    Args:
        lhs: int8, ``(rows, products)``, or the digits of floats on a leading axis.
        rhs: int4, ``(columns, products)``.
        factors: float32, ``(rows, tiles)``, the scales of integers or the units of
            digits.
        scales: float32, ``(columns, tiles)``.

    Returns:
        float32, ``(rows, columns)``.
    """
    lhs = lhs if lhs.ndim > 2 else lhs[None]
    return _ScaledSums()(lhs, rhs, factors, scales)


@dataclasses.dataclass(frozen=True)
class _ScaledSums(TargetDependent):
    """The scaled sums of tiles, called only where `is_available`."""

    def reference(self, lhs, rhs, factors, scales):
        tiles = scales.shape[1]
        left, right = (
            x.astype(jnp.int32).reshape(*x.shape[:-1], tiles, -1) for x in (lhs, rhs)
        )
        sums = jnp.einsum("drtk,ntk->dtrn", left, right).astype(jnp.float32)
        factors, scales = factors.T[:, :, None], scales.T[:, None]
        return (digits.combine(list(sums)) * factors * scales).sum(0)

    def lowered(self, target, lhs, rhs, factors, scales):
        del target
        count, _, products = lhs.shape
        tiles = scales.shape[1]
        kernel = Kernel(
            count,
            is_scaled=True,
            is_single=products == tiles * BLOCK,
            has_dots=processor.adds_products_of_bytes(),
        )
        return _call(kernel, lhs, rhs, tiles, factors.T, scales)

    def packing(self, known, types):
        return _Bytes(self) if 1 in known else None


@dataclasses.dataclass(frozen=True)
class _Bytes(Packing):
    """The same memory as bytes of two weights: XLA copies int4 one by one, in loops."""

    function: _ScaledSums
    argument = 1

    @property
    def layout(self):
        return type(self)

    def pack(self, x):
        return (pairs.as_bytes(x),)

    def run(self, packed, args):
        (weights,), (lhs, _, factors, scales) = packed, args
        return self.function.lowered(None, lhs, weights, factors, scales)


def digits_of_tiles(
    x: jax.Array, tiles: int, out_dtype: np.dtype
) -> tuple[jax.Array, jax.Array]:
    """Returns digits of floats with a unit for each tile, and units ``(rows, tiles)``.

    Args:
        x: floats, ``(rows, products)``.
        tiles: number of tiles.
        out_dtype: final dtype of the contraction.
    """
    rows, products = x.shape
    cut = x.reshape(rows, tiles, products // tiles)
    count = digits.count_of_floats(x.dtype, out_dtype)
    values, unit = digits.of_floats(cut, (2,), count)
    return values.reshape(count, rows, products), unit[..., 0]


def _call(
    kernel: Kernel, lhs: jax.Array, rhs: jax.Array, tiles: int, *scales: jax.Array
) -> jax.Array:
    """Calls a kernel with digits ``(digits, rows, products)`` and weights."""
    count, rows, products = lhs.shape
    steps, blocks = products // tiles, products // tiles // BLOCK
    offsets = lhs.reshape(count, rows, tiles, steps).sum(3, dtype=jnp.int32)
    offsets = lax.transpose(-_RAISED_BY * offsets, (2, 1, 0))
    # Of each eight elements the even ones, then the odd ones, as nibbles are widened.
    x = lhs.reshape(count, rows, tiles, blocks, BLOCK // 8, 4, 2)
    x = x.transpose(2, 3, 1, 0, 4, 6, 5).reshape(tiles, blocks, rows, count, BLOCK)
    dtype = jnp.float32 if kernel.is_scaled else jnp.int32
    out = jax.ShapeDtypeStruct((rows, rhs.shape[0]), dtype)
    name = int4_kernel.registered(kernel)
    call = jax.ffi.ffi_call(name, out, vmap_method="sequential")
    result: jax.Array = call(rhs, x, offsets, *scales)
    return result
