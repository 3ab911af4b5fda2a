"""Registered ONNX operators: one function of JAX for each."""

import dataclasses
from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]
"""Function of an `evaluation.Call` and the input values; see `operator`."""

DOMAINS = {"ai.onnx": ""}
"""Other names of a domain."""


@dataclasses.dataclass(frozen=True)
class Operator:
    """What `operator` was told of an ONNX operator."""

    function: Function

    weights: tuple[int, ...] = ()
    """Inputs that are weights of a layer. A constant with a single element is a
    parameter only there; elsewhere it is a number of the formula."""

    static: tuple[int, ...] = ()
    """Inputs of floats that decide about shapes, and are no parameters."""


_operators: dict[tuple[str, str], Operator] = {}


def operator(
    *names: str,
    domain: str = "",
    weights: tuple[int, ...] = (),
    static: tuple[int, ...] = (),
) -> Callable[[Function], Function]:
    """Registers a function for ONNX operators.

    The function takes a `Call`, which has the attributes and the opset version, and the
    inputs: arrays, or None for an optional one that is missing at the end or in
    between. An input that is a NumPy array is known while the program is traced, all
    others are JAX arrays. It returns an array, or a tuple for several outputs.

    >>> import numpy as np
    >>> from onnx import TensorProto, helper
    >>> from aqtlite import onnx
    >>> @onnx.operator("Halve", domain="com.example")
    ... def halve(call, x):
    ...     return x / 2 + call.attribute("offset", 0.0)
    >>> node = helper.make_node("Halve", ["x"], ["y"], domain="com.example", offset=1.0)
    >>> x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "xy")
    >>> graph = helper.make_graph([node], "network", [x], [y])
    >>> opsets = [helper.make_opsetid("com.example", 1)]
    >>> network, parameters = onnx.load(helper.make_model(graph, opset_imports=opsets))
    >>> print(network(parameters, np.float32([2, 4])))
    [2. 3.]

    Args:
        names: operators of ONNX that the function computes.
        domain: domain of these operators; "" for ONNX's own.
        weights: positions of inputs that are weights of a layer.
        static: positions of inputs of floats that have to be known in tracing.

    Returns:
        A decorator.
    """

    def register(function: Function) -> Function:
        for name in names:
            _operators[domain, name] = Operator(function, weights, static)
        return function

    return register


def name_of(proto: Any) -> str:
    """Returns the name of an `onnx.NodeProto`, or one by its operator and output."""
    return proto.name or f"{proto.op_type}_{next(filter(None, proto.output), '')}"


def has(domain: str, name: str) -> bool:
    """Whether an operator is registered."""
    return (DOMAINS.get(domain, domain), name) in _operators


def get(domain: str, name: str) -> Operator:
    """Returns a registered operator."""
    return _operators[DOMAINS.get(domain, domain), name]
