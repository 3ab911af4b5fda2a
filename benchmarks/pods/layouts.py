"""Ways to divide a transformer and its batch among the chips of a pod."""

from collections.abc import Sequence

from jax.sharding import PartitionSpec as P

from benchmarks.collectives.strategies import Strategy

WEIGHTS = ("qkv", "out", "up", "down")
"""Weights of a layer; the second of each pair contracts what the first returns."""

TENSOR_PARALLEL = 4
"""Chips along the axis "model"."""


def strategies(chips: int) -> Sequence[Strategy]:
    """Strategies for a number of chips; sequence parallelism has whole weights.

    Activations are constrained between the layers ("residual") and inside the pairs of
    weights ("inner").
    """
    flat = (chips, 1)
    grid = (chips // TENSOR_PARALLEL, TENSOR_PARALLEL)
    by_data = {"residual": P("data"), "inner": P("data")}
    by_both = {"residual": P("data"), "inner": P("data", None, "model")}
    by_tokens = {"residual": P("data", "model"), "inner": P("data", None, "model")}
    return (
        Strategy("data parallel", flat, P("data"), _pairs(P(), P()), by_data),
        Strategy("FSDP", flat, P("data"), _pairs(P("data"), P("data")), by_data),
        Strategy(
            "FSDP x TP",
            grid,
            P("data"),
            _pairs(P("data", "model"), P("model", "data")),
            by_both,
        ),
        Strategy(
            "sequence parallel",
            grid,
            P("data", "model"),
            _pairs(P(None, "model"), P("model")),
            by_tokens,
        ),
    )


def _pairs(first: P, second: P) -> dict[str, P]:
    return dict(zip(WEIGHTS, (first, second, first, second), strict=True))
