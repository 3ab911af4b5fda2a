"""The collections in which the states of contractions are kept."""

from collections.abc import Mapping

from aqtlite import config

STATISTICS = "aqt_stats"
"""The collection of the statistics of operands."""

PARAMETERS = "params"
"""The collection of learned parameters, the same as for a model's other parameters."""

OF_GRADIENTS = "_overwrite_with_gradient"
"""The collection of the statistics of output gradients, which a training step replaces
by their gradient: `flax.training.train_state.TrainState` knows the name."""


ADAPTER = "adapter"
"""Field of `States`, in the collection "params", with the parameters of an adapter."""

DROPOUT = "dropout"
"""Name of the key for the dropout of adapters, beside the collections of a state."""

OF_CONVERSION = frozenset({"moment"})
"""Fields of `States` that only a conversion reads: calls do without them."""


def collections_of(cfg: config.DotGeneral) -> Mapping[str, list[str]]:
    """Maps each collection that a contraction uses to its fields of `States`."""
    found: dict[str, list[str]] = {}
    tensors = {
        "lhs": cfg.fwd.lhs,
        "rhs": cfg.fwd.rhs,
        "dlhs": cfg.dlhs.lhs,
        "drhs": cfg.drhs.lhs,
    }
    for side, tensor in tensors.items():
        if tensor.is_learned:
            found.setdefault(PARAMETERS, []).append(side)
        elif tensor.gathers_statistics:
            is_gradient = side in ("dlhs", "drhs")
            collection = OF_GRADIENTS if is_gradient else STATISTICS
            found.setdefault(collection, []).append(side)
    if cfg.has_smoothing_state:
        found.setdefault(STATISTICS, []).append("smoothing")
    if cfg.fwd.rhs.rounding is not None:
        found.setdefault(STATISTICS, []).append("moment")
    return found
