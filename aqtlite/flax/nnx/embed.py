"""An NNX embedding whose `attend` can be quantized."""

from typing import Any

import jax
from flax import nnx


class AqtEmbed(nnx.Embed):
    """`flax.nnx.Embed` with a `dot_general` argument for `attend`.

    Its other arguments and its parameter are those of `nnx.Embed`. The table stays in
    float for lookups.

    >>> import jax.numpy as jnp
    >>> from aqtlite import config
    >>> from aqtlite.flax.nnx import AqtDotGeneral
    >>> dot_general = AqtDotGeneral(config.fully_quantized())
    >>> embed = AqtEmbed(8, 4, dot_general=dot_general, rngs=nnx.Rngs(0))
    >>> embed.attend(embed(jnp.array([[3, 1, 2]]))).shape
    (1, 3, 8)
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        dot_general: Any = jax.lax.dot_general,
        rngs: nnx.Rngs,
        **kwargs: Any,
    ):
        super().__init__(num_embeddings, features, rngs=rngs, **kwargs)
        self.dot_general = dot_general

    def attend(self, query: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Contracts a query with each row, as `nnx.Embed.attend` does."""
        query, table = self.promote_dtype(
            (query, self.embedding[...]), dtype=self.dtype
        )
        dims = (((query.ndim - 1,), (1,)), ((), ()))
        return self.dot_general(query, table, dims, out_sharding=out_sharding)
