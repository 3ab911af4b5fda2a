"""Evaluation of a jaxpr with some of its equations replaced.

All other equations run as they are: neighbours together, as one jaxpr, and an equation
with a body is built anew only where something inside is replaced, by the function of
JAX that made it. The result is ordinary traceable code.

A replacement may take arrays of its own and leave some behind. The loops around it
pass them on: a scan slices and stacks them along its steps, or carries them.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from aqtlite.jaxpr import custom_rules, equations, scopes

Step = tuple[int, int]
"""The index of an equation, and of the body in it that the next step leads into."""

Location = tuple[Step, ...]
"""The place of an equation: the steps to it from the outermost jaxpr."""


@dataclasses.dataclass(frozen=True)
class Replacement:
    """What takes the place of an equation."""

    function: Callable[[Sequence[Any], Any], tuple[Sequence[Any], Any]]
    """Takes the inputs of the equation and what is given; returns its outputs and a
    pytree of arrays to leave."""

    given: Any = None
    """A pytree of arrays."""

    leaves: bool = False
    """It leaves arrays; of the structure of those that it is given, if there are any.
    Otherwise what it returns in their place is dropped."""

    per_step: tuple[bool, ...] = ()
    """For each scan around it, the outermost first, whether each step has arrays of its
    own. Otherwise all steps are given the same; or what one leaves is given to the
    next, and the last one leaves it."""


Replacements = Mapping[Location, Replacement]

Left = dict[Location, Any]
"""What replacements left."""


def evaluate(
    closed: core.ClosedJaxpr, inputs: Sequence[Any], replacements: Replacements
) -> tuple[list[Any], Left]:
    """Evaluates a jaxpr.

    Args:
        closed: the jaxpr.
        inputs: the values of its inputs.
        replacements: of equations; where they are in the bodies of others, of such as
            `enters` tells.

    Returns:
        The values of its outputs, and what each replacement left.
    """
    jaxpr = closed.jaxpr
    known = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    known.update(zip(jaxpr.invars, inputs, strict=True))
    inside: dict[int, dict[Location, Replacement]] = {}
    for location, one in replacements.items():
        inside.setdefault(location[0][0], {})[location] = one
    left: Left = {}
    for part in _parts(jaxpr, inside):
        if isinstance(part, int):
            eqn = jaxpr.eqns[part]
            values = [
                atom.val if isinstance(atom, core.Literal) else known[atom]
                for atom in eqn.invars
            ]
            with _scope_of(eqn):
                results, of_equation = _replaced(eqn, values, inside[part])
            known.update(zip(eqn.outvars, results, strict=True))
            left.update(of_equation)
        else:
            values = [known[var] for var in part.invars]
            results = core.jaxpr_as_fun(core.ClosedJaxpr(part, ()))(*values)
            known.update(zip(part.outvars, results, strict=True))
    outputs = [
        atom.val if isinstance(atom, core.Literal) else known[atom]
        for atom in jaxpr.outvars
    ]
    return outputs, left


def _parts(jaxpr: Any, stops: Mapping[int, Any]) -> Iterator[Any]:
    """Yields indices of equations to replace, and jaxprs of what lies between them."""
    ends = sorted({*stops, len(jaxpr.eqns)})
    used_after = _used_after(jaxpr, ends)
    start = 0
    for end in ends:
        if start < end:
            yield _part(jaxpr, jaxpr.eqns[start:end], used_after[end])
        if end in stops:
            yield end
        start = end + 1


def _used_after(jaxpr: Any, indices: Sequence[int]) -> dict[int, set[Any]]:
    """For each index, the variables that it or what comes behind it reads."""
    wanted, found = set(indices), {}
    used = {atom for atom in jaxpr.outvars if not isinstance(atom, core.Literal)}
    for index in range(len(jaxpr.eqns), -1, -1):
        if index < len(jaxpr.eqns):
            atoms = jaxpr.eqns[index].invars
            used.update(a for a in atoms if not isinstance(a, core.Literal))
        if index in wanted:
            found[index] = set(used)
    return found


def _part(jaxpr: Any, eqns: Sequence[Any], used_after: set[Any]) -> Any:
    """A jaxpr of some equations that follow one another."""
    made = [
        var for eqn in eqns for var in eqn.outvars if not isinstance(var, core.DropVar)
    ]
    read = dict.fromkeys(
        atom
        for eqn in eqns
        for atom in eqn.invars
        if not isinstance(atom, core.Literal)
    )
    is_made = set(made)
    return jaxpr.replace(
        constvars=[],
        invars=[var for var in read if var not in is_made],
        outvars=[var for var in made if var in used_after],
        eqns=list(eqns),
        effects=frozenset().union(*(eqn.effects for eqn in eqns)),
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )


@contextlib.contextmanager
def _scope_of(eqn: Any) -> Iterator[None]:
    """Keeps the names of an equation for what takes its place, and its context.

    That is where it is computed (`jax.experimental.compute_on`) and metadata for XLA.
    JAX has no other way to it than the `ctx` of an equation. Should that go, they are
    lost, and a test of this file fails.
    """
    text = scopes.text_of(eqn)
    with eqn.ctx.manager, jax.named_scope(text) if text else contextlib.nullcontext():
        yield


def _replaced(
    eqn: Any, values: list[Any], here: Mapping[Location, Replacement]
) -> tuple[Sequence[Any], Left]:
    """Evaluates an equation that is replaced, or that holds one."""
    for location, one in here.items():
        if len(location) == 1:
            outputs, left = one.function(values, one.given)
            return outputs, {location: left} if one.leaves else {}
    return _BUILDERS[eqn.primitive.name](eqn, values, here)


def enters(eqn: Any) -> bool:
    """Returns True if what is in the bodies of an equation can be replaced."""
    return eqn.primitive.name in _BUILDERS


def _evaluate_body(
    closed: core.ClosedJaxpr,
    index: int,
    values: Sequence[Any],
    here: Mapping[Location, Replacement],
) -> tuple[list[Any], Left]:
    """Evaluates a body of an equation, with what is replaced there.

    Args:
        closed: the body.
        index: which one it is.
        values: its inputs.
        here: all that is replaced in the equation.
    """
    steps = {location[0] for location in here if location[0][1] == index}
    if not steps:
        return core.jaxpr_as_fun(closed)(*values), {}
    (step,) = steps
    inside = {
        location[1:]: one for location, one in here.items() if location[0] == step
    }
    outputs, left = evaluate(closed, values, inside)
    return outputs, {(step, *location): one for location, one in left.items()}


def _given(here: Mapping[Location, Replacement]) -> Left:
    return {location: one.given for location, one in here.items()}


def _giving(
    here: Mapping[Location, Replacement], given: Mapping[Location, Any]
) -> dict[Location, Replacement]:
    return {
        location: dataclasses.replace(one, given=given[location])
        for location, one in here.items()
    }


def _only_body(eqn: Any) -> core.ClosedJaxpr:
    (body,) = equations.bodies(eqn)
    return body


def _body_function(eqn: Any, here: Mapping[Location, Replacement]) -> Callable:
    """The body of a call, as a function of what is given and of its inputs."""
    body = _only_body(eqn)

    def function(given: Left, *values: Any) -> tuple[list[Any], Left]:
        return _evaluate_body(body, 0, values, _giving(here, given))

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


def _call(eqn, values, here):
    return _body_function(eqn, here)(_given(here), *values)


def _jit(eqn, values, here):
    params, function = eqn.params, _body_function(eqn, here)
    function.__name__ = params["name"]
    # What is given comes first, and may be placed anywhere.
    shardings: dict[str, Any] = {}
    for name, first in (("in_shardings", (None,)), ("out_shardings", ())):
        placed = [
            one if isinstance(one, jax.sharding.Sharding) else None
            for one in params[name]
        ]
        if any(one is not None for one in placed):
            shardings[name] = (*first, *placed)
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
    return jitted(_given(here), *values)


def _remat(eqn, values, here):
    function = jax.checkpoint(
        _body_function(eqn, here),
        prevent_cse=eqn.params["prevent_cse"],
        policy=eqn.params["policy"],
    )
    return function(_given(here), *values)


def _custom_jvp(eqn, values, here):
    function = custom_rules.with_jvp_of(
        _original(eqn), _body_function(eqn, here), eqn.params["symbolic_zeros"]
    )
    return function(_given(here), *values)


def _custom_vjp(eqn, values, here):
    function = custom_rules.with_vjp_of(
        _original(eqn),
        _body_function(eqn, here),
        eqn.params["num_consts"],
        eqn.params["symbolic_zeros"],
    )
    return function(_given(here), *values)


def _shard_map(eqn, values, here):
    params, body = eqn.params, _only_body(eqn)

    def function(*values):
        return tuple(_evaluate_body(body, 0, values, here)[0])

    mapped = jax.shard_map(
        function,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        check_vma=params["check_vma"],
        axis_names=frozenset(params["newly_manual_axes"]),
    )
    if jax.tree.leaves(_given(here)) or any(one.leaves for one in here.values()):
        raise ValueError(
            "a contraction inside jax.shard_map would be given arrays, or leave some, "
            "which have no placement there"
        )
    return mapped(*values), {}


def _scan(eqn, values, here):
    params, body = eqn.params, eqn.params["jaxpr"]
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    consts, start, scanned = values[:first], values[first:last], values[last:]
    inner = {
        location: dataclasses.replace(one, per_step=one.per_step[1:])
        for location, one in here.items()
    }
    given = _given(here)
    sliced = {
        location: given[location] for location in here if here[location].per_step[0]
    }
    carried = {
        location: given[location]
        for location, one in here.items()
        if one.leaves and location not in sliced
    }

    def step(carry, slices):
        (carry, carried), (slices, sliced) = carry, slices
        outputs, left = _evaluate_body(
            body,
            0,
            [*consts, *carry, *slices],
            _giving(inner, {**given, **carried, **sliced}),
        )
        of_step = {
            location: one for location, one in left.items() if location in sliced
        }
        to_next = {location: left[location] for location in carried}
        count = params["num_carry"]
        return (outputs[:count], to_next), (outputs[count:], of_step)

    slices = _first_slices((scanned, sliced))
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


def _first_slices(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)


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
        location: one
        if one is not None
        else jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), left[location])
        for location, one in carried.items()
    }


def _while(eqn, values, here):
    params = eqn.params
    first = params["cond_nconsts"]
    second = first + params["body_nconsts"]
    of_condition, of_body = values[:first], values[first:second]
    given = _given(here)

    def condition(carry):
        (result,) = core.jaxpr_as_fun(params["cond_jaxpr"])(*of_condition, *carry[0])
        return result

    def body(carry):
        carry, carried = carry
        return _evaluate_body(
            params["body_jaxpr"],
            1,
            [*of_body, *carry],
            _giving(here, {**given, **carried}),
        )

    start, carried = values[second:], _left_unchanged(here)
    carried = _start(carried, lambda: body((start, carried))[1])
    return lax.while_loop(condition, body, (start, carried))


def _left_unchanged(here: Mapping[Location, Replacement]) -> Left:
    """What is left where nothing is evaluated: what was given."""
    return {location: one.given for location, one in here.items() if one.leaves}


def _cond(eqn, values, here):
    """Evaluates a branch; those that are not taken leave what they were given."""
    index, *operands = values
    given = _given(here)

    def branch(number: int, closed: core.ClosedJaxpr) -> Callable[..., Any]:
        def function(given, *operands):
            outputs, left = _evaluate_body(
                closed, number, operands, _giving(here, given)
            )
            unchanged = _left_unchanged(_giving(here, given))
            return outputs, {**unchanged, **left}

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


_BUILDERS: Mapping[str, Callable[..., tuple[Sequence[Any], Left]]] = {
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
