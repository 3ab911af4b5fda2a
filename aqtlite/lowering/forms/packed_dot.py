"""Dots of int8 weights that are packed before the call, on XLA:CPU.

Where the processor multiplies only uint8 by int8 (`processor.has_unsigned_dots`), one
operand has to be raised by 128, and the sums corrected for it. A packed weight saves
these at every call: it is raised, or its part of the correction is known.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering import digits, target
from aqtlite.lowering.forms import (
    cpu,
    layouts,
    pairs,
    panel_products,
    panels,
    plain,
    processor,
)
from aqtlite.lowering.packing import Packed, Packing
from aqtlite.lowering.row_grid import Grid
from aqtlite.shapes import dimension_numbers as dn
from aqtlite.shapes.sharding import shape_of

_MATRICES = ((1,), (1,)), ((), ())

# XLA's kernels read lhs as it is, and lay out rhs anew at every call. Weights as lhs
# pay up to this number of rows: the first, or the second for sums of many products.
_FEW_ROWS, _FEW_LONG_ROWS, _LONG = 32, 128, 2048

# One row by up to this number of weights takes less time in float32: the kernels of
# integers take longer to start. Sums of up to that many products of int8 are exact.
_FEW_WEIGHTS = 2**14
_EXACT_PRODUCTS = digits.EXACT_SUM // digits.LARGEST**2

# With VNNI, the kernel of panels takes less time than XLA's dots up to this number of
# rows.
_PANEL_ROWS = 512

# With AMX, XLA's dots take less time than the kernel for more rows by more weights than
# these.
_ROWS_OF_AMX, _WEIGHTS_OF_AMX = 64, 2**18

# The kernels compute this number of rows, or of columns, at a time.
_TILE, _ROWS = 16, 4


def packing_of(eqn: Any, known: frozenset[int]) -> Packing | None:
    """Returns how to pack an argument of an equation; None if there is nothing to gain.

    Args:
        eqn: a `lax.dot_general`, or a call of a `TargetDependent` function.
        known: indices of its arguments that are known before the call.
    """
    types = [shape_of(atom.aval) for atom in eqn.invars]
    function = target.function_of(eqn)
    if function is not None:
        return function.packing(known, types)
    params = eqn.params
    if params["preferred_element_type"] != np.int32 or params["out_sharding"]:
        return None
    lhs, rhs = types
    return of_dot(lhs, rhs, params["dimension_numbers"], known)


def of_dot(
    lhs: jax.ShapeDtypeStruct,
    rhs: jax.ShapeDtypeStruct,
    dims: dn.DimensionNumbers,
    known: frozenset[int],
) -> "_WithWeights | None":
    """Returns how to pack the known operand of a dot of int8; None if it does not pay.

    Args:
        lhs: shape and dtype of lhs.
        rhs: shape and dtype of rhs.
        dims: dimension numbers.
        known: indices of the operands that are known, 0 for lhs.
    """
    if len(known) != 1 or dims[1][0]:
        return None
    (argument,) = known
    dtypes = lhs.dtype, rhs.dtype
    is_int4 = dtypes[argument] == jnp.int4
    narrow = (np.int8, jnp.int4) if is_int4 else (np.int8,)
    if any(dtype not in narrow for dtype in dtypes):
        return None
    of_x, of_weight = 1 - argument, argument
    shapes, contracting = (lhs.shape, rhs.shape), dims[0]
    first = len(shapes[of_x]) - len(contracting[of_x])
    if contracting[of_x] != tuple(range(first, len(shapes[of_x]))):
        return None
    rows, products = (
        math.prod(n) for n in (shapes[of_x][:first], shapes[of_x][first:])
    )
    size = math.prod(shapes[of_weight])
    bits, columns = 4 if is_int4 else 8, size // max(products, 1)
    in_panels = None
    if rows and panel_products.reads_here(columns, products, bits):
        in_panels = Panels(argument, contracting[of_weight], shapes[of_weight], bits)
    if is_int4 and in_panels is not None:
        return in_panels
    if is_int4 and pairs.pays_packed(rows, size):
        return _Pairs(argument, contracting[of_weight], shapes[of_weight])
    if is_int4:
        return None
    is_large = rows > _ROWS_OF_AMX and size > _WEIGHTS_OF_AMX
    is_for_xla = is_large and processor.may_use_amx()
    if in_panels and pays_in_panels(rows, dtypes[argument]) and not is_for_xla:
        return in_panels
    if not processor.has_unsigned_dots():
        return None
    if rows == 1 and size <= _FEW_WEIGHTS and products <= _EXACT_PRODUCTS:
        return _FloatWeights(argument, contracting[of_weight], shapes[of_weight])
    if rows == 0 or size < _worthwhile(rows):
        return None
    form: type[_WithWeights]
    if rows <= (_FEW_LONG_ROWS if products >= _LONG else _FEW_ROWS):
        form = _RaisedWeights
    elif processor.multiplies_unsigned(rows):
        form = _SummedWeights
    else:
        return None
    return form(argument, contracting[of_weight], shapes[of_weight])


def pays_in_panels(rows: int, dtype: np.dtype) -> bool:
    """Returns True if the kernel takes less time than other forms of panels do.

    Args:
        rows: number of rows that are contracted with the weights.
        dtype: dtype of the weights, int4 or int8.
    """
    if dtype == jnp.int4:
        return True
    if processor.adds_products_of_bytes():
        return rows <= _PANEL_ROWS
    return processor.has_slow_dots_of_bytes()


def _worthwhile(rows: int) -> int:
    """Returns the least number of elements of weights that pay for a number of rows.

    Fewer stay in the cache. Old versions of XLA:CPU divide the products of few rows
    among threads, packed or not; `cpu.dot` avoids that for weights as they are.
    """
    return 2**18 if rows <= 8 and not processor.HAS_OLD_KERNELS else 2**19 + 1


@dataclasses.dataclass(frozen=True)
class _WithWeights(Packing):
    """A dot of int8 weights by rows that contract their last axes."""

    argument: int
    contracting: dn.Axes
    """Contracting axes of the weights."""

    shape: tuple[int, ...]
    """Shape of the weights."""

    @property
    def layout(self):
        return type(self), self.contracting

    def matrix(self, args: Sequence[jax.Array]) -> jax.Array:
        """The weights as a matrix of a row for each of their remaining elements."""
        weights = args[self.argument]
        order = (*self._remaining, *self.contracting)
        products = math.prod(self.shape[axis] for axis in self.contracting)
        return weights.transpose(order).reshape(-1, products)

    def run(self, packed, args):
        x = args[1 - self.argument]
        return self.arranged(self.sums(packed, self.rows(x)), x)

    def rows(self, x: jax.Array) -> jax.Array:
        """The other operand as a matrix."""
        return x.reshape(math.prod(self._kept(x)), -1)

    def arranged(self, sums: jax.Array, x: jax.Array) -> jax.Array:
        """Sums of `rows` in the shape of the result, int32."""
        rows = self._kept(x)
        columns = tuple(self.shape[axis] for axis in self._remaining)
        if self.argument == 0:
            out = sums.T.reshape(columns + rows)
        else:
            out = sums.reshape(rows + columns)
        # In another layout, which XLA would hand on to consumers, their sums of floats
        # would be of another order. A vector has one layout.
        is_vector = out.size == max(out.shape, default=1)
        out = out if is_vector else layouts.row_major(out)
        return out.astype(jnp.int32)

    def sums(self, packed: Packed, x: jax.Array) -> jax.Array:
        """Contracts a matrix with the packed weights, to a row for each of its rows.

        Sums are int32, or float32 that are integers.
        """
        raise NotImplementedError

    def _kept(self, x: jax.Array) -> tuple[int, ...]:
        """The sizes of the other operand that are not contracted."""
        return x.shape[: x.ndim - len(self.contracting)]

    @property
    def _remaining(self) -> dn.Axes:
        return dn.remaining_axes(len(self.shape), self.contracting, ())


class _FloatWeights(_WithWeights):
    """Weights as float32, whose products with integers have exact sums."""

    def pack(self, args):
        return (self.matrix(args).T.astype(jnp.float32),)

    def sums(self, packed, x):
        (weights,) = packed
        x = x.astype(jnp.float32)
        return lax.dot(x, weights, precision=lax.Precision.HIGHEST)


class _RaisedWeights(_WithWeights):
    """Weights raised by 128, as lhs, behind them rows of zeros (before that).

    The sums of the rows of zeros are the correction.
    """

    def pack(self, args):
        weights = self.matrix(args)
        zeros = _TILE - weights.shape[0] % _TILE
        return (cpu.offset_by_128(plain.with_zeros(weights, 0, zeros)),)

    def sums(self, packed, x):
        (weights,) = packed
        rows, columns = x.shape[0], math.prod(self.shape[a] for a in self._remaining)
        x = plain.with_zeros(x, 0, -rows % _ROWS)
        out = cpu.mixed_dot(weights, x, _MATRICES)
        # XLA folds a transposition of the sums into the dot, which then has no kernel.
        out = out[:columns] - out[columns : columns + 1]
        return out.T[:rows]


class _SummedWeights(_WithWeights):
    """Weights with 128 times their sums, the correction for rows raised by 128."""

    def pack(self, args):
        weights = self.matrix(args)
        return weights, 128 * jnp.sum(weights, axis=1, dtype=jnp.int32)

    def sums(self, packed, x):
        weights, correction = packed
        out = cpu.mixed_dot(cpu.offset_by_128(x), weights, _MATRICES)
        return out - lax.expand_dims(correction, (0,))


class _Pairs(_WithWeights):
    """int4 weights as bytes, each of two."""

    def pack(self, args):
        return (pairs.as_bytes(self.matrix(args)),)

    def sums(self, packed, x):
        (weights,) = packed
        return pairs.sums(x, weights)


@dataclasses.dataclass(frozen=True)
class Panels(_WithWeights):
    """int4 or int8 weights as their kernel reads them."""

    bits: int

    def pack(self, args):
        return (panels.of_weights(self.matrix(args)),)

    def sums(self, packed, x):
        (weights,) = packed
        return panel_products.of_matrices(x, weights, self._columns, self.bits)

    def run_rounding(
        self, packed: Packed, x: jax.Array, grid: Grid, *scale: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Computes what the function computes of `x`, rounded to a grid.

        Args:
            packed: the packed weights.
            x: the other operand before it is rounded, float32.
            grid: grid of each row.
            *scale: scale of all rows, if it is given.

        Returns:
            The result, and what `panel_products.of_rounded_rows` returns of each row,
            keepdims.
        """
        (weights,) = packed
        sums, of_rows = panel_products.of_rounded_rows(
            self.rows(x), weights, self._columns, self.bits, grid, *scale
        )
        shape = self._kept(x) + (1,) * len(self.contracting)
        return self.arranged(sums, x), of_rows.reshape(shape)

    @property
    def _columns(self) -> int:
        return math.prod(self.shape[axis] for axis in self._remaining)
