"""Calls with packed variables: laid out once, as the call reads them."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax.extend import core

from aqtlite.jaxpr import analysis, equations, rewriting, sites, slicing, tracing
from aqtlite.jaxpr.origins import Loop, Origin
from aqtlite.jaxpr.replacement import Replacement, Replacements
from aqtlite.jaxpr.sites import Site
from aqtlite.lowering import packing_of, target
from aqtlite.lowering.forms import packed_on_gpu
from aqtlite.lowering.packing import Packed, Packing
from aqtlite.lowering.target import Target
from aqtlite.program.compiled import rounded_rows
from aqtlite.program.compiled.merged import Merged
from aqtlite.shapes.sharding import shape_of, zeros

# The primitives of equations that may have arguments to pack.
_PRIMITIVES = ("dot_general", target.PRIMITIVE)

# Primitives with bodies that packed arguments cannot leave.
_CLOSED = {"cond", "while", "shard_map"}


@dataclasses.dataclass(frozen=True)
class PackedCall:
    """A call as a function of packed variables."""

    function: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
    """Function of `variables`, and of the inputs that are not variables, to the
    outputs."""

    variables: tuple[jax.Array, ...]
    """The packed variables, the variables that are read as they are, and small scales,
    merged. Calls take a tuple faster than other trees."""


def pack(
    closed: core.ClosedJaxpr,
    variables: Sequence[jax.Array],
    on: Target,
    scales: frozenset[int] = frozenset(),
) -> PackedCall | None:
    """Packs the variables of a call that runs on one device; None if nothing is gained.

    Outputs are equal bit for bit: integers are laid out anew, and the only floats that
    are computed before the call are those whose consumers are compiled alike.

    Args:
        closed: the call, with the variables as its first inputs.
        variables: values of these inputs.
        on: a CPU or GPU.
        scales: indices of the variables to merge for a CPU, from `merged.scales`.
    """
    count = len(variables)
    scales = frozenset() if on.is_gpu else scales
    closed = _expanded(closed, count, on)
    found = _find(closed, count, on)
    if not found and len(scales) < 2:
        return None
    first = {one.key: one for one in reversed(found)}
    chosen = list(first.values())
    number = {one.key: i for i, one in enumerate(chosen)}
    rounding = rounded_rows.find(closed, [(one.site, one.packing) for one in found])
    packed = _packed(closed, variables, chosen) if chosen else []
    unread = {one.site.location: set(one.arguments) for one in found}
    of_packed = frozenset().union(*(x.inputs for one in found for x in one.origins))
    read = analysis.read_inputs(closed, range(count), unread)
    rest = {i: x for i, x in enumerate(variables) if i in read or i not in of_packed}
    # A slice of a merged array would be copied before a kernel reads it.
    whole = frozenset().union(*(product.scale_inputs for product in rounding))
    small = [i for i in rest if i in scales - whole]
    join = Merged.of([rest[i] for i in small])
    joined = [join.merge([rest.pop(i) for i in small])] if small else []

    leaves, structure = jax.tree.flatten((packed, rest, joined))

    def function(given: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        packed, rest, joined = jax.tree.unflatten(structure, given)
        parts = [part for one in joined for part in join.split(one)]
        rest = {**rest, **dict(zip(small, parts, strict=True))}
        values = [
            rest[i] if i in rest else zeros(shape_of(aval))
            for i, aval in enumerate(closed.in_avals[:count])
        ]
        replacements = {
            one.site.location: Replacement(
                one.run, packed[number[one.key]], per_step=one.per_step
            )
            for one in found
        }
        for product in rounding:
            alone = replacements[product.site.location]
            replacements.update(product.replacements(alone))
        return rewriting.evaluate(closed, [*values, *inputs], replacements)[0]

    return PackedCall(function, tuple(leaves))


@dataclasses.dataclass(frozen=True)
class _Found:
    """An equation with an argument to pack."""

    site: Site
    packing: Packing

    @property
    def arguments(self) -> tuple[int, ...]:
        """The arguments that are packed."""
        return self.packing.argument, *self.packing.beside

    @property
    def origins(self) -> list[Origin]:
        """The origins of these arguments."""
        return [self.site.operands[i] for i in self.arguments]

    @property
    def per_step(self) -> tuple[bool, ...]:
        """Whether each scan around the equation has an argument for every step."""
        loops = range(len(self.site.per_step))
        needed = frozenset().union(*(one.needed for one in self.origins))
        return tuple(Loop(depth, False) in needed for depth in loops)

    @property
    def key(self) -> Hashable:
        """Equal for equations that share a packed argument."""
        identities = tuple(one.identity for one in self.origins)
        return identities, self.per_step, self.packing.layout

    def record(
        self, jaxpr: Any, values: Sequence[Any], given: None
    ) -> tuple[list[Any], Packed]:
        """Evaluates the equation, of any jaxpr, and returns the packed argument too."""
        del given
        packed = self.packing.pack(values)
        return equations.evaluate(jaxpr, self.site.eqn, values), packed

    def run(self, values: Sequence[Any], given: Packed) -> tuple[list[Any], None]:
        """Evaluates the equation with a packed argument."""
        return [self.packing.run(given, values)], None


def _find(closed: core.ClosedJaxpr, count: int, on: Target) -> list[_Found]:
    """Returns the equations with an argument to pack, of the first `count` inputs."""
    find = packed_on_gpu.packing_of if on.is_gpu else packing_of
    found = []
    for site in _sites(closed, count):
        packing = find(site.eqn, _known(site))
        if packing is not None:
            found.append(_Found(site, packing))
    return found


def _sites(closed: core.ClosedJaxpr, count: int) -> list[Site]:
    """Returns the equations that may have arguments to pack."""
    parameters = {
        i: str(i)
        for i, aval in enumerate(closed.in_avals[:count])
        if not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key)
    }
    found = sites.find(closed, parameters, _PRIMITIVES).contractions
    return [
        site
        for site in found
        if site.obstacle is None and _known(site) and not _CLOSED & {*site.around}
    ]


def _known(site: Site) -> frozenset[int]:
    """Returns the operands of an equation that are made of variables alone."""
    return frozenset(
        i
        for i, origin in enumerate(site.operands)
        if origin.identity is not None and origin.inputs
    )


def _expanded(closed: core.ClosedJaxpr, count: int, on: Target) -> core.ClosedJaxpr:
    """Replaces equations made of others that may have arguments to pack by these.

    On GPUs these are the products themselves.
    """
    while True:
        replacements = {}
        for site in _sites(closed, count):
            function = target.function_of(site.eqn)
            if function is not None and _may_pack(function, site.eqn, on):
                form = functools.partial(_form, function, on)
                shared = (False,) * len(site.per_step)
                replacements[site.location] = Replacement(form, per_step=shared)
        if not replacements:
            return closed
        closed = _replaced(closed, replacements)


def _may_pack(function: target.TargetDependent, eqn: Any, on: Target) -> bool:
    """Whether the form of a call may have equations with arguments to pack."""
    return packed_on_gpu.reads_float8(eqn) if on.is_gpu else function.is_composite


def _form(
    function: target.TargetDependent, on: Target, values: Sequence[Any], given: None
) -> tuple[list[Any], None]:
    del given
    return [function.lowered(on, *values)], None


def _replaced(closed: core.ClosedJaxpr, replacements: Replacements) -> core.ClosedJaxpr:
    """Returns a jaxpr with replaced equations."""

    def function(*values: Any) -> list[Any]:
        return rewriting.evaluate(closed, values, replacements)[0]

    return jax.make_jaxpr(function)(*map(shape_of, closed.in_avals))


def _packed(
    closed: core.ClosedJaxpr, variables: Sequence[jax.Array], found: Sequence[_Found]
) -> list[Packed]:
    """Returns the packed arguments of equations."""

    def record(*values: Any) -> list[Packed]:
        replacements = {
            one.site.location: Replacement(
                functools.partial(one.record, closed.jaxpr),
                has_aux=True,
                per_step=one.per_step,
            )
            for one in found
        }
        _, aux = rewriting.evaluate(closed, values, replacements)
        return [aux[one.site.location] for one in found]

    traced = tracing.trace(record, tuple(map(shape_of, closed.in_avals)))
    part = slicing.slice_outputs(traced.jaxpr, traced.outputs)
    run = jax.jit(lambda *values: part(*values))
    packed: list[Packed] = run(*(variables[i] for i in part.inputs))
    return packed
