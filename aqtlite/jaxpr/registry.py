"""Contracting operations of JAX, and operations that users register.

A registered operation is a kernel or function that a program calls by name. A reference
implementation in plain JAX defines what it computes. Analysis and rewriting use the
jaxpr of the reference as the body of the equation that calls the operation; if nothing
in it is replaced, the equation is unchanged.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from aqtlite.jaxpr import equations, mapped
from aqtlite.shapes.sharding import describe, shape_of

OF_PRIMITIVES = {
    "dot_general": "dot_general",
    "conv_general_dilated": "conv_general_dilated",
    "ragged_dot_general": "ragged_dot",
}
"""The operation of each contracting primitive."""

LOOKUP = "take"
"""The operation that reads rows of a table; it contracts nothing."""

_references: dict[str, Callable[..., Any]] = {}


def register_operation(name: str, reference: Callable[..., Any]) -> None:
    """Registers a reference implementation of a kernel, so that rules can quantize it.

    Rules know `jax.lax.dot_general`, `conv_general_dilated` and `ragged_dot`, but
    cannot see into a custom kernel, such as a Pallas kernel or a custom primitive. With
    a reference implementation, a call of the kernel has the contractions of the
    reference: rules match them, plans show them, and conversions freeze their weights.
    If one of them is quantized, the reference replaces the kernel, with this library's
    gradients; otherwise the kernel runs.

    >>> from jax.experimental import pallas
    >>> import jax.numpy as jnp
    >>> import aqtlite
    >>> def product(x, w):
    ...     def product_kernel(x, w, out):
    ...         out[...] = x[...] @ w[...]
    ...     shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    ...     return pallas.pallas_call(product_kernel, shape, interpret=True)(x, w)
    >>> aqtlite.register_operation("product_kernel", jnp.matmul)
    >>> rules = aqtlite.Rule(op="product_kernel", cfg=aqtlite.config.fully_quantized())
    >>> x, w = jnp.ones((2, 8)), jnp.ones((8, 4))
    >>> aqtlite.plan(lambda w, x: product(x, w), w, x, rules=rules).summary()
    '1 contractions: 1 quantized, 0 in float'

    `aqtlite.testing.assert_kernel_equals_reference` compares kernel and reference.

    Args:
        name: name of a function with `jax.jit`, `jax.custom_vjp` or `jax.custom_jvp`,
            of a Pallas kernel (its ``name=``, or else the name of its function), of a
            `jax.lax.composite`, or of a primitive that is not JAX's. In nested calls,
            the outermost registered name counts.
        reference: function in plain JAX with results equal to the call's, in shape and
            dtype too. It takes the inputs of the call as in the traced program: only
            arrays, with pytrees flattened in order, and no static arguments; for a
            function with a custom derivative, preceded by the arrays it closes over.
            Inside a `jax.vmap` it is mapped over the axes that give the call's results;
            if equal sizes make these ambiguous, tracing the call raises an error.

    Raises:
        TypeError: if `name` is not a string, or `reference` is not callable.
        ValueError: if `name` is an operation of JAX, or another function is registered
            under it. Registering the same function again, redefined in a notebook for
            example, replaces it.
    """
    if not isinstance(name, str) or not callable(reference):
        raise TypeError(
            "register_operation takes the name of a kernel or function, and a function "
            f"of JAX that computes the same, got {name!r} and {reference!r}"
        )
    if name in {"", LOOKUP, *OF_PRIMITIVES, *OF_PRIMITIVES.values()}:
        raise ValueError(
            f"{name!r} cannot be registered: rules know {', '.join(names())} already, "
            "and other operations need names of their own"
        )
    known = _references.get(name)
    if known is not None and _origin(known) != _origin(reference):
        raise ValueError(
            f"an operation named {name!r} is registered already, as "
            f"{_origin(known)}: {_origin(reference)} needs another name"
        )
    _references[name] = reference


def names() -> list[str]:
    """Returns the names of operations that a rule may have."""
    return [*OF_PRIMITIVES.values(), LOOKUP, *sorted(_references)]


def name_of(eqn: Any) -> str | None:
    """Returns the name of the registered operation that an equation calls, if any."""
    name = equations.called_name(eqn) if _references else None
    return name if name in _references else None


def reference_of(name: str) -> Callable[..., Any]:
    """Returns the function that is registered for an operation.

    Raises:
        ValueError: if no function is registered.
    """
    if name not in _references:
        raise ValueError(
            f"no operation named {name!r} is registered (aqtlite.register_operation); "
            f"there are {', '.join(sorted(_references)) or 'none'}"
        )
    return _references[name]


def body_of(eqn: Any, name: str) -> core.ClosedJaxpr:
    """Returns the reference of a registered operation as the body of an equation.

    Args:
        eqn: equation that calls the operation, checked by `checked_body` before.
        name: name of the operation.

    Raises:
        ValueError: if the reference does not take the inputs of the equation, or has
            other outputs.
    """
    try:
        return _body(eqn, name, _references[name])
    except ValueError as error:
        found = _readings(eqn, name)
        if not found:
            raise error
        return _body(eqn, name, found[0].of(_references[name]))


def checked_body(eqn: Any, name: str, *, is_mapped: bool) -> core.ClosedJaxpr:
    """Returns `body_of` a call after checking that its mapped axes are unambiguous.

    Args:
        eqn: equation that calls the operation.
        name: name of the operation.
        is_mapped: whether it is inside a `jax.vmap`, so that its arrays may have
            another axis anywhere.

    Raises:
        ValueError: if the reference does not take the inputs, has other outputs, or if
            the shapes do not determine which axes are mapped.
    """
    reference = _references[name]
    found = _readings(eqn, name) if is_mapped else []
    if not found:
        return _body(eqn, name, reference)
    inputs = [shape_of(atom.aval) for atom in eqn.invars]
    if len(found) > 1 and not mapped.agree(reference, found, inputs):
        raise ValueError(
            f"{_call(eqn, name)} inside of a jax.vmap, and their shapes do not tell "
            "which axes are mapped. Give a function around the jax.vmap a name of its "
            "own, by jax.jit, and register it as what the mapped reference computes: "
            "aqtlite.register_operation(name, jax.vmap(reference, in_axes, out_axes))"
        )
    return _body(eqn, name, found[0].of(reference))


def _readings(eqn: Any, name: str) -> list[mapped.Reading]:
    inputs, wanted = (
        [shape_of(atom.aval) for atom in atoms] for atoms in (eqn.invars, eqn.outvars)
    )
    return mapped.readings(_references[name], inputs, wanted)


def _body(eqn: Any, name: str, reference: Callable[..., Any]) -> core.ClosedJaxpr:
    """Returns a reference as the body of an equation.

    Raises:
        ValueError: if it does not take the inputs, or has other outputs.
    """
    inputs = [shape_of(atom.aval) for atom in eqn.invars]
    wanted = [shape_of(var.aval) for var in eqn.outvars]
    try:
        body, out = jax.make_jaxpr(reference, return_shape=True)(*inputs)
    except mapped.OF_REFERENCES as error:
        raise ValueError(
            f"{_call(eqn, name)}, and the function that is registered for it fails: "
            f"{type(error).__name__}: {error}. It has to take these inputs, which "
            "inside of a jax.vmap have another axis"
        ) from error
    found = jax.tree.leaves(out)
    if [(x.shape, x.dtype) for x in found] != [(x.shape, x.dtype) for x in wanted]:
        raise ValueError(
            f"{_call(eqn, name)} and returns {_brief(wanted)}, but the function that "
            f"is registered for it returns {_brief(found)}"
        )
    if any(equations.called_name(one) == name for one in body.jaxpr.eqns):
        raise ValueError(
            f"the function that is registered for the operation {name!r} calls {name!r}"
        )
    return body


def _call(eqn: Any, name: str) -> str:
    inputs = [shape_of(atom.aval) for atom in eqn.invars]
    return f"the operation {name!r} is called with {_brief(inputs)}"


def _origin(function: Callable[..., Any]) -> str:
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _brief(shapes: Sequence[Any]) -> str:
    return ", ".join(map(describe, shapes)) or "nothing"
