"""Statistics of a program's values over batches, and the ranges computed from them."""

import dataclasses
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.calibration import Calibration, MinMax, counting
from aqtlite.edge import grids, masks
from aqtlite.edge.graph import Node
from aqtlite.edge.operators.arithmetic import Subtract
from aqtlite.edge.operators.layout import Select
from aqtlite.edge.passes.unify import Group
from aqtlite.edge.program import Program
from aqtlite.edge.ranges import Range, Ranges

_GRID = grids.GRIDS["int8"]
"""The grid to calibrate for: affine, so that a range has two ends."""

_LOST = 0.9
"""Fraction of nonzero elements rounded to zero above which a warning is raised."""


@dataclasses.dataclass
class Observer:
    """Gathers the statistics of one program."""

    program: Program
    calibration: Calibration

    def __post_init__(self) -> None:
        self._observe = jax.jit(self._observed)
        self._maskable = masks.maskable(self.program.graph)
        self._of_softmaxes = frozenset(
            node.inputs[0]
            for node in self.program.graph.nodes
            if masks.is_softmax(node.operator)
        )

    def update(
        self, states: Any, variables: Any, args: tuple[Any, ...], batch: int
    ) -> Any:
        """Returns the statistics updated with a batch.

        Args:
            states: previous statistics; None for the first batch.
            variables: variables of the model.
            args: the batch.
            batch: number of the batch, for error messages.

        Raises:
            ValueError: if a value is NaN or infinite.
        """
        states = self._initial() if states is None else states
        values = self.program.bind(variables, args)
        values = {
            i: x for i, x in values.items() if i not in self.program.graph.constants
        }
        of_groups, summands = jax.device_get(self._observe(values))
        found = {}
        for name in self.program.ranged_groups:
            x, counts, peak = of_groups[name]
            all_ends = _ends(x)
            weighed, seen = x, all_ends
            if counts is not None:
                # Every range includes zero, so zero replaces what does not count.
                weighed, seen = np.where(counts, x, np.float32(0)), _ends(x[counts])
            is_finite = np.isfinite(seen).all() or seen == _NOTHING
            if not is_finite or np.isnan(all_ends).any():
                raise ValueError(
                    f"batch {batch} gives NaN or infinity at {name!r}: ranges come "
                    "from finite values. Check the data and the variables"
                )
            state = states["groups"][name]
            found[name] = {
                "kept": _updated(
                    self.calibration, state["kept"], self._enough(weighed, seen)
                ),
                "seen": _wider(state["seen"], seen),
                "all": _wider(state["all"], all_ends),
                "peak": min(state["peak"], peak),
                "magnitudes": state["magnitudes"] + _magnitudes(weighed),
            }
        wider = {
            i: (min(low, summands[i][0]), max(high, summands[i][1]))
            for i, (low, high) in states["summands"].items()
        }
        return {"groups": found, "summands": wider}

    def _enough(self, x: np.ndarray, ends: tuple[float, float]) -> np.ndarray:
        """What the calibration needs of a batch: all of it, or its ends.

        Arrays of two elements take one program for all groups, and no time.
        """
        if type(getattr(self.calibration, "of", None)) is MinMax:
            return np.asarray((0, 0) if ends == _NOTHING else ends, np.float32)
        return x

    def _initial(self) -> Any:
        of_groups = {
            name: {
                "kept": counting.before_first(self.calibration, (1,), _GRID),
                "seen": _NOTHING,
                "all": _NOTHING,
                "peak": np.inf,
                "magnitudes": _no_magnitudes(),
            }
            for name in self.program.ranged_groups
        }
        return {
            "groups": of_groups,
            "summands": dict.fromkeys(self._summands, _NOTHING),
        }

    @property
    def _summands(self) -> frozenset[int]:
        """The known operands of sums that give maskable values."""
        return frozenset(
            value
            for node in self.program.graph.nodes
            if masks.is_sum(node.operator) and node.output in self._maskable
            for value in self.program.static.intersection(node.inputs)
        )

    def _observed(self, values: dict[int, Any]) -> tuple[Any, Any]:
        """Evaluates the program in float.

        Returns:
            For each group, its elements, which of them count for its range (None for
            all), and the lowest peak of its softmaxes; and the ends of the summands.
        """
        graph = self.program.graph
        known = graph.evaluate(values, Node.compute)
        counted = masks.counted(graph, known, self._maskable)
        of_groups = {}
        for name, group in self.program.ranged_groups.items():
            peak = jnp.float32(jnp.inf)
            for value in self._softmax_inputs(group):
                peak = jnp.minimum(peak, masks.lowest_peak(known[value]))
            parts = [_weighed(known[i], counted.get(i)) for i in group.sources]
            x = jnp.concatenate([x for x, _ in parts])
            counts = None
            if any(one is not None for _, one in parts):
                counts = jnp.concatenate(
                    [
                        jnp.ones(x.shape, bool) if one is None else one
                        for x, one in parts
                    ]
                )
            of_groups[name] = x, counts, peak
        summands = {i: (known[i].min(), known[i].max()) for i in self._summands}
        return of_groups, summands

    def _softmax_inputs(self, group: Group) -> frozenset[int]:
        return self._of_softmaxes.intersection(group.members)

    def ranges(self, states: Any) -> Ranges:
        """Computes the table of ranges from the statistics of all batches."""
        of_groups = states["groups"]
        selected = self._selected()
        found = {}
        for name in self.program.ranged_groups:
            state = of_groups[name]
            x = jnp.zeros((1,))
            kept = self.calibration.range(x, (0,), _GRID, state["kept"])
            high = float(kept.high.reshape(()))
            low = -high if kept.low is None else float(kept.low.reshape(()))
            first, last = map(float, state["seen"])
            low, high = max(low, min(first, 0.0)), min(high, max(last, 0.0))
            if np.isfinite(state["peak"]):
                below = float(state["peak"]) - masks.DISTANCE
                low = min(low, max(below, float(state["all"][0])))
            elif name in selected:
                low = min(low, high - masks.DISTANCE)
            found[name] = Range(low, high)
        self._make_room(found, states)
        # Adding 0.0 turns -0.0 into 0.0, which reads better in a table.
        ranges = {name: (low + 0.0, high + 0.0) for name, (low, high) in found.items()}
        self._warn(ranges, of_groups)
        return Ranges(ranges)

    def _make_room(self, found: dict[str, Range], states: Any) -> None:
        """Widens the ranges of summands so that either one can mask the sum.

        A summand at the end of its range then moves the other one's maximum to the
        lower end of the sum's range.
        """
        program, summands = self.program, states["summands"]
        names = {v: n for n, one in program.ranged_groups.items() for v in one.members}

        def ends(value: int) -> tuple[float, float] | None:
            if value in summands:
                low, high = summands[value]
                return float(low), float(high)
            return found.get(names.get(value, ""))

        for node in reversed(program.graph.nodes):
            if not masks.is_sum(node.operator) or node.output not in self._maskable:
                continue
            x, y = node.inputs
            of_sum, of_x, of_y = ends(node.output), ends(x), ends(y)
            if of_sum is None or of_x is None or of_y is None:
                continue
            is_difference = isinstance(node.operator, Subtract)
            lowest_x = of_sum[0] + (of_y[0] if is_difference else -of_y[1])
            self._widen(found, states, names.get(x), lowest_x)
            if is_difference:
                self._widen(found, states, names.get(y), of_x[1] - of_sum[0])
            else:
                self._widen(found, states, names.get(y), of_sum[0] - of_x[1])

    def _widen(
        self, found: dict[str, Range], states: Any, name: str | None, end: float
    ) -> None:
        """Widens a range to include `end`, but not beyond the observed values."""
        if name is None:
            return
        first, last = map(float, states["groups"][name]["all"])
        end = min(max(end, first), last)
        low, high = found[name]
        found[name] = Range(min(low, end), max(high, end))

    def _selected(self) -> set[str]:
        """Names of the ranges of values that are masked by a selection."""
        graph, groups = self.program.graph, self.program.groups
        return {
            self.program.range_name(groups[node.output])
            for node in graph.nodes
            if isinstance(node.operator, Select)
            and any(
                (graph.constants[i] <= masks.MASKED_BELOW).any()
                for i in node.inputs[1:]
                if i in graph.constants
            )
        }

    def _warn(self, ranges: dict[str, tuple[float, float]], of_groups: Any) -> None:
        """Warns of ranges so wide that most nonzero elements round to zero."""
        lines = []
        for name, group in self.program.ranged_groups.items():
            scale = _step(*ranges[name], group.dtype)
            histogram = np.asarray(of_groups[name]["magnitudes"])
            share = _share_below(histogram, scale / 2)
            if share > _LOST:
                low, high = ranges[name]
                lines.append(f"{name!r}: {share:.0%} in [{low:.4g}, {high:.4g}]")
        if lines:
            warnings.warn(
                "most elements of these values that are not zero round to zero, since "
                "a few others make their range wide. Clip these with a calibration of "
                "percentiles or Ranges.replace, or use edge.Rule(activations='int16') "
                "or is_float=True:\n  " + "\n  ".join(lines),
                stacklevel=4,
            )


