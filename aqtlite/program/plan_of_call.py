"""The plan of one call of a function or a model."""

from collections.abc import Mapping
from typing import Any

from aqtlite.program.modules import flax_models
from aqtlite.program.naming import Parameters, Paths
from aqtlite.program.plan import Plan
from aqtlite.program.quantize import quantize_function


def plan(
    fn: Any,
    *args: Any,
    rules: Any,
    params: Parameters = None,
    paths: Paths = "scopes",
    platform: str | None = None,
    **kwargs: Any,
) -> Plan:
    """Returns what rules do to a function or a model, without running it.

    >>> import jax.numpy as jnp
    >>> model = lambda w, x: x @ w
    >>> print(plan(model, jnp.ones((4, 8)), jnp.ones((2, 4)), rules=[], params=0))
    ... # doctest: +NORMALIZE_WHITESPACE
                       1 contractions: 0 quantized, 1 in float
    <BLANKLINE>
      path              op           lhs                       rhs   ...

    Args:
        fn: a function, or a model whose `apply` takes the variables first, as Linen's.
        *args: its arguments, or `jax.ShapeDtypeStruct`s for arrays.
        rules: as in `quantize_function`.
        params: as in `quantize_function`. None: for a model, its parameters.
        paths: as in `quantize_function`.
        platform: "cpu", "cuda", "rocm" or "tpu", to also say in which dtypes it
            contracts: each contraction is lowered for one device, on any host.
        **kwargs: as `args`.

    Raises:
        TypeError: if `fn` is a model of NNX, or one of Linen without variables; if
            `rules` has another type.
        ValueError: if a required rule matches nothing; if an argument is unknown.
    """
    flax_models.check_can_be_planned(fn, args)
    if hasattr(fn, "apply"):
        fn = fn.apply
        if params is None:
            is_tree = bool(args) and isinstance(args[0], Mapping)
            params = _is_in_params if is_tree and "params" in args[0] else 0
    quantized = quantize_function(fn, rules, params=params, paths=paths)
    return quantized.plan(*args, platform=platform, **kwargs)


def _is_in_params(path: str) -> bool:
    """Whether a leaf of the arguments is a parameter of a Linen model."""
    return path.startswith("0/params/")
