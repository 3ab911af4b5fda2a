"""ONNX graphs as Python objects: nodes with attributes, constants, parameters."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from aqtlite.onnx import registry


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """One operation of a graph."""

    name: str
    op_type: str
    domain: str
    opset: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    operator: registry.Operator

    @property
    def has_body(self) -> bool:
        """Whether it is a condition or a loop, whose nodes have names of their own."""
        return any(isinstance(one, Graph) for one in self.attributes.values())

    def __str__(self) -> str:
        return f"{self.op_type} node {self.name!r}"


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """Nodes in the order of computation; also the body of a condition or a loop."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    constants: Mapping[str, np.ndarray]
    """Values that are known in tracing, by name."""

    parameters: Mapping[str, str]
    """Key of a parameter by name of a value."""
