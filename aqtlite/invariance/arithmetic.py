"""Arithmetic of float32 with one result everywhere, and functions made of it."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.invariance.rounding import barrier, mul
from aqtlite.lowering.elementwise import ElementwiseOnTarget

_f = np.float32


@dataclasses.dataclass(frozen=True)
class Written(ElementwiseOnTarget):
    """A function of `jax.lax`, evaluated in a form with one result everywhere."""

    plain: Callable[..., jax.Array]
    """The function."""

    form: Callable[..., jax.Array]

    slopes: Callable[..., Sequence[jax.Array]] | None = None
    """Function from the result and the arguments to the derivatives by these, made of
    the result and of such functions; None for those of `plain`."""

    def __repr__(self) -> str:
        return f"Written({self.plain.__name__})"

    def reference(self, *args):
        return self.plain(*args)

    def lowered(self, target, *args):
        del target
        return self.form(*args)

    def tangent(self, out, args, tangents):
        if self.slopes is None:
            return super().tangent(out, args, tangents)
        parts = map(jnp.multiply, tangents, self.slopes(out, *args))
        return functools.reduce(jnp.add, parts)


def where(condition, x, y):
    """Selects by a condition; constants may be NumPy's."""
    x, y = (
        one if isinstance(one, jax.Array) else lax.full_like(condition, one, one.dtype)
        for one in (x, y)
    )
    return lax.select(condition, x, y)


def div(x, y):
    """Divides, and never multiplies by a reciprocal."""
    # XLA multiplies by the reciprocal of a divisor that it knows, or that is an
    # element repeated; of this one it does not see that it is `y`, even where it knows
    # `x`, whose sign it would compute.
    bits = lax.bitcast_convert_type(barrier(y), jnp.uint32)
    sign = lax.bitcast_convert_type(lax.abs(barrier(x)), jnp.uint32) >> np.uint32(31)
    divisor = lax.bitcast_convert_type(lax.bitwise_xor(bits, sign), jnp.float32)
    return barrier(lax.div(x, divisor))


def sqrt(x):
    """Takes the square root."""
    return barrier(lax.sqrt(barrier(x)))


def rsqrt(x):
    """Divides one by the square root."""
    return div(lax.full_like(x, 1), sqrt(x))


def polynomial(x, coefficients: Sequence[float]):
    """A polynomial by Horner's rule, from its highest coefficient."""
    out = lax.full_like(x, coefficients[0])
    for one in coefficients[1:]:
        out = mul(out, x) + _f(one)
    return out


def _add(x, y):
    return barrier(lax.add(x, y))


def _sub(x, y):
    return barrier(lax.sub(x, y))


# Sums go through a barrier since XLA adds constants first.
ADD = Written(lax.add, _add)
SUB = Written(lax.sub, _sub)
MUL = Written(lax.mul, mul)
DIV = Written(lax.div, div)

ROOTS = {
    "sqrt": Written(lax.sqrt, sqrt, lambda y, x: (_f(0.5) / y,)),
    "rsqrt": Written(lax.rsqrt, rsqrt, lambda y, x: (_f(-0.5) * y / x,)),
}
"""Functions of one argument that processors compute in one operation."""
