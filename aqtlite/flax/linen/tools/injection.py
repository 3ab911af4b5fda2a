"""Injection into layers without a `dot_general` field for their inner layers."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import flax.linen as nn

from aqtlite import config


@contextlib.contextmanager
def inject_dot_general(dot_general: Any) -> Iterator[None]:
    """Injects a `dot_general` into every dense layer that is called in the context.

    For layers without a field for it, such as recurrent cells, which contain
    `nn.Dense`. An `nn.Dense` or `nn.DenseGeneral` with a `dot_general` of its own keeps
    it. The parameters do not change.

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
        dot_general: function such as `aqtlite.flax.AqtDotGeneral`.

    Raises:
        TypeError: if `dot_general` is not a function; or, when a cell is called, if it
            is an `nn.OptimizedLSTMCell`, which contracts with `jnp.dot` (`nn.LSTMCell`
            takes the same parameters).
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
    # The clone runs in the scope of the layer, and so has the layer's parameters.
    return layer.clone(parent=layer.scope, dot_general=dot_general)(*args, **kwargs)
