"""An embedding whose `attend` and lookups can be quantized."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


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
