"""What is checked before a factor is folded into the kernel of a layer."""

from collections.abc import Collection, Mapping
from typing import Any

from aqtlite.program.serving import statistics_uses
from aqtlite.quantization.states.state_collections import ADAPTER, STATISTICS

_LEARNED = "aqt_"
"""Prefix of a contraction's learned parameters among those of the layer."""


def learned(params: Mapping[str, Any]) -> list[str]:
    """Names of the learned parameters of a layer's calibrations."""
    return [name for name in params if name.startswith(_LEARNED)]


def check_no_adapter(layer: str, params: Any) -> None:
    """Refuses a layer with an adapter (`config.Lora`), whose product it adds."""
    for name in learned(params) if isinstance(params, Mapping) else ():
        if isinstance(params[name], Mapping) and ADAPTER in params[name]:
            raise ValueError(
                f"{layer!r} has an adapter, {name}, which was trained for the kernel "
                "as it is: merge it into the kernel first (merge_adapters), or change "
                "the float variables before adapters are made"
            )


def with_statistics(
    variables: Mapping[str, Any], layer: str, of: Collection[str]
) -> str | None:
    """Name of a contraction of the layer that has some of these statistics."""
    entries = at(variables.get(STATISTICS, {}), layer) or {}
    return next((name for name, one in entries.items() if set(of) & set(one)), None)


def check_not_normalized(variables: Mapping[str, Any], layer: str) -> None:
    """Checks that no `nn.WeightNorm` or `nn.SpectralNorm` normalizes the kernel."""
    *parents, name = layer.split("/")
    for collection in variables.values():
        around = collection if not parents else at(collection, "/".join(parents))
        for norm, node in (around or {}).items():
            keys = node if isinstance(node, dict) else ()
            if any(key.startswith(f"{name}/") for key in keys):
                raise ValueError(
                    f"{norm!r} normalizes the kernel of {layer!r}, which would undo a "
                    "factor of the kernel: compute the normalized kernel first"
                )


def at(tree: Any, path: str) -> Any:
    """Returns the node at a path, or None."""
    return statistics_uses.at(tree, tuple(path.split("/")))
