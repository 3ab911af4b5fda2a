"""Injection into layers that pass no `dot_general` on to the layers inside them."""

import functools
from typing import Any

import flax.linen as nn


class WithDotGeneral(nn.Module):
    """A module of which the layers inside contract by a `dot_general` of yours.

    Recurrent cells have `nn.Dense` layers inside and no field for their `dot_general`.
    This module calls another one, and gives `dot_general` to every `nn.Dense` and
    `nn.DenseGeneral` in it that has none of its own. Parameters keep the paths that
    they have without it.

    >>> import jax, jax.numpy as jnp
    >>> from aqtlite import config
    >>> from aqtlite.flax import AqtDotGeneral, convert
    >>> rnn = nn.RNN(nn.LSTMCell(8), variable_broadcast=["params", "aqt"])
    >>> model = WithDotGeneral(rnn, AqtDotGeneral(config.fully_quantized()))
    >>> x = jnp.ones((2, 5, 4))
    >>> variables = model.init(jax.random.key(0), x)
    >>> serving = convert(model, variables, x, strict=True)
    >>> model.apply(serving, x).shape
    (2, 5, 8)

    Raises:
        TypeError: at a call, for a module that contracts by `jnp.dot` (the cell
            `nn.OptimizedLSTMCell`; `nn.LSTMCell` has the same parameters).
    """

    module: nn.Module
    """The module to call."""

    dot_general: Any
    """Goes to the layers inside, such as `AqtDotGeneral`."""

    def setup(self) -> None:
        nn.share_scope(self, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        with nn.intercept_methods(functools.partial(_inject, self.dot_general)):
            return self.module(*args, **kwargs)


def _inject(dot_general: Any, call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """Calls a method of a module, with `dot_general` where it can be injected."""
    layer = context.module
    if isinstance(layer, nn.OptimizedLSTMCell):
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
