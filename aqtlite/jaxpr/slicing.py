"""Slicing: the part of a jaxpr that makes some of its outputs."""

import dataclasses
from typing import Any

import jax
from jax.extend import core

from aqtlite.jaxpr import dependencies, evaluation
from aqtlite.shapes import sharding


@dataclasses.dataclass(frozen=True)
class Slice:
    """A part of a jaxpr, as a function."""

    jaxpr: core.ClosedJaxpr
    inputs: tuple[int, ...]
    """The inputs of the whole jaxpr that the part takes, in its order."""

    treedef: Any
    """The structure of its outputs."""

    def __call__(self, *inputs: Any) -> Any:
        return self.unflatten(core.jaxpr_as_fun(self.jaxpr)(*inputs))

    def unflatten(self, leaves: Any) -> Any:
        """Arranges one value for each output of the jaxpr as the outputs are."""
        return jax.tree.unflatten(self.treedef, leaves)


def slice_outputs(closed: core.ClosedJaxpr, outputs: Any) -> Slice:
    """Slices a jaxpr: what is left takes no input that the outputs do not depend on.

    Args:
        closed: the whole.
        outputs: a pytree of indices of outputs.

    Returns:
        A function of the inputs that are left, which returns a pytree of values in
        place of the indices.
    """
    wanted, treedef = jax.tree.flatten(outputs)
    of_output = dependencies.output_dependencies(closed)
    kept = sorted(frozenset().union(*(of_output[i] for i in wanted)))
    invars = closed.jaxpr.invars

    def evaluate(*values: Any) -> list[Any]:
        inputs: list[Any] = [None] * len(invars)
        for i, value in zip(kept, values, strict=True):
            inputs[i] = value
        return evaluation.evaluate(closed, inputs, wanted)

    shapes = [sharding.shape_of(invars[i].aval) for i in kept]
    return Slice(jax.make_jaxpr(evaluate)(*shapes), tuple(kept), treedef)
