"""Writing of deployed programs to the bytes of a LiteRT file."""

from collections.abc import Callable, Mapping

import jax

from aqtlite.edge.deployed import Deployed
from aqtlite.edge.grid import Grid
from aqtlite.edge.litert import annotations, check, converter, flatbuffer
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
    data = converter.convert({name: _function(*one) for name, one in programs.items()})
    reports = {
        name: check.check(flatbuffer.read(data, name), deployed)
        for name, (deployed, _) in programs.items()
    }
    converter.check_runs(data)
    return data, reports


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
