"""Calls of NNX models as functions of arrays."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.extend import core

from aqtlite.flax.nnx import partitioning
from aqtlite.functions import injected
from aqtlite.functions.freezing import FrozenParameter
from aqtlite.jaxpr import forwarding, tracing

Path = tuple[Any, ...]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Object:
    """Stands for an NNX object among the arguments."""

    index: int


class PureCall:
    """A call of a method of a model, as a function of arrays.

    ``call.function(*call.arguments)`` returns what the method does, and the variables
    that it changed, which `update` then writes into the model.
    """

    def __init__(
        self,
        model: nnx.Module,
        method: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ):
        self._method = method
        self._objects: list[Any] = [model]
        self._args, self._kwargs = jax.tree.map(
            self._arrays_of, (args, dict(kwargs)), is_leaf=_is_object
        )
        graphdef, state = nnx.split(self._objects, graph=True)
        self._graphdef: nnx.GraphDef[Any] = graphdef
        leaves = _flat(state)
        self._params = [one for one in leaves if _is_parameter(*one)]
        self._others = [one for one in leaves if not _is_parameter(*one)]

    def _arrays_of(self, x: Any) -> Any:
        """Leaves arrays as they are; takes note of NNX objects."""
        if not _is_object(x):
            return x
        self._objects.append(x)
        return _Object(len(self._objects) - 1)

    @property
    def params(self) -> dict[Any, Any]:
        """The values of the model's parameters, by the steps of their paths."""
        tree: dict[Any, Any] = {}
        for (_, *steps), leaf in self._params:
            _set(tree, steps, _value(leaf))
        return tree

    @property
    def variables(self) -> dict[tuple[str, ...], nnx.Variable[Any]]:
        """The parameters of the model, as variables."""
        return {tuple(map(str, steps)): leaf for (_, *steps), leaf in self._params}

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of `function`, the parameters of the model first."""
        others = [_value(leaf) for _, leaf in self._others]
        return self.params, others, self._args, self._kwargs

    def function(
        self,
        params: Any,
        others: Sequence[Any],
        args: Any,
        kwargs: Any,
    ) -> tuple[Any, dict[int, Any]]:
        """Calls the method.

        Returns:
            What it returns, and the values of the variables that it changed.

        Raises:
            ValueError: if it changes more than the values of variables.
        """
        values = [_get(params, path[1:]) for path, _ in self._params]
        values += others
        leaves = [*self._params, *self._others]
        state = nnx.from_flat_state(
            (path, _with_value(leaf, value))
            for (path, leaf), value in zip(leaves, values, strict=True)
        )
        objects = nnx.merge(self._graphdef, state)
        args, kwargs = jax.tree.map(
            lambda x: objects[x.index] if isinstance(x, _Object) else x,
            (args, kwargs),
            is_leaf=lambda x: isinstance(x, _Object),
        )
        with injected.marking():
            out = getattr(objects[0], self._method)(*args, **kwargs)
        graphdef, state = nnx.split(objects, graph=True)
        if graphdef != self._graphdef:
            raise ValueError(
                f"{type(objects[0]).__name__}.{self._method} changes the structure of "
                "the model: it adds or removes variables or modules, or sets an "
                "attribute that is no array. Call it on the model itself (the `model` "
                "of a QuantizedModel), and gather intermediates with nnx.capture"
            )
        after = dict(_flat(state))
        changed = {}
        for index, ((path, _), value) in enumerate(zip(leaves, values, strict=True)):
            new = _value(after[path])
            if not _is_same(new, value):
                changed[index] = new
        return out, changed

    def without_unchanged(self, traced: tracing.Traced) -> tracing.Traced:
        """Leaves variables that a trace returns as they were out of what it returns.

        `nnx.scan`, `nnx.remat` and others return all variables that they are given.

        Args:
            traced: of `function`.
        """
        forwarded = forwarding.forwarded_inputs(traced.jaxpr)
        (params, others, _, _), _ = traced.inputs
        before = [_get(params, path[1:]) for path, _ in self._params] + others
        out, changed = traced.outputs
        outputs = (
            out,
            {
                index: after
                for index, after in changed.items()
                if jax.tree.map(lambda i: forwarded[i], after) != before[index]
            },
        )
        kept, treedef = jax.tree.flatten(outputs)
        jaxpr = traced.jaxpr.jaxpr
        pruned = jaxpr.replace(
            outvars=[jaxpr.outvars[i] for i in kept],
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )
        return dataclasses.replace(
            traced,
            jaxpr=core.ClosedJaxpr(pruned, traced.jaxpr.consts),
            outputs=jax.tree.unflatten(treedef, range(len(kept))),
        )

    def update(self, changed: Mapping[int, Any]) -> None:
        """Writes new values into the variables of the model, and of the arguments."""
        leaves = [*self._params, *self._others]
        self._write((leaves[i], value) for i, value in changed.items())

    def replace_params(self, params: Any) -> None:
        """Writes values into the parameters, in the structure of `params`.

        A parameter that is frozen loses its sharding metadata: it has no axes.
        """
        self._write((one, _get(params, one[0][1:])) for one in self._params)

    def _write(self, values: Any) -> None:
        flat = [(path, _with_value(leaf, value)) for (path, leaf), value in values]
        for _, leaf in flat:
            if isinstance(_value(leaf), FrozenParameter):
                metadata = partitioning.without_names(leaf.get_metadata())
                leaf.set_metadata(metadata)
        nnx.update(self._objects, nnx.from_flat_state(flat))


def _is_object(x: Any) -> bool:
    return isinstance(x, nnx.Pytree | nnx.Variable)


def _is_parameter(path: Path, x: Any) -> bool:
    """Tells whether a leaf is a parameter of the model, the first of the objects."""
    return path[0] == 0 and isinstance(x, nnx.Param)


def _flat(state: Any) -> list[tuple[Path, Any]]:
    return list(nnx.to_flat_state(state))


def _value(leaf: Any) -> Any:
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def _with_value(leaf: Any, value: Any) -> Any:
    return leaf.replace(value) if isinstance(leaf, nnx.Variable) else value


def _is_same(one: Any, other: Any) -> bool:
    """Tells whether two values are made of the same arrays."""
    structures: list[Any] = [jax.tree.structure(one), jax.tree.structure(other)]
    if structures[0] != structures[1]:
        return False
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(a is b for a, b in pairs)


def _set(tree: dict[Any, Any], steps: Sequence[Any], value: Any) -> None:
    *first, last = steps
    for step in first:
        tree = tree.setdefault(step, {})
    tree[last] = value


def _get(tree: Any, steps: Sequence[Any]) -> Any:
    for step in steps:
        tree = tree[step]
    return tree
