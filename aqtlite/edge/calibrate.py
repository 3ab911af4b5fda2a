"""Calibration: the ranges of a program's values, from batches of data."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.progress
from absl import logging

from aqtlite import errors
from aqtlite.calibration import Calibration, MaxOverBatches, MinMax
from aqtlite.calibration import batches as batches_lib
from aqtlite.edge import program as program_lib
from aqtlite.edge.observer import Observer
from aqtlite.edge.ranges import Ranges
from aqtlite.edge.rules import Rule
from aqtlite.shapes import processes

WIDEST = MaxOverBatches(of=MinMax())
"""The default calibration, which clips no observed value."""


def calibrate(
    model: Any,
    variables: Any,
    batches: Iterable[Any],
    rules: Sequence[Rule] = (),
    *,
    calibration: Calibration = WIDEST,
) -> Ranges:
    """Finds the ranges of the values of a full-integer program.

    Runs the model in float once for each batch. Shows a progress bar in a terminal;
    elsewhere, logs the number of batches.

    Args:
        model: a Linen module, an NNX module, or a function of variables and arguments.
        variables: variables of the model.
        batches: inputs of the model, each a tuple of arguments or a single argument.
            All of their elements count, but for those that the model masks itself:
            there is no mask=, so give batches without padding.
        rules: rules that select the integers of each operator.
        calibration: calibration over batches. `MaxOverBatches`, the default, clips no
            observed value; `MovingAverage`, `MeanOverBatches` and
            `PercentileOverBatches` clip the largest values; `MseOverBatches` clips
            where the squared error is least. No range exceeds the observed values.

    Returns:
        A table of ranges, which can be saved and edited as JSON.

    Raises:
        TypeError: if the model computes in a dtype other than float32, if `batches` is
            an array or a mapping, or is not iterable, or if `calibration` is learned.
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
            f"calibration.MaxOverBatches(of=calibration.MinMax()), got "
            f"{errors.brief(calibration)}"
        )
    if not calibration.has_state:
        calibration = MaxOverBatches(of=calibration)
    console = rich.console.Console(stderr=True)
    observers: dict[Any, Observer] = {}
    states: Any = None
    count = 0
    for batch in rich.progress.track(
        processes.alike(batches_lib.check(batches), variables),
        "calibrating",
        console=console,
        disable=not console.is_terminal,
    ):
        args = batches_lib.args_of(batch)
        if any(np.size(x) == 0 for x in jax.tree.leaves(args)):
            raise ValueError(f"batch {count} is empty: ranges come from data")
        key = str(jax.tree.map(lambda x: (np.shape(x), jnp.result_type(x)), args))
        if key not in observers:
            with batches_lib.called_with(batch):
                program = program_lib.make(model, variables, args, rules)
            observers[key] = Observer(program, calibration)
        states = observers[key].update(states, variables, args, count)
        count += 1
    if not count:
        raise ValueError("calibrate was given no batch: ranges come from data")
    logging.info("calibrated with %d batches", count)
    return observers[key].ranges(states)
