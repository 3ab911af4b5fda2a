"""Programs of integer operators, made of float models before ranges are known."""

import collections
import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from aqtlite import errors
from aqtlite.contraction import differentiation
from aqtlite.edge import importing, quantized
from aqtlite.edge import rules as rules_lib
from aqtlite.edge.graph import Graph, Node
from aqtlite.edge.operators.base import Equation
from aqtlite.edge.passes import fuse, patterns, roots, simplify, translate, unify
from aqtlite.edge.passes.unify import Group
from aqtlite.edge.rules import Rule
from aqtlite.flax.linen.quantize_model import QuantizedModel
from aqtlite.jaxpr import tracing


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of operators that runtimes support."""

    graph: Graph
    traced: tracing.Traced
    rules: tuple[Rule, ...]
    names: Mapping[int, str]
    """Names of the inputs and of the outputs of operators, by number."""

    groups: Mapping[int, Group]
    """Group of values on one grid, by number of each member."""

    def rule_of(self, node: Node) -> Rule:
        """The rule that decides an operator's integers."""
        return _rule_of(self.rules, node)

    def is_quantized(self, node: Node) -> bool:
        """Whether an operator computes on integers."""
        if isinstance(node.operator, Equation) or self.rule_of(node).is_float:
            return False
        return any(value in self.groups for value in (*node.inputs, *node.outputs))

    @functools.cached_property
    def static(self) -> frozenset[int]:
        """The values that depend only on parameters and constants."""
        return self.graph.static_values()

    @functools.cached_property
    def unrounded(self) -> frozenset[int]:
        """Outputs of operators left in float, and inputs of the program they take."""
        of_floats = [
            node
            for node in self.graph.nodes
            if not self.is_quantized(node) and not self.static.issuperset(node.outputs)
        ]
        given = {value for node in of_floats for value in node.outputs}
        taken = {value for node in of_floats for value in node.inputs}
        values = given | taken.intersection(self.graph.inputs)
        return frozenset(values.intersection(self.groups))

    @functools.cached_property
    def rounded_groups(self) -> tuple[Group, ...]:
        """The groups with a value that is an integer somewhere in the file.

        That is in an integer operator, or as an input or output of the program. Empty
        if all operators stay in float.
        """
        rounded = {
            value
            for node in self.graph.nodes
            if self.is_quantized(node)
            for value in (*node.inputs, *node.outputs)
        }
        if rounded:
            rounded.update(self.graph.inputs, self.graph.outputs)
        found = {
            one.members: one
            for one in self.groups.values()
            if not rounded.isdisjoint(one.members)
        }
        return tuple(found.values())

    def range_name(self, group: Group) -> str:
        """The name of a group's range."""
        candidates = (*group.sources, *group.members)
        return next(self.names[v] for v in candidates if v in self.names)

    @functools.cached_property
    def ranged_groups(self) -> dict[str, Group]:
        """The groups that need a calibrated range, by name of the range."""
        return {
            self.range_name(group): group
            for group in self.rounded_groups
            if group.fixed is None
        }

    def bind(self, variables: Any, args: tuple[Any, ...]) -> dict[int, Any]:
        """Maps the inputs and parameters of the graph to their values, by number."""
        values = self.traced.values((variables, *args))
        numbers = sorted((*self.graph.inputs, *self.graph.parameters))
        return dict(zip(numbers, values, strict=True))

    def result(self, values: Mapping[int, Any]) -> Any:
        """Assembles the result of the function from values by number."""
        outputs = [values[i] for i in self.graph.outputs]
        return jax.tree.map(lambda i: outputs[i], self.traced.outputs)


def make(model: Any, variables: Any, args: tuple[Any, ...], rules: Any = ()) -> Program:
    """Makes a program of a model.

    Args:
        model: a Linen module, an NNX module, or a function of variables and arguments.
        variables: variables of the model, or their shapes.
        args: sample arguments, or their shapes.
        rules: rules that select the integers of each operator.

    Raises:
        TypeError: if a module has no variables, or if a value has a floating dtype
            other than float32.
        ValueError: if the model is already quantized, if an operation has no integer
            form, or if a required rule fits no operator.
    """
    _check_variables(model, variables)
    checked = rules_lib.check(rules)
    graph, traced = importing.trace(function_of(model), variables, args)
    _check_not_quantized(graph)
    return _of_graph(graph, traced, checked)


_IN_FLOAT = (Rule(is_float=True, is_required=False),)


def make_as_configured(model: Any, variables: Any, args: tuple[Any, ...]) -> Program:
    """Makes a program in float, with the frozen weights that the model's configs made.

    Args:
        model: a model converted for serving, or a float model.
        variables: variables of the model, or their shapes.
        args: sample arguments, or their shapes.

    Raises:
        TypeError: if a module has no variables, or if a value has a floating dtype
            other than float32.
        ValueError: if weights are not frozen, or control flow depends on data.
    """
    _check_variables(model, variables)
    is_by_rules = isinstance(model, QuantizedModel)
    function = model.apply if is_by_rules else function_of(model)
    graph, traced = quantized.trace(function, variables, args)
    return _of_graph(graph, traced, _IN_FLOAT)


def _check_variables(model: Any, variables: Any) -> None:
    """Raises TypeError if a module is given None in place of its variables."""
    if variables is not None or not isinstance(model, nnx.Module | linen.Module):
        return
    wanted = "nnx.state(model)" if isinstance(model, nnx.Module) else "model.init(...)"
    raise TypeError(
        f"variables is None: an exported {type(model).__name__} is a function of its "
        f"variables. Give {wanted}, or what training made of it"
    )