@functools.partial(jax.jit, static_argnums=0)
def _updated(calibration: Calibration, state: Any, x: Any) -> Any:
    """Updates the state of a calibration, in one program for all groups of a size.

    Together with the model, and with the other statistics, which are cheap on the host,
    these would take most of the time to compile it.
    """
    return counting.updated(calibration, state, x, (0,), _GRID)


def _weighed(x: Any, counted: Any) -> tuple[Any, Any]:
    """Flattens an array; returns its elements, and which of them count for a range."""
    is_known = isinstance(x, np.ndarray)
    if counted is None and is_known:
        counted = x > masks.MASKED_BELOW
    if is_known:
        # A variance has a NaN constant for the case of zero degrees of freedom.
        is_number = ~np.isnan(x)
        return x[is_number], counted[is_number]
    return jnp.ravel(x), None if counted is None else jnp.ravel(counted)


_NOTHING = (np.inf, -np.inf)
"""Ends of no elements."""


def _ends(x: np.ndarray) -> tuple[float, float]:
    """The smallest and largest element; both are NaN if one is."""
    return float(x.min(initial=np.inf)), float(x.max(initial=-np.inf))


def _wider(
    ends: tuple[float, float], others: tuple[float, float]
) -> tuple[float, float]:
    return min(ends[0], others[0]), max(ends[1], others[1])


