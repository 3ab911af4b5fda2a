"""What depends on what in a traced program, and the part of it that some outputs need.

A *program* is a closed jaxpr. The walk follows calls, scans and the like into their
bodies where inputs and outputs correspond one to one, and elsewhere takes every
output to depend on every input, which errs on the safe side.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend import core

Dependencies = frozenset[int]
_NOTHING: Dependencies = frozenset()


def output_dependencies(program: core.ClosedJaxpr) -> list[Dependencies]:
    """For each output, the indices of the inputs that its value depends on."""
    inputs = [frozenset({i}) for i in range(len(program.jaxpr.invars))]
    return _walk(program.jaxpr, inputs)


def _walk(jaxpr: Any, inputs: Sequence[Dependencies]) -> list[Dependencies]:
    known = dict.fromkeys(jaxpr.constvars, _NOTHING)
    known.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Dependencies:
        return _NOTHING if isinstance(atom, core.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        outputs = _equation(eqn, [read(atom) for atom in eqn.invars])
        known.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _equation(eqn: Any, inputs: list[Dependencies]) -> list[Dependencies]:
    if eqn.primitive.name == "scan":
        return _scan(eqn, inputs)
    inner = list(bodies(eqn))
    if len(inner) == 1 and corresponds(inner[0], eqn):
        return _walk(inner[0], inputs)
    return [_NOTHING.union(*inputs)] * len(eqn.outvars)


def _scan(eqn: Any, inputs: list[Dependencies]) -> list[Dependencies]:
    """What goes into the carry comes around until nothing new does."""
    body = eqn.params["jaxpr"].jaxpr
    first, count = eqn.params["num_consts"], eqn.params["num_carry"]
    while True:
        outputs = _walk(body, inputs)
        carry = [
            old | new
            for old, new in zip(
                inputs[first : first + count], outputs[:count], strict=True
            )
        ]
        if carry == inputs[first : first + count]:
            return outputs
        inputs = inputs[:first] + carry + inputs[first + count :]


def bodies(eqn: Any) -> Iterator[Any]:
    """The jaxprs among an equation's parameters."""
    for value in eqn.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, core.ClosedJaxpr):
                yield one.jaxpr
            elif isinstance(one, core.Jaxpr):
                yield one


def corresponds(jaxpr: Any, eqn: Any) -> bool:
    """Whether a body's inputs and outputs are those of its equation, one to one."""
    return (
        len(jaxpr.invars) == len(eqn.invars)
        and len(jaxpr.outvars) == len(eqn.outvars)
        and eqn.primitive.name != "while"
    )


def cut(
    program: core.ClosedJaxpr, outputs: Sequence[int]
) -> tuple[core.ClosedJaxpr, list[int]]:
    """The part of a program that makes some of its outputs.

    Args:
        program: the whole.
        outputs: indices of the outputs to keep, in the order wanted.

    Returns:
        The program cut down, and the indices of the inputs that it still takes.
    """
    jaxpr = program.jaxpr
    outvars = [jaxpr.outvars[i] for i in outputs]
    needed = {var for var in outvars if not isinstance(var, core.Literal)}
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        if needed.isdisjoint(eqn.outvars):
            continue
        eqns.append(eqn)
        needed.update(v for v in eqn.invars if not isinstance(v, core.Literal))
    kept = [i for i, var in enumerate(jaxpr.invars) if var in needed]
    consts = [
        (var, value)
        for var, value in zip(jaxpr.constvars, program.consts, strict=True)
        if var in needed
    ]
    smaller = jaxpr.replace(
        constvars=[var for var, _ in consts],
        invars=[jaxpr.invars[i] for i in kept],
        outvars=outvars,
        eqns=eqns[::-1],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return core.ClosedJaxpr(smaller, [value for _, value in consts]), kept
