"""Computations lowered in a form that depends on the platform and the partitioning.

Platforms differ in the forms that they run fast or support; and a form that reshapes,
pads or loops over blocks defeats XLA's partitioner, which then gathers the operands
first. Platform and partitioning are known when a program is lowered, not when it is
traced: it may be exported for another platform, and its shardings may come from
``jax.jit(..., in_shardings=...)``.

`jax.lax.platform_dependent` traces a form for each platform at every call, and does not
know the partitioning. Here only the form that is compiled is traced.
"""

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
from jax.extend.core import ClosedJaxpr, Primitive, Var
from jax.interpreters import ad, batching, mlir, partial_eval

from aqtlite.lowering.packing import Packing


@dataclasses.dataclass(frozen=True)
class Target:
    """The platform and partitioning that a program is compiled for."""

    platform: str
    """ "cpu", "cuda", "rocm", "tpu", or "other"."""

    partitions: int
    """Number of devices among which XLA divides arrays; 1 inside a `jax.shard_map` over
    all axes of its mesh, where each device sees whole arrays."""

    is_exported: bool = False
    """Whether the program is exported (`jax.export`): it may only contain custom calls
    for which JAX guarantees stability."""

    is_partly_mapped: bool = False
    """Whether the program is inside a `jax.shard_map` over some axes of its mesh.
    Values that are whole to it differ among devices, which still exchange others."""

    @property
    def is_gpu(self) -> bool:
        """Whether XLA:GPU compiles the program."""
        return self.platform in ("cuda", "rocm")

    @property
    def takes_layouts(self) -> bool:
        """Whether the program may contain `with_layout_constraint`."""
        return self.partitions == 1 and not self.is_exported


class TargetDependent(abc.ABC):
    """A function of arrays that is lowered in a form for its target.

    Subclasses are frozen dataclasses of static values. All forms return equal values.
    """

    is_composite: ClassVar[bool] = False
    """Whether the lowered form is made of functions that may have packings."""

    @property
    def sums_floats(self) -> bool:
        """Whether forms add floats in different orders: `aqtlite.invariant` replaces
        the function by its reference then."""
        return False

    @abc.abstractmethod
    def reference(self, *args: Any) -> jax.Array:
        """The plain form, which defines the type of the result and the derivative."""

    @abc.abstractmethod
    def lowered(self, target: Target, *args: Any) -> jax.Array:
        """The form for a target."""

    def tangent(
        self, out: jax.Array, args: Sequence[Any], tangents: Sequence[Any]
    ) -> jax.Array:
        """Returns the tangent of the result.

        Args:
            out: the result.
            args: the arguments.
            tangents: their tangents, as arrays.
        """
        del out
        found: jax.Array = jax.jvp(self.reference, tuple(args), tuple(tangents))[1]
        return found

    def type_of(self, *args: Any) -> Any:
        """Returns the type of the result without tracing; None if it is not known.

        Args:
            *args: types of the arguments, on one device.
        """
        del args
        return None

    def lower(self, target: Target, context: Any, *args: Any) -> Any:
        """Lowers a call, as a lowering rule of `jax.interpreters.mlir`."""
        form = functools.partial(self.lowered, target)
        return mlir.lower_fun(form, multiple_results=False)(context, *args)

    def mapped(self, axes: Sequence[int | None], *args: Any) -> jax.Array:
        """Maps the function over axes of the arguments; the new axis is the first."""
        return Mapped(self, tuple(axes))(*args)

    def packing(
        self, known: frozenset[int], types: Sequence[jax.ShapeDtypeStruct]
    ) -> Packing | None:
        """Returns how to pack an argument on CPUs; None if there is nothing to gain.

        Args:
            known: indices of the arguments that are known before the call.
            types: shapes and dtypes of all arguments.
        """
        del known, types
        return None

    def __call__(self, *args: Any) -> jax.Array:
        """Evaluates the function."""
        return _target_dependent_p.bind(*args, function=self)


class OnCpu(TargetDependent):
    """A function with a form for CPUs; other platforms run the reference."""

    @abc.abstractmethod
    def on_cpu(self, is_whole: bool, *args: Any) -> jax.Array:
        """The form for CPUs.

        Args:
            is_whole: whether each device sees whole arrays.
            *args: arguments of `reference`.
        """

    def lowered(self, target: Target, *args: Any) -> jax.Array:
        if target.platform != "cpu":
            return self.reference(*args)
        return self.on_cpu(target.partitions == 1, *args)


_target_dependent_p = Primitive("target_dependent")


def function_of(eqn: Any) -> TargetDependent | None:
    """Returns the function that an equation of a jaxpr calls; None for no such call."""
    is_call = eqn.primitive is _target_dependent_p
    return eqn.params["function"] if is_call else None


def reference_of(eqn: Any) -> ClosedJaxpr | None:
    """Returns the plain form of the function that an equation calls, if it calls one.

    Args:
        eqn: an equation of a jaxpr.
    """
    function = function_of(eqn)
    if function is None:
        return None
    avals = tuple(atom.aval for atom in eqn.invars)
    return _reference_jaxpr(function, avals, jax.sharding.get_abstract_mesh())


