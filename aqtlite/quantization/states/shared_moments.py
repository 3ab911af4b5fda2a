"""Second moments of inputs that several contractions read, gathered and kept once.

The projections of attention to queries, keys and values read one input, and so do both
of a gated MLP. Each of them has its place in a tree of statistics. Which places hold
equal moments is seen in the program that updates the statistics, whoever made it: these
places get one array, which is computed once.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from aqtlite.jaxpr.recognition import equality
from aqtlite.quantization.states.second_moment import SecondMoment


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Distinct:
    """A pytree with equal second moments held once."""

    arrays: list[Any]

    places: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    """For each leaf of the pytree, the index of its array."""

    treedef: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, tree: Any, numbers: Sequence[int]) -> "_Distinct":
        """Holds moments of one number once.

        Args:
            tree: a pytree.
            numbers: a number for each leaf.
        """
        leaves, treedef = jax.tree.flatten(tree)
        arrays: list[Any] = []
        places = []
        of_number: dict[int, int] = {}
        for leaf, number, is_moment in zip(
            leaves, numbers, _are_moments(tree), strict=True
        ):
            place = of_number.get(number) if is_moment else None
            if place is None:
                place = len(arrays)
                arrays.append(leaf)
            if is_moment:
                of_number[number] = place
            places.append(place)
        return cls(arrays, tuple(places), treedef)

    @property
    def tree(self) -> Any:
        return jax.tree.unflatten(self.treedef, [self.arrays[i] for i in self.places])


def once(update: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles an update of statistics that computes equal second moments once.

    Args:
        update: function of a tree of statistics and of other pytrees of arrays. It
            returns the statistics after one more batch.

    Returns:
        The function under `jax.jit`, whose result has one array in the place of all
        second moments that are equal.
    """

    @jax.jit
    def run(before: _Distinct, *others: Any) -> _Distinct:
        def after(before: _Distinct, *others: Any) -> Any:
            return update(before.tree, *others)

        closed, shapes = jax.make_jaxpr(after, return_shape=True)(before, *others)
        values = core.jaxpr_as_fun(closed)(*jax.tree.leaves((before, others)))
        tree = jax.tree.unflatten(jax.tree.structure(shapes), values)
        return _Distinct.of(tree, equality.numbers_of_outputs(closed))

    def updated(statistics: Any, *others: Any) -> Any:
        identities = [id(leaf) for leaf in jax.tree.leaves(statistics)]
        return run(_Distinct.of(statistics, identities), *others).tree

    return updated


def fresh(statistics: Any) -> Any:
    """Returns statistics in which moments of no batches share one array of zeros.

    Args:
        statistics: pytree of concrete arrays.
    """
    zeros: dict[Any, jax.Array] = {}

    def shared(node: Any) -> Any:
        if not isinstance(node, SecondMoment) or np.asarray(node.batches).any():
            return node
        key = node.moment.shape, getattr(node.moment, "sharding", None)
        moment = zeros.setdefault(key, node.moment)
        return dataclasses.replace(node, moment=moment)

    return jax.tree.map(shared, statistics, is_leaf=_is_second_moment)


def _are_moments(tree: Any) -> list[bool]:
    """Returns whether each leaf of a pytree is a second moment."""

    def marked(node: Any) -> Any:
        if isinstance(node, SecondMoment):
            return SecondMoment(False, True)  # type: ignore[arg-type]
        return False

    marks = jax.tree.map(marked, tree, is_leaf=_is_second_moment)
    return jax.tree.leaves(marks)


def _is_second_moment(node: Any) -> bool:
    return isinstance(node, SecondMoment)
