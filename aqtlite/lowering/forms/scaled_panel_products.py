"""Scaled sums of products of narrow weights by the kernel of `panel_products`.

Scales are applied in the order of the forms of XLA: results are equal bit for bit to
those of loops over tiles, which compute them without the kernel.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.lowering import digits, exact
from aqtlite.lowering.forms import panel_products, panels
from aqtlite.lowering.forms.panels import Panels
from aqtlite.lowering.forms.weight_coding import Coding
from aqtlite.lowering.packing import Packing
from aqtlite.lowering.target import TargetDependent
from aqtlite.shapes import dimension_numbers as dn

_Weights = jax.Array | Panels


def sums_of_floats(
    lhs: jax.Array, rhs: jax.Array, dims: dn.DimensionNumbers, out_dtype: np.dtype
) -> jax.Array:
    """Contracts floats with int4 or int8, both along their last axis, to float32.

    Args:
        lhs: floating.
        rhs: int4 or int8.
        dims: dimension numbers, as `takes_scaled` takes them.
        out_dtype: final dtype of the contraction.
    """
    x, weights = (one.reshape(-1, one.shape[-1]) for one in (lhs, rhs))
    scales = jnp.ones((weights.shape[0], 1), jnp.float32)
    out = of_floats(x, weights, scales, out_dtype)
    return out.reshape(dn.output_shape(dims, lhs.shape, rhs.shape))


def of_integers(
    lhs: jax.Array,
    rhs: _Weights,
    factors: jax.Array,
    scales: jax.Array,
    *,
    coding: Coding = Coding.INTEGERS,
) -> jax.Array:
    """Contracts rows of integers with rows of weights, and adds scaled sums of tiles.

    Args:
        lhs: int8, ``(rows, products)``.
        rhs: int4 or int8, ``(columns, products)``, which may be in panels; or int4 as
            bytes, ``(columns, products / 2)``.
        factors: float32, ``(rows, tiles)``, the scales of lhs.
        scales: float32, ``(columns, tiles)``.
        coding: what the bits of rhs mean. Codes are given as int4 are.

    Returns:
        float32, ``(rows, columns)``.
    """
    return _scaled_sums(1, coding, rhs, lhs, factors, scales)


def of_floats(
    lhs: jax.Array,
    rhs: _Weights,
    scales: jax.Array,
    out_dtype: np.dtype,
    *,
    coding: Coding = Coding.INTEGERS,
) -> jax.Array:
    """Like `of_integers`, for rows of floats, which have a unit for each tile.

    Args:
        lhs: floating, ``(rows, products)``.
        rhs: as in `of_integers`.
        scales: float32, ``(columns, tiles)``.
        out_dtype: final dtype of the contraction.
        coding: as in `of_integers`.
    """
    count = digits.count_of_floats(lhs.dtype, out_dtype)
    return _scaled_sums(count, coding, rhs, exact.float32(lhs), scales)


def _scaled_sums(
    count: int, coding: Coding, weights: _Weights, *others: jax.Array
) -> jax.Array:
    """The scaled sums of tiles, of `count` digits of an element of lhs."""
    if isinstance(weights, Panels):
        bits, weights = weights.bits, weights.values
    else:
        bits = 8 if weights.dtype == jnp.int8 else 4
    if coding is not Coding.INTEGERS and bits != 4:
        raise ValueError(f"codes of {coding.name} have 4 bits, got weights of {bits}")
    return _ScaledSums(count, bits, coding)(weights, *others)


@dataclasses.dataclass(frozen=True)
class _ScaledSums(TargetDependent):
    """The scaled sums of tiles, called only where `is_available`."""

    digits: int
    """Number of digits of an element of lhs, of floats if there are several."""

    bits: int
    """Bits of a weight."""

    coding: Coding
    """What the bits of a weight mean."""

    def reference(self, rhs, lhs, *scales):
        *_, of_columns = scales
        columns, tiles = of_columns.shape
        if rhs.dtype == jnp.uint8:
            rhs = Panels(_in_panels(rhs, columns), columns, self.bits).integers()
        rhs = self.coding.decoded(rhs)
        x, weights = (x.reshape(x.shape[0], tiles, -1) for x in (lhs, rhs))
        if self.digits > 1:
            values, unit = digits.of_floats(x, (2,), self.digits)
            factors = unit[..., 0]
        else:
            values, factors = x[None], scales[0]
        values, weights = values.astype(jnp.int32), weights.astype(jnp.int32)
        sums = list(jnp.einsum("drtk,ntk->dtrn", values, weights))
        if self.digits > 1:
            total = digits.rounded(sums, None)
        else:
            total = sums[0].astype(jnp.float32)
        return (total * factors.T[:, :, None] * of_columns.T[:, None]).sum(0)

    def lowered(self, target, *args):
        del target
        (weights, *others), columns = args, args[-1].shape[0]
        if weights.dtype == jnp.uint8:
            weights = _in_panels(weights, columns)
        return self.call(weights, *others, columns=columns)

    def call(self, *given: jax.Array, columns: int) -> jax.Array:
        """Calls the kernel with weights that may be in panels, as may their scales."""
        return panel_products.call(
            *given,
            columns=columns,
            bits=self.bits,
            count=self.digits,
            coding=self.coding,
        )

    def packing(self, known, types):
        weights, scales = 0, len(types) - 1
        of_scales = tuple(known & {scales})
        columns = types[scales].shape[0]
        if types[weights].dtype == jnp.uint8 and types[weights].shape[0] != columns:
            return _Panels(self, scales) if of_scales else None
        return _Panels(self, weights, of_scales) if weights in known else None


def _in_panels(weights: jax.Array, columns: int) -> jax.Array:
    """Weights that are in panels, or int4 as bytes, in panels."""
    return panels.of_weights(weights) if len(weights) == columns else weights


@dataclasses.dataclass(frozen=True)
class _Panels(Packing):
    """The weights in panels, or their scales, or both."""

    function: _ScaledSums
    argument: int
    beside: tuple[int, ...] = ()

    @property
    def layout(self):
        return type(self)

    def pack(self, args):
        arguments = self.argument, *self.beside
        return tuple(
            panels.of_scales(args[i]) if i else panels.of_weights(args[i])
            for i in arguments
        )

    def run(self, packed, args):
        arguments = dict(zip((self.argument, *self.beside), packed, strict=True))
        given = (arguments.get(i, x) for i, x in enumerate(args))
        return self.function.call(*given, columns=args[-1].shape[0])
