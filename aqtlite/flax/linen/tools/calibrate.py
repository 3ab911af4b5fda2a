"""Gathers the statistics of activations over batches, and merges those of hosts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import rich.console
import rich.progress
from absl import logging
from flax import core as flax_core

from aqtlite.calibration import batches as batches_lib
from aqtlite.calibration import masks as masks_lib
from aqtlite.calibration.masks import Masks
from aqtlite.flax.linen import caller, given_variables
from aqtlite.flax.linen.quantize_model import Model, QuantizedModel, check_model
from aqtlite.program.masking import gathering as masking
from aqtlite.program.serving import statistics_uses
from aqtlite.program.serving.statistics_uses import Uses
from aqtlite.quantization.states import shared_moments, statistics
from aqtlite.quantization.states.state_collections import STATISTICS
from aqtlite.quantization.states.stored_statistics import restored_statistics
from aqtlite.shapes import processes


def calibrate(
    model: Model,
    variables: Mapping[str, Any],
    batches: Iterable[Any],
    *,
    mask: Masks = None,
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
            Where variables span processes, batches that are no arrays of all of these
            have to be equal in each.
        mask: which tokens count, of batches that are padded: a function from a batch to
            a bool array with the leading axes of the arrays in it, such as
            ``lambda batch: batch[1]`` of shape (batch, length), True for tokens that
            count; or an iterable of such arrays, one for each batch. In place of an
            array, a tuple has one, or None, for each argument.
        **kwargs: other arguments of `apply`, such as ``train=False``, `rngs` or
            `method`. They are constants of the compiled program.

    Returns:
        `variables` with an updated collection "aqt_stats".

    Raises:
        TypeError: if `model` is not one of Linen, if `batches` is an array or a
            mapping, or cannot be iterated over, or if a batch is a mapping that the
            model does not take, or if a mask is not of bool.
        ValueError: if there is no batch, or nothing gathers statistics; if processes
            give different batches with variables that span them; if a mask has the
            leading axes of no array in its batch, its tokens cannot be followed to
            an array of which statistics are gathered, or none of them counts in one.

    >>> import flax.linen as nn
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

    A batch in which the second row is padding:

    >>> padded, mask = x.at[1].set(1000.0), jnp.array([True, False])
    >>> variables = calibrate(model, variables, [padded], mask=[mask])
    >>> variables["aqt_stats"]["dot_general_ab_bc"]["lhs"].state["ends"]["high"].item()
    4.0
    """
    check_model(model, "calibrate")
    return _calibrated(model.apply, variables, batches, mask, kwargs)


