"""Promotion of the dtypes of a layer's operands."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from aqtlite.qtensor.qtensor import QTensor


def promote_dtype(*args: Any, dtype: Any = None, inexact: bool = True) -> list[Any]:
    """Promotes like `flax.linen.dtypes.promote_dtype`, also for `QTensor`s.

    Pass it as `promote_dtype=` to a layer that takes the quantized result of another
    layer. The stored integers and scales do not change: the dtype of a `QTensor` is the
    dtype of its `dequant`.

    >>> import flax.linen as nn, jax
    >>> from aqtlite import config, numerics
    >>> from aqtlite.flax import AqtDotGeneral
    >>> cfg = config.fully_quantized()
    >>> to_int8 = config.update(cfg, {"out.numerics": numerics.IntSymmetric(bits=8)})
    >>> layers = nn.Sequential([
    ...     nn.Dense(8, use_bias=False, dot_general=AqtDotGeneral(to_int8)),
    ...     nn.Dense(4, dot_general=AqtDotGeneral(cfg), promote_dtype=promote_dtype),
    ... ])
    >>> layers.init_with_output(jax.random.key(0), jnp.ones((2, 3)))[0].shape
    (2, 4)

    Args:
        args: arrays, `QTensor`s and None.
        dtype: dtype to promote to; None for the common dtype of all arguments.
        inexact: as in Flax.
    """
    stand_ins = [jnp.zeros((), x.dtype) if isinstance(x, QTensor) else x for x in args]
    promoted = nn.dtypes.promote_dtype(*stand_ins, dtype=dtype, inexact=inexact)
    return [
        x.astype(one.dtype) if isinstance(x, QTensor) else one
        for x, one in zip(args, promoted, strict=True)
    ]
