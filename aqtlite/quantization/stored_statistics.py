"""Statistics as checkpoints hold them.

A checkpoint that is read without a target (Orbax, `flax.serialization.msgpack_restore`)
has dictionaries in place of records. In those written before calibrations were given
the number of batches, some calibrations counted for themselves, too: a number beside
what else they kept, always equal to that of the record, and left out here.
"""

from collections.abc import Collection, Mapping
from typing import Any

from aqtlite.calibration import Statistics
from aqtlite.quantization.gradient_statistics import GradientStatistics
from aqtlite.quantization.smoothing import SmoothingStatistics

_BATCHES = "batches"

_COUNTED = ({"ends"}, {"high", "history"})
"""What calibrations kept that counted for themselves."""

_OPERANDS = {"lhs", "rhs"}
_FACTORS = {"lhs_factor", "absorbed"}


def restored_statistics(variables: Any) -> Any:
    """Makes records of statistics in variables that a checkpoint gave as dictionaries.

    Functions and models take such variables as they are, and return records. Where a
    loop has to get back what it gave (`jax.lax.scan`), give it records.

    Args:
        variables: nested mappings, such as the variables of a Linen model, one of their
            collections, or the state of a quantized function; with statistics of
            earlier versions, too.

    Returns:
        Nested dictionaries with `calibration.Statistics` and its like. What was neither
        a mapping nor statistics is unchanged.

    >>> stored = {"lhs": {"batches": 3.0, "state": {"ends": {"high": 2.0}}}}
    >>> restored_statistics(stored)
    {'lhs': Statistics(batches=3.0, state={'ends': {'high': 2.0}})}
    """
    if not isinstance(variables, Mapping):
        return variables
    tree = {name: restored_statistics(value) for name, value in variables.items()}
    if isinstance(tree.get(_BATCHES), Mapping | None):
        return tree
    fields = tree.keys() - {_BATCHES}
    if fields in _COUNTED:
        return {name: tree[name] for name in tree if name != _BATCHES}
    if fields == {"state"}:
        return Statistics(**tree)
    if fields == {"state", "roots", "uses"}:
        return GradientStatistics(**tree)
    if fields & _FACTORS and fields <= _FACTORS | _OPERANDS:
        return SmoothingStatistics(**tree)
    return tree


def is_obsolete(name: str, names: Collection[str]) -> bool:
    """Whether an array of a checkpoint is a number that is left out.

    Args:
        name: name of the array, its steps joined by slashes.
        names: names of all arrays of the checkpoint.
    """
    above, _, last = name.removesuffix("/value").rpartition("/")
    if last != _BATCHES:
        return False
    below = {
        one.removeprefix(f"{above}/").partition("/")[0]
        for one in names
        if one.startswith(f"{above}/")
    }
    return below - {_BATCHES} in _COUNTED
