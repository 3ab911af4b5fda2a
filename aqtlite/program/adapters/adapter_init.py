"""Initial parameters of adapters that start from values of their weights."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import errors
from aqtlite.jaxpr.replacement import Location
from aqtlite.program.adapters import low_rank, magnitude, merging
from aqtlite.program.planned import PlannedContraction
from aqtlite.program.program import Program
from aqtlite.program.served import Entries


class Started(NamedTuple):
    """How adapters start."""

    adapters: dict[Location, dict[str, Any]]
    """Their parameters, by contraction."""

    changed: dict[int, jax.Array]
    """Inputs of the program that keep the rest of a weight (PiSSA), by index."""

    def beside(self, values: Sequence[Any]) -> list[Any]:
        """Returns the inputs of the program beside which the adapters start."""
        return [self.changed.get(i, x) for i, x in enumerate(values)]


def start(
    program: Program, values: Sequence[Any], frozen: Entries, converter: str
) -> Started:
    """Returns the initial parameters of adapters, and changed parameters of weights.

    Nothing is run for adapters that start from shapes alone; and for others, if
    the values are shapes, shapes are returned.

    Args:
        program: the call.
        values: inputs of its jaxpr; placeholders for frozen parameters.
        frozen: the frozen weights, by module.
        converter: the user's call of the conversion, for messages.

    Raises:
        ValueError: if a weight is frozen and its adapter starts from the float one, or
            if a weight that changes is more than moved parameters.
    """
    ones = [one for one in program.plan.replaced() if one.adapter is not None]
    adapters = {one.site.location: low_rank.init(one) for one in ones}
    if not any(map(_reads_weight, ones)):
        return Started(adapters, {})
    weights = merging.weights_of(program, values, frozen, converter)
    weights = {at: one for at, one in weights.items() if _reads_weight(one.one)}
    for weight in weights.values():
        how = weight.one.adapter
        if weight.frozen is not None and how is not None and how.init != "zero":
            raise ValueError(
                f"the adapter of {errors.quoted(weight.one.path)} starts from its "
                f"float weight (init={how.init!r}), which is frozen: make adapters of "
                "the float parameters, and convert these then"
            )
    made, before = merging.read_by(program, values, weights)

    def run(before: Sequence[Any]) -> tuple[Any, Any]:
        operands, pull = jax.vjp(made, *before)
        found, changes, wanted = {}, {}, {}
        for at, weight in weights.items():
            one, w = weight.one, operands[at]
            base = merging.base_of(program, weight, w)
            begin = _of_step(one)
            for _ in range(sum(one.site.per_step)):
                begin = jax.vmap(begin)
            found[at], changes[at] = begin(adapters[at], w, base)
            wanted[at] = w + changes[at]
        after = [x + change for x, change in zip(before, pull(changes), strict=True)]
        return found, (after, wanted)

    if any(isinstance(x, jax.ShapeDtypeStruct) for x in before):
        found, _ = jax.eval_shape(run, before)
        return Started({**adapters, **found}, {})
    found, (after, wanted) = run(before)
    moving = {at for at, one in weights.items() if changes_weight(one.one)}
    if not moving:
        return Started({**adapters, **found}, {})
    got = made(*after)
    for at in moving:
        merging.check_reached(weights[at].one, got[at], wanted[at])
    return Started({**adapters, **found}, dict(zip(made.inputs, after, strict=True)))


def check_keeps_weights(program: Program, remedy: str) -> None:
    """Refuses adapters that start from what they take out of their weights.

    Args:
        program: the call.
        remedy: the call that returns changed weights, too.

    Raises:
        ValueError: if there is one.
    """
    for one in filter(changes_weight, program.plan.replaced()):
        raise ValueError(
            f"the adapter of {errors.quoted(one.path)} takes the largest directions "
            f"out of its weight (init='pissa'), which changes: make both with {remedy}"
        )


def changes_weight(one: PlannedContraction) -> bool:
    """Whether a weight keeps what its adapter does not start from."""
    return one.adapter is not None and one.adapter.init == "pissa"


def _reads_weight(one: PlannedContraction) -> bool:
    adapter = one.adapter
    return adapter is not None and (adapter.init != "zero" or magnitude.has_one(one))


def _of_step(one: PlannedContraction) -> Any:
    """Returns the function from what an adapter starts from to its parameters.

    For one step of the scans around: of the parameters at "zero", the float weight and
    the rounded one; to the parameters, and the change of the float weight.
    """
    assert one.adapter is not None
    how, axes = one.adapter, low_rank.axes(one)

    def begin(
        adapter: Mapping[str, Any], w: jax.Array, base: jax.Array
    ) -> tuple[dict[str, Any], jax.Array]:
        given, change = dict(adapter), jnp.zeros_like(w)
        wide = w.astype(jnp.float32)
        of_rounding = how.init == "loftq"
        rest = wide - base.astype(jnp.float32) if of_rounding else wide
        if how.init != "zero":
            given = _directions(axes, rest, how.rank, how.scale)
        update = low_rank.product_of(one)(given[low_rank.A], given[low_rank.B])
        if how.init == "pissa":
            change = -update.astype(w.dtype)
        if magnitude.has_one(one):
            whole = wide if how.init == "pissa" else base.astype(jnp.float32) + update
            given[magnitude.MAGNITUDE] = magnitude.norm(axes, whole)
        return given, change

    return begin


def _directions(
    axes: tuple[low_rank.WeightAxes, low_rank.WeightAxes],
    w: jax.Array,
    rank: int,
    scale: float,
) -> dict[str, jax.Array]:
    """Returns an adapter whose product is a weight's largest singular directions.

    Args:
        axes: axes of the weight that `lora_a` and `lora_b` have; None: the rank.
        w: the weight, or an error of it.
        rank: the number of directions.
        scale: factor of the product.
    """
    of_a, of_b = ([i for i in one if i is not None] for one in axes)
    batch = [axis for axis in of_a if axis in of_b]
    inputs = [axis for axis in of_a if axis not in of_b]
    outputs = [axis for axis in of_b if axis not in of_a]
    groups, rows, columns = (
        [w.shape[axis] for axis in some] for some in (batch, inputs, outputs)
    )
    moved = w.transpose(*batch, *inputs, *outputs)
    matrix = moved.reshape(*groups, int(np.prod(rows)), int(np.prod(columns)))
    u, s, v = jnp.linalg.svd(matrix, full_matrices=False)
    root = jnp.sqrt(s / np.float32(abs(scale)))
    sign = np.float32(np.sign(scale))
    a, b = u * root[..., None, :], sign * root[..., None] * v
    missing = max(rank - s.shape[-1], 0)
    none = [(0, 0)] * (a.ndim - 1)
    a = jnp.pad(a[..., :rank], [*none, (0, missing)])
    b = jnp.pad(b[..., :rank, :], [*none[:-1], (0, missing), (0, 0)])
    a = a.reshape(*groups, *rows, rank)
    b = b.reshape(*groups, rank, *columns)
    orders = ([*batch, *inputs, None], [*batch, None, *outputs])
    return {
        name: x.transpose([order.index(axis) for axis in wanted])
        for name, x, order, wanted in zip(
            (low_rank.A, low_rank.B), (a, b), orders, axes, strict=True
        )
    }
