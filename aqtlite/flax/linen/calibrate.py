"""Gathers the statistics of activations over batches."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import rich.console
import rich.progress
from absl import logging
from flax import core as flax_core

from aqtlite.calibration import batches as batches_lib
from aqtlite.flax.linen import given_variables, modes
from aqtlite.flax.linen.quantize_model import Model, QuantizedModel
from aqtlite.quantization.state_collections import STATISTICS


def calibrate(
    model: Model,
    variables: Mapping[str, Any],
    batches: Iterable[Any],
    **kwargs: Any,
) -> dict[str, Any]:
    """Gathers the statistics of a model's activations, and changes nothing else.

    Runs ``model.apply(variables, *batch, mutable=["aqt_stats"], **kwargs)`` under
    `jax.jit`, once for each batch, with the statistics of the batches before. A
    terminal shows a progress bar; otherwise the number of batches is logged.

    Args:
        model: a Linen module with `AqtDotGeneral` or `AqtEinsum` inside, and a config
            with a calibration that gathers statistics, such as
            `calibration.MeanOverBatches`; or a `QuantizedModel`.
        variables: its variables. Existing statistics are continued.
        batches: the inputs, each a tuple of positional arguments or a single argument.
        **kwargs: other arguments of `apply`, such as ``train=False``, `rngs` or
            `method`. They are constants of the compiled program.

    Returns:
        `variables` with an updated collection "aqt_stats".

    Raises:
        TypeError: if `batches` is an array or a mapping, or cannot be iterated over.
        ValueError: if there is no batch, or nothing gathers statistics.

    >>> import flax.linen as nn
    >>> import jax.numpy as jnp
    >>> from aqtlite import calibration, config
    >>> from aqtlite.flax import AqtDotGeneral
    >>> cfg = config.update(config.fully_quantized(), {
    ...     "fwd.lhs.calibration": calibration.MeanOverBatches(),
    ...     "fwd.lhs.calib_shared_axes": "per_tensor",
    ... })
    >>> model = nn.Dense(4, dot_general=AqtDotGeneral(cfg))
    >>> x = jnp.ones((2, 3))
    >>> variables = model.init(jax.random.key(0), x)
    >>> variables = calibrate(model, variables, [x, 2 * x])
    >>> model.apply(variables, x).shape
    (2, 4)
    """
    return _calibrated(model.apply, variables, batches, kwargs)


def calibrate_in_float(
    model: Model,
    variables: Mapping[str, Any],
    batches: Iterable[Any],
    **kwargs: Any,
) -> dict[str, Any]:
    """Gathers the statistics of the float model's activations.

    As `calibrate`, but every contraction runs in float. With `calibrate`, a layer after
    a static range sees activations quantized with the statistics so far. Here it sees
    those of the float model, whatever was gathered before: one pass is enough, and
    merging the statistics of several hosts (`merge_statistics`) equals one pass over
    all batches.

    Results that a config quantizes (`config.DotGeneral.out`) are float arrays here.
    Attention to a KV cache stays quantized.

    Args:
        model: as in `calibrate`.
        variables: its variables. Existing statistics are continued.
        batches: the inputs, each a tuple of positional arguments or a single argument.
        **kwargs: other arguments of `apply`, constants of the compiled program.

    Returns:
        `variables` with an updated collection "aqt_stats".

    Raises:
        TypeError: if `batches` is an array or a mapping, or cannot be iterated over.
        ValueError: if there is no batch, or nothing gathers statistics.

    >>> import flax.linen as nn
    >>> import jax.numpy as jnp
    >>> from aqtlite import config
    >>> from aqtlite.flax import AqtDotGeneral
    >>> dot_general = AqtDotGeneral(config.static_int8())
    >>> layers = [nn.Dense(4, dot_general=dot_general) for _ in range(2)]
    >>> model, x = nn.Sequential(layers), jnp.ones((2, 3))
    >>> variables = model.init(jax.random.key(0), x)
    >>> variables = calibrate_in_float(model, variables, [x, 2 * x])
    >>> model.apply(variables, x).shape
    (2, 4)
    """
    call = model.gather if isinstance(model, QuantizedModel) else model.apply

    def run(*args: Any, **kwargs: Any) -> Any:
        with modes.in_float():
            return call(*args, **kwargs)

    return _calibrated(run, variables, batches, kwargs)


def _calibrated(
    run: Callable[..., Any],
    variables: Mapping[str, Any],
    batches: Iterable[Any],
    kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """Gathers statistics with one call of `run` per batch."""
    variables = given_variables.unfrozen(variables)
    others = {k: v for k, v in variables.items() if k != STATISTICS}

    @jax.jit
    def updated(statistics: Any, others: Any, args: tuple[Any, ...]) -> Any:
        _, changed = run(
            {**others, **statistics}, *args, mutable=[STATISTICS], **kwargs
        )
        return changed

    statistics = {k: v for k, v in variables.items() if k == STATISTICS}
    console = rich.console.Console(stderr=True)
    count = 0
    for batch in rich.progress.track(
        batches_lib.check(batches),
        "calibrating",
        console=console,
        disable=not console.is_terminal,
    ):
        args = batches_lib.args_of(batch)
        with given_variables.checked(variables):
            statistics = flax_core.unfreeze(updated(statistics, others, args))
        count += 1
    if not count:
        raise ValueError("calibrate was given no batch")
    if not statistics:
        raise ValueError(
            "no calibration of the model gathers statistics: give the config one, such "
            "as calibration.MeanOverBatches(), in fwd.lhs.calibration"
        )
    logging.info("calibrated with %d batches", count)
    return {**others, **statistics}
