"""Writing of deployed programs to the bytes of a LiteRT file."""

from collections.abc import Callable, Mapping

import jax

from aqtlite.edge.deployed import Deployed
from aqtlite.edge.grid import Grid
from aqtlite.edge.litert import annotations, check, converter, flatbuffer, floats
from aqtlite.edge.operators.base import Equation
from aqtlite.edge.operators.contractions import Conv2D
from aqtlite.edge.report import Report

Given = tuple[Deployed, Callable[[int], Grid | None]]
"""A program, and a function that returns the grid of an input or output in the file;
None if it is float32."""


def write(programs: Mapping[str, Given]) -> tuple[bytes, dict[str, Report]]:
    """Returns the bytes of a LiteRT file, and a report of each signature.

    Args:
        programs: programs by name of their signature.

    Raises:
        ModuleNotFoundError: if the converter or the interpreter is not installed.
        ValueError: if they refuse the file, or it differs from its programs.
    """
    for deployed, _ in programs.values():
        check.check_widths(deployed)
        check.check_weights(deployed)
        floats.check(deployed)
    functions = {name: _function(*one) for name, one in programs.items()}
    try:
        data = converter.convert(functions)
    except ValueError as error:
        for deployed, _ in programs.values():
            _check_widths(deployed, error)
            _check_needs_no_library(deployed, error)
        raise
    reports = {
        name: check.check(flatbuffer.read(data, name), deployed)
        for name, (deployed, _) in programs.items()
    }
    converter.check_runs(data)
    return data, reports


def _check_widths(deployed: Deployed, refusal: ValueError) -> None:
    """Raises ValueError for convolutions of int2, which the converter does not name."""
    for node in deployed.program.graph.nodes:
        weight = deployed.operands.get(node.output, {}).get(1)
        is_conv = isinstance(node.operator, Conv2D)
        if is_conv and weight is not None and weight.grid.dtype == "int2":
            raise ValueError(
                f"{node.path!r} has weights of int2, which LiteRT has in dense layers "
                f"alone: give it edge.Rule(path={node.path!r}, weights='int4')"
            ) from refusal


def _check_needs_no_library(deployed: Deployed, refusal: ValueError) -> None:
    """Raises ValueError for float operations that JAX leaves to a library of the host.

    Args:
        deployed: a program.
        refusal: what the converter says of it, which names no operation.
    """
    graph, found = deployed.program.graph, []
    for node in graph.nodes:
        operator = node.operator
        if isinstance(operator, Equation):
            values = (graph.values[i] for i in node.inputs)
            inputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values]
            lowered = jax.jit(operator.compute_all).lower(*inputs)
            if "stablehlo.custom_call" in lowered.as_text():
                found.append(f"{node.place}: {operator.name_in_rules}")
    if found:
        raise ValueError(
            "these operations call a library of the host, such as LAPACK, and LiteRT "
            "has no operator for them, in float or not; leave them out of what is "
            "exported, and run them before or behind the file:\n  " + "\n  ".join(found)
        ) from refusal


def _function(
    deployed: Deployed, grid_of: Callable[[int], Grid | None]
) -> converter.Function:
    graph = deployed.program.graph

    def type_of(value: int) -> jax.ShapeDtypeStruct:
        x, grid = graph.values[value], grid_of(value)
        return jax.ShapeDtypeStruct(x.shape, x.dtype if grid is None else grid.dtype)

    return converter.Function(
        annotations.annotated(deployed, grid_of),
        [type_of(i) for i in graph.inputs],
        *deployed.names(),
    )
