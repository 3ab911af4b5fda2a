"""Merges statistics that were gathered in several places."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from aqtlite.flax.linen.quantize_model import Model
from aqtlite.program.serving import statistics_uses
from aqtlite.program.serving.statistics_uses import Uses
from aqtlite.quantization import statistics
from aqtlite.quantization.state_collections import STATISTICS
from aqtlite.quantization.stored_statistics import restored_statistics


def merge_statistics(
    model: Model,
    variables: Mapping[str, Any],
    others: Sequence[Mapping[str, Any]],
    *args: Any,
    **kwargs: Any,
) -> dict[str, Any]:
    """Merges activation statistics that other hosts or devices gathered.

    Every host calibrates with its own batches; then all statistics are gathered in one
    place (`jax.experimental.multihost_utils.process_allgather`, or a file) and merged.
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
    >>> import jax.numpy as jnp
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