def calibrate_in_float(
    model: Model,
    variables: Mapping[str, Any],
    batches: Iterable[Any],
    *,
    mask: Masks = None,
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
        batches: as in `calibrate`.
        mask: as in `calibrate`.
        **kwargs: other arguments of `apply`, constants of the compiled program.

    Returns:
        `variables` with an updated collection "aqt_stats".

    Raises:
        TypeError: if `model` is not one of Linen, if `batches` is an array or a
            mapping, or cannot be iterated over, or if a batch is a mapping that the
            model does not take, or if a mask is not of bool.
        ValueError: if there is no batch, or nothing gathers statistics; if processes
            give different batches with variables that span them; if a mask has the
            leading axes of no array in its batch, its tokens cannot be followed to
            an array of which statistics are gathered, or none of them counts in one.

    >>> import flax.linen as nn
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
    check_model(model, "calibrate_in_float")
    call = model.gather if isinstance(model, QuantizedModel) else model.apply

    def run(*args: Any, **kwargs: Any) -> Any:
        with caller.in_float():
            return call(*args, **kwargs)

    return _calibrated(run, variables, batches, mask, kwargs)


def _calibrated(
    run: Callable[..., Any],
    variables: Mapping[str, Any],
    batches: Iterable[Any],
    mask: Masks,
    kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """Gathers statistics with one call of `run` per batch."""
    variables = given_variables.unfrozen(variables)
    others = {k: v for k, v in variables.items() if k != STATISTICS}

    def update(gathered: Any, others: Any, args: tuple[Any, ...]) -> Any:
        _, changed = run({**others, **gathered}, *args, mutable=[STATISTICS], **kwargs)
        return flax_core.unfreeze(changed)

    gathering = masking.Gathering(update)
    gathered = {k: v for k, v in variables.items() if k == STATISTICS}
    gathered = shared_moments.fresh(restored_statistics(gathered))
    console = rich.console.Console(stderr=True)
    count = 0
    for batch, counts in rich.progress.track(
        processes.alike(
            masks_lib.with_batches(batches_lib.check(batches), mask), variables
        ),
        "calibrating",
        console=console,
        disable=not console.is_terminal,
    ):
        args = batches_lib.args_of(batch)
        of_leaves = masks_lib.of_leaves(counts, args)
        with batches_lib.called_with(batch), given_variables.checked(variables):
            gathered = gathering.after(of_leaves, gathered, others, args)
        batches_lib.check_gathers(gathered, batch)
        count += 1
    if not count:
        raise ValueError("calibrate was given no batch")
    gathering.entries.check()
    logging.info("calibrated with %d batches", count)
    return {**others, **gathered}


def merge_statistics(
    model: Model,
    variables: Mapping[str, Any],
    others: Sequence[Mapping[str, Any]],
    *args: Any,
    **kwargs: Any,
) -> dict[str, Any]:
    """Merges activation statistics that other hosts or devices gathered.

    Every host calibrates with its own batches, and with variables that are whole in its
    own process; then all statistics are gathered in one place
    (`jax.experimental.multihost_utils.process_allgather`, or a file) and merged.
    The model is traced, not run, to find the contraction of each array.

    Args:
        model: as in `calibrate`.
        variables: its variables, with statistics.
        others: variables with statistics of other batches, or mappings with only their
            collection "aqt_stats"; merged in this order.
        *args: the arguments of ``model.apply(variables, *args, **kwargs)``, or their
            shapes.
        **kwargs: keyword arguments of `apply`; they are constants.

    Returns:
        `variables` with the statistics of all batches.

    Raises:
        ValueError: if statistics depend on the order of batches, as a moving average
            does, differ in shape, or cannot be assigned to contractions of the call.

    >>> import flax.linen as nn
    >>> from aqtlite import calibration, config
    >>> from aqtlite.flax import AqtDotGeneral, calibrate
    >>> cfg = config.static_int8(calibration.MaxOverBatches())
    >>> model = nn.Dense(4, dot_general=AqtDotGeneral(cfg))
    >>> x = jnp.ones((2, 3))
    >>> fresh = model.init(jax.random.key(0), x)
    >>> one, other = (calibrate(model, fresh, [batch]) for batch in (x, 2 * x))
    >>> merged = merge_statistics(model, one, [other], x)
    >>> merged["aqt_stats"]["dot_general_ab_bc"]["lhs"].batches.item()
    2.0
    """
    uses = Uses()
    with statistics_uses.noted_in(uses):
        jax.eval_shape(lambda *args: model.apply(variables, *args, **kwargs), *args)
    merged = restored_statistics(variables.get(STATISTICS, {}))
    for other in others:
        found = restored_statistics(other.get(STATISTICS, {}))
        merged = _merged(merged, found, uses)
    return {**variables, STATISTICS: merged}


def _merged(collection: Any, other: Any, uses: Uses) -> Any:
    one, two = (jax.tree.map(jnp.shape, tree) for tree in (collection, other))
    if one != two:
        raise ValueError(
            f"the statistics in '{STATISTICS}' are not of the same model: the arrays "
            f"are of the shapes {one} and {two}"
        )
    states: dict[statistics_uses.Place, Any] = {}
    for place, use in uses.items():
        state = statistics_uses.at(collection, place)
        depth = None if use is None else statistics_uses.stacked(use.state, state)
        if use is None or depth is None:
            continue

        def merge(one: Any, two: Any, use: statistics_uses.Use = use) -> Any:
            return statistics.merge_state(use.tensor, one, two, use.path)

        for _ in range(depth):
            merge = jax.vmap(merge)
        states[place] = merge(state, statistics_uses.at(other, place))
    known = len(jax.tree.leaves(states))
    if known < len(jax.tree.leaves(collection)):
        raise ValueError(
            f"of {len(jax.tree.leaves(collection))} arrays of statistics in "
            f"'{STATISTICS}', {known} are of contractions of this call with one config "
            "each: statistics of a smoothing, fixed scales, those that two configs use "
            "and those that the call does not reach cannot be merged"
        )
    return statistics_uses.replaced(collection, states)
