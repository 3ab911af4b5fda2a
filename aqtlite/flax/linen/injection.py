"""Injection into layers that pass no `dot_general` on to the layers inside them."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import flax.linen as nn

from aqtlite import config


@contextlib.contextmanager
def inject_dot_general(dot_general: Any) -> Iterator[None]:
    """Gives a `dot_general` to every dense layer that is called while it lasts.

    Recurrent cells, for instance, have `nn.Dense` layers inside, and no field for their
    `dot_general`. `nn.Dense` and `nn.DenseGeneral` that have one of their own keep it.
    Parameters are the same as without it.

    >>> import jax, jax.numpy as jnp
    >>> from aqtlite import config
    >>> from aqtlite.flax import AqtDotGeneral, convert
    >>> class Model(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         with inject_dot_general(AqtDotGeneral(config.fully_quantized())):
    ...             cell = nn.LSTMCell(8)
    ...             return nn.RNN(cell, variable_broadcast=["params", "aqt"])(x)
    >>> x = jnp.ones((2, 5, 4))
    >>> variables = Model().init(jax.random.key(0), x)
    >>> serving = convert(Model(), variables, x, strict=True)
    >>> Model().apply(serving, x).shape
    (2, 5, 8)

    Args:
        dot_general: such as `aqtlite.flax.AqtDotGeneral`.

    Raises:
        TypeError: if `dot_general` is no function, or, at the call, a cell contracts by
            `jnp.dot` (`nn.OptimizedLSTMCell`; `nn.LSTMCell` takes the same parameters).
    """
    if not callable(dot_general) or isinstance(dot_general, config.DotGeneral):
        raise TypeError(
            "inject_dot_general takes a function such as AqtDotGeneral(cfg), got "
            f"{dot_general!r}"
        )
    with nn.intercept_methods(functools.partial(_inject, dot_general)):
        yield


def _inject(dot_general: Any, call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """Calls a method of a module, with `dot_general` where it can be injected."""
    layer = context.module
    if isinstance(layer, nn.OptimizedLSTMCell) and context.method_name == "__call__":
        raise TypeError(
            "nn.OptimizedLSTMCell contracts by jnp.dot, where nothing can be injected; "
            "nn.LSTMCell takes the same parameters"
        )
    is_plain = (
        isinstance(layer, nn.Dense | nn.DenseGeneral)
        and context.method_name == "__call__"
        and layer.dot_general is None
        and layer.dot_general_cls is None
    )
    if not is_plain:
        return call(*args, **kwargs)
    # In the scope of the layer, so that it has its parameters.
    return layer.clone(parent=layer.scope, dot_general=dot_general)(*args, **kwargs)
