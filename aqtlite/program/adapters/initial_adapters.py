"""Initial adapters of functions, with the parameters that they change."""

from typing import Any

import jax

from aqtlite.program import calibration_state
from aqtlite.program.adapters import adapter_init
from aqtlite.program.convert import program_of
from aqtlite.program.quantize import QuantizedFunction
from aqtlite.program.serving import guards


def with_initial_adapters(
    fn: QuantizedFunction, params: Any, *args: Any, **kwargs: Any
) -> tuple[Any, dict[str, Any]]:
    """Returns the parameters without what adapters start from, and the first state.

    For adapters that take what they start from out of the weights (``init="pissa"`` of
    a `config.Lora`); others start as by `init_state`. Convert the result afterwards,
    which quantizes the rest.

    >>> import aqtlite
    >>> import jax.numpy as jnp
    >>> from aqtlite import config
    >>> rule = aqtlite.Rule(cfg=None, adapter=config.Lora(2, 4, init="pissa"))
    >>> fn = aqtlite.quantize_function(lambda w, x: x @ w, [rule], params=0)
    >>> w, x = jnp.arange(32.0).reshape(8, 4), jnp.eye(8)
    >>> rest, state = with_initial_adapters(fn, w, x)
    >>> bool(abs(rest).max() < 1e-3)  # w is of rank 2
    True
    >>> bool(jnp.allclose(fn(state, rest, x)[0], w, atol=1e-3))
    True

    Args:
        fn: result of `quantize_function`, by rules with adapters.
        params: its parameters, its first argument.
        *args: its other arguments, or their shapes.
        **kwargs: as `args`.

    Raises:
        ValueError: if a weight that changes is more than moved parameters.
    """
    program = program_of(fn, params, args, kwargs, {})
    leaves, treedef = jax.tree.flatten(params)
    given = [*leaves, *jax.tree.leaves((args, kwargs))]
    values = [given[i] for i in program.traced.leaves]
    started = adapter_init.start(program, values, {}, guards.FUNCTION)
    for i, x in started.changed.items():
        leaves[program.traced.leaves[i]] = x
    rest = started.beside(values)
    state = calibration_state.first(program, rest, started.adapters)
    return jax.tree.unflatten(treedef, leaves), state
