"""Gathers the statistics of an NNX model over batches."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
from absl import logging
from flax import nnx

from aqtlite.calibration import batches as batches_lib
from aqtlite.calibration import masks as masks_lib
from aqtlite.calibration.masks import Masks
from aqtlite.flax.nnx.calls import call_method, gather, set_statistics
from aqtlite.flax.nnx.model import QuantizedModel, state_of
from aqtlite.flax.nnx.quantize import check_quantized, init_state
from aqtlite.jaxpr import tracing
from aqtlite.program.calibration_state import check_not_serving
from aqtlite.program.masking import gathering as masking
from aqtlite.quantization.states import shared_moments
from aqtlite.quantization.states.state_collections import PARAMETERS, STATISTICS
from aqtlite.shapes import processes


def calibrate(
    model: nnx.Module,
    batches: Iterable[Any],
    *,
    mask: Masks = None,
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
            Where variables span processes, batches that are no arrays of all of these
            have to be equal in each.
        mask: which tokens count, of batches that are padded: a function from a batch to
            a bool array with the leading axes of the arrays in it, such as
            ``lambda batch: batch[1]`` of shape (batch, length), True for tokens that
            count; or an iterable of such arrays, one for each batch. In place of an
            array, a tuple has one, or None, for each argument.
        method: name of the method to call.
        **kwargs: keyword arguments of the method, constants of the compiled program.

    Raises:
        TypeError: if `model` is not quantized, or if `batches` is an array or a
            mapping, or cannot be iterated over, or if a mask is not of bool.
        ValueError: if there is no batch, or nothing gathers statistics; if processes
            give different batches with variables that span them; if a mask has the
            leading axes of no array in its batch, its tokens cannot be followed to
            an array of which statistics are gathered, or none of them counts in one; if
            learned scales would start from a padded batch.
    """
    quantized = check_quantized(model, "calibrate")
    _calibrate(_call, quantized, batches, mask, method, kwargs)


def calibrate_in_float(
    model: nnx.Module,
    batches: Iterable[Any],
    *,
    mask: Masks = None,
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
        batches: as in `calibrate`.
        mask: as in `calibrate`.
        method: name of the method to call.
        **kwargs: keyword arguments of the method, constants of the compiled program.

    Raises:
        TypeError: if `model` is not quantized, or if `batches` is an array or a
            mapping, or cannot be iterated over, or if a mask is not of bool.
        ValueError: if there is no batch, or nothing gathers statistics; if processes
            give different batches with variables that span them; if a mask has the
            leading axes of no array in its batch, its tokens cannot be followed to
            an array of which statistics are gathered, or none of them counts in one; if
            learned scales would start from a padded batch.
    """
    quantized = check_quantized(model, "calibrate_in_float")
    _calibrate(gather, quantized, batches, mask, method, kwargs)


def _call(
    model: QuantizedModel, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    model.aqt.use_running_average = False
    call_method(model, method, args, kwargs)


def _calibrate(
    run: Callable[..., None],
    quantized: QuantizedModel,
    batches: Iterable[Any],
    mask: Masks,
    method: str,
    kwargs: dict[str, Any],
) -> None:
    """Gathers statistics with one call of `run` per batch."""

    def update(gathered: Any, graphdef: Any, state: Any, arrays: Any) -> Any:
        # Changes other than statistics are dropped with the copy.
        model, others = nnx.merge(graphdef, state)
        args = jax.tree.map(
            lambda one, other: other if one is None else one,
            arrays,
            others,
            is_leaf=_is_whole,
        )
        set_statistics(model, gathered)
        run(model, method, args, kwargs)
        return state_of(model)[STATISTICS]

    gathering = masking.Gathering(update)
    gathered: Any = None
    count = 0
    pairs = masks_lib.with_batches(batches_lib.check(batches), mask)
    for batch, counts in processes.alike(pairs, nnx.state(quantized)):
        args = batches_lib.args_of(batch)
        if gathered is None:
            before = state_of(quantized)
            with batches_lib.called_with(batch):
                init_state(quantized, *args, method=method, **kwargs)
            batches_lib.check_gathers(quantized.aqt.statistics, batch)
            given = state_of(quantized)[STATISTICS]
            check_not_serving(given, has_frozen=bool(quantized.aqt.frozen))
            if counts is not None:
                _check_learned(before, state_of(quantized))
            gathered = shared_moments.fresh(state_of(quantized)[STATISTICS])
        arrays = jax.tree.map(lambda x: _array(x), args, is_leaf=_is_whole)
        others = jax.tree.map(
            lambda x: None if _array(x) is not None else x, args, is_leaf=_is_whole
        )
        of_leaves = masks_lib.of_leaves(counts, arrays)
        graphdef, state = nnx.split((quantized, others), graph=True)
        gathered = gathering.after(of_leaves, gathered, graphdef, state, arrays)
        set_statistics(quantized, gathered)
        count += 1
    if not count:
        raise ValueError("calibrate was given no batch")
    quantized.aqt.use_running_average = True
    gathering.entries.check()
    logging.info("calibrated with %d batches", count)


def _is_whole(x: Any) -> bool:
    """Whether an argument is None, or an object of NNX, and not looked into."""
    return x is None or isinstance(x, nnx.Pytree | nnx.Variable)


def _array(x: Any) -> Any:
    """Returns an array among the arguments; None for anything else."""
    return x if tracing.is_array(x) and not _is_whole(x) else None


def _check_learned(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raises ValueError if learned scales started from a batch that is padded."""
    known = before.get(PARAMETERS, {})
    made = sorted(path for path in after.get(PARAMETERS, {}) if path not in known)
    if made:
        raise ValueError(
            f"the learned scales of {', '.join(made)} would start from the first batch "
            "with its padding: make them before, from one without, by "
            "aqtlite.flax.nnx.init_state(model, x)"
        )
