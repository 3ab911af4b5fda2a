"""Products of arrays that are written as a multiplication and a sum.

``jnp.sum(x[:, :, None] * w, 1)`` computes what ``x @ w`` does, and is no contraction to
JAX: rules do not quantize it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from aqtlite.jaxpr.recognition import producers
from aqtlite.jaxpr.recognition.producers import Value
from aqtlite.jaxpr.sites import Site

PRIMITIVE = "reduce_sum"

WHY_FLOAT = "written as a multiplication and a sum"


def is_product(site: Site, program: producers.Body) -> bool:
    """Whether a sum is one of products of arrays that each lack an axis of the result.

    Sums of squares, statistics and weighted means of one array are not.

    Args:
        site: the sum.
        program: the program that contains it.
    """
    if not jnp.issubdtype(site.eqn.outvars[0].aval.dtype, jnp.floating):
        return False
    given = producers.operands(program, site.location)
    if not given or not any(one.needed for one in site.operands):
        return False
    shape, summed = given[0].shape, site.eqn.params["axes"]
    # Sizes may be symbolic, which can be told from 1 alone.
    kept = {i for i, size in enumerate(shape) if size != 1 and i not in summed}
    lacking = [_lacks(one, shape) for one in _factors(given[0])]
    # Those that lack all axes are numbers.
    lacks = [kept & axes for axes in lacking if len(axes) < len(shape)]
    return len(lacks) > 1 and all(lacks) and not set.intersection(*lacks)


def _factors(value: Value) -> Iterator[Value]:
    """Yields the factors of a product, itself if it is none."""
    name = None if value.maker is None else value.maker.primitive.name
    if name == "mul":
        for one in value.inputs:
            yield from _factors(one)
    elif name in ("convert_element_type", "copy", "neg"):
        yield from _factors(value.inputs[0])
    else:
        yield value


def _lacks(value: Value, shape: Sequence[int]) -> set[int]:
    """Returns the axes of products along which a factor repeats itself."""
    sizes: dict[int, Any] = dict(enumerate(value.shape))
    made = value.maker
    if made is not None and made.primitive.name == "broadcast_in_dim":
        axes = made.params["broadcast_dimensions"]
        sizes = dict(zip(axes, made.invars[0].aval.shape, strict=True))
    return {axis for axis in range(len(shape)) if sizes.get(axis, 1) == 1}
