"""Gathers the statistics of an NNX model over batches."""

from collections.abc import Callable, Iterable
from typing import Any

from absl import logging
from flax import nnx

from aqtlite.calibration import batches as batches_lib
from aqtlite.flax.nnx.model import QuantizedModel, state_of
from aqtlite.flax.nnx.quantize import (
    call_method,
    check_quantized,
    gather,
    init_state,
    set_statistics,
)
from aqtlite.quantization import shared_moments
from aqtlite.quantization.state_collections import STATISTICS


def calibrate(
    model: nnx.Module,
    batches: Iterable[Any],
    *,
    method: str = "__call__",
    **kwargs: Any,
) -> None:
    """Gathers the statistics of a model's contractions, and changes nothing else.

    Calls the model in `nnx.jit`, once for each batch, in its current mode: call
    ``model.eval()`` before to turn dropout off. Afterwards
    ``model.aqt.use_running_average`` is True, so that calls do not update statistics.

    >>> import jax.numpy as jnp
    >>> from aqtlite import config
    >>> from aqtlite.flax.nnx import quantize_model
    >>> model = quantize_model(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), config.static_int8())
    >>> calibrate(model, [jnp.ones((3, 4)), 2 * jnp.ones((3, 4))])
    >>> model(jnp.ones((3, 4))).shape
    (3, 2)

    Args:
        model: a quantized model with a calibration that gathers statistics, such as
            `calibration.MeanOverBatches`.
        batches: the inputs, each a tuple of positional arguments or a single argument.
        method: name of the method to call.
        **kwargs: keyword arguments of the method, constants of the compiled program.

    Raises:
        TypeError: if `model` is not quantized, or if `batches` is an array or a
            mapping, or cannot be iterated over.
        ValueError: if there is no batch, or nothing gathers statistics.
    """
    _calibrate(_call, check_quantized(model, "calibrate"), batches, method, kwargs)


def calibrate_in_float(
    model: nnx.Module,
    batches: Iterable[Any],
    *,
    method: str = "__call__",
    **kwargs: Any,
) -> None:
    """Gathers the statistics of the float model's activations.

    As `calibrate`, but every contraction runs in float. With `calibrate`, a layer after
    a static range sees activations quantized with the statistics so far. Here it sees
    those of the float model, whatever was gathered before: one pass is enough, and
    merged statistics equal those of one pass over all batches.

    >>> import jax.numpy as jnp
    >>> from aqtlite import config
    >>> from aqtlite.flax.nnx import quantize_model
    >>> model = quantize_model(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), config.static_int8())
    >>> calibrate_in_float(model, [jnp.ones((3, 4)), 2 * jnp.ones((3, 4))])
    >>> model(jnp.ones((3, 4))).shape
    (3, 2)

    Args:
        model: as in `calibrate`.
        batches: the inputs, each a tuple of positional arguments or a single argument.
        method: name of the method to call.
        **kwargs: keyword arguments of the method, constants of the compiled program.

    Raises:
        TypeError: if `model` is not quantized, or if `batches` is an array or a
            mapping, or cannot be iterated over.
        ValueError: if there is no batch, or nothing gathers statistics.
    """
    quantized = check_quantized(model, "calibrate_in_float")
    _calibrate(gather, quantized, batches, method, kwargs)


def _call(
    model: QuantizedModel, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    model.aqt.use_running_average = False
    call_method(model, method, args, kwargs)


def _calibrate(
    run: Callable[..., None],
    quantized: QuantizedModel,
    batches: Iterable[Any],
    method: str,
    kwargs: dict[str, Any],
) -> None:
    """Gathers statistics with one call of `run` per batch."""

    @shared_moments.once
    def updated(gathered: Any, graphdef: Any, state: Any) -> Any:
        # Changes other than statistics are dropped with the copy.
        model, args = nnx.merge(graphdef, state)
        set_statistics(model, gathered)
        run(model, method, args, kwargs)
        return state_of(model)[STATISTICS]

    gathered: Any = None
    count = 0
    for batch in batches_lib.check(batches):
        args = batches_lib.args_of(batch)
        if gathered is None:
            with batches_lib.called_with(batch):
                init_state(quantized, *args, method=method, **kwargs)
            batches_lib.check_gathers(quantized.aqt.statistics, batch)
            gathered = shared_moments.fresh(state_of(quantized)[STATISTICS])
        gathered = updated(gathered, *nnx.split((quantized, args), graph=True))
        set_statistics(quantized, gathered)
        count += 1
    if not count:
        raise ValueError("calibrate was given no batch")
    quantized.aqt.use_running_average = True
    logging.info("calibrated with %d batches", count)
