"""Equations: their bodies, literals, and parameters in all supported versions of JAX.

Only this file reads parameters of higher-order primitives: their names differ between
versions. Unknown names are an error, as ignoring a parameter could change what the
equation computes.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.extend import core
from jax.extend.core import primitives

from aqtlite.jaxpr import marks

T = TypeVar("T")

_CALLS = (
    primitives.jit_p,
    primitives.call_p,
    primitives.closed_call_p,
    primitives.remat_p,
    primitives.custom_jvp_call_p,
    primitives.custom_vjp_call_p,
)


def called_body(eqn: Any) -> core.ClosedJaxpr | None:
    """Returns the body of a call (jit, remat, custom_vjp, a mark, ...), or None.

    Inputs and outputs of the body correspond one to one to those of the equation. The
    primitive decides, since other bodies, such as the computation of a `lax.reduce`,
    may also have as many inputs and outputs as their equation.
    """
    if eqn.primitive not in _CALLS and marks.mark_of(eqn) is None:
        return None
    found = list(bodies(eqn))
    return found[0] if len(found) == 1 else None


def bodies(eqn: Any) -> Iterator[core.ClosedJaxpr]:
    """Yields all jaxprs among the parameters of an equation, and that of a mark's call.

    The condition of a while loop comes before its body.
    """
    if eqn.primitive is primitives.while_p:
        loop = While.of(eqn)
        yield from (loop.condition, loop.body)
        return
    marked = marks.body_of(eqn)
    if marked is not None:
        yield marked
        return
    for value in eqn.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, core.ClosedJaxpr):
                yield one
            elif isinstance(one, core.Jaxpr) and not one.constvars:
                yield core.ClosedJaxpr(one, ())


def kind_of(eqn: Any) -> str:
    """Returns the name of the primitive; of calls with a mark, "mark" or "vmap"."""
    if marks.mark_of(eqn) is not None:
        return "mark"
    return "vmap" if marks.mapped_call(eqn) is not None else str(eqn.primitive.name)


_FUNCTION_CALLS = {
    "jit",
    "custom_jvp_call",
    "custom_vjp_call",
    "pallas_call",
    "composite",
}

_OF_JAX = {
    one.name for one in vars(primitives).values() if isinstance(one, core.Primitive)
} | {"shard_map"}


def called_name(eqn: Any) -> str | None:
    """Returns the name of the function, kernel or custom primitive that is called.

    None for JAX's own operations, loops and branches. The name of a function with a
    custom derivative, or of a kernel without a name, is only available from the
    `debug_info` of its jaxpr.
    """
    name = str(eqn.primitive.name)
    if name not in _FUNCTION_CALLS:
        return None if name in _OF_JAX else name
    given = eqn.params.get("name")
    return given or _only_body(eqn).jaxpr.debug_info.func_name


def with_bodies(closed: core.ClosedJaxpr) -> Iterator[Any]:
    """Yields the equations of a jaxpr, each before those of its `bodies`."""
    for eqn in closed.jaxpr.eqns:
        yield eqn
        for body in bodies(eqn):
            yield from with_bodies(body)


def called_names(closed: core.ClosedJaxpr) -> set[str]:
    """Returns the `called_name`s of all equations of a jaxpr, including bodies."""
    names = map(called_name, with_bodies(closed))
    return {name for name in names if name is not None}


def literal_value(literal: Any) -> Any:
    """Returns the value of a literal with a dtype.

    JAX wraps Python numbers in types that keep dtype and weak type, but not a bool.
    """
    value = literal.val
    is_typed = hasattr(value, "dtype")
    return value if is_typed else np.asarray(value, literal.aval.dtype)


def part(jaxpr: Any, eqns: Sequence[Any], inputs: Any, outputs: Any) -> Any:
    """Returns a jaxpr of some equations of another jaxpr.

    Args:
        jaxpr: jaxpr of the equations.
        eqns: consecutive equations.
        inputs: variables that they read and do not define.
        outputs: variables that they define.
    """
    return jaxpr.replace(
        constvars=[],
        invars=list(inputs),
        outvars=list(outputs),
        eqns=list(eqns),
        effects=frozenset().union(*(eqn.effects for eqn in eqns)),
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )


def evaluate(
    jaxpr: Any, eqn: Any, inputs: Sequence[Any], outputs: Sequence[Any] | None = None
) -> list[Any]:
    """Evaluates one equation as a jaxpr, which is the only public way.

    Args:
        jaxpr: jaxpr of the equation, or any other jaxpr.
        eqn: the equation.
        inputs: values of all inputs, including literals.
        outputs: output variables to return; None for all.
    """
    given = {
        atom: value
        for atom, value in zip(eqn.invars, inputs, strict=True)
        if not isinstance(atom, core.Literal)
    }
    single = part(jaxpr, [eqn], given, eqn.outvars if outputs is None else outputs)
    return core.jaxpr_as_fun(core.ClosedJaxpr(single, ()))(*given.values())


@dataclasses.dataclass(frozen=True)
class Scan:
    """A `jax.lax.scan`."""

    body: core.ClosedJaxpr
    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: int | bool

    @classmethod
    def of(cls, eqn: Any) -> "Scan":
        """Reads an equation of `scan_p`."""
        common = {"jaxpr", "length", "reverse", "unroll"}
        params = _read(
            eqn,
            common | {"num_consts", "num_carry"},
            common | {"ft_in", "ft_out"},  # JAX 0.11: trees of inputs and of outputs.
        )
        if "ft_in" in params:
            consts, carry, _ = params["ft_in"].unpack()
            counts = len(consts), len(carry)
        else:
            counts = params["num_consts"], params["num_carry"]
        return cls(
            params["jaxpr"],
            *counts,
            params["length"],
            params["reverse"],
            params["unroll"],
        )

    def of_inputs(self, values: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """Groups one value for each input: constants, start of the carry, scanned."""
        consts, carry = self.num_consts, self.num_consts + self.num_carry
        return list(values[:consts]), list(values[consts:carry]), list(values[carry:])

    def of_outputs(self, values: Sequence[T]) -> tuple[list[T], list[T]]:
        """Groups one value for each output: carry, stacked."""
        return list(values[: self.num_carry]), list(values[self.num_carry :])


@dataclasses.dataclass(frozen=True)
class While:
    """A `jax.lax.while_loop`."""

    condition: core.ClosedJaxpr
    body: core.ClosedJaxpr
    num_condition_consts: int
    num_body_consts: int

    @classmethod
    def of(cls, eqn: Any) -> "While":
        """Reads an equation of `while_p`."""
        params = _read(
            eqn, {"cond_jaxpr", "body_jaxpr", "cond_nconsts", "body_nconsts"}
        )
        return cls(
            params["cond_jaxpr"],
            params["body_jaxpr"],
            params["cond_nconsts"],
            params["body_nconsts"],
        )

    def of_inputs(self, values: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """Groups one value for each input: constants of the condition and of the body,
        start of the carry."""
        first = self.num_condition_consts
        second = first + self.num_body_consts
        return list(values[:first]), list(values[first:second]), list(values[second:])


@dataclasses.dataclass(frozen=True)
class Cond:
    """A `jax.lax.cond`, `switch` or `platform_dependent`.

    Its first input is the index of the branch; the others are the branches' inputs.
    """

    branches: tuple[core.ClosedJaxpr, ...]
    platforms: tuple[tuple[str, ...] | None, ...] | None
    """For each branch of `platform_dependent`, the platforms it is lowered for, None
    for all others."""

    @classmethod
    def of(cls, eqn: Any) -> "Cond":
        """Reads an equation of `cond_p`."""
        params = _read(eqn, {"branches"}, {"branches", "branches_platforms"})
        return cls(params["branches"], params.get("branches_platforms"))


class Call(NamedTuple):
    """The body of an equation that calls it, and the options of the call."""

    body: core.ClosedJaxpr
    options: dict[str, Any]
    """Arguments, by name, of the function of JAX that made the equation."""


def jit(eqn: Any) -> Call:
    """Reads a `jax.jit`; unspecified shardings and layouts are None."""
    params = _read(
        eqn,
        {
            "jaxpr",
            "name",
            "in_shardings",
            "out_shardings",
            "in_layouts",
            "out_layouts",
            "donated_invars",
            "inline",
            "keep_unused",
            "ctx_mesh",  # The mesh of the context, which does not change.
            "compiler_options_kvs",  # JAX uses only those of the outermost jit.
        },
    )
    options = {
        "inline": params["inline"],
        "keep_unused": params["keep_unused"],
        "donate_argnums": [i for i, one in enumerate(params["donated_invars"]) if one],
    }
    for side in ("in", "out"):
        sides = params[f"{side}_shardings"], params[f"{side}_layouts"]
        options[f"{side}_shardings"] = list(map(_placed, *sides))
    return Call(_only_body(eqn), options)


def _placed(sharding: Any, layout: Any) -> Any:
    """Returns a sharding and a layout in the form of `jax.jit`; None for neither."""
    # JAX has a sentinel in place of an unspecified sharding.
    sharding = sharding if isinstance(sharding, jax.sharding.Sharding) else None
    return sharding if layout is None else Format(layout, sharding)


def checkpoint(eqn: Any) -> Call:
    """Reads a `jax.checkpoint`."""
    params = _read(eqn, {"jaxpr", "prevent_cse", "policy", "differentiated"})
    options = {name: params[name] for name in ("prevent_cse", "policy")}
    return Call(_only_body(eqn), options)


def custom_jvp(eqn: Any) -> Call:
    """Reads a call of a function with a `jax.custom_jvp` rule."""
    names = {"call_jaxpr", "jvp_jaxpr_fun", "num_consts", "symbolic_zeros"}
    params = _read(eqn, names)
    return Call(_only_body(eqn), {"symbolic_zeros": params["symbolic_zeros"]})


def custom_vjp(eqn: Any) -> Call:
    """Reads a call of a function with `jax.custom_vjp` rules.

    The option "num_consts" is the number of leading inputs that the function closes
    over.
    """
    of_rules = {"call_jaxpr", "fwd_jaxpr_thunk", "bwd", "out_trees", "symbolic_zeros"}
    params = _read(eqn, of_rules | {"num_consts"})
    return Call(_only_body(eqn), {"num_consts": params["num_consts"]})


def num_closed_over(eqn: Any) -> int:
    """Returns how many leading inputs a `jax.custom_vjp` or `custom_jvp` closes over.

    Its rules do not know them.
    """
    return int(eqn.params["num_consts"])


def shard_map(eqn: Any) -> Call:
    """Reads a `jax.shard_map`."""
    options = {"mesh", "in_specs", "out_specs", "check_vma"}
    params = _read(
        eqn,
        {"jaxpr", *options, "manual_axes"},  # Before JAX 0.10.2.
        {"jaxpr", *options, "newly_manual_axes"},
    )
    axis_names = params.get("newly_manual_axes", params.get("manual_axes"))
    made = {name: params[name] for name in options}
    specs = {name: tuple(made[name]) for name in ("in_specs", "out_specs")}
    return Call(_only_body(eqn), {**made, **specs, "axis_names": frozenset(axis_names)})


def compute_on(eqn: Any) -> Call:
    """Reads a function that `jax.experimental.compute_on` places."""
    options = {"compute_type", "out_memory_spaces"}
    params = _read(eqn, {"jaxpr", *options, "compiler_options_json"})
    of_compiler = params["compiler_options_json"]
    made = {name: params[name] for name in options}
    made["compiler_options"] = None if of_compiler is None else json.loads(of_compiler)
    return Call(_only_body(eqn), made)


def _only_body(eqn: Any) -> core.ClosedJaxpr:
    (body,) = bodies(eqn)
    return body


def _read(eqn: Any, *known: set[str]) -> Mapping[str, Any]:
    """Returns the parameters of an equation.

    Args:
        eqn: the equation.
        known: the sets of names that the parameters may have.

    Raises:
        NotImplementedError: if the parameters have other names.
    """
    names = set(eqn.params)
    if names not in known:
        nearest = min(known, key=lambda form: len(form ^ names))
        differences = [
            f"{what} {', '.join(sorted(found))}"
            for what, found in (
                ("unknown", names - nearest),
                ("missing", nearest - names),
            )
            if found
        ]
        raise NotImplementedError(
            f"JAX {jax.__version__} has other parameters in its {eqn.primitive.name} "
            f"equations than this version of aqtlite can read "
            f"({'; '.join(differences)}): install JAX 0.10 to 0.12, or a newer aqtlite"
        )
    return eqn.params
