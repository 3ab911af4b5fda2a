"""Updates of statistics with the tokens that count."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from aqtlite.calibration.masks import OfLeaves
from aqtlite.jaxpr import counted, sites, tracing
from aqtlite.program.masking.entries import Entries, Updated
from aqtlite.program.masking.evaluation import Evaluation
from aqtlite.program.masking.masks import placed
from aqtlite.quantization.states import shared_moments


class Gathering:
    """Statistics of batches, by a compiled update without what does not count."""

    def __init__(self, update: Callable[..., Any]) -> None:
        """Begins before the first batch.

        Args:
            update: function of a tree of statistics and of other pytrees of arrays, as
                in `shared_moments.once`.
        """
        self.entries = Entries()

        @shared_moments.once
        def whole(statistics: Any, *others: Any) -> Updated:
            return Updated.of(statistics, update(statistics, *others))

        @shared_moments.once
        def masked(statistics: Any, masks: OfLeaves, *others: Any) -> Updated:
            after = evaluate(update, (statistics, *others), masks)
            return Updated.of(statistics, after)

        self._whole, self._masked = whole, masked

    def after(self, masks: OfLeaves, statistics: Any, *others: Any) -> Any:
        """Returns the statistics after a batch.

        Args:
            masks: masks of the last argument, as in `evaluate`.
            statistics: statistics of the batches before.
            *others: other arguments of the update.
        """
        if all(mask is None for mask in masks.masks):
            updated = self._whole(statistics, *others)
        else:
            self.entries.is_masked = True
            updated = self._masked(statistics, masks, *others)
        self.entries.add(statistics, updated)
        return updated.tree


def of_one(update: Callable[..., Any], args: tuple[Any, ...], masks: OfLeaves) -> Any:
    """Returns the statistics after a batch, as `evaluate`, which has to enter them.

    Raises:
        ValueError: as `evaluate`; and if no element counts in an array of which
            statistics are gathered, as far as that is known.
    """
    updated = Updated.of(args[0], evaluate(update, args, masks))
    if not any(
        isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((args, updated))
    ):
        entries = Entries(is_masked=True)
        entries.add(args[0], updated)
        entries.check()
    return updated.tree


def evaluate(update: Callable[..., Any], args: tuple[Any, ...], masks: OfLeaves) -> Any:
    """Updates statistics with the elements of tokens that count.

    Args:
        update: function of pytrees of arrays that updates statistics.
        args: its arguments.
        masks: masks of the leaves of the last argument.

    Raises:
        ValueError: if the tokens cannot be followed to an operand of which statistics
            are gathered, if it depends on no array with a mask but on one of which it
            is not known what counts, or if no operand depends on the masks.
    """
    every = jax.tree.leaves(args)
    others = len(every) - len(masks.masks)
    # What is no array stays a constant.
    flat, leaves = tracing.close_over_constants(update, args, tracing.is_array)
    with counted.counting():
        closed, out = jax.make_jaxpr(flat, return_shape=True)(leaves)
    all_masks = [*[None] * others, *masks.masks]
    are_known = [*[True] * others, *masks.is_known]
    kept = [
        (None if mask is None else placed(mask, range(mask.ndim), jnp.ndim(x)), known)
        for x, mask, known in zip(every, all_masks, are_known, strict=True)
        if tracing.is_array(x)
    ]
    unknown = {i for i, (_, is_known) in enumerate(kept) if not is_known}
    evaluation = Evaluation()
    outputs, _ = evaluation.run(closed, leaves, [mask for mask, _ in kept])
    _check(closed, unknown, evaluation.masked)
    return jax.tree.unflatten(jax.tree.structure(out), outputs)


def _check(closed: core.ClosedJaxpr, unknown: set[int], masked: set[str]) -> None:
    """Raises ValueError if masks do not say which elements of some array count.

    Args:
        closed: program that updates statistics.
        unknown: inputs of which it is not known what counts.
        masked: names of arrays with a mask.
    """
    if not masked:
        raise ValueError(
            "mask= says which tokens of a batch count, and no array of which "
            "statistics are gathered is computed from them"
        )
    if not unknown:
        return
    for value in sites.find(closed).named:
        name = counted.name_in(value.name)
        if name is not None and name not in masked and value.origin.inputs & unknown:
            raise ValueError(
                f"mask= does not say what counts in {name}: it is computed from an "
                "array of the batch of which the leading axes are not those of the "
                "mask. Give a tuple with a mask, or None if all of it counts, for "
                "each argument"
            )
