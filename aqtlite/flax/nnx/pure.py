"""Calls of NNX models as pure functions of arrays."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.extend import core

from aqtlite.flax.nnx import layers, partitioning
from aqtlite.flax.nnx.layers import Path
from aqtlite.flax.nnx.model import ATTRIBUTE, QuantizedModel, float_class_of
from aqtlite.jaxpr import tracing
from aqtlite.jaxpr.recognition import forwarding
from aqtlite.program import injected
from aqtlite.program.modules import marked_modules
from aqtlite.program.serving.frozen_parameter import FrozenParameter

_CAPTURES = "__captures__"


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Object:
    """Stands for an NNX object among the arguments."""

    index: int


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Fixed:
    """A static value among the results."""

    value: Any


class Changes(NamedTuple):
    """Changes that a call makes in the model and in NNX objects among the arguments."""

    values: dict[int, Any]
    """New values of variables, by number."""

    added: list[tuple[_Fixed, nnx.Variable[Any]]]
    """New variables, such as those of `sow`, with their paths: the number of the
    object, and the steps below it."""

    metadata: _Fixed
    """New metadata of variables, by number."""

    has_other: _Fixed
    """Whether there are other changes."""


class PureCall:
    """A call of a method of a model, as a pure function of arrays.

    ``call.function(*call.arguments)`` returns the method's result and the changes of
    variables, which `update` makes in the model.
    """

    def __init__(
        self,
        model: QuantizedModel,
        method: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        path: Path = (),
    ):
        """Takes the call.

        Args:
            model: the model.
            method: name of a method of the model, or of a layer.
            args: positional arguments.
            kwargs: keyword arguments.
            path: steps from the model to the layer whose method it is.
        """
        self.method, self.path = method, path
        self._objects: list[Any] = [model]
        self._args, self._kwargs = jax.tree.map(
            self._arrays_of, (args, dict(kwargs)), is_leaf=_is_object
        )
        with _without_captures_of_lists(self._objects):
            graphdef, state = nnx.split(self._objects, graph=True)
        self._graphdef: nnx.GraphDef[Any] = graphdef
        # The quantization's own variables are not inputs of the call.
        leaves: list[tuple[Path, Any]] = []
        self._params: list[tuple[Path, Any]] = []
        self._others: list[tuple[Path, Any]] = []
        self._rest: list[tuple[Path, Any]] = []
        for path, leaf in _flat(state):
            is_ours = path[:2] == (0, ATTRIBUTE)
            (self._rest if is_ours else leaves).append((path, leaf))
        # Those of serving models inside of the model are as they are served.
        served = [
            tuple(map(str, path))
            for path, inner in layers.quantized_below(model)
            if inner.aqt.frozen
        ]
        for path, leaf in leaves:
            steps = tuple(map(str, path[1:]))
            is_served = any(steps[: len(one)] == one for one in served)
            is_parameter = _is_parameter(path, leaf) and not is_served
            (self._params if is_parameter else self._others).append((path, leaf))

    def _arrays_of(self, x: Any) -> Any:
        """Replaces an NNX object by a stand-in; returns anything else unchanged."""
        if not _is_object(x):
            return x
        self._objects.append(x)
        return _Object(len(self._objects) - 1)

    @property
    def name(self) -> str:
        """The name of the method, with its class."""
        return f"{float_class_of(self._receiver).__name__}.{self.method}"

    @property
    def _receiver(self) -> Any:
        return _node(self._objects[0], self.path)

    def in_float(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Calls the method as it is, with the objects of the call themselves."""
        method = getattr(float_class_of(self._receiver), self.method)
        return method(self._receiver, *args, **kwargs)

    @property
    def params(self) -> dict[Any, Any]:
        """Values of the model's parameters, nested by the steps of their paths."""
        tree: dict[Any, Any] = {}
        for (_, *steps), leaf in self._params:
            _set(tree, steps, _value(leaf))
        return tree

    @property
    def variables(self) -> dict[tuple[str, ...], nnx.Variable[Any]]:
        """The variables of the model's parameters, by path."""
        return {tuple(map(str, steps)): leaf for (_, *steps), leaf in self._params}

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of `function`, beginning with the model's parameters."""
        others = [_value(leaf) for _, leaf in self._others]
        return self.params, others, self._args, self._kwargs

    def function(
        self,
        params: Any,
        others: Sequence[Any],
        args: Any,
        kwargs: Any,
    ) -> tuple[Any, Changes]:
        """Calls the method.

        Returns:
            The method's result, and its changes.
        """
        values = [_get(params, path[1:]) for path, _ in self._params]
        values += others
        leaves = [*self._params, *self._others]
        given = [
            (path, _with_value(leaf, value))
            for (path, leaf), value in zip(leaves, values, strict=True)
        ]
        objects = nnx.merge(self._graphdef, nnx.from_flat_state(given + self._rest))
        layers.make_float(objects[0])
        marked_modules.mark(objects[0])
        before = nnx.graphdef(objects, graph=True)
        args, kwargs = jax.tree.map(
            lambda x: objects[x.index] if isinstance(x, _Object) else x,
            (args, kwargs),
            is_leaf=lambda x: isinstance(x, _Object),
        )
        with injected.marking():
            out = getattr(_node(objects[0], self.path), self.method)(*args, **kwargs)
        out = jax.tree.map(lambda x: x if _is_array(x) else _Fixed(x), out)
        added = list(self._taken_out(objects))
        metadata = _Fixed(self._metadata_taken_out(objects))
        graphdef, state = nnx.split(objects, graph=True)
        if graphdef != before:
            return out, Changes({}, added, metadata, _Fixed(True))
        after = dict(_flat(state))
        changed = {}
        for index, ((path, _), value) in enumerate(zip(leaves, values, strict=True)):
            new = _value(after[path])
            if not _is_same(new, value):
                changed[index] = new
        return out, Changes(changed, added, metadata, _Fixed(False))

    def _taken_out(
        self, objects: list[Any]
    ) -> Iterator[tuple[_Fixed, nnx.Variable[Any]]]:
        """Removes variables that the call added to modules, and yields them."""
        before = {path for path, _ in (*self._params, *self._others)}
        for path, leaf in _flat(nnx.state(objects, graph=True)):
            *above, name = path
            if path in before or not isinstance(leaf, nnx.Variable):
                continue
            module = _node(objects, above)
            if isinstance(module, nnx.Module):
                delattr(module, name)
                yield _Fixed(path), leaf

    def _metadata_taken_out(self, objects: list[Any]) -> dict[int, dict[str, Any]]:
        """Restores metadata of variables that the call changed, and returns it."""
        left = {path for path, _ in _flat(nnx.state(objects, graph=True))}
        changed = {}
        for index, (path, before) in enumerate((*self._params, *self._others)):
            variable = _node(objects, path) if path in left else None
            if not isinstance(variable, nnx.Variable):
                continue
            metadata = variable.get_metadata()
            if metadata != before.get_metadata():
                changed[index] = metadata
                _set_metadata(variable, before.get_metadata())
        return changed

    def checked(self, traced: tracing.Traced) -> tracing.Traced:
        """Removes variables that did not change from the outputs of a trace.

        `nnx.scan`, `nnx.remat` and others return all variables they are given.

        Args:
            traced: trace of `function`.

        Raises:
            ValueError: if the call changes more than variables.
        """
        _, changes = traced.outputs
        if changes.has_other.value:
            name = self.name
            raise ValueError(
                f"{name} changes the structure of the model: it removes variables, "
                "adds or removes modules, or sets an attribute that is no variable. "
                f"Do that in a method that contracts nothing, or call {name}(model, "
                "...), which runs as it is, with the class that was quantized"
            )
        forwarded = forwarding.forwarded_inputs(traced.jaxpr)
        (params, others, _, _), _ = traced.inputs
        before = [_get(params, path[1:]) for path, _ in self._params] + others
        out, changes = traced.outputs
        values = {
            index: after
            for index, after in changes.values.items()
            if jax.tree.map(lambda i: forwarded[i], after) != before[index]
        }
        outputs = out, changes._replace(values=values)
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

    def update(self, changes: Changes) -> None:
        """Makes the changes in the model and in the arguments."""
        leaves = [*self._params, *self._others]
        self._write((leaves[i], value) for i, value in changes.values.items())
        for i, metadata in changes.metadata.value.items():
            _set_metadata(_node(self._objects, leaves[i][0]), metadata)
        for path, variable in changes.added:
            *above, name = path.value
            setattr(_node(self._objects, above), name, variable)

    def result(self, out: Any) -> Any:
        """Returns the method's result from the first result of `function`."""
        return jax.tree.map(
            lambda x: x.value if isinstance(x, _Fixed) else x, out, is_leaf=_is_fixed
        )

    def replace_params(self, params: Any) -> None:
        """Writes values, in the structure of `params`, into the parameters.

        A frozen parameter loses its sharding metadata, as it has no axes.
        """
        self._write((one, _get(params, one[0][1:])) for one in self._params)

    def _write(self, values: Any) -> None:
        flat = [(path, _with_value(leaf, value)) for (path, leaf), value in values]
        for _, leaf in flat:
            if isinstance(_value(leaf), FrozenParameter):
                _set_metadata(leaf, leaf.get_metadata())
        nnx.update(self._objects, nnx.from_flat_state(flat))


