"""Two programs contract the same integers."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jax.extend.core import primitives

from aqtlite import errors
from aqtlite.contraction import differentiation, remat
from aqtlite.jaxpr import equations, module_scopes, scopes
from aqtlite.program.modules import flax_models
from aqtlite.testing import differences
from aqtlite.testing.traced_values import TracedValues


def assert_same_integers(
    first: Callable[..., Any], second: Callable[..., Any], *args: Any
) -> None:
    """Asserts that two functions sum the products of the same integers.

    Runs both, and compares the sums of each quantized contraction of this library, bit
    for bit, in program order: a training step and the one after a change, a function
    by rules and one by injected layers. It tells where two programs part that quantize
    alike.

    >>> import jax.numpy as jnp
    >>> from aqtlite import Rule, config, make_dot_general, quantize_function
    >>> cfg = config.fully_quantized(use_stochastic_rounding=False)
    >>> dot_general = make_dot_general(cfg)
    >>> def injected(x, w):
    ...     return jnp.einsum("bk,kn->bn", x, w, _dot_general=dot_general)
    >>> by_rules = quantize_function(jnp.matmul, Rule(cfg=cfg))
    >>> x, w = jnp.linspace(-1, 1, 8).reshape(2, 4), jnp.eye(4)
    >>> assert_same_integers(injected, by_rules, x, w)
    >>> assert_same_integers(injected, lambda x, w: by_rules(x**3, w), x, w)
    Traceback (most recent call last):
    ...
    AssertionError: contraction 0, bk,kn->bn, sums other integers: 6 of 8 differ

    Args:
        first: a function of arrays.
        second: another one of the same arguments.
        *args: the arguments.

    Raises:
        AssertionError: if contractions differ in number, shape or sums; the message
            names the first that does.
        ValueError: if the first function has no quantized contraction of this library,
            or one is in a loop or branch, where values cannot be seen.
    """
    one, other = (list(_sums(fn, args)) for fn in (first, second))
    if not one:
        raise ValueError(
            "the first function has no quantized contraction of aqtlite, so that there "
            "are no integers to compare"
        )
    if len(one) != len(other):
        raise AssertionError(
            f"the first function has {len(one)} quantized contractions, and the second "
            f"{len(other)}"
        )
    for number, ((path, sums), (_, others)) in enumerate(zip(one, other, strict=True)):
        what = f"contraction {number}, {errors.label(path)},"
        if sums.shape != others.shape or sums.dtype != others.dtype:
            raise AssertionError(
                f"{what} sums {_type(sums)} in the first function, and "
                f"{_type(others)} in the second"
            )
        differs = sums != others
        if differs.any():
            raise AssertionError(
                f"{what} sums other integers: {differs.sum()} of {differs.size} differ"
            )


def _type(x: np.ndarray) -> str:
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def _sums(
    fn: Callable[..., Any], args: tuple[Any, ...]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the path and the sums of each quantized contraction."""
    traced = flax_models.trace(fn, args)
    every = sum(map(_is_sums, equations.with_bodies(traced.jaxpr)))
    values = TracedValues.of(traced.jaxpr)
    arrays = values.run(*traced.values(args))
    found = [one for one in values.equations if _is_sums(one.eqn)]
    if len(found) != every:
        raise ValueError(
            f"{every - len(found)} of {every} quantized contractions are in loops or "
            "branches, where their values cannot be seen: unroll them"
        )
    for one in found:
        path = scopes.parse(one.scope).path
        names = module_scopes.resolved(path).path.split("/")
        if differentiation.SCOPE in names:
            names = names[: names.index(differentiation.SCOPE)]
        yield "/".join(names), differences.data(arrays[one.outputs[0]])


def _is_sums(eqn: Any) -> bool:
    return eqn.primitive is primitives.name_p and eqn.params["name"] == remat.SUMS
