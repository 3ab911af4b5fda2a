"""Sums of products of narrow weights by a kernel, where there is one (`panel_kernel`).

The kernel reads int4, and int8 that have a scale for each tile, as XLA stores them, so
that nothing has to be packed, and packed int8. Sums of integers are exact: results are
equal bit for bit to those of `pairs`, which computes them without the kernel. Sums that
are scaled are in `scaled_panel_products`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from aqtlite.lowering import digits
from aqtlite.lowering.forms import (
    cpu,
    custom_call,
    integer_products,
    panel_kernel,
    panels,
    processor,
)
from aqtlite.lowering.forms.integer_products import Instructions
from aqtlite.lowering.forms.panel_kernel import Kernel, Layout
from aqtlite.lowering.forms.panel_rows import BLOCK, TRANSPOSED
from aqtlite.lowering.forms.panels import PANEL
from aqtlite.lowering.forms.weight_coding import Coding
from aqtlite.lowering.row_grid import Grid
from aqtlite.lowering.target import Target
from aqtlite.shapes import dimension_numbers as dn

# XLA:CPU writes int4 that are computed, as in training, one by one. More rows than
# these are rather those of training than of a program that is given int4.
_ROWS = 512

# From this number of rows on, products of int16 take less time, although weights have
# to be widened.
_ROWS_OF_INT16 = 8

# From this number of digits of rows on, AMX takes less time than VNNI, by bits of a
# weight: int4 have to be widened.
_DIGITS_OF_AMX = {4: 48, 8: 6}

# Sums of more products might leave int32, by bits of a weight. (Those of raised codes
# may, modulo 2^32.)
_PRODUCTS = {4: 2**20, 8: 2**16}

_Typed = jax.Array | jax.ShapeDtypeStruct


def is_available(target: Target) -> bool:
    """Returns True if programs for a target may call the kernel.

    A program that is exported, or divided among devices, may not.
    """
    is_whole = target.partitions == 1 and not target.is_exported
    return target.platform == "cpu" and is_whole and runs_here()


def runs_here() -> bool:
    """Returns True if the kernel is installed and this processor runs it."""
    instructions = integer_products.of_processor()
    return instructions is not None and custom_call.is_available()


def sums_bytes() -> bool:
    """Returns True if the kernel is here, and faster than XLA's dots of int8."""
    return processor.has_slow_dots_of_bytes() and runs_here()


def takes(lhs: _Typed, rhs: _Typed, dims: dn.DimensionNumbers) -> bool:
    """Returns True if `sums` contracts operands.

    These are int4 along the last axes of both operands, and int8 along any axes.
    """
    if rhs.dtype == jnp.int4:
        return takes_scaled(lhs, rhs, dims)
    (lhs_ca, _), (batch, _) = dims
    if lhs.dtype not in (jnp.int4, jnp.int8) or rhs.dtype != jnp.int8 or batch:
        return False
    products = math.prod(lhs.shape[axis] for axis in lhs_ca)
    columns = math.prod(rhs.shape) // max(products, 1)
    return 0 not in lhs.shape and reads(columns, products, 8)


def takes_scaled(lhs: _Typed, rhs: _Typed, dims: dn.DimensionNumbers) -> bool:
    """Returns True if `sums_of_floats` contracts operands: rhs of int4 or int8."""
    (lhs_ca, rhs_ca), (batch, _) = dims
    is_last = lhs_ca == (lhs.ndim - 1,) and rhs_ca == (rhs.ndim - 1,)
    if rhs.dtype not in (jnp.int4, jnp.int8) or batch or not is_last or 0 in lhs.shape:
        return False
    *columns, products = rhs.shape
    return reads(math.prod(columns), products, jnp.iinfo(rhs.dtype).bits)


def reads(columns: int, products: int, bits: int) -> bool:
    """Returns True if the kernel reads a matrix of weights.

    Args:
        columns: number of rows of the matrix; symbolic ones are not read.
        products: number of weights of a row in a tile.
        bits: bits of a weight.
    """
    if not isinstance(columns, int):
        return False
    is_whole = products % BLOCK == 0 and 0 < products <= _PRODUCTS[bits]
    return is_whole and columns >= PANEL


def reads_here(columns: int, products: int, bits: int) -> bool:
    """Returns True if there is a kernel, and it `reads` a matrix of weights."""
    return runs_here() and reads(columns, products, bits)


def has_fast_sums(lhs: jax.Array, rhs: jax.Array, dims: dn.DimensionNumbers) -> bool:
    """Returns True if `sums` takes operands, and less time than other forms do.

    Of any number of rows, it does so of int4 that are given, and packed.
    """
    if rhs.dtype == jnp.int8:
        return sums_bytes() and cpu.can_reshape(lhs, rhs) and takes(lhs, rhs, dims)
    return takes(lhs, rhs, dims) and math.prod(lhs.shape[:-1]) <= _ROWS


def sums(lhs: jax.Array, rhs: jax.Array, dims: dn.DimensionNumbers) -> jax.Array:
    """Contracts int4 or int8 with int4 or int8, which `takes`, to int32."""
    (lhs_ca, rhs_ca), _ = dims
    products = math.prod(rhs.shape[axis] for axis in rhs_ca)
    x = lhs.astype(jnp.int8)
    if _is_transposed(rhs, rhs_ca):
        weights = rhs.reshape(products, -1)
        is_transposed = (
            _is_transposed(x, lhs_ca) and x.size // products % TRANSPOSED == 0
        )
        out = call(
            weights,
            x.reshape(products, -1) if is_transposed else _rows(x, lhs_ca),
            columns=weights.shape[1],
            bits=8,
            layout=Layout.COLUMNS,
            is_transposed=is_transposed,
        )
    else:
        weights = _rows(rhs, rhs_ca)
        bits = jnp.iinfo(rhs.dtype).bits
        out = of_matrices(_rows(x, lhs_ca), weights, weights.shape[0], bits)
    return out.reshape(dn.output_shape(dims, lhs.shape, rhs.shape))