def _is_array(x: Any) -> bool:
    return tracing.is_array(x) or isinstance(x, bool | int | float | complex)


def _is_fixed(x: Any) -> bool:
    return isinstance(x, _Fixed)


def _is_object(x: Any) -> bool:
    return isinstance(x, nnx.Pytree | nnx.Variable)


def _is_parameter(path: Path, x: Any) -> bool:
    """Whether a leaf is a parameter of the model, which is the first object."""
    return path[0] == 0 and isinstance(x, nnx.Param)


def _flat(state: Any) -> list[tuple[Path, Any]]:
    return list(nnx.to_flat_state(state))


@contextlib.contextmanager
def _without_captures_of_lists(objects: list[Any]) -> Iterator[None]:
    """Temporarily removes the attribute that nnx.capture adds, from every nnx.List.

    Nothing is sown in a list, and `nnx.merge` cannot sort a name among numbers.
    """
    taken = [
        (module, vars(module)[_CAPTURES])
        for _, module in nnx.iter_graph(objects)
        if isinstance(module, nnx.List) and _CAPTURES in vars(module)
    ]
    for module, _ in taken:
        delattr(module, _CAPTURES)
    try:
        yield
    finally:
        for module, captures in taken:
            setattr(module, _CAPTURES, nnx.data(captures))


