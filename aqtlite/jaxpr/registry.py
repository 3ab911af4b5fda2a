"""Names of operations: those of JAX that contract, and those that users register.

A registered operation is a kernel, or any function, that a program calls by a name. Its
reference implementation, a function of plain JAX, says what it computes. Analysis and
rewriting take the jaxpr of this function for the body of the equation that calls the
operation; where nothing in it is replaced, the equation stays as it is.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from aqtlite.jaxpr import equations, mapped
from aqtlite.shapes.sharding import shape_of

OF_PRIMITIVES = {
    "dot_general": "dot_general",
    "conv_general_dilated": "conv_general_dilated",
    "ragged_dot_general": "ragged_dot",
}
"""The operation of each primitive that contracts."""

_references: dict[str, Callable[..., Any]] = {}


def register_operation(name: str, reference: Callable[..., Any]) -> None:
    """Says what a kernel computes, so that rules quantize it.

    Rules know `jax.lax.dot_general`, `conv_general_dilated` and `ragged_dot`. What a
    program computes in a kernel of its own they cannot see into: a Pallas kernel, a
    custom primitive. With a reference implementation, a call of the kernel has the
    contractions of this function, which rules name, plans show, and conversions freeze
    the weights of. Where one of them is quantized, the reference takes the place of the
    kernel, and gradients are those of the library; where none is, the kernel runs.

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

    `aqtlite.testing.assert_kernel_equals_reference` compares both.

    Args:
        name: name of a function with a `jax.jit`, `jax.custom_vjp` or
            `jax.custom_jvp`, of a Pallas kernel (its ``name=``, else that of its
            function), of a `jax.lax.composite`, or of a primitive that is not JAX's. Of
            nested calls the outermost with a registered name is taken.
        reference: a function of plain JAX with equal results. It takes the inputs
            of the call as the traced program has them: arrays alone, pytrees flattened,
            in order, and nothing that is static; for a function with a custom
            derivative, behind the arrays that it closes over. Its results are those of
            the call, in shape and dtype. Inside of a `jax.vmap` it is mapped over the
            axes that give the call's results; where equal sizes leave a choice, what
            traces the call raises an error.

    Raises:
        TypeError: if `name` is no string, or `reference` cannot be called.
        ValueError: if `name` is that of an operation of JAX, or another function is
            registered under it. The same function, defined again (in a notebook, say),
            takes the place of the earlier one.
    """
    if not isinstance(name, str) or not callable(reference):
        raise TypeError(
            "register_operation takes the name of a kernel or function, and a function "
            f"of JAX that computes the same, got {name!r} and {reference!r}"
        )
    if name in {"", *OF_PRIMITIVES, *OF_PRIMITIVES.values()}:
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
    """The names of operations that a rule may have."""
    return [*OF_PRIMITIVES.values(), *sorted(_references)]


def name_of(eqn: Any) -> str | None:
    """Returns the name of the registered operation that an equation calls, if any."""
    name = equations.called_name(eqn) if _references else None
    return name if name in _references else None


def reference_of(name: str) -> Callable[..., Any]:
    """Returns the function that is registered for an operation.

    Raises:
        ValueError: if there is none.
    """
    if name not in _references:
        raise ValueError(
            f"no operation named {name!r} is registered (aqtlite.register_operation); "
            f"there are {', '.join(sorted(_references)) or 'none'}"
        )
    return _references[name]


def body_of(eqn: Any, name: str) -> core.ClosedJaxpr:
    """Returns the reference of a registered operation, as the body of an equation.

    Args:
        eqn: calls the operation; `checked_body` has passed it.
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
    """`body_of` a call, once it is certain what the reference computes of its inputs.

    Args:
        eqn: calls the operation.
        name: name of the operation.
        is_mapped: it is inside of a `jax.vmap`, so that its arrays may have another
            axis anywhere.

    Raises:
        ValueError: if the reference does not take the inputs, has other outputs, or if
            the shapes do not tell which axes are mapped.
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
    texts = [f"{x.dtype.name}[{','.join(map(str, x.shape))}]" for x in shapes]
    return ", ".join(texts) or "nothing"
