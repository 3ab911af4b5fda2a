"""Calibration: the ranges of a program's values, from batches of data."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.progress
from absl import logging

from aqtlite.calibration import Calibration, MaxOverBatches, MinMax
from aqtlite.edge import grids
from aqtlite.edge import program as program_lib
from aqtlite.edge.graph import Node
from aqtlite.edge.operators.layout import Select
from aqtlite.edge.program import Program
from aqtlite.edge.ranges import Ranges
from aqtlite.edge.rules import Rule
from aqtlite.edge.translation.elementwise import MASKED_BELOW

WIDEST = MaxOverBatches(of=MinMax())
"""Clips nothing that was seen."""

_GRID = grids.GRIDS["int8"]
"""The grid that a range is found for: affine, so that it has two ends."""

_MASK_DISTANCE = 10.0
"""How far below the largest value a range with a mask reaches: exp(-10) is 4.5e-5."""


def calibrate(
    model: Any,
    variables: Any,
    batches: Iterable[Any],
    rules: Sequence[Rule] = (),
    *,
    calibration: Calibration = WIDEST,
) -> Ranges:
    """Finds the ranges of the values of a full-integer program.

    Runs the model in float once for each batch. A progress bar shows on a terminal;
    elsewhere the count is logged.

    Args:
        model: a Linen module, an NNX module, or a function of variables and arguments.
        variables: of the model.
        batches: its inputs: each a tuple of positional arguments, or a single one.
        rules: which integers.
        calibration: what is kept of the batches. `MaxOverBatches`, the default, clips
            nothing that was seen; `MovingAverage`, `MeanOverBatches` and
            `PercentileOverBatches` clip the largest values; `MseOverBatches` clips
            where the squared error is least. They cannot reach beyond what was seen.

    Returns:
        A table, which can be read and edited as JSON.

    Raises:
        TypeError: if the model computes in another dtype than float32.
        ValueError: if there is no batch, if a value is NaN or infinite, or if an
            operation has no integer form.

    >>> import flax.linen as nn
    >>> model, x = nn.Dense(3), jnp.ones((2, 4))
    >>> variables = model.init(jax.random.key(0), x)
    >>> list(calibrate(model, variables, [x, -x]))
    ['input', 'Dense/fully_connected']
    """
    if not isinstance(calibration, Calibration) or calibration.is_learned:
        raise TypeError(
            "calibration must be one that gathers statistics, such as "
            f"calibration.MaxOverBatches(of=calibration.MinMax()), got {calibration!r}"
        )
    if not calibration.has_state:
        calibration = MaxOverBatches(of=calibration)
    console = rich.console.Console(stderr=True)
    observers: dict[Any, _Observer] = {}
    states: Any = None
    count = 0
    for batch in rich.progress.track(
        batches, "calibrating", console=console, disable=not console.is_terminal
    ):
        args = batch if isinstance(batch, tuple) else (batch,)
        if any(np.size(x) == 0 for x in jax.tree.leaves(args)):
            raise ValueError(f"batch {count} is empty: ranges come from data")
        key = str(jax.tree.map(lambda x: (np.shape(x), jnp.result_type(x)), args))
        if key not in observers:
            program = program_lib.make(model, variables, args, rules)
            observers[key] = _Observer(program, calibration)
        states = observers[key].update(states, variables, args, count)
        count += 1
    if not count:
        raise ValueError("calibrate was given no batch: ranges come from data")
    logging.info("calibrated with %d batches", count)
    return observers[key].ranges(states)


@dataclasses.dataclass
class _Observer:
    """Gathers the statistics of one program."""

    program: Program
    calibration: Calibration

    def __post_init__(self) -> None:
        self._update = jax.jit(self._updated)

    def update(
        self, states: Any, variables: Any, args: tuple[Any, ...], batch: int
    ) -> Any:
        """The statistics after one more batch."""
        states = self._initial() if states is None else states
        values = self.program.bind(variables, args)
        values = {
            i: x for i, x in values.items() if i not in self.program.graph.constants
        }
        states, is_finite = self._update(states, values)
        for name in self.program.ranged_groups:
            if not is_finite[name]:
                raise ValueError(
                    f"batch {batch} gives NaN or infinity at {name!r}: ranges come "
                    "from finite values. Check the data and the variables"
                )
        return states

    def _initial(self) -> Any:
        return {
            name: {
                "kept": self.calibration.init_state((1,), _GRID),
                "seen": (jnp.float32(jnp.inf), jnp.float32(-jnp.inf)),
            }
            for name, group in self.program.ranged_groups.items()
        }

    def _updated(self, states: Any, values: dict[int, Any]) -> tuple[Any, Any]:
        graph = self.program.graph
        known = graph.evaluate(values, Node.compute)
        updated, is_finite = {}, {}
        for name, group in self.program.ranged_groups.items():
            parts = [_observed(known[value]) for value in group.sources]
            x = jnp.concatenate([part for part in parts if part.size])
            is_finite[name] = jnp.isfinite(x).all()
            low, high = states[name]["seen"]
            grid = _GRID
            updated[name] = {
                "kept": self.calibration.update(states[name]["kept"], x, (0,), grid),
                "seen": (jnp.minimum(low, x.min()), jnp.maximum(high, x.max())),
            }
        return updated, is_finite

    def ranges(self, states: Mapping[str, Any]) -> Ranges:
        """The table, from the statistics of all batches."""
        masked = self._masked()
        found = {}
        for name in self.program.ranged_groups:
            x = jnp.zeros((1,))
            kept = self.calibration.range(x, (0,), _GRID, states[name]["kept"])
            high = float(kept.high.reshape(()))
            low = -high if kept.low is None else float(kept.low.reshape(()))
            first, last = map(float, states[name]["seen"])
            low, high = max(low, min(first, 0.0)), min(high, max(last, 0.0))
            if name in masked:
                low = min(low, high - _MASK_DISTANCE)
            # Minus zero is no end that a person expects in a table.
            found[name] = (low + 0.0, high + 0.0)
        return Ranges(found)

    def _masked(self) -> set[str]:
        """The ranges of values some of which are masked."""
        graph, groups = self.program.graph, self.program.groups
        return {
            self.program.range_name(groups[node.output])
            for node in graph.nodes
            if isinstance(node.operator, Select)
            and any(
                (graph.constants[i] < MASKED_BELOW).any()
                for i in node.inputs[1:]
                if i in graph.constants
            )
        }


def _observed(x: Any) -> jax.Array:
    """What counts for a range: all elements, but for known ones that mask others."""
    if isinstance(x, np.ndarray):
        x = x[x >= MASKED_BELOW]
    return jnp.reshape(x, (-1,))