def _value(leaf: Any) -> Any:
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def _with_value(leaf: Any, value: Any) -> Any:
    return leaf.replace(value) if isinstance(leaf, nnx.Variable) else value


def _set_metadata(variable: nnx.Variable[Any], metadata: Mapping[str, Any]) -> None:
    """Replaces the metadata of a variable; a frozen one has no axes to name."""
    if isinstance(_value(variable), FrozenParameter):
        metadata = partitioning.without_names(metadata)
    variable.set_metadata(dict(metadata))


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values consist of identical array objects."""
    structures: list[Any] = [jax.tree.structure(one), jax.tree.structure(other)]
    if structures[0] != structures[1]:
        return False
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(a is b for a, b in pairs)


def _node(objects: Any, path: Sequence[Any]) -> Any:
    """Returns the object at a path."""
    node: Any = objects
    for step in path:
        is_attribute = isinstance(step, str) and hasattr(node, step)
        node = getattr(node, step) if is_attribute else node[step]
    return node


def _set(tree: dict[Any, Any], steps: Sequence[Any], value: Any) -> None:
    *first, last = steps
    for step in first:
        tree = tree.setdefault(step, {})
    tree[last] = value


def _get(tree: Any, steps: Sequence[Any]) -> Any:
    for step in steps:
        tree = tree[step]
    return tree
