"""Equations with bodies, built anew by the functions of JAX that made them."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import compute_on
from jax.experimental.layout import Format
from jax.extend import core
from jax.extend.core import primitives

from aqtlite.jaxpr import custom_rules, equations
from aqtlite.jaxpr.replacement import Inside, Left
from aqtlite.shapes.sharding import shape_of_slice, zeros


def _body_function(body: core.ClosedJaxpr, inside: Inside) -> Callable:
    """The body of a call as a function of given arrays and of the inputs."""

    def function(given: Left, *values: Any) -> tuple[list[Any], Left]:
        return inside.giving(given).body(body, 0, values)

    return function


def _original(eqn: Any, body: core.ClosedJaxpr) -> Callable[..., list[Any]]:
    """An equation that calls a body, as a function of its inputs."""
    variables = [atom for atom in eqn.invars if not isinstance(atom, core.Literal)]
    is_literal = [isinstance(atom, core.Literal) for atom in eqn.invars]
    jaxpr = body.jaxpr
    unique = dict.fromkeys(variables)
    single = jaxpr.replace(
        constvars=[],
        invars=list(unique),
        outvars=list(eqn.outvars),
        eqns=[eqn],
        effects=eqn.effects,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    run = core.jaxpr_as_fun(core.ClosedJaxpr(single, ()))

    def function(*values: Any) -> list[Any]:
        by_variable = {
            atom: value
            for atom, value, skip in zip(eqn.invars, values, is_literal, strict=True)
            if not skip
        }
        return run(*(by_variable[var] for var in unique))

    return function


def _call(eqn, values, inside):
    (body,) = equations.bodies(eqn)
    return _body_function(body, inside)(inside.given(), *values)


def _jit(eqn, values, inside):
    call = equations.Jit.of(eqn)
    function = _body_function(call.body, inside)
    function.__name__ = call.name
    # What is given comes first, and may be placed anywhere.
    shardings: dict[str, Any] = {}
    placed = list(map(_placed, call.in_shardings, call.in_layouts))
    if any(one is not None for one in placed):
        shardings["in_shardings"] = (None, *placed)
    placed = list(map(_placed, call.out_shardings, call.out_layouts))
    if any(one is not None for one in placed):
        shardings["out_shardings"] = (placed, None)
    jitted = jax.jit(
        function,
        donate_argnums=[i + 1 for i, one in enumerate(call.donated) if one],
        inline=call.inline,
        keep_unused=call.keep_unused,
        **shardings,
    )
    return jitted(inside.given(), *values)


def _placed(sharding: Any, layout: Any) -> Any:
    """A sharding and a layout as `jax.jit` takes them; None for neither."""
    return sharding if layout is None else Format(layout, sharding)


def _remat(eqn, values, inside):
    call = equations.Checkpoint.of(eqn)
    function = jax.checkpoint(
        _body_function(call.body, inside),
        prevent_cse=call.prevent_cse,
        policy=call.policy,
    )
    return function(inside.given(), *values)


def _custom_jvp(eqn, values, inside):
    call = equations.CustomJvp.of(eqn)
    function = custom_rules.with_jvp_of(
        _original(eqn, call.body),
        _body_function(call.body, inside),
        call.symbolic_zeros,
    )
    return function(inside.given(), *values)


def _custom_vjp(eqn, values, inside):
    call = equations.CustomVjp.of(eqn)
    function = custom_rules.with_vjp_of(
        _original(eqn, call.body),
        _body_function(call.body, inside),
        call.num_consts,
        call.symbolic_zeros,
    )
    return function(inside.given(), *values)


def _shard_map(eqn, values, inside):
    call = equations.ShardMap.of(eqn)

    def function(*values):
        return tuple(inside.body(call.body, 0, values)[0])

    mapped = jax.shard_map(
        function,
        mesh=call.mesh,
        in_specs=call.in_specs,
        out_specs=call.out_specs,
        check_vma=call.check_vma,
        axis_names=call.axis_names,
    )
    if jax.tree.leaves(inside.given()) or any(
        one.leaves for one in inside.replacements.values()
    ):
        raise ValueError(
            "a contraction inside jax.shard_map would be given arrays, or leave some, "
            "which have no placement there"
        )
    return mapped(*values), {}


def _compute_on(eqn, values, inside):
    call = equations.ComputeOn.of(eqn)
    # Before JAX 0.12, `compute_on` was a context alone.
    place: Any = getattr(compute_on, "compute_on2", compute_on.compute_on)
    function = place(
        _body_function(call.body, inside),
        compute_type=call.compute_type,
        out_memory_spaces=(list(call.out_memory_spaces), jax.memory.Space.Device),
        compiler_options=call.compiler_options,
    )
    return function(inside.given(), *values)


def _scan(eqn, values, inside):
    scan = equations.Scan.of(eqn)
    consts, start, scanned = scan.of_inputs(values)
    here = inside.replacements
    of_a_step = {
        location: dataclasses.replace(one, per_step=one.per_step[1:])
        for location, one in here.items()
    }
    inner = dataclasses.replace(inside, replacements=of_a_step)
    given = inside.given()
    sliced = {
        location: given[location] for location, one in here.items() if one.per_step[0]
    }
    carried = {
        location: given[location]
        for location, one in here.items()
        if one.leaves and location not in sliced
    }

    def step(carry, slices):
        (carry, carried), (slices, sliced) = carry, slices
        there = inner.giving({**given, **carried, **sliced})
        outputs, left = there.body(scan.body, 0, [*consts, *carry, *slices])
        of_step = {
            location: one for location, one in left.items() if location in sliced
        }
        to_next = {location: left[location] for location in carried}
        final, stacks = scan.of_outputs(outputs)
        return (final, to_next), (stacks, of_step)

    slices = jax.tree.map(shape_of_slice, (scanned, sliced))
    carried = _start(carried, lambda one: step((start, carried), one)[0][1], slices)
    (final, left), (stacks, of_steps) = lax.scan(
        step,
        (start, carried),
        (scanned, sliced),
        length=scan.length,
        reverse=scan.reverse,
        unroll=scan.unroll,
    )
    return [*final, *stacks], {**left, **of_steps}


def _start(
    carried: Left,
    left_by_step: Callable[..., Left],
    *shapes: Any,
) -> Left:
    """Initial carry of left arrays: those given, or zeros."""
    if all(one is not None for one in carried.values()):
        return carried
    left = jax.eval_shape(left_by_step, *shapes)
    return {
        location: one if one is not None else jax.tree.map(zeros, left[location])
        for location, one in carried.items()
    }


def _while(eqn, values, inside):
    loop = equations.While.of(eqn)
    of_condition, of_body, start = loop.of_inputs(values)
    given = inside.given()

    def condition(carry):
        (result,) = core.jaxpr_as_fun(loop.condition)(*of_condition, *carry[0])
        return result

    def body(carry):
        carry, carried = carry
        there = inside.giving({**given, **carried})
        return there.body(loop.body, 1, [*of_body, *carry])

    carried = inside.left_unchanged()
    carried = _start(carried, lambda: body((start, carried))[1])
    return lax.while_loop(condition, body, (start, carried))


def _cond(eqn, values, inside):
    """Evaluates a branch; those that are not taken leave what they were given."""
    index, *operands = values
    given = inside.given()

    def branch(number: int, closed: core.ClosedJaxpr) -> Callable[..., Any]:
        def function(given, *operands):
            there = inside.giving(given)
            outputs, left = there.body(closed, number, operands)
            return outputs, {**there.left_unchanged(), **left}

        return function

    cond = equations.Cond.of(eqn)
    branches = [branch(i, closed) for i, closed in enumerate(cond.branches)]
    if cond.platforms is not None:
        return _by_platform(branches, cond.platforms)(given, *operands)
    return lax.switch(index, branches, given, *operands)


def _by_platform(
    branches: Sequence[Callable[..., Any]],
    platforms: Sequence[tuple[str, ...] | None],
) -> Callable[..., Any]:
    """A function that is one of several by the platform that it is lowered for.

    The others are not lowered, and perhaps could not be.

    Args:
        branches: the functions.
        platforms: platforms of each branch; None for all others.
    """
    by_platform, default = {}, None
    for function, names in zip(branches, platforms, strict=True):
        if names is None:
            default = function
        else:
            by_platform.update(dict.fromkeys(names, function))
    return functools.partial(lax.platform_dependent, default=default, **by_platform)


BUILDERS: Mapping[str, Callable[..., tuple[Sequence[Any], Left]]] = {
    primitives.jit_p.name: _jit,
    primitives.closed_call_p.name: _call,
    primitives.call_p.name: _call,
    primitives.remat_p.name: _remat,
    primitives.custom_jvp_call_p.name: _custom_jvp,
    primitives.custom_vjp_call_p.name: _custom_vjp,
    primitives.scan_p.name: _scan,
    primitives.while_p.name: _while,
    primitives.cond_p.name: _cond,
    "shard_map": _shard_map,
    "compute_on": _compute_on,
}
"""By the name of the primitive: what evaluates an equation from its inputs, with
something replaced `Inside`."""
