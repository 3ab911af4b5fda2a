"""Sums of products of codes of a table of 16 floats, by a kernel (`table_kernel`).

A sum of products depends on its row and column alone: its bits are the same for any
number of rows, of codes in any layout and on any processor.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from aqtlite.lowering.forms import gpu, panels, processor, table_kernel
from aqtlite.lowering.forms.panels import PANEL
from aqtlite.lowering.forms.table_kernel import LARGEST_RUN, Kernel, Layout
from aqtlite.lowering.forms.table_sums import TABLE_BITS
from aqtlite.lowering.packing import Packing
from aqtlite.lowering.target import TargetDependent

# Runs of fewer products would be rounded too often.
_SMALLEST_RUN = 16

# Of more rows, decoded weights take less time in XLA's dots.
_ROWS = 256

Table = tuple[float, ...]


def reads(columns: int, products_per_tile: int) -> bool:
    """Returns True if the kernel reads a matrix of codes.

    Args:
        columns: number of columns; symbolic ones are not read.
        products_per_tile: number of weights of a column that have one scale.
    """
    if not (isinstance(columns, int) and isinstance(products_per_tile, int)):
        return False
    is_whole = products_per_tile > 0 and products_per_tile % _SMALLEST_RUN == 0
    return is_whole and columns >= PANEL


def pays(rows: int) -> bool:
    """Returns True if the kernel takes less time than decoded weights do."""
    return 0 < rows <= _ROWS


def sums(x: jax.Array, codes: jax.Array, scales: jax.Array, table: Table) -> jax.Array:
    """Contracts rows of floats with the weights of codes, called only where available.

    Args:
        x: float32, ``(rows, products)``.
        codes: int4, or uint8 of which the lower half is a code,
            ``(columns, products)``.
        scales: float32, ``(columns, tiles)``.
        table: the weight of each code.

    Returns:
        float32, ``(rows, columns)``.
    """
    layout = Layout.BYTES if codes.dtype == jnp.uint8 else Layout.PAIRS
    return _TableSums(table, layout)(codes, x, scales)


def sums_of_columns(
    x: jax.Array, codes: jax.Array, scales: jax.Array, table: Table
) -> jax.Array:
    """Like `sums`, with codes ``(products, columns)``.

    Args:
        x: as in `sums`.
        codes: uint8; or int4, of an even number of columns.
        scales: float32, ``(tiles, columns)``.
        table: as in `sums`.
    """
    is_byte = codes.dtype == jnp.uint8
    layout = Layout.COLUMNS_OF_BYTES if is_byte else Layout.COLUMNS
    return _TableSums(table, layout)(codes, x, scales)


@dataclasses.dataclass(frozen=True)
class _TableSums(TargetDependent):
    """The scaled sums of tiles."""

    table: Table
    layout: Layout

    def reference(self, codes, x, scales):
        scales = scales.T if self.layout.is_of_columns else scales
        tiles = scales.shape[1]
        codes = codes.T if self.layout.is_of_columns else codes
        codes = codes.astype(jnp.int32) % 2**TABLE_BITS
        weights = jnp.asarray(self.table, jnp.float32)[codes]
        x, weights = (one.reshape(one.shape[0], tiles, -1) for one in (x, weights))
        weights = weights * scales[..., None]
        return jnp.einsum("rtk,ctk->rc", x, weights, precision="highest")

    def lowered(self, target, codes, x, scales):
        del target
        return _call(self, codes, x, scales, self.columns_of(scales))

    def columns_of(self, scales: jax.Array) -> int:
        """The number of columns, by scales that are not in panels."""
        return scales.shape[1 if self.layout.is_of_columns else 0]

    def packing(self, known, types):
        codes, scales = 0, 2
        return _Panels(self, tuple(known & {scales})) if codes in known else None


def _call(
    function: _TableSums,
    codes: jax.Array,
    x: jax.Array,
    scales: jax.Array,
    columns: int,
) -> jax.Array:
    """Calls the kernel; `scales` may be in panels."""
    rows, products = x.shape
    has_packed_scales = scales.ndim == 3
    are_rows = has_packed_scales or not function.layout.is_of_columns
    tiles = scales.shape[1 if are_rows else 0]
    kernel = Kernel(
        function.table,
        PANEL if processor.has_avx512() else PANEL // 2,
        math.gcd(products // tiles, LARGEST_RUN),
        function.layout,
        has_packed_scales,
        is_row=rows == 1,
    )
    out = jax.ShapeDtypeStruct((rows, columns), jnp.float32)
    name = table_kernel.registered(kernel)
    call = jax.ffi.ffi_call(name, out, vmap_method="sequential")
    return call(codes, x, scales)


@dataclasses.dataclass(frozen=True)
class _Panels(Packing):
    """The codes in panels, and their scales where they are known."""

    argument = 0

    function: _TableSums
    beside: tuple[int, ...]

    @property
    def layout(self):
        return type(self), self.function.layout

    def pack(self, args):
        of_scales = [panels.of_scales(self._of_rows(args[i])) for i in self.beside]
        return self._in_panels(args[self.argument]), *of_scales

    def _of_rows(self, scales: jax.Array) -> jax.Array:
        """Scales ``(columns, tiles)``."""
        return scales.T if self.function.layout.is_of_columns else scales

    def _in_panels(self, codes: jax.Array) -> jax.Array:
        if self.function.layout.is_of_columns:
            codes = gpu.transposed(codes, (1, 0))
        return panels.of_weights(codes.astype(jnp.int4))

    def run(self, packed, args):
        codes, *of_scales = packed
        _, x, scales = args
        given = of_scales[0] if of_scales else self._of_rows(scales)
        of = dataclasses.replace(self.function, layout=Layout.PANELS)
        return _call(of, codes, x, given, self.function.columns_of(scales))
