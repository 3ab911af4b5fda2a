"""Conversion of statistics read from checkpoints.

A checkpoint that is read without a target (Orbax, `flax.serialization.msgpack_restore`)
has dictionaries in place of records. In earlier versions, some calibrations counted
batches themselves: their number, always equal to the record's, is dropped here.
"""

from collections.abc import Collection, Mapping
from typing import Any

from aqtlite.calibration import Statistics
from aqtlite.quantization.preparation.smoothing import SmoothingStatistics
from aqtlite.quantization.states.gradient_statistics import GradientStatistics
from aqtlite.quantization.states.second_moment import SecondMoment

_BATCHES = "batches"

_COUNTED = ({"ends"}, {"high", "history"})
"""The other fields of calibrations that counted batches themselves."""

_OPERANDS = {"lhs", "rhs"}
_FACTORS = {"lhs_factor", "absorbed"}


def restored_statistics(variables: Any) -> Any:
    """Converts statistics that a checkpoint holds as dictionaries to records.

    Functions and models also take the dictionaries, and return records. A loop with a
    carry of constant structure (`jax.lax.scan`) needs records.

    Args:
        variables: nested mappings, such as the variables of a Linen model, one of their
            collections, or the state of a quantized function; statistics of earlier
            versions are converted, too.

    Returns:
        Nested dictionaries with `calibration.Statistics` and similar records. Anything
        but mappings and statistics is unchanged.

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
    if fields == {"moment"}:
        return SecondMoment(**tree)
    if fields == {"state", "roots", "uses"}:
        return GradientStatistics(**tree)
    if fields & _FACTORS and fields <= _FACTORS | _OPERANDS:
        return SmoothingStatistics(**tree)
    return tree


def is_obsolete(name: str, names: Collection[str]) -> bool:
    """Whether an array of a checkpoint is a number of batches that is dropped.

    Args:
        name: path of the array, joined by slashes.
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
