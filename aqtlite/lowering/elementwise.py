"""Elementwise functions as single equations, traced and lowered for scalars.

Quantization evaluates a few short elementwise functions for every operand. JAX takes
longest where an operation meets a shape for the first time, in tracing and again in
lowering. A function here is traced and lowered once, for scalars; its operations are
then repeated for each shape.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func
from jax.interpreters import mlir

from aqtlite.lowering.target import Target, TargetDependent, on_mesh

Shape = tuple[int, ...]

_ADD_AXES = "stablehlo.broadcast_in_dim", "stablehlo.reshape"


class ElementwiseOnTarget(TargetDependent):
    """An elementwise function of arrays, which broadcasts axes of size one.

    Its forms are made of elementwise operations of `jax.lax`, and of calls of functions
    of this kind.
    """

    def type_of(self, *args):
        shapes = [x.shape for x in args]
        if not _are_known(shapes):
            return None
        (of_scalars,) = _of_scalars(self, _scalars(args)).out_avals
        shape = _broadcast(shapes)
        like = next(x for x in args if len(x.shape) == len(shape))
        return like.update(shape=shape, dtype=of_scalars.dtype, weak_type=False)

    def lower(self, target, context, *args):
        shapes = [x.shape for x in context.avals_in]
        if on_mesh(context.avals_in) or not _are_known(shapes):
            return super().lower(target, context, *args)
        values = [_Value(x, shape) for x, shape in zip(args, shapes, strict=True)]
        return [_emit(_steps(self, target, context, values), values)]

    def mapped(self, axes, *args):
        """Applies the function to arrays with the mapped axis first."""
        pairs = list(zip(args, axes, strict=True))
        ndim = max(x.ndim - (axis is not None) for x, axis in pairs)
        moved = []
        for x, axis in pairs:
            if axis is not None:
                x = jnp.moveaxis(x, axis, 0)
                moved.append(lax.expand_dims(x, range(x.ndim, ndim + 1)))
            else:
                moved.append(lax.expand_dims(x, (0,)) if x.ndim else x)
        return self(*moved)


@dataclasses.dataclass(frozen=True)
class Elementwise(ElementwiseOnTarget):
    """An elementwise function with one form for all targets.

    >>> def scaled(factor, x, scale):
    ...     return jax.lax.mul(x, jax.lax.mul(scale, factor))
    >>> Elementwise(scaled, (2.0,))(jnp.ones((2, 3)), jnp.ones((2, 1))).shape
    (2, 3)
    """

    function: Callable[..., jax.Array]
    """Function of the values of `static`, followed by the arrays."""

    static: tuple[Hashable, ...] = ()

    def __repr__(self) -> str:
        name = f"{self.function.__module__}.{self.function.__qualname__}"
        return f"Elementwise({name}, {self.static})"

    def reference(self, *args):
        return self.function(*self.static, *args)

    def lowered(self, target, *args):
        del target
        return self.reference(*args)


def spread(x: jax.Array, shape: Shape) -> jax.Array:
    """Broadcasts an array of as many axes, or a scalar, to `shape`.

    XLA expands an axis of size one in three instructions, a squeezed one in one.
    """
    pairs = enumerate(zip(x.shape, shape[: x.ndim], strict=True))
    grown = [axis for axis, (size, wanted) in pairs if size != wanted]
    kept = [axis for axis in range(x.ndim) if axis not in grown]
    return lax.broadcast_in_dim(lax.squeeze(x, grown), shape, kept)


def _scalars(types: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(x.update(shape=(), weak_type=False) for x in types)


@functools.lru_cache(maxsize=4096)
def _of_scalars(function: TargetDependent, scalars: tuple[Any, ...]) -> ClosedJaxpr:
    return jax.make_jaxpr(function.reference)(*scalars)


def _are_known(shapes: Sequence[Shape]) -> bool:
    """Whether no size is symbolic (`jax.export`)."""
    return all(isinstance(size, int) for shape in shapes for size in shape)


def _broadcast(shapes: Iterable[Shape]) -> Shape:
    """Returns the shape of an elementwise operation's result; scalars fit any shape.

    Raises:
        ValueError: if other shapes differ in more than sizes of one.
    """
    distinct = {shape for shape in shapes if shape}
    if len(distinct) < 2:
        return next(iter(distinct), ())
    shape = []
    for sizes in zip(*distinct, strict=True):
        (size,) = {*sizes} - {1} or {1}
        shape.append(size)
    return tuple(shape)


class _Step(NamedTuple):
    """An operation of scalars."""

    name: str
    operands: tuple[int, ...]
    """Numbers of its operands among the arguments, then the results of all steps."""

    element: ir.Type
    attributes: tuple[tuple[str, ir.Attribute], ...]


class _Steps(NamedTuple):
    """The operations of a function of scalars."""

    steps: list[_Step]
    output: int
    """Number of the result, as `_Step.operands`."""


def _steps(
    function: TargetDependent, target: Target, context: Any, values: "list[_Value]"
) -> _Steps:
    """Returns the operations of a function, lowered for scalars once per module."""
    known: dict[Hashable, _Steps] = context.module_context.cached_primitive_lowerings
    scalars = _scalars(context.avals_in)
    key = function, scalars, target
    if key not in known:
        inner = context.replace(avals_in=scalars, avals_out=None)
        types = [ir.RankedTensorType.get((), x.element) for x in values]
        form = functools.partial(function.lowered, target)
        known[key] = _lowered_for_scalars(form, inner, types)
    return known[key]


def _lowered_for_scalars(
    form: Callable[..., jax.Array], context: Any, types: Sequence[ir.Type]
) -> _Steps:
    module = ir.Module.create(ir.Location.unknown())
    function: Any = func.FuncOp(
        "scalars", (types, ()), ip=ir.InsertionPoint(module.body)
    )
    body = function.add_entry_block()
    with ir.InsertionPoint(body):
        lower = mlir.lower_fun(form, multiple_results=False)
        (output,) = lower(context, *body.arguments)
    steps: dict[_Step, int] = {}  # Equal ones once.
    numbers = {x: number for number, x in enumerate(body.arguments)}
    count = len(numbers)
    for one in body.operations:
        operation = one.operation
        (result,) = operation.results
        attributes = operation.attributes
        pairs = (attributes[number] for number in range(len(attributes)))
        step = _Step(
            operation.name,
            tuple(numbers[x] for x in operation.operands),
            _Value(result, ()).element,
            tuple((x.name, x.attr) for x in pairs),
        )
        numbers[result] = steps.setdefault(step, count + len(steps))
    return _Steps([*steps], numbers[output])


class _Value(NamedTuple):
    """A value of an MLIR function, and its shape."""

    value: ir.Value
    shape: Shape

    @property
    def element(self) -> ir.Type:
        """Type of its elements."""
        return ir.RankedTensorType(self.value.type).element_type

    def broadcast(self, shape: Shape) -> ir.Value:
        """Returns the value in a larger shape."""
        if self.shape == shape:
            return self.value
        pairs = enumerate(zip(self.shape, shape[: len(self.shape)], strict=True))
        kept = [axis for axis, (size, wanted) in pairs if size == wanted]
        axes = ir.DenseI64ArrayAttr.get(kept)
        attributes = (("broadcast_dimensions", axes),)
        squeezed = self._of_shape(tuple(self.shape[axis] for axis in kept))
        return _operation(
            "stablehlo.broadcast_in_dim", [squeezed], self.element, shape, attributes
        )

    def _of_shape(self, shape: Shape) -> ir.Value:
        """Returns the value without axes of size one, as `spread`."""
        if self.shape == shape:
            return self.value
        maker = self.value.owner
        if isinstance(maker, ir.Operation) and maker.name in _ADD_AXES:
            (given,) = maker.operands
            if tuple(ir.RankedTensorType(given.type).shape) == shape:
                return given
        return _operation("stablehlo.reshape", [self.value], self.element, shape, ())


def _emit(steps: _Steps, values: list[_Value]) -> ir.Value:
    """Repeats operations of scalars for arrays."""
    whole = _broadcast(x.shape for x in values)
    known: dict[tuple[int, Shape], ir.Value] = {}

    def read(number: int, shape: Shape) -> ir.Value:
        if (number, shape) not in known:
            known[number, shape] = values[number].broadcast(shape)
        return known[number, shape]

    for name, numbers, element, attributes in steps.steps:
        shapes = [values[number].shape for number in numbers]
        shape = _broadcast(shapes)
        given = [
            # Bounds may be scalars.
            read(number, own if name == "stablehlo.clamp" and not own else shape)
            for number, own in zip(numbers, shapes, strict=True)
        ]
        value = _operation(name, given, element, shape, attributes)
        values.append(_Value(value, shape))
    return values[steps.output].broadcast(whole)


def _operation(
    name: str,
    operands: Sequence[ir.Value],
    element: ir.Type,
    shape: Shape,
    attributes: Iterable[tuple[str, ir.Attribute]],
) -> ir.Value:
    made = ir.Operation.create(
        name,
        results=[ir.RankedTensorType.get(shape, element)],
        operands=operands,
        attributes=dict(attributes),
    )
    return made.result
