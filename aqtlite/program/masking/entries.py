"""Which batches entered which statistics of a calibration.

A batch does not enter the statistics of an array in which it gives a NaN or an
infinity, or in which no element counts. Neither happens silently.
"""

import dataclasses
import warnings
from typing import Any

import jax
import numpy as np

from aqtlite.quantization.states.statistics import records_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Updated:
    """Statistics after a batch."""

    tree: Any

    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    """Those that the traced program updates, whatever the batch holds."""

    @classmethod
    def of(cls, before: Any, after: Any) -> "Updated":
        """Compares statistics in the trace of their update."""
        known = _batches(before)
        names = (
            name for name, one in _batches(after).items() if one is not known.get(name)
        )
        return cls(after, tuple(names))


@dataclasses.dataclass
class Entries:
    """The number of batches in statistics, after each batch of a calibration."""

    is_masked: bool = False
    """Whether some elements of a batch do not count."""

    _gained: list[dict[str, tuple[Any, Any]]] = dataclasses.field(default_factory=list)

    def add(self, before: Any, after: Updated) -> None:
        """Adds a batch.

        Args:
            before: statistics before it.
            after: statistics after it.
        """
        known, counts = _batches(before), _batches(after.tree)
        self._gained.append(
            {name: (known.get(name, 0), counts[name]) for name in after.names}
        )

    def check(self) -> None:
        """Raises or warns if a batch did not enter statistics that it should have.

        Raises:
            TypeError: in the trace of a JAX transformation.
            ValueError: if there are masks, and no batch entered some statistics.
        """
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(self._gained)):
            raise TypeError(
                "calibrate reads which batches entered the statistics, and cannot be "
                "traced by jax.jit or another transformation: call it outside; it "
                "compiles the model itself"
            )
        gained = jax.device_get(self._gained)
        names = dict.fromkeys(name for one in gained for name in one)
        nothing, some = [], []
        for name in names:
            counts = {
                batch: np.subtract(after, before)
                for batch, one in enumerate(gained)
                if name in one
                for before, after in (one[name],)
            }
            left_out = [batch for batch, count in counts.items() if not count.all()]
            if not np.sum([*counts.values()], 0).all():
                nothing.append(name)
            elif left_out:
                some.append(f"{name}: batch {', '.join(map(str, left_out))}")
        if nothing and self.is_masked:
            raise ValueError(
                "mask= says which tokens count, and in no batch does one count, with "
                f"finite values, in {_listed(nothing)}: these statistics got nothing. "
                "Give masks that are True for tokens that count, and batches that "
                "reach all branches of the model"
            )
        if nothing or some:
            every = [f"{name}: every batch" for name in nothing]
            warnings.warn(
                "batches were left out of statistics, since they give NaN or infinity "
                "there, have no element that counts, or take another branch of the "
                f"model: {_listed([*every, *some])}. Check the data and the variables",
                stacklevel=4,
            )


def _batches(tree: Any) -> dict[str, Any]:
    """The number of batches of each record of statistics, by its path."""
    return {
        jax.tree_util.keystr(path): record.batches for path, record in records_of(tree)
    }


def _listed(names: list[str]) -> str:
    more = f", and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
