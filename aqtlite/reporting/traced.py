"""The contractions of a traced program: what a function asks for."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from aqtlite.contraction import differentiation, remat
from aqtlite.jaxpr import registry, sites
from aqtlite.jaxpr.origins import Loop, Origin, digest
from aqtlite.jaxpr.recognition import opaque, producers, written_products
from aqtlite.jaxpr.sites import Site
from aqtlite.lowering import target
from aqtlite.program import injected
from aqtlite.program.equation import equation_of
from aqtlite.program.naming import by_scope_or_leaf, numbered
from aqtlite.program.planned_operand import PlannedOperand
from aqtlite.reporting import macs, scales, sizes
from aqtlite.reporting.products import both
from aqtlite.reporting.scales import Argument, Scale
from aqtlite.shapes.sharding import describe

Role = Literal["forward", "gradient", "recomputed"]

_FORWARD: Role = "forward"
_AGAIN = "rematted_computation"


@dataclasses.dataclass(frozen=True)
class TracedContraction:
    """A contraction as the function asks for it."""

    path: str
    """Name scopes around it, or the path of its parameter, as in plans."""

    op: str
    """The function of `jax.lax`, the registered kernel, or the primitive."""

    equation: str
    """Its axes, as in `jnp.einsum`; empty for other operations."""

    role: Role
    """"gradient": of a backward pass. "recomputed": the forward one again, in it."""

    lhs: str
    rhs: str
    out_size: int
    asked: str
    """Dtypes of the operands: "int8", "int8 x int4", "float32"."""

    macs: int | None
    """Multiply-accumulates of a call, or None where the program does not say."""

    times: int
    """Number of times that it runs in a call."""

    is_known: bool
    """Whether that is known: while loops count once."""

    is_in_kernel: bool
    """Whether it is inside of a kernel, which compilers take as it is."""

    is_frozen: bool
    """Whether an operand is computed from integers of at most 16 bits, or floats of 8,
    that the function takes."""

    weight_bytes: int
    """Bytes of the operands that are made of parameters alone, as they are stored."""

    why_float: str
    """Why no rule quantizes it, where that is known without rules."""

    scales: tuple[Scale, ...]
    """Those of its operands that are quantized in the call."""

    scope: tuple[str, ...]
    """Names of the scopes around it, by which the compiled program is joined."""

    def in_layer(self) -> "TracedContraction":
        """Returns it in the scopes around those of this library."""
        names = self.scope
        if differentiation.SCOPE in names:
            names = names[: names.index(differentiation.SCOPE)]
        return dataclasses.replace(self, scope=names)


class _Group(NamedTuple):
    """The products of a contraction: several, if it is quantized in parts."""

    products: list[Site]
    named: list[Site]
    """Equations that name values and scales of its operands."""


def find(
    closed: core.ClosedJaxpr, parameters: Mapping[int, str], names: Sequence[str]
) -> list[TracedContraction]:
    """Returns the contractions of a program, in its order.

    Args:
        closed: the program.
        parameters: names of its inputs that are parameters, by index.
        names: names of all inputs.
    """
    found_by = {
        *registry.OF_PRIMITIVES,
        target.PRIMITIVE,
        "name",
        written_products.PRIMITIVE,
    }
    unseen = opaque.names_in(closed)
    contents = sites.find(closed, parameters, found_by | unseen)
    program = producers.Body(closed)
    found = list(_groups(contents.contractions, unseen, program))
    heads = [_outside(group.products[0], parameters) for group in found]
    paths = [one.path for one in by_scope_or_leaf(heads, parameters)]
    roles = [_role(group.products[0]) for group in found]
    # A forward contraction has two gradients, which share its path.
    numbers = iter(
        numbered([x for x, y in zip(paths, roles, strict=True) if y == _FORWARD])
    )
    arguments = [
        Argument(names[i], aval.ndim, _is_floating(aval.dtype), i in parameters)
        for i, aval in enumerate(closed.in_avals)
    ]
    return [
        _contraction(
            group.products,
            next(numbers) if role == _FORWARD else path,
            role,
            scales.of(group.named, arguments, program),
            program,
            parameters,
        )
        for group, path, role in zip(found, paths, roles, strict=True)
    ]


def _groups(
    found: Sequence[Site], unseen: set[str], program: producers.Body
) -> Iterator[_Group]:
    """Yields the products of each contraction.

    A contraction of this library ends with the sums that it names.
    """
    pending = _Group([], [])
    for site in found:
        name = site.eqn.primitive.name
        if unseen & set(site.around):
            continue  # The body of a kernel, which counts as one.
        if name == "name":
            if scales.is_named(site):
                pending.named.append(site)
            elif site.eqn.params["name"] == remat.SUMS and pending.products:
                yield pending
                pending = _Group([], [])
            continue
        if not _is_product(site, program):
            continue
        is_ours = differentiation.SCOPE in site.scope.path.split("/")
        before = pending.products
        if before and (not is_ours or site.scope != before[-1].scope):
            yield pending
            pending = _Group([], [])
        if is_ours:
            pending.products.append(site)
        else:
            yield _Group([site], [])
    if pending.products:
        yield pending


def _is_product(site: Site, program: producers.Body) -> bool:
    eqn = site.eqn
    if eqn.primitive.name == written_products.PRIMITIVE:
        return written_products.is_product(site, program)
    if target.function_of(eqn) is not None:
        return macs.of_equation(eqn) > 0
    is_known = eqn.primitive.name in registry.OF_PRIMITIVES
    return is_known or opaque.why(eqn) is not None


def _outside(site: Site, parameters: Mapping[int, str]) -> Site:
    """Returns a contraction as it is named: in the scopes around this library's own.

    A quantized weight counts as what it is made of, whose name it has.
    """
    names = injected.without_mark(site.scope.path).split("/")
    names = [name for name in names if name not in (_AGAIN, "checkpoint")]
    if differentiation.SCOPE in names:
        names = names[: names.index(differentiation.SCOPE)]
    scope = site.scope._replace(path="/".join(names))
    operands = tuple(
        x._replace(identity=digest("weight"))
        if PlannedOperand.of(atom.aval, x, parameters).kind == "weight"
        else x
        for atom, x in zip(site.eqn.invars, site.operands, strict=False)
    )
    return dataclasses.replace(site, scope=scope, operands=operands)


def _role(site: Site) -> Role:
    if _AGAIN in site.scope.path.split("/"):
        return "recomputed"
    return "gradient" if "transpose" in site.scope.transformations else _FORWARD


def _contraction(
    group: Sequence[Site],
    path: str,
    role: Role,
    of_operands: tuple[Scale, ...],
    program: producers.Body,
    parameters: Mapping[int, str],
) -> TracedContraction:
    site = group[0]
    eqn = site.eqn
    times = _times(site, program)
    why = opaque.why(eqn) or ""
    if eqn.primitive.name == written_products.PRIMITIVE:
        why = written_products.WHY_FLOAT
    operands = [
        PlannedOperand.of(atom.aval, origin, parameters)
        for atom, origin in zip(eqn.invars[:2], site.operands, strict=False)
    ]
    total = sum(macs.of_equation(one.eqn) * _times(one, program) for one in group)
    if why == written_products.WHY_FLOAT:
        total = math.prod(eqn.invars[0].aval.shape) * times
    described = [*map(describe, operands), "", ""]
    return TracedContraction(
        path=path,
        op=site.registered or registry.OF_PRIMITIVES.get(_name(site), _name(site)),
        equation=_equation(site),
        role=role,
        lhs=described[0],
        rhs=described[1],
        out_size=math.prod(eqn.outvars[0].aval.shape) if eqn.outvars else 0,
        asked=_asked(site, operands),
        macs=total or (None if why else 0),
        times=times,
        is_known="while" not in site.around,
        is_in_kernel="pallas_call" in site.around,
        is_frozen=any(
            _is_narrow(operand.dtype) and _is_given(origin, program.closed)
            for operand, origin in zip(operands, site.operands, strict=False)
        ),
        weight_bytes=sum(
            sizes.of_type(atom.aval)
            for atom, operand in zip(eqn.invars, operands, strict=False)
            if operand.kind == "weight"
        ),
        why_float=why,
        scales=of_operands,
        scope=tuple(filter(None, site.scope.path.split("/"))),
    )


def _times(site: Site, program: producers.Body) -> int:
    """Returns how often a site runs: in all steps of loops and runs of kernels."""
    times, body = math.prod(site.lengths), program
    for index, number in site.location[:-1]:
        eqn = body.closed.jaxpr.eqns[index]
        times *= macs.kernel_runs(eqn)
        if registry.name_of(eqn) is not None:
            break
        body = body.inside(eqn, number)
    return times


def _name(site: Site) -> str:
    """Returns the name of an operation; of those of this library, of what they sum."""
    reference = target.reference_of(site.eqn)
    if reference is None:
        return str(site.eqn.primitive.name)
    if macs.ragged_of(site.eqn) is not None:
        return "ragged_dot_general"
    return next(
        (x for x in registry.OF_PRIMITIVES if x in _primitives(reference)),
        "dot_general",
    )


def _primitives(closed: core.ClosedJaxpr) -> set[str]:
    found = set()
    for site in sites.find(closed, {}, {*registry.OF_PRIMITIVES, target.PRIMITIVE})[0]:
        inner = target.reference_of(site.eqn)
        name = str(site.eqn.primitive.name)
        found |= {name} if inner is None else _primitives(inner)
    return found


def _equation(site: Site) -> str:
    reference = target.reference_of(site.eqn)
    if reference is None:
        return equation_of(site.eqn) or ""
    if macs.ragged_of(site.eqn) is not None:
        return ""
    inner = sites.find(reference, {}, {*registry.OF_PRIMITIVES, target.PRIMITIVE})[0]
    return _equation(inner[0]) if len(inner) == 1 else ""


def _asked(site: Site, operands: Sequence[PlannedOperand]) -> str:
    """Returns the dtypes that operands have, or the grids that they are rounded to."""
    how = getattr(target.function_of(site.eqn), "how", None)
    if how is not None:
        tensors = (how.lhs.tensor, how.rhs.tensor)
        names = [
            tensor.grid.name if tensor.is_quantized else operand.dtype
            for tensor, operand in zip(tensors, operands, strict=False)
        ]
        return both(*names)
    floats = [one.dtype for one in operands]
    if site.eqn.primitive.name == written_products.PRIMITIVE or len(floats) < 2:
        return floats[0] if floats else str(site.eqn.outvars[0].aval.dtype)
    return both(*floats)


def _is_narrow(dtype: str) -> bool:
    """Whether a dtype is one of frozen weights: indices are integers of more bits."""
    if _is_floating(dtype):
        return bool(jnp.finfo(dtype).bits <= 8)
    return dtype.removeprefix("u") in ("int2", "int4", "int8", "int16")


def _is_floating(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def _is_given(origin: Origin, closed: core.ClosedJaxpr) -> bool:
    """Whether a value is made of narrow inputs alone."""
    inputs = [i for i in origin.needed if not isinstance(i, Loop)]
    dtypes = [closed.in_avals[i].dtype for i in inputs]
    # Random keys have a dtype of JAX's own.
    return bool(dtypes) and not any(
        jnp.issubdtype(x, jax.dtypes.extended) or not _is_narrow(str(x)) for x in dtypes
    )
