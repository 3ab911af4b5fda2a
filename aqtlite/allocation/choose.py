"""Chooses a config for each weight of a model, under a budget of bytes or of time."""

import math
import numbers
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

import numpy as np

from aqtlite import errors
from aqtlite.allocation import knapsack
from aqtlite.allocation import measure as measuring
from aqtlite.allocation import programs as programs_lib
from aqtlite.allocation import times as times_lib
from aqtlite.allocation import weights as weights_lib
from aqtlite.allocation.candidates import FLOAT
from aqtlite.allocation.knapsack import Option
from aqtlite.allocation.measure import Result
from aqtlite.allocation.programs import Programs
from aqtlite.allocation.result import Allocation, Choice, Point, Unit
from aqtlite.allocation.sensitivity import programs_of
from aqtlite.allocation.switches import Switch
from aqtlite.allocation.times import Times
from aqtlite.allocation.weights import Weights
from aqtlite.jaxpr.registry import LOOKUP
from aqtlite.program.rules.rules import Rule

_NUM_POINTS = 8
"""Number of budgets on the curve, beside those of uniform candidates."""


def choose_bits(
    model: Any,
    variables: Any,
    batches: Iterable[Any],
    *,
    candidates: Any,
    budget: int | float,
    unit: Unit = "bytes",
    loss: Callable[..., Any] | None = None,
    num_inputs: int | None = None,
    **kwargs: Any,
) -> Allocation:
    """Chooses a config for each weight of a model, under a budget of bytes or of time.

    Each weight is quantized alone, with each of the candidates, to measure its cost:
    the change of the loss; without a loss, the power of the output's error. Of all
    choices within the budget, the one with the least sum of costs is found by integer
    programming (a multiple-choice knapsack), and measured, as are those under other
    budgets, and all weights with one candidate. What measures best within the budget is
    chosen, so that no uniform candidate is better on these batches. Under a budget of
    seconds, no weight gets a candidate with which it takes longer than in float.

    A weight can stay in float, too. Contractions that read one weight get one choice,
    and contractions of activations stay in float.

    What is measured is served by the rules after `aqtlite.flax.calibrate_in_float` with
    the inputs of these batches, if the chosen configs need statistics, and
    `aqtlite.flax.convert`, or their counterparts for NNX models and functions.

    >>> import flax.linen as nn
    >>> import jax
    >>> from aqtlite import config
    >>> model = nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(4)])
    >>> x = jax.random.normal(jax.random.key(0), (32, 8))
    >>> variables = model.init(jax.random.key(1), x)
    >>> candidates = [config.weight_only(bits=4), config.weight_only(bits=8)]
    >>> found = choose_bits(
    ...     model, variables, [x], candidates=candidates, budget=0.4
    ... )
    >>> found.chosen.nbytes <= found.budget
    True
    >>> from aqtlite.flax import quantize_model
    >>> quantize_model(model, found.rules).apply(variables, x).shape
    (32, 4)

    Args:
        model: a float model of Linen or NNX, or a function, as in `sensitivity`; the
            rules of a model that is quantized by rules are replaced. One that is
            `invariant` is measured so: quantize it with the rules and that, too.
        variables: the model's variables, or the first argument of the function; None
            for an NNX model.
        batches: the inputs, each a tuple of positional arguments or a single argument.
            All are held in memory, and all of their elements count: there is no mask=.
        candidates: the configs to choose from, as in `sensitivity`.
        budget: bound of the bytes of all variables, as a checkpoint keeps them: values
            of 4 bits, two to a byte. A float below 1 is a part of the bytes in float.
            With ``unit="seconds"``, bound of the time of a call with a batch.
        unit: "bytes" or "seconds". With the latter, all contractions that read a weight
            are timed on this device with each candidate, as by `measure_serving`, with
            arrays of several processes by the first of these, and the budget is of the
            sum of their times. They are medians, noisy, and
            without the operations between contractions.
        loss: function ``loss(outputs, *batch)``, as in `sensitivity`.
        num_inputs: number of items of a batch that are arguments of the model.
        **kwargs: other arguments of all calls.

    Returns:
        The choices, with the rules that quantize the model so, and what was measured.

    Raises:
        TypeError: as in `sensitivity`, or if `budget` is no number.
        ValueError: as in `sensitivity`; if `unit` is unknown, if no contraction has a
            weight, or if the budget is too small; the message names the smallest
            possible.
    """
    budget = _checked_budget(budget, unit)
    if candidates is None:
        raise TypeError("candidates is None: give the configs to choose from")
    programs = programs_of(
        model, variables, candidates, loss, num_inputs, kwargs, operands="weight"
    )
    held = measuring.held(programs, batches)
    return _Search(programs, held, unit).allocation(budget)


