"""Evaluation of graphs: shapes by NumPy in tracing, all else by JAX."""

import contextlib
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.onnx.graph import Graph, Node

Value = Any
"""NumPy array (known in tracing), JAX array, tuple of values (a sequence) or None."""


def is_static(value: Value) -> bool:
    """Whether a value is known while the program is traced."""
    return value is None or isinstance(value, np.ndarray)


def numpy_of(*values: Value) -> Any:
    """Returns `numpy` if all values are known in tracing, else `jax.numpy`."""
    return np if all(map(is_static, values)) else jnp


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One evaluation of a node, as functions of `operator` see it."""

    node: Node
    """The node, with the names of what it reads and computes."""

    values: Mapping[str, Value]
    """Values of the graph and of the graphs around it, which bodies can use."""

    parameters: Mapping[str, Value]
    """Parameters of the network, by key."""

    @property
    def opset(self) -> int:
        """Version of the operators of this domain."""
        return self.node.opset

    def attribute(self, name: str, default: Any = None) -> Any:
        """Returns an attribute of the node."""
        return self.node.attributes.get(name, default)

    def has_output(self, position: int) -> bool:
        """Whether something reads an optional output."""
        outputs = self.node.outputs
        return position < len(outputs) and bool(outputs[position])

    def static(self, value: Value, name: str) -> np.ndarray:
        """Returns a value that has to be known in tracing.

        Raises:
            ValueError: if it depends on data.
        """
        if isinstance(value, np.ndarray):
            return value
        raise ValueError(
            f"{self.node}: its {name} depends on data, and shapes of JAX programs are "
            "static. An input that decides about shapes becomes known with "
            "aqtlite.onnx.load(path, constants={name: array})"
        )

    def integers(self, value: Value, name: str) -> tuple[int, ...]:
        """Returns integers that have to be known in tracing."""
        return tuple(int(x) for x in self.static(value, name).reshape(-1))

    def integer(self, value: Value, name: str) -> int:
        """Returns an integer that has to be known in tracing.

        Raises:
            ValueError: if it depends on data, or is not one number.
        """
        found = self.integers(value, name)
        if len(found) != 1:
            raise self.unsupported(f"its {name} has {len(found)} elements, not one")
        return found[0]

    def unsupported(self, what: str) -> ValueError:
        """Returns the error for a variant of the operator that is not supported."""
        return ValueError(f"{self.node} (opset {self.opset}): {what}")

    def run(self, graph: Graph, *inputs: Value) -> list[Value]:
        """Evaluates a body."""
        return evaluate(graph, self.parameters, inputs, self.values)


def evaluate(
    graph: Graph,
    parameters: Mapping[str, Value],
    inputs: Sequence[Value],
    outer: Mapping[str, Value],
) -> list[Value]:
    """Evaluates a graph.

    Args:
        graph: graph to evaluate.
        parameters: parameters of the network, by key.
        inputs: values of the inputs.
        outer: values of the graphs around it.

    Returns:
        Outputs of the graph.

    Raises:
        ValueError: if a node cannot be computed with its inputs.
    """
    values = dict(outer)
    values.update(graph.constants)
    values.update((name, parameters[key]) for name, key in graph.parameters.items())
    values.update(zip(graph.inputs, inputs, strict=True))
    for node in graph.nodes:
        results = _results(node, parameters, values)
        values.update(zip(node.outputs, results, strict=False))
    return [values[name] for name in graph.outputs]


def _results(
    node: Node, parameters: Mapping[str, Value], values: Mapping[str, Value]
) -> tuple[Value, ...]:
    inputs = [values[name] if name else None for name in node.inputs]
    if not all(map(is_static, inputs)):
        inputs = [_narrowed(value) for value in inputs]
    scope: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if not node.has_body:
        scope = jax.named_scope(path_of(node.name))
    try:
        with scope:
            results = node.operator.function(Call(node, values, parameters), *inputs)
    except ValueError as error:
        error.add_note(f"in the {node} of the ONNX network, with {_text(inputs)}")
        raise
    except (IndexError, TypeError) as error:
        # The caller's arguments were checked: an error of types is one of the file.
        raise ValueError(
            f"the {node} of the ONNX network cannot be computed with {_text(inputs)}: "
            f"{error}"
        ) from error
    results = results if isinstance(results, tuple) else (results,)
    return tuple(np.asarray(x) if isinstance(x, np.generic) else x for x in results)


def _narrowed(value: Value) -> Value:
    """Known integers, within the limits of those that JAX computes with.

    In 32 bits the largest integer of 64, which stands for infinity, would become -1.
    """
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
        return value
    limits = np.iinfo(jax.dtypes.canonicalize_dtype(value.dtype))
    if limits.bits == 8 * value.itemsize:
        return value
    return np.asarray(np.clip(value, limits.min, limits.max))


def _text(inputs: Sequence[Value]) -> str:
    shapes = (f"{x.dtype}{list(x.shape)}" for x in inputs if hasattr(x, "dtype"))
    return f"inputs {', '.join(shapes)}"


def path_of(name: str) -> str:
    """Returns the path of a node.

    Converters of TensorFlow join the names of fused nodes by semicolons, and JAX uses
    parentheses in scopes for transformations.

    >>> path_of("/encoder/layer.0/MatMul"), path_of("a/conv;a/bias"), path_of("f(x)")
    ('encoder/layer.0/MatMul', 'a/conv', 'f_x_')
    """
    return re.sub(r"[()]", "_", name.partition(";")[0]).strip("/")
