"""Equations with bodies, built anew by the functions of JAX that made them."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental.layout import Format
from jax.extend import core

from aqtlite.jaxpr import custom_rules, equations
from aqtlite.jaxpr.replacement import Inside, Left
from aqtlite.sharding import shape_of_slice, zeros


def _only_body(eqn: Any) -> core.ClosedJaxpr:
    (body,) = equations.bodies(eqn)
    return body


def _body_function(eqn: Any, inside: Inside) -> Callable:
    """The body of a call, as a function of what is given and of its inputs."""
    body = _only_body(eqn)

    def function(given: Left, *values: Any) -> tuple[list[Any], Left]:
        return inside.giving(given).body(body, 0, values)

    return function


def _original(eqn: Any) -> Callable[..., list[Any]]:
    """An equation as a function of its inputs."""
    variables = [atom for atom in eqn.invars if not isinstance(atom, core.Literal)]
    is_literal = [isinstance(atom, core.Literal) for atom in eqn.invars]
    jaxpr = _only_body(eqn).jaxpr
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
    return _body_function(eqn, inside)(inside.given(), *values)


def _jit(eqn, values, inside):
    params, function = eqn.params, _body_function(eqn, inside)
    function.__name__ = params["name"]
    # What is given comes first, and may be placed anywhere.
    shardings: dict[str, Any] = {}
    for which, first in (("in", (None,)), ("out", ())):
        placed = [
            _placed(sharding, layout)
            for sharding, layout in zip(
                params[f"{which}_shardings"], params[f"{which}_layouts"], strict=True
            )
        ]
        if any(one is not None for one in placed):
            shardings[f"{which}_shardings"] = (*first, *placed)
    if "out_shardings" in shardings:
        shardings["out_shardings"] = (list(shardings["out_shardings"]), None)
    donated = [i + 1 for i, one in enumerate(params["donated_invars"]) if one]
    jitted = jax.jit(
        function,
        donate_argnums=donated,
        inline=params["inline"],
        keep_unused=params["keep_unused"],
        **shardings,
    )
    return jitted(inside.given(), *values)


def _placed(sharding: Any, layout: Any) -> Any:
    """A sharding and a layout as `jax.jit` takes them; None for neither."""
    if not isinstance(sharding, jax.sharding.Sharding):
        sharding = None
    return sharding if layout is None else Format(layout, sharding)


def _remat(eqn, values, inside):
    function = jax.checkpoint(
        _body_function(eqn, inside),
        prevent_cse=eqn.params["prevent_cse"],
        policy=eqn.params["policy"],
    )
    return function(inside.given(), *values)


def _custom_jvp(eqn, values, inside):
    function = custom_rules.with_jvp_of(
        _original(eqn), _body_function(eqn, inside), eqn.params["symbolic_zeros"]
    )
    return function(inside.given(), *values)


def _custom_vjp(eqn, values, inside):
    function = custom_rules.with_vjp_of(
        _original(eqn),
        _body_function(eqn, inside),
        eqn.params["num_consts"],
        eqn.params["symbolic_zeros"],
    )
    return function(inside.given(), *values)


def _shard_map(eqn, values, inside):
    params, body = eqn.params, _only_body(eqn)

    def function(*values):
        return tuple(inside.body(body, 0, values)[0])

    mapped = jax.shard_map(
        function,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        check_vma=params["check_vma"],
        axis_names=frozenset(params["newly_manual_axes"]),
    )
    if jax.tree.leaves(inside.given()) or any(
        one.leaves for one in inside.replacements.values()
    ):
        raise ValueError(
            "a contraction inside jax.shard_map would be given arrays, or leave some, "
            "which have no placement there"
        )
    return mapped(*values), {}


def _scan(eqn, values, inside):
    params, body = eqn.params, eqn.params["jaxpr"]
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    consts, start, scanned = values[:first], values[first:last], values[last:]
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
        outputs, left = there.body(body, 0, [*consts, *carry, *slices])
        of_step = {
            location: one for location, one in left.items() if location in sliced
        }
        to_next = {location: left[location] for location in carried}
        count = params["num_carry"]
        return (outputs[:count], to_next), (outputs[count:], of_step)

    slices = jax.tree.map(shape_of_slice, (scanned, sliced))
    carried = _start(carried, lambda one: step((start, carried), one)[0][1], slices)
    unusual = {name: params[name] for name in ("_split_transpose",) if name in params}
    (final, left), (stacks, of_steps) = lax.scan(
        step,
        (start, carried),
        (scanned, sliced),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
        **unusual,
    )
    return [*final, *stacks], {**left, **of_steps}


def _start(
    carried: Left,
    left_by_step: Callable[..., Left],
    *shapes: Any,
) -> Left:
    """What a loop carries at first: zeros where nothing is given and some is left."""
    if all(one is not None for one in carried.values()):
        return carried
    left = jax.eval_shape(left_by_step, *shapes)
    return {
        location: one if one is not None else jax.tree.map(zeros, left[location])
        for location, one in carried.items()
    }


def _while(eqn, values, inside):
    params = eqn.params
    first = params["cond_nconsts"]
    second = first + params["body_nconsts"]
    of_condition, of_body = values[:first], values[first:second]
    given = inside.given()

    def condition(carry):
        (result,) = core.jaxpr_as_fun(params["cond_jaxpr"])(*of_condition, *carry[0])
        return result

    def body(carry):
        carry, carried = carry
        there = inside.giving({**given, **carried})
        return there.body(params["body_jaxpr"], 1, [*of_body, *carry])

    start, carried = values[second:], inside.left_unchanged()
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

    branches = [branch(i, closed) for i, closed in enumerate(eqn.params["branches"])]
    platforms = eqn.params.get("branches_platforms")
    if platforms is not None:
        return _by_platform(branches, platforms)(given, *operands)
    return lax.switch(index, branches, given, *operands)


def _by_platform(
    branches: Sequence[Callable[..., Any]],
    platforms: Sequence[tuple[str, ...] | None],
) -> Callable[..., Any]:
    """A function that is one of several by the platform that it is lowered for.

    The others are not lowered, and perhaps could not be.

    Args:
        branches: the functions.
        platforms: of each one; None for all others.
    """
    by_platform, default = {}, None
    for function, names in zip(branches, platforms, strict=True):
        if names is None:
            default = function
        else:
            by_platform.update(dict.fromkeys(names, function))
    return functools.partial(lax.platform_dependent, default=default, **by_platform)


BUILDERS: Mapping[str, Callable[..., tuple[Sequence[Any], Left]]] = {
    "jit": _jit,
    "pjit": _jit,
    "closed_call": _call,
    "call": _call,
    "remat2": _remat,
    "checkpoint": _remat,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
    "shard_map": _shard_map,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
"""By the name of the primitive: what evaluates an equation from its inputs, with
something replaced `Inside`."""