def _checked_budget(budget: Any, unit: Unit) -> int | float:
    """Returns a budget as an int, of bytes, or a float: seconds, or a part of bytes."""
    if unit not in get_args(Unit):
        known = " or ".join(map(repr, get_args(Unit)))
        raise ValueError(f"unit must be {known}, got {unit!r}")
    if not isinstance(budget, numbers.Real) or isinstance(budget, bool):
        raise TypeError(
            f"budget must be a number of bytes, or a part of the bytes in float, such "
            f"as 0.25, got {errors.brief(budget)}"
        )
    if unit == "seconds":
        seconds = float(budget)
        if not 0 < seconds < math.inf:
            raise ValueError(f"budget must be positive, of seconds, got {budget!r}")
        return seconds
    if isinstance(budget, numbers.Integral):
        found: int | float = int(budget)
    else:
        found = float(budget)
    if not found > 0 or (isinstance(found, float) and found > 1):
        raise ValueError(
            f"budget must be a positive integer, of bytes, or a float up to 1, a part "
            f"of the bytes in float, got {budget!r}"
        )
    return found


_Chosen = tuple[int | None, ...]
"""For each weight, the index of a candidate, or None for float."""


class _Search:
    """The weights of a model with their costs, and the choices measured so far."""

    def __init__(self, programs: Programs, batches: Sequence[Any], unit: Unit):
        self._programs, self._batches, self._unit = programs, batches, unit
        switched = programs.of(batches[0])
        self._switches: tuple[Switch, ...] = switched.switches
        try:
            self._weights: Weights = weights_lib.weights_of(switched)
        except ValueError:
            switched.check()  # Names the contraction and the candidate.
            raise
        if not self._weights.weights:
            raise ValueError(programs_lib.NO_WEIGHT)
        self._times: Times | None = None
        if unit == "seconds":
            self._times = times_lib.times_of(switched, self._weights)
        self._results: dict[_Chosen, Result] = {}

    @property
    def _spent(self) -> Weights | Times:
        """What the budget is of."""
        return self._weights if self._times is None else self._times

    def allocation(self, budget: int | float) -> Allocation:
        """Returns the choice under a budget, with what was measured."""
        spent, weights = self._spent, self._weights.weights
        in_float: _Chosen = (None,) * len(weights)
        limit = self._limit(budget)
        least = self._least(limit)
        self._programs.calibrate(self._batches)
        costs = self._costs()
        groups = [
            [
                Option(costs.get((i, candidate), math.nan), spent.amount(i, candidate))
                for candidate in self._options(i)
            ]
            for i in range(len(weights))
        ]
        uniform = {FLOAT: in_float}
        for number, name in enumerate(self._programs.names):
            uniform[name] = self._uniform(number)
        sizes = [spent.total(one) for one in uniform.values() if one != in_float]
        spread = np.linspace(least, max(sizes), _NUM_POINTS).astype(int)
        budgets = {limit, *sizes, *spread.tolist()}
        found: dict[_Chosen, None] = {}
        for one in sorted(budgets):
            solved = knapsack.solve(groups, one - spent.other)
            if solved is not None:
                taken = (self._options(i)[place] for i, place in enumerate(solved))
                found[tuple(taken)] = None
        self._measure([*found, *uniform.values()], "choices")
        within = [
            one
            for one in dict.fromkeys([*found, *uniform.values()])
            if spent.total(one) <= limit
            and math.isfinite(self._cost_of(one))
            and all(candidate in self._options(i) for i, candidate in enumerate(one))
        ]
        if not within:
            raise ValueError(
                "no choice within the budget has a finite loss: give other candidates"
            )
        best = min(within, key=self._cost_of)
        curve = [self._point("chosen", x) for x in sorted(found, key=spent.total)]
        return Allocation(
            budget=limit if self._times is None else limit / times_lib.SECOND,
            unit=self._unit,
            chosen=self._point("chosen", best),
            choices=tuple(self._choices(best, costs)),
            uniform=tuple(self._point(name, x) for name, x in uniform.items()),
            curve=tuple(curve),
            batches=len(self._batches),
        )

    def _least(self, limit: int) -> int:
        """Returns the smallest possible size, after a check of the budget."""
        spent, count = self._spent, len(self._weights.weights)
        least = spent.other + sum(
            min(spent.amount(i, candidate) for candidate in self._options(i))
            for i in range(count)
        )
        if least <= limit:
            return least
        in_float = spent.total((None,) * count)
        if self._times is None:
            raise ValueError(
                f"the budget of {limit:,} bytes is too small: these candidates "
                f"need at least {least:,}, of which {spent.other:,} are of "
                "variables that they do not quantize, and the float model has "
                f"{in_float:,}"
            )
        raise ValueError(
            f"the budget of {limit / 1e3:,.1f} microseconds is too small: these "
            f"candidates need at least {least / 1e3:,.1f} for the contractions that "
            f"read a weight, and the float model {in_float / 1e3:,.1f}"
        )

    def _limit(self, budget: int | float) -> int:
        """Returns the budget in bytes or nanoseconds."""
        if self._times is not None:
            return int(budget * times_lib.SECOND)
        if isinstance(budget, float):
            in_float: _Chosen = (None,) * len(self._weights.weights)
            return int(budget * self._weights.total(in_float))
        return budget

    def _possible(self, i: int) -> list[int | None]:
        """Returns all candidates that can quantize a weight, after float."""
        sizes = self._weights.weights[i].sizes
        return [None, *(k for k, size in enumerate(sizes) if size is not None)]

    def _options(self, i: int) -> list[int | None]:
        """Returns what can be chosen for a weight: nothing that takes more than float.

        The cost of one may be negative, by the noise of a loss of few batches.
        """
        spent = self._spent
        in_float = spent.amount(i, None)
        return [one for one in self._possible(i) if spent.amount(i, one) <= in_float]

    def _uniform(self, candidate: int) -> _Chosen:
        return tuple(
            candidate if candidate in self._possible(i) else None
            for i in range(len(self._weights.weights))
        )

    def _costs(self) -> dict[tuple[int, int | None], float]:
        """Measures each weight alone; returns the cost of each option of each."""
        count = len(self._weights.weights)
        alone: dict[tuple[int, int | None], _Chosen] = {}
        for i in range(count):
            for option in self._options(i):
                alone[i, option] = tuple(
                    option if place == i else None for place in range(count)
                )
        self._measure(list(alone.values()), "weights alone")
        in_float = self._cost_of((None,) * count)
        return {key: self._cost_of(one) - in_float for key, one in alone.items()}

    def _measure(self, several: Iterable[_Chosen], what: str) -> None:
        """Measures choices that are not measured yet."""
        missing = [one for one in dict.fromkeys(several) if one not in self._results]
        choices = [self._choices_of_switches(one) for one in missing]
        if missing:
            found = measuring.measure(
                self._programs, self._batches, lambda _: choices, what
            )
            self._results.update(zip(missing, found.results, strict=True))

    def _choices_of_switches(self, chosen: _Chosen) -> list[int]:
        choices = [0] * len(self._switches)
        for one, candidate in zip(self._weights.weights, chosen, strict=True):
            for place in one.places if candidate is not None else ():
                choices[place] = 1 + (candidate or 0)
        return choices

    def _cost_of(self, chosen: _Chosen) -> float:
        result = self._results[chosen]
        return result.relative_noise if result.loss is None else result.loss

    def _point(self, name: str, chosen: _Chosen) -> Point:
        result, seconds = self._results[chosen], None
        nbytes, rules = self._weights.total(chosen), tuple(self._rules(chosen))
        if self._times is not None:
            seconds = self._times.total(chosen) / times_lib.SECOND
        return Point(name, nbytes, seconds, result.loss, result.snr, rules)

    def _choices(self, chosen: _Chosen, costs: Mapping[Any, float]) -> Iterable[Choice]:
        pairs = zip(self._weights.weights, chosen, strict=True)
        for i, (one, candidate) in enumerate(pairs):
            yield Choice(
                tuple(self._switches[place].path for place in one.places),
                FLOAT if candidate is None else self._programs.names[candidate],
                one.nbytes(candidate),
                one.float_bytes,
                costs[i, candidate],
                self._seconds(i, candidate),
                self._seconds(i, None),
            )

    def _seconds(self, i: int, candidate: int | None) -> float | None:
        times = self._times
        return None if times is None else times.amount(i, candidate) / times_lib.SECOND

    def _rules(self, chosen: _Chosen) -> Iterable[Rule]:
        pairs = zip(self._weights.weights, chosen, strict=True)
        cfgs = {
            place: None if i is None else self._switches[place].forms[i]
            for one, i in pairs
            for place in one.places
        }
        for place in sorted(cfgs):
            form, path = cfgs[place], re.escape(self._switches[place].path)
            cfg = None if form is None or not form.is_quantized else form.cfg
            op = LOOKUP if self._switches[place].forms[0].op == LOOKUP else None
            yield Rule(path=path, op=op, cfg=cfg)
