"""Serving variables with 4-bit integers in other forms."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_WIDENED = {jnp.dtype("int4"): jnp.int8, jnp.dtype("uint4"): jnp.uint8}


def widen_int4(variables: Any) -> Any:
    """Widens the 4-bit integers of serving variables to 8 bits.

    XLA keeps two int4 in a byte, and CPUs and GPUs take them apart at every call.
    Widened once, they take twice the memory, and on CPUs the time of int8 weights. The
    results are the same, bit for bit.

    Args:
        variables: serving variables, of `aqtlite.flax.convert` or
            `aqtlite.checkpoint.load_serving`; any pytree of JAX or NumPy arrays.

    Returns:
        The variables, int4 as int8 and uint4 as uint8.

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


def uint4_as_int4(variables: Any) -> Any:
    """Keeps the uint4 of serving variables as int4 of the same bits, to save them.

    Checkpoint libraries store int4, and Orbax no uint4, in which `numerics.NormalFloat`
    and unsigned `numerics.IntAffine` of 4 bits are stored. The variables are served as
    they are, with results that are the same, bit for bit.

    Args:
        variables: serving variables, of `aqtlite.flax.convert` or another conversion;
            any pytree of JAX or NumPy arrays.

    Returns:
        The variables, uint4 as int4.

    >>> from flax import linen as nn
    >>> from aqtlite import config, numerics
    >>> from aqtlite.flax import AqtDotGeneral, convert
    >>> nf4 = {"fwd.rhs.numerics": numerics.NormalFloat()}
    >>> cfg = config.update(config.weight_only(), nf4)
    >>> model = nn.Dense(4, dot_general=AqtDotGeneral(cfg))
    >>> x = jnp.ones((2, 3))
    >>> serving = convert(model, model.init(jax.random.key(0), x), x)
    >>> saved = uint4_as_int4(serving)
    >>> [x.dtype.name for x in jax.tree.leaves(saved["aqt"]) if x.dtype != "float32"]
    ['int4']
    >>> (model.apply(saved, x) == model.apply(serving, x)).all().item()
    True
    """

    def renamed(x: Any) -> Any:
        if not isinstance(x, jax.Array | np.ndarray) or x.dtype != jnp.uint4:
            return x
        return lax.bitcast_convert_type(x, jnp.int4)

    return jax.tree.map(renamed, variables)
