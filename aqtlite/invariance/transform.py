"""Functions whose results depend on values alone, bit for bit."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jax.extend import core

from aqtlite.invariance import finding
from aqtlite.jaxpr import merging, rewriting, tracing
from aqtlite.jaxpr.replacement import Aux, Replacements

F = TypeVar("F", bound=Callable[..., Any])


def invariant(fn: F) -> F:
    """Returns a function that computes each result from values alone, bit for bit.

    Float arithmetic on a processor depends on the program around it: on the size of a
    batch, the length of a sequence or a cache, on padding, on the gradient that is
    computed beside a result, on the instructions that the processor has, and on the
    version of XLA. The result of this function does not. Sums are added in an order by
    distances modulo powers of two, products are rounded before they are added to
    anything, exponentials and other functions are written out, and 16-bit results are
    rounded where the program says so. Contractions of floats add their products one by
    one, which takes some three times as long: quantize large ones, since sums of
    integers are exact in any order.

    The derivative is that of `fn`, made of these values. Bits of gradients depend on
    values alone if the function that computes them is given:
    ``invariant(jax.grad(loss))``.

    >>> import jax
    >>> x = jax.random.normal(jax.random.key(0), (8, 100))
    >>> softmax = invariant(jax.nn.softmax)
    >>> whole = jax.jit(softmax)(x)
    >>> bool((jax.jit(softmax)(x[3:4]) == whole[3:4]).all())
    True

    Args:
        fn: function of pytrees of arrays. It is traced at every call, so call the
            result inside a `jax.jit`.

    Returns:
        The function. Where `fn` has an operation without such a form, it raises a
        `ValueError` that names the operation and its name scope: products along axes,
        linear algebra, float64 and complex numbers, and functions other than exp, log,
        pow, tanh, logistic, erf, sin, cos, sqrt and their variants. Sums over devices
        (`jax.lax.psum`) depend on the number of devices, too.
    """

    @functools.wraps(fn)
    def function(*args: Any, **kwargs: Any) -> Any:
        traced = tracing.trace(lambda args, kwargs: fn(*args, **kwargs), (args, kwargs))
        outputs, _ = evaluate(traced.jaxpr, traced.values((args, kwargs)), {})
        return traced.result(outputs)

    return function  # type: ignore[return-value]


def evaluate(
    closed: core.ClosedJaxpr, values: Sequence[Any], others: Replacements
) -> tuple[list[Any], Aux]:
    """Evaluates a program in forms whose bits depend on values alone.

    Args:
        closed: the program.
        values: its inputs.
        others: replacements of equations, as in `rewriting.evaluate`. They are
            evaluated in such forms, too.

    Returns:
        Values of the outputs, and the auxiliary arrays of `others`.

    Raises:
        ValueError: if an operation has no such form.
    """
    merged = merging.merged(closed, others)
    forms = finding.find(merged.closed, {*others, *merged.unread})
    forms.check()
    replaced = {
        location: dataclasses.replace(one, function=invariant(one.function))
        for location, one in others.items()
    }
    replacements = {
        location: dataclasses.replace(one, beside=invariant)
        for location, one in {**forms.replacements, **replaced}.items()
    }
    return rewriting.evaluate(merged.closed, values, replacements)
