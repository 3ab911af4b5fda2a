"""Widens the 4-bit integers of serving variables to 8 bits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_WIDENED = {jnp.dtype("int4"): jnp.int8, jnp.dtype("uint4"): jnp.uint8}


def widen_int4(variables: Any) -> Any:
    """Widens the 4-bit integers of serving variables to 8 bits.

    XLA packs two int4 into a byte, and CPUs and GPUs unpack them at every call.
    Widened once, they take twice the memory, and on CPUs as little time as int8
    weights; `compile_serving` reads int4 as fast there, but for weights in blocks.
    Weights that ``packed="cpu"`` packed stay as they are. The results are equal bit for
    bit.

    Args:
        variables: serving variables from `aqtlite.flax.convert` or
            `aqtlite.checkpoint.load_serving`, or any pytree of JAX or NumPy arrays.

    Returns:
        The variables, with int4 as int8 and uint4 as uint8.

    >>> from flax import linen as nn
    >>> from aqtlite import config
    >>> from aqtlite.flax import AqtDotGeneral, convert
    >>> model = nn.Dense(4, dot_general=AqtDotGeneral(config.weight_only(bits=4)))
    >>> x = jnp.ones((2, 3))
    >>> serving = convert(model, model.init(jax.random.key(0), x), x)
    >>> wide = widen_int4(serving)
    >>> [x.dtype.name for x in jax.tree.leaves(wide["aqt"]) if x.dtype != "float32"]
    ['int8']
    >>> (model.apply(wide, x) == model.apply(serving, x)).all().item()
    True
    """

    def widen(x: Any) -> Any:
        if not isinstance(x, jax.Array | np.ndarray) or x.dtype not in _WIDENED:
            return x
        return x.astype(_WIDENED[x.dtype])

    return jax.tree.map(widen, variables)
