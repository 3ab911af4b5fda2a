"""Comparison of a full-integer program with its float model, value by value."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import rich.box
import rich.table

from aqtlite.edge import masks
from aqtlite.edge.graph import Node
from aqtlite.edge.simulate import Simulation
from aqtlite.output import rich_tables


@dataclasses.dataclass(frozen=True)
class Difference:
    """The quantization error of one value."""

    name: str
    operator: str
    mean_quanta: float
    """Mean absolute error, in steps of the value's grid."""

    max_quanta: float
    clipped: float
    """Fraction of the floats beyond the ends of the grid."""

    decibels: float
    """Signal-to-noise ratio in dB; infinite if the signal or the error is zero."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The quantization errors of all values, in program order."""

    differences: tuple[Difference, ...]

    def __rich__(self) -> rich.table.Table:
        table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
        table.add_column("value", overflow="fold")
        for name in ("mean quanta", "max quanta", "clipped", "dB"):
            table.add_column(name, justify="right")
        for one in self.differences:
            table.add_row(
                one.name,
                f"{one.mean_quanta:.2f}",
                f"{one.max_quanta:.1f}",
                f"{one.clipped:.2%}",
                f"{one.decibels:.1f}",
            )
        return table

    def __str__(self) -> str:
        return rich_tables.as_text(self, width=120)

    def plot(self) -> Any:
        """Draws the signal-to-noise ratio of every value; returns a Matplotlib figure.

        Raises:
            ModuleNotFoundError: if Matplotlib is not installed.
        """
        import matplotlib.pyplot as plt

        names = [one.name for one in self.differences]
        height = 1 + 0.22 * len(names)
        figure, axes = plt.subplots(figsize=(8, height), layout="constrained")
        places = np.arange(len(names))
        ratios = [min(one.decibels, 100.0) for one in self.differences]
        axes.barh(places, ratios)
        axes.set_yticks(places, names, fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("signal to noise ratio of the integers, dB")
        return figure


def compare(simulation: Simulation, *args: Any) -> Comparison:
    """Compares the integers of a program with the floats of its model.

    Accuracy is lost where the signal-to-noise ratio drops far below that of earlier
    values: check the range of that value, or let a rule give its operator int16 or
    float.

    Args:
        simulation: simulation of the full-integer program.
        *args: floating inputs of the model.

    >>> import flax.linen as nn
    >>> import jax.numpy as jnp
    >>> from aqtlite import edge
    >>> model, x = nn.Dense(3), jnp.linspace(-1, 1, 8).reshape(2, 4)
    >>> variables = model.init(jax.random.key(0), x)
    >>> ranges = edge.calibrate(model, variables, [x])
    >>> simulation = edge.simulate(model, variables, ranges, x)
    >>> [one.operator for one in compare(simulation, x).differences]
    ['input', 'fully_connected']
    """
    deployed = simulation.deployed
    program = deployed.program
    inputs = dict(zip(program.graph.inputs, jax.tree.leaves(args), strict=True))

    @jax.jit
    def evaluated(inputs: Any) -> Any:
        known = program.graph.evaluate({**deployed.known, **inputs}, Node.compute)
        counts = masks.counted(program.graph, known, masks.maskable(program.graph))
        return {value: known[value] for value in deployed.grids}, counts

    floats, counted = evaluated(inputs)
    integers = jax.jit(simulation.values)(*args)
    operators = {i: n.operator.name for n in program.graph.nodes for i in n.outputs}
    differences = []
    for value, name in program.names.items():
        if name not in integers or value in program.unrounded:
            continue
        values = integers[name]
        x = np.asarray(floats[value], np.float64)
        grid = deployed.grids[value]
        error = np.asarray(simulation.dequantize(name, values), np.float64) - x
        scale = float(grid.scale)
        low, high = map(float, grid.ends)
        # Values up to half a step beyond an end still round to it.
        is_clipped = (x < low - scale / 2) | (x > high + scale / 2)
        # Elements of masks, such as -1e9, are beyond every grid.
        counts = np.asarray(counted.get(value, x > masks.MASKED_BELOW))
        error, x, is_clipped = error[counts], x[counts], is_clipped[counts]
        power, noise = np.mean(np.square(x)), np.mean(np.square(error))
        differences.append(
            Difference(
                name,
                operators.get(value, "input"),
                float(np.abs(error).mean() / scale),
                float(np.abs(error).max() / scale),
                float(is_clipped.mean()),
                10 * math.log10(power / noise) if noise and power else math.inf,
            )
        )
    return Comparison(tuple(differences))