_SMALLEST, _LARGEST = -64, 64
"""Bounds of the histogram of exponents; exponents beyond are clipped."""


def _no_magnitudes() -> np.ndarray:
    """An empty histogram of exponents."""
    return np.zeros(_LARGEST - _SMALLEST)


_SAMPLE = 1 << 16
"""Elements of which the exponents are counted, about, of a larger array."""


def _magnitudes(x: np.ndarray) -> np.ndarray:
    """Histogram of the exponents of an array's nonzero elements, or of a sample."""
    # An odd step meets all channels.
    x = x[:: x.size // _SAMPLE | 1]
    _, exponents = np.frexp(x[x != 0])
    places = np.clip(exponents - _SMALLEST, 0, _LARGEST - _SMALLEST - 1)
    return np.bincount(places, minlength=_LARGEST - _SMALLEST)


def _step(low: float, high: float, dtype: str) -> float:
    """The step of the grid of a range."""
    if dtype == "int16":
        return max(-low, high) / 32767
    return (high - low) / 255


def _share_below(histogram: np.ndarray, bound: float) -> float:
    """Lower bound of the fraction of elements with magnitudes below a bound."""
    # Exponent e stands for magnitudes below 2**e.
    ends = np.exp2(np.arange(_SMALLEST, _LARGEST, dtype=np.float64))
    total = float(histogram.sum())
    return float(histogram[ends <= bound].sum()) / total if total else 0.0