def on_mesh(types: Sequence[Any]) -> bool:
    """Returns whether results may be sharded over a mesh.

    Constants are on the current mesh, and results with them, even if no argument is.

    Args:
        types: types of the arguments.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return not (mesh.empty and all(x.sharding.mesh.empty for x in types))


PRIMITIVE = _target_dependent_p.name
"""Name of the primitive whose equations call such functions."""


@functools.cache
def _jitted(function: TargetDependent) -> Any:
    return jax.jit(function)


@_target_dependent_p.def_impl
def _run(*args: jax.Array, function: TargetDependent) -> jax.Array:
    # Under `jax.disable_jit`, the jitted function would be evaluated here again.
    with jax.disable_jit(False):
        return _jitted(function)(*args)


@_target_dependent_p.def_abstract_eval
def _result_type(*args: Any, function: TargetDependent) -> Any:
    known = None if on_mesh(args) else function.type_of(*args)
    mesh = jax.sharding.get_abstract_mesh()
    return known or _reference_jaxpr(function, args, mesh).out_avals[0]


@functools.lru_cache(maxsize=4096)
def _reference_jaxpr(
    function: TargetDependent, args: tuple[Any, ...], mesh: Any
) -> ClosedJaxpr:
    del mesh  # A key of the cache: tracing depends on the current mesh.
    return jax.make_jaxpr(function.reference)(*args)


def _jvp(primals, tangents, *, function: TargetDependent):
    tangents = tuple(ad.instantiate_zeros(tangent) for tangent in tangents)
    out = function(*primals)
    return out, function.tangent(out, primals, tangents)


@dataclasses.dataclass(frozen=True)
class Mapped(TargetDependent):
    """A function mapped over axes of its arguments; the new axis is the first one."""

    function: TargetDependent
    axes: tuple[int | None, ...]

    @property
    def sums_floats(self):
        return self.function.sums_floats

    def reference(self, *args):
        return jax.vmap(self.function.reference, self.axes)(*args)

    def lowered(self, target, *args):
        form = functools.partial(self.function.lowered, target)
        return jax.vmap(form, self.axes)(*args)


def _batch(args, axes, *, function: TargetDependent):
    return function.mapped(axes, *args), 0


def _lower(platform: str, context, *args, function: TargetDependent):
    axes = context.module_context.axis_context
    is_partly_mapped = False
    if isinstance(axes, mlir.ShardingContext):
        partitions = axes.num_devices
    elif isinstance(axes, mlir.SPMDAxisContext):
        is_whole = axes.manual_axes == frozenset(axes.mesh.axis_names)
        partitions = 1 if is_whole else axes.mesh.size
        is_partly_mapped = bool(axes.manual_axes) and not is_whole
    else:  # Replicas, each with arrays of its own.
        partitions = 1
    is_exported = context.module_context.lowering_parameters.for_export
    target = Target(platform, partitions, is_exported, is_partly_mapped)
    return function.lower(target, context, *args)


def _partial_eval_under_policy(saveable, unknown, instantiated, eqn):
    """Applies the policy of a `jax.checkpoint` to the reference form.

    Returns the equation to evaluate, the equation to evaluate again in the backward
    pass, whether each output is unknown and whether it is instantiated there, and the
    inputs to save.
    """
    missing = [
        x
        for x, is_there in zip(eqn.invars, instantiated, strict=True)
        if isinstance(x, Var) and not is_there
    ]
    if any(unknown):
        return None, eqn, [True], [True], missing
    args = tuple(x.aval for x in eqn.invars)
    if _is_saved(saveable, eqn.params["function"], args):
        return eqn, None, [False], [False], []
    return eqn, eqn, [False], [True], missing


def _is_saved(saveable: Any, function: TargetDependent, args: tuple[Any, ...]) -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    for eqn in _reference_jaxpr(function, args, mesh).jaxpr.eqns:
        types = tuple(x.aval for x in eqn.invars)
        if eqn.primitive is _target_dependent_p:
            decision = _is_saved(saveable, eqn.params["function"], types)
        else:
            decision = saveable(eqn.primitive, *types, **eqn.params)
        # A value to offload (it has a destination) is saved, but not moved.
        if decision is True or hasattr(decision, "dst"):
            return True
    return False


ad.primitive_jvps[_target_dependent_p] = _jvp
partial_eval.partial_eval_jaxpr_custom_rules[_target_dependent_p] = (
    _partial_eval_under_policy
)
batching.primitive_batchers[_target_dependent_p] = _batch
for _platform in ("cpu", "cuda", "rocm", "tpu"):
    mlir.register_lowering(
        _target_dependent_p, functools.partial(_lower, _platform), platform=_platform
    )
mlir.register_lowering(_target_dependent_p, functools.partial(_lower, "other"))