def _of_graph(
    graph: Graph, traced: tracing.Traced, checked: tuple[Rule, ...]
) -> Program:
    """Makes a program of a traced model."""
    _check_dtypes(graph)
    # Also taken before passes, since rules may name what these replace.
    operators = _operators(graph)
    graph = patterns.recognise(graph)

    rule_of = functools.partial(_rule_of, checked)

    def is_float(node: Node) -> bool:
        return rule_of(node).is_float

    graph = simplify.simplify(translate.translate(graph, rule_of))
    operators += _operators(graph)
    graph = roots.as_exponentials(graph, rule_of)
    graph = fuse.fuse_activations(fuse.fold(graph, is_float), is_float)
    graph = simplify.simplify(graph)
    rules_lib.check_used(checked, [*operators, *_operators(graph)])
    graph = unify.rescale_inputs(graph, rule_of)
    names = _names(graph, traced)
    return Program(graph, traced, checked, names, unify.groups(graph, rule_of))


def _operators(graph: Graph) -> list[tuple[str, str]]:
    """Name scopes and name of each operator that depends on the inputs."""
    static = graph.static_values()
    return [
        (node.path, node.operator.name_in_rules)
        for node in graph.nodes
        if not static.issuperset(node.outputs)
    ]


def _rule_of(rules: Sequence[Rule], node: Node) -> Rule:
    return rules_lib.of(rules, node.path, node.operator.name_in_rules)


def function_of(model: Any, **kwargs: Any) -> Callable[..., Any]:
    """Turns a model into a function of variables and positional arguments.

    Args:
        model: a Linen module, an NNX module, or such a function.
        **kwargs: keyword arguments of a module, and the name of its `method`.

    Raises:
        TypeError: if `model` is none of these.
    """
    if isinstance(model, linen.Module):
        return functools.partial(model.apply, **kwargs)
    if isinstance(model, nnx.Module):
        return functools.partial(_inferred, nnx.graphdef(model), **kwargs)
    if isinstance(model, QuantizedModel):
        raise TypeError(f"the model is what quantize_model returned. {_FLOAT_MODEL}")
    if not callable(model):
        raise TypeError(
            "the model must be a Linen module, an NNX module, or a function of "
            f"variables and arguments, got {errors.brief(model)}. It comes "
            "first, before the variables"
        )
    function: Callable[..., Any] = model
    return function


def _inferred(
    graphdef: Any, state: Any, *args: Any, method: str = "__call__", **kwargs: Any
) -> Any:
    """Calls an NNX module, given as graphdef and state.

    Raises:
        ValueError: if the module changes its variables, as in training.
    """
    model = nnx.merge(graphdef, state)
    before = nnx.to_flat_state(nnx.state(model))
    given = {path: one.get_value() for path, one in before}
    result = getattr(model, method)(*args, **kwargs)
    changed = [
        "/".join(map(str, path))
        for path, one in nnx.to_flat_state(nnx.state(model))
        if path in given and not _is_same(one.get_value(), given[path])
    ]
    if changed:
        raise ValueError(
            f"the model changes its variables when it is called: {', '.join(changed)}. "
            "A file has no state: call model.eval(), so that dropout and batch "
            "normalization infer"
        )
    return result


def _is_same(one: Any, other: Any) -> bool:
    """Whether two trees have the same arrays, as objects."""
    leaves, others = jax.tree.leaves(one), jax.tree.leaves(other)
    return len(leaves) == len(others) and all(map(operator.is_, leaves, others))


_FLOAT_MODEL = (
    "A full-integer program is made of the float model: give the module without its "
    "quantization, such as MODEL(cfg=None), and the float variables of training"
)


def _check_not_quantized(graph: Graph) -> None:
    paths = [node.path.split("/") for node in graph.nodes]
    found = {
        "/".join(path[: path.index(differentiation.SCOPE)])
        for path in paths
        if differentiation.SCOPE in path
    }
    if found:
        raise ValueError(
            "the model quantizes contractions itself, in "
            f"{', '.join(sorted(path or 'the function' for path in found))}. "
            f"{_FLOAT_MODEL}"
        )


def _check_dtypes(graph: Graph) -> None:
    for number, value in enumerate(graph.values):
        if graph.is_float(number) and value.dtype != jnp.float32:
            raise TypeError(
                f"the model computes {value.dtype.name} of shape {value.shape}; files "
                "are made of a model that computes in float32: build it with "
                "dtype=jnp.float32, and cast its variables to float32, before they are "
                "converted for serving if the file is one without ranges"
            )


def _names(graph: Graph, traced: tracing.Traced) -> dict[int, str]:
    """Names the inputs and the outputs of operators, uniquely."""
    names = {}
    for number, name in zip(graph.inputs, _input_names(traced), strict=True):
        names[number] = name
    counts: collections.Counter[str] = collections.Counter()
    static = graph.static_values()
    for node in graph.nodes:
        if static.issuperset(node.outputs):
            continue
        name = "/".join(part for part in (node.path, node.operator.name) if part)
        for output in node.outputs:
            number = counts[name]
            counts[name] += 1
            names[output] = f"{name}#{number}" if number else name
    return names


def _input_names(traced: tracing.Traced) -> list[str]:
    """Names inputs: "input", or "input/PLACE" by place in the arguments if several."""
    _, *args = traced.inputs
    places = jax.tree.leaves_with_path(tuple(args))
    found = {
        number: jax.tree_util.keystr(path, simple=True, separator="/")
        for path, number in places
    }
    if len(found) == 1:
        return ["input"]
    return [f"input/{found[number]}" for number in sorted(found)]
