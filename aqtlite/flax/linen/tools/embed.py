"""Lookups in a table that is also contracted, such as that of a tied embedding."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from aqtlite import config, operations
from aqtlite.contraction import lookup as table_lookup
from aqtlite.flax.injectable import injectable
from aqtlite.flax.linen import caller as callers
from aqtlite.flax.linen.bare import lookup
from aqtlite.flax.linen.caller import find_caller
from aqtlite.flax.linen.dot_general import Injected
from aqtlite.program.serving.contraction import Contraction
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization import checks

_AXES = operations.OperandAxes.of_contracting(2, (1,))


@injectable
@dataclasses.dataclass(frozen=True)
class AqtTake(Injected):
    """Rows of a quantized table, dequantized: `jnp.take` for Flax modules.

    The table is quantized by ``cfg.fwd.rhs``, rounded to nearest, as `AqtDotGeneral`
    quantizes an rhs with the last axis contracted. If one module does both with the
    same config (``embed(tokens)`` and ``embed.attend(x)`` of a tied embedding),
    `convert` freezes one table for both, and no float copy remains. The gradient is a
    straight-through estimator.

    Its fields are those of `AqtDotGeneral`.

    >>> import jax.numpy as jnp
    >>> take = AqtTake(config.fully_quantized())
    >>> take(jnp.ones((8, 4)), jnp.array([[1, 2, 3]])).shape
    (1, 3, 4)
    """

    def __call__(self, table: Any, indices: Any) -> jax.Array:
        """Takes rows of a table.

        Args:
            table: floating-point table of shape ``(rows, features)``.
            indices: integers of any shape. Rows of indices out of range are NaN.

        Raises:
            TypeError: if the indices are not integers, or the table is no array or, to
                be quantized, not floating-point.
            ValueError: if the table is not a matrix, or if the config does not compute
                the scale of the table from the table alone.
        """
        table = checks.as_array(table, "the table of AqtTake")
        indices = jnp.asarray(indices)
        if not jnp.issubdtype(indices.dtype, jnp.integer):
            raise TypeError(
                f"AqtTake takes integers as indices of rows, got {indices.dtype} of "
                f"shape {indices.shape}"
            )
        if table.ndim != 2:
            raise ValueError(
                f"AqtTake takes rows of a table of two axes, got shape {table.shape}"
            )
        cfg = (self.cfg or config.unquantized()).with_float_out()
        table_lookup.check(cfg)
        if cfg.fwd.rhs.is_quantized:
            checks.check_floating(table, table_lookup.PATH)
        caller = find_caller()
        if cfg.needs_noise and self._is_for_serving(caller):
            cfg = cfg.for_serving()
        # A stand-in for the other operand of a contraction.
        lhs = jnp.zeros((1, table.shape[1]), table.dtype)
        dims = (((1,), (1,)), ((), ()))
        call = Contraction(
            cfg=cfg,
            frozen_operands=self.frozen_operands,
            name=self.name,
            operation=operations.DotGeneral.of(dims, lhs.shape, table.shape),
            lhs=lhs,
            rhs=table,
        )
        call, (lhs, table) = self._prepare(call, caller)
        tensor = call.cfg.fwd.rhs.to_nearest()
        if callers.is_in_float():
            tensor = config.Tensor()
        return lookup.contract(lambda _, x: _rows(x, indices, tensor), lhs, table)


def _rows(table: Any, indices: Any, tensor: config.Tensor) -> jax.Array:
    """Returns rows of a table, quantized first if `tensor` says so."""
    take = functools.partial(jnp.take, indices=indices, axis=0)
    if not isinstance(table, QTensor):
        if not tensor.is_quantized:
            return take(table)
        table = table_lookup.quantized(table, tensor, _AXES)
    return table_lookup.rows(table, 0, take)


class AqtEmbed(nn.Embed):
    """`flax.linen.Embed` with fields to inject quantized functions.

    Its parameters are those of `nn.Embed`; to load a checkpoint, give it the name of
    the layer that it replaces (``name="Embed_0"``).

    With `dot_general` alone, `attend` contracts integers, and the float table stays in
    the serving variables for lookups. With `take` as well, lookups return rows of the
    quantized table, in training and serving, and only its integers are kept.

    >>> from aqtlite import config
    >>> from aqtlite.flax import AqtDotGeneral, AqtTake, convert
    >>> cfg = config.fully_quantized()
    >>> class Tied(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, tokens):
    ...         embed = AqtEmbed(
    ...             32, 8, dot_general=AqtDotGeneral(cfg), take=AqtTake(cfg)
    ...         )
    ...         return embed.attend(embed(tokens))
    >>> tokens = jnp.array([[3, 1, 4]])
    >>> variables = Tied().init(jax.random.key(0), tokens)
    >>> serving = convert(Tied(), variables, tokens)
    >>> serving["aqt"]["AqtEmbed_0"]["embedding"]["rhs"]
    QTensor(int8[32,8], scale=float32[32,1], ...)
    """

    dot_general: Any = None
    """Function that contracts in `attend`, such as `AqtDotGeneral`. None: `jnp.dot`."""

    take: Any = None
    """Function that looks up rows, such as `AqtTake`. None: `jnp.take`."""

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Looks up rows by index, as `nn.Embed` does."""
        if self.take is None:
            return super().__call__(inputs)
        if not jnp.issubdtype(inputs.dtype, jnp.integer):
            raise TypeError(
                f"an embedding is looked up by integers, got {inputs.dtype} of shape "
                f"{inputs.shape}"
            )
        return self.take(self._table(), inputs)

    def attend(self, query: jax.Array) -> jax.Array:
        """Contracts a query with each row, as `nn.Embed.attend` does."""
        if self.dot_general is None:
            return super().attend(query)
        (promoted,) = self.promote_dtype(query, dtype=self.dtype)
        dims = (((query.ndim - 1,), (1,)), ((), ()))
        return self.dot_general(promoted, self._table(), dims)

    def _table(self) -> Any:
        (table,) = self.promote_dtype(self.embedding, dtype=self.dtype, inexact=False)
        return table
