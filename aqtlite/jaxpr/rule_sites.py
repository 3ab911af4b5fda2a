"""Finds the contractions in the rules that a function has for its gradient."""

from typing import NamedTuple

from aqtlite.jaxpr import equations, registry, sites, user_rules
from aqtlite.jaxpr.axes import axis_facts
from aqtlite.jaxpr.origins import Origin, digest
from aqtlite.jaxpr.sites import Found, Site


class InCall(NamedTuple):
    """The contractions of a function and of its rules.

    The inputs of the function are numbered in their origins, then the gradients of its
    floating outputs.
    """

    function: list[Site]
    forward: list[Site]
    backward: list[Site]
    gradients: frozenset[int]
    """Numbers of the gradients."""


def find(call: Site, rules: user_rules.UserRules) -> InCall:
    """Finds the contractions of a call of a function with rules.

    Args:
        call: the call, as a site of `sites.find`.
        rules: result of `user_rules.of`.
    """
    (body,) = equations.bodies(call.eqn)
    # What the function closes over is an input of it, and a constant of its rules.
    closed_over = call.operands[: rules.num_closed_over]
    constants = {i: one.identity for i, one in enumerate(closed_over) if not one.needed}
    inputs = [
        Origin(
            frozenset({i}),
            constants.get(i, digest("input of a function", str(i))),
            axis_facts.unknown(len(aval.shape)),
        )
        for i, aval in enumerate(body.in_avals)
    ]
    found, outputs = {}, []
    for number, closed in (
        (user_rules.FUNCTION, body),
        (user_rules.FORWARD, rules.forward),
    ):
        found[number] = Found([], [])
        outputs = sites.walk(closed, inputs, _place(call, number), found[number])
    residuals = outputs[rules.num_outputs :]
    count = len(rules.backward.in_avals) - len(residuals)
    gradients = range(len(inputs), len(inputs) + count)
    of_outputs = [
        Origin(frozenset({i}), facts=axis_facts.unknown(len(aval.shape)))
        for i, aval in zip(
            gradients, rules.backward.in_avals[len(residuals) :], strict=True
        )
    ]
    found[user_rules.BACKWARD] = Found([], [])
    given = [*residuals, *of_outputs]
    sites.walk(
        rules.backward,
        given,
        _place(call, user_rules.BACKWARD),
        found[user_rules.BACKWARD],
    )
    function, forward, backward = (
        found[number].contractions
        for number in (user_rules.FUNCTION, user_rules.FORWARD, user_rules.BACKWARD)
    )
    return InCall(function, forward, backward, frozenset(gradients))


def _place(call: Site, number: int) -> sites.Place:
    """Returns the place of a body of a call."""
    (body,) = equations.bodies(call.eqn)
    *before, (index, _) = call.location
    return sites.Place(
        parameters=frozenset(range(len(body.in_avals))),
        primitives=frozenset(registry.OF_PRIMITIVES),
        location=(*before, (index, number)),
        scope=call.scope.path,
        around=(*call.around, call.eqn.primitive.name),
        per_step=call.per_step,
        lengths=call.lengths,
        obstacle=call.obstacle,
    )
