"""Rebuilds equations of higher-order primitives with changed bodies."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import compute_on
from jax.extend import core
from jax.extend.core import primitives

from aqtlite.jaxpr import custom_rules, equations, marks, user_rules
from aqtlite.jaxpr.replacement import Aux, Inside
from aqtlite.shapes.sharding import shape_of_slice, zeros


def _body_function(body: core.ClosedJaxpr, inside: Inside) -> Callable:
    """Returns the body of a call as a function of given arrays and the inputs."""

    def function(given: Aux, *values: Any) -> tuple[list[Any], Aux]:
        return inside.giving(given).body(body, 0, values)

    return function


def _original(eqn: Any, body: core.ClosedJaxpr) -> Callable[..., list[Any]]:
    """Returns an equation that calls a body, as a function of its inputs."""
    return lambda *values: equations.evaluate(body.jaxpr, eqn, values)


def _call(eqn, values, inside):
    (body,) = equations.bodies(eqn)
    return _body_function(body, inside)(inside.given(), *values)


def _jit(eqn, values, inside):
    body, options = equations.jit(eqn)
    function = _body_function(body, inside)
    function.__name__ = equations.called_name(eqn) or function.__name__
    # Given arrays come first and auxiliary arrays last, without shardings.
    options["donate_argnums"] = [i + 1 for i in options["donate_argnums"]]
    placed = options.pop("in_shardings"), options.pop("out_shardings")
    if any(one is not None for one in placed[0]):
        options["in_shardings"] = (None, *placed[0])
    if any(one is not None for one in placed[1]):
        options["out_shardings"] = (placed[1], None)
    return jax.jit(function, **options)(inside.given(), *values)


def _remat(eqn, values, inside):
    body, options = equations.checkpoint(eqn)
    function = jax.checkpoint(_body_function(body, inside), **options)
    return function(inside.given(), *values)


def _custom_jvp(eqn, values, inside):
    body, options = equations.custom_jvp(eqn)
    run = _body_function(body, inside)
    rules = _replaced_rules(eqn, inside)
    function = (
        custom_rules.with_jvp_of(_original(eqn, body), run, inside.beside, **options)
        if rules is None
        else custom_rules.with_rules(run, rules)
    )
    return function(inside.given(), *values)


def _custom_vjp(eqn, values, inside):
    body, options = equations.custom_vjp(eqn)
    run = _body_function(body, inside)
    rules = _replaced_rules(eqn, inside)
    function = (
        custom_rules.with_vjp_of(_original(eqn, body), run, inside.beside, **options)
        if rules is None
        else custom_rules.with_rules(run, rules)
    )
    return function(inside.given(), *values)


def _replaced_rules(eqn: Any, inside: Inside) -> custom_rules.Rules | None:
    """Returns the rules of a call with what is replaced in them; None if nothing is."""
    numbers = {location[0][1] for location in inside.replacements}
    if numbers <= {user_rules.FUNCTION}:
        return None
    rules = user_rules.of(eqn)
    if rules is None:
        return None

    def function(number: int, body: core.ClosedJaxpr) -> Callable[..., Sequence[Any]]:
        return lambda given, values: inside.giving(given).body(body, number, values)[0]

    return custom_rules.Rules(
        function(user_rules.FORWARD, rules.forward),
        function(user_rules.BACKWARD, rules.backward),
        rules.differentiated,
    )


def _shard_map(eqn, values, inside):
    body, options = equations.shard_map(eqn)
    if jax.tree.leaves(inside.given()) or any(
        one.has_aux for one in inside.replacements.values()
    ):
        raise ValueError(
            "rules do not support states (statistics, learned scales, adapters) inside "
            "jax.shard_map, and have one of a contraction there. Give a rule for it "
            "before the others: a config without states, or Rule(path=..., cfg=None); "
            "or contract outside of the jax.shard_map"
        )

    def function(*values):
        return tuple(inside.body(body, 0, values)[0])

    return jax.shard_map(function, **options)(*values), {}


def _compute_on(eqn, values, inside):
    body, options = equations.compute_on(eqn)
    # Before JAX 0.12, `compute_on` was a context alone.
    place: Any = getattr(compute_on, "compute_on2", compute_on.compute_on)
    spaces = (list(options.pop("out_memory_spaces")), jax.memory.Space.Device)
    function = place(_body_function(body, inside), out_memory_spaces=spaces, **options)
    return function(inside.given(), *values)


def _scan(eqn, values, inside):
    scan = equations.Scan.of(eqn)
    consts, start, scanned = scan.of_inputs(values)
    here = inside.replacements
    inner = _in_a_step(inside)
    given = inside.given()
    sliced = {
        location: given[location] for location, one in here.items() if one.per_step[0]
    }
    carried = {
        location: given[location]
        for location, one in here.items()
        if one.has_aux and location not in sliced
    }

    def step(carry, slices):
        (carry, carried), (slices, sliced) = carry, slices
        there = inner.giving({**given, **carried, **sliced})
        outputs, aux = there.body(scan.body, 0, [*consts, *carry, *slices])
        of_step = {location: one for location, one in aux.items() if location in sliced}
        to_next = {location: aux[location] for location in carried}
        final, stacks = scan.of_outputs(outputs)
        return (final, to_next), (stacks, of_step)

    slices = jax.tree.map(shape_of_slice, (scanned, sliced))
    carried = _start(carried, lambda one: step((start, carried), one)[0][1], slices)
    (final, aux), (stacks, of_steps) = lax.scan(
        step,
        (start, carried),
        (scanned, sliced),
        length=scan.length,
        reverse=scan.reverse,
        unroll=scan.unroll,
    )
    return [*final, *stacks], {**aux, **of_steps}


def _mapped(eqn, values, inside):
    call: Any = marks.mapped_call(eqn)
    here = inside.replacements
    inner = _in_a_step(inside)
    axes = {location: 0 if one.per_step[0] else None for location, one in here.items()}

    def function(given, values):
        return inner.giving(given).body(call.body, 0, values)

    # Arrays that are left and not of each call, such as a shared weight, are all alike.
    left = {location: axes[location] for location, one in here.items() if one.has_aux}
    given, of_values = inside.given(), [0 if one else None for one in call.is_mapped]
    return jax.vmap(function, (axes, of_values), (0, left))(given, values)


def _in_a_step(inside):
    """Returns the replacements in one step of a scan, or one of mapped calls."""
    replacements = {
        location: dataclasses.replace(one, per_step=one.per_step[1:])
        for location, one in inside.replacements.items()
    }
    return dataclasses.replace(inside, replacements=replacements)


def _start(
    carried: Aux,
    aux_by_step: Callable[..., Aux],
    *shapes: Any,
) -> Aux:
    """Returns the initial carry of auxiliary arrays: those given, or zeros."""
    if all(one is not None for one in carried.values()):
        return carried
    aux = jax.eval_shape(aux_by_step, *shapes)
    return {
        location: one if one is not None else jax.tree.map(zeros, aux[location])
        for location, one in carried.items()
    }


def _while(eqn, values, inside):
    loop = equations.While.of(eqn)
    of_condition, of_body, start = loop.of_inputs(values)
    given = inside.given()

    # Under `jax.vmap`, there is a result for each row, and rows stop one by one.
    rows = loop.condition.out_avals[0].shape

    def goes_on(carry):
        (result,) = core.jaxpr_as_fun(loop.condition)(*of_condition, *carry)
        return result

    def condition(carry):
        result = goes_on(carry[0])
        return jnp.any(result) if rows else result

    def body(carry):
        carry, carried = carry
        there = inside.giving({**given, **carried})
        after, aux = there.body(loop.body, 1, [*of_body, *carry])
        if rows:
            after = _where(goes_on(carry), after, carry)
        return after, aux

    carried = inside.unchanged_aux()
    carried = _start(carried, lambda: body((start, carried))[1])
    return lax.while_loop(condition, body, (start, carried))


def _where(rows, taken, others):
    """Returns arrays with rows, their leading axes, from one of two lists."""
    return [
        jnp.where(jnp.expand_dims(rows, tuple(range(rows.ndim, one.ndim))), one, other)
        for one, other in zip(taken, others, strict=True)
    ]


def _cond(eqn, values, inside):
    """Evaluates branches; one that is not taken returns its given arrays unchanged."""
    index, *operands = values
    given = inside.given()

    def branch(number: int, closed: core.ClosedJaxpr) -> Callable[..., Any]:
        def function(given, *operands):
            there = inside.giving(given)
            outputs, aux = there.body(closed, number, operands)
            return outputs, {**there.unchanged_aux(), **aux}

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
    """Returns a function that selects a branch by the platform it is lowered for.

    The other branches are not lowered, and perhaps could not be.

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


BUILDERS: Mapping[str, Callable[..., tuple[Sequence[Any], Aux]]] = {
    primitives.jit_p.name: _jit,
    primitives.closed_call_p.name: _call,
    primitives.call_p.name: _call,
    primitives.remat_p.name: _remat,
    primitives.custom_jvp_call_p.name: _custom_jvp,
    primitives.custom_vjp_call_p.name: _custom_vjp,
    primitives.scan_p.name: _scan,
    "mark": _call,
    "vmap": _mapped,
    primitives.while_p.name: _while,
    primitives.cond_p.name: _cond,
    "shard_map": _shard_map,
    "compute_on": _compute_on,
}
"""Functions by `equations.kind_of`: each evaluates an equation from its inputs, with
the replacements of an `Inside`."""