def _is_transposed(x: jax.Array, contracting: dn.Axes) -> bool:
    """Whether the contracting axes of an operand come first, and others follow."""
    count = len(contracting)
    return contracting == tuple(range(count)) and x.ndim > count


def _rows(x: jax.Array, contracting: dn.Axes) -> jax.Array:
    """Returns an operand as a matrix of its contracting axes, which are its rows."""
    remaining = dn.remaining_axes(x.ndim, contracting, ())
    products = math.prod(x.shape[axis] for axis in contracting)
    if _is_transposed(x, contracting):
        return cpu.transposed_matrix(x.reshape(products, -1))
    return x.transpose(*remaining, *contracting).reshape(-1, products)


def of_matrices(x: jax.Array, weights: jax.Array, columns: int, bits: int) -> jax.Array:
    """Contracts rows of integers with rows of weights, to int32.

    Args:
        x: int4 or int8, ``(rows, products)``.
        weights: int4 or int8, ``(columns, products)``, or `panels.of_weights` of these.
        columns: number of rows of weights.
        bits: bits of a weight.
    """
    return call(weights, x.astype(jnp.int8), columns=columns, bits=bits)


def of_rounded_rows(
    x: jax.Array, weights: jax.Array, columns: int, bits: int, grid: Grid, *scale: Any
) -> tuple[jax.Array, jax.Array]:
    """Rounds rows of floats, and contracts them with rows of weights.

    Args:
        x: float32, ``(rows, products)``.
        weights: `panels.of_weights`.
        columns: number of rows of weights.
        bits: bits of a weight.
        grid: grid of the rows.
        *scale: scale of all rows, float32 of one element, if it is given.

    Returns:
        The sums, int32, and for each row, float32 ``(rows, 1)``, its own scale, or if a
        scale is given, 1, or NaN where the first or the last element is not finite.
    """
    panels.check(weights, columns, x.shape[1], bits)
    kernel = Kernel(bits, _instructions(x.shape[0], bits, 1, x.shape[1]), grid=grid)
    sums = jax.ShapeDtypeStruct((x.shape[0], columns), jnp.int32)
    of_rows = jax.ShapeDtypeStruct((x.shape[0], 1), jnp.float32)
    name = panel_kernel.registered(kernel)
    kernel_call = jax.ffi.ffi_call(name, (sums, of_rows), vmap_method="sequential")
    found, found_of_rows = kernel_call(weights, x, *scale)
    return found, found_of_rows


def call(
    weights: jax.Array,
    x: jax.Array,
    *scales: jax.Array,
    columns: int,
    bits: int,
    count: int = 1,
    layout: Layout = Layout.ROWS,
    is_transposed: bool = False,
    coding: Coding = Coding.INTEGERS,
) -> jax.Array:
    """Calls the kernel.

    Args:
        weights: int4 or int8 in a layout, or `panels.of_weights`.
        x: its other operand.
        scales: factors of rows and scales of columns, or `panels.of_scales` of these,
            if sums are scaled.
        columns: number of columns.
        bits: bits of a weight.
        count: number of digits of an element of `x`.
        layout: layout of weights that are not in panels.
        is_transposed: whether `x` is ``(products, rows)``, beside `Layout.COLUMNS`. XLA
            would transpose it in a loop, and round it a second time.
        coding: what the bits of a weight mean.
    """
    products, rows = x.shape if is_transposed else x.shape[::-1]
    if weights.dtype == jnp.uint8:
        panels.check(weights, columns, products, bits)
        layout = Layout.PANELS
    products //= scales[-1].shape[1] if scales else 1
    instructions = _instructions(rows, bits, count, products)
    # Products of int16 are carried in any case.
    is_exact = products * digits.LARGEST**2 <= digits.EXACT_SUM
    kernel = Kernel(
        bits,
        instructions,
        count,
        is_scaled=bool(scales),
        is_single=bool(scales) and products == BLOCK,
        carries=count > 1 and not (is_exact or instructions.takes_int16),
        layout=layout,
        has_packed_scales=bool(scales) and scales[-1].ndim == 3,
        coding=coding,
    )
    dtype = jnp.float32 if scales else jnp.int32
    out = jax.ShapeDtypeStruct((rows, columns), dtype)
    name = panel_kernel.registered(kernel)
    kernel_call = jax.ffi.ffi_call(name, out, vmap_method="sequential")
    attributes = {"is_transposed": True} if is_transposed else {}
    return kernel_call(weights, x, *scales, **attributes)


def _instructions(rows: int, bits: int, count: int, products: int) -> Instructions:
    """The instructions that take the least time for digits of some rows.

    Args:
        rows: number of rows.
        bits: bits of a weight.
        count: number of digits of an element of the rows.
        products: number of weights of a row in a tile.
    """
    found = integer_products.of_processor()
    assert found is not None
    if found is Instructions.AMX:
        is_many = rows * count >= _DIGITS_OF_AMX[bits]
        is_whole = products % found.block == 0
        return found if is_many and is_whole else Instructions.AVX512_VNNI
    is_split = found is Instructions.AVX2 and bits == 8 and count > 1
    return Instructions.AVX2_INT16 if is_split and rows >= _ROWS_OF_INT16 else found
