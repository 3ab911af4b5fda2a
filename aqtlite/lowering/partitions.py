"""A form for programs of one partition, another for those that XLA partitions.

What a processor runs fast, reshaped, padded or in a loop over blocks, XLA's partitioner
cannot keep sharded: it gathers the operands first. How many partitions there are is
known when a program is lowered, not when it is traced: shardings may come from
``jax.jit(..., in_shardings=...)``, or from a constraint further down.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jax.sharding import AxisType

Form = Callable[..., jax.Array]

_choice_p = Primitive("partition_dependent")


def partition_dependent(*args: jax.Array, one: Form, several: Form) -> jax.Array:
    """`one` of the arguments if a single device sees them whole, else `several`.

    As `lax.platform_dependent` chooses by platform: both are traced, one is compiled.
    Neither may close over an array. Inside a `jax.shard_map` over all axes of its mesh,
    arrays are whole.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and set(mesh.axis_types) == {AxisType.Manual}:
        return one(*args)
    if not any(isinstance(x, jax.core.Tracer) for x in args):
        return (several if _are_sharded(args) else one)(*args)
    traced = (jax.make_jaxpr(form)(*args) for form in (one, several))
    return _choice_p.bind(*args, **dict(zip(("one", "several"), traced, strict=True)))


def _are_sharded(arrays: tuple[jax.Array, ...]) -> bool:
    return any(jax.typeof(x).sharding.mesh.size > 1 for x in arrays)


def _as_form(jaxpr: ClosedJaxpr) -> Form:
    return lambda *args: jaxpr_as_fun(jaxpr)(*args)[0]


@_choice_p.def_impl
def _run(*args: jax.Array, one: ClosedJaxpr, several: ClosedJaxpr) -> jax.Array:
    return _as_form(several if _are_sharded(args) else one)(*args)


@_choice_p.def_abstract_eval
def _result(*_: Any, one: ClosedJaxpr, several: ClosedJaxpr) -> jax.core.AbstractValue:
    del several
    return one.out_avals[0]


def _batch(args, axes, *, one: ClosedJaxpr, several: ClosedJaxpr):
    forms = {
        name: jax.vmap(_as_form(jaxpr), axes)
        for name, jaxpr in (("one", one), ("several", several))
    }
    return partition_dependent(*args, **forms), 0


def _lower(context, *args, one: ClosedJaxpr, several: ClosedJaxpr):
    axes = context.module_context.axis_context
    if isinstance(axes, mlir.ShardingContext):
        partitions = axes.num_devices
    elif isinstance(axes, mlir.SPMDAxisContext):  # Some axes are manual, not all.
        partitions = axes.mesh.size
    else:  # Replicas, which see their own arrays.
        partitions = 1
    chosen = jaxpr_as_fun(several if partitions > 1 else one)
    return mlir.lower_fun(chosen, multiple_results=True)(context, *args)


batching.primitive_batchers[_choice_p] = _batch
mlir.register_lowering(_choice_p, _lower)
