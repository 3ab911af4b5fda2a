"""The state of an interrupted training, in a file."""

import json
import os
import time
import zlib
from collections.abc import Mapping
from typing import Any

import jax
from flax import serialization

from aqtlite_demo.corpus import Corpus
from aqtlite_demo.options import Options
from aqtlite_demo.training import Trained

EVERY_SECONDS = 15.0
"""Time between two writes; the state is three times the size of the weights."""

_FILE = "training.msgpack"
_LISTS = ("losses", "curve", "seconds")
_OF_TRAINING = (
    *("steps", "layers", "width", "heads", "batch", "length", "lr", "seed"),
    *("fwd_bits", "bwd_bits", "validation_batches"),
)


class FileSnapshot:
    """Keeps the state of a training run in the output folder."""

    def __init__(self, options: Options, text: Corpus):
        """Looks for the state of a run with the same options and text."""
        self._path = options.out / _FILE
        sums = [zlib.crc32(part.data) for part in (text.training, text.validation)]
        values = [getattr(options, name) for name in _OF_TRAINING]
        self._key = json.dumps([*values, *sums])
        self._written = time.monotonic()
        self.step = 0
        """Step of the saved state; 0 if there is none."""
        self._found = self._read() if not options.overwrite else None
        if self._found is not None:
            self.step = self._found["step"]

    def restore(self, runs: Mapping[str, Trained], opt_states: dict[str, Any]) -> int:
        """Restores the saved state, if any; returns its step, or 0."""
        if self._found is None:
            return 0
        for name, run in runs.items():
            kept = self._found["runs"][name]
            arrays = run.variables, opt_states[name]
            run.variables, opt_states[name] = jax.tree.map(
                jax.numpy.asarray, serialization.from_bytes(arrays, kept["arrays"])
            )
            for field in _LISTS:
                setattr(run, field, json.loads(kept[field]))
            run.curve = [(step, loss) for step, loss in run.curve]
        return self.step

    def keep(
        self,
        step: int,
        runs: Mapping[str, Trained],
        opt_states: Mapping[str, Any],
        *,
        is_last: bool,
    ) -> None:
        """Writes the state if it is the last or `EVERY_SECONDS` have passed."""
        if time.monotonic() - self._written < EVERY_SECONDS and not is_last:
            return
        state = {
            "key": self._key,
            "step": step,
            "runs": {
                name: {
                    "arrays": serialization.to_bytes((run.variables, opt_states[name])),
                    **{field: json.dumps(getattr(run, field)) for field in _LISTS},
                }
                for name, run in runs.items()
            },
        }
        part = self._path.with_suffix(".part")
        part.write_bytes(serialization.msgpack_serialize(state))
        os.replace(part, self._path)
        self._written, self.step = time.monotonic(), step

    def discard(self) -> None:
        """Deletes the saved state."""
        self._path.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any] | None:
        try:
            found = serialization.msgpack_restore(self._path.read_bytes())
        except FileNotFoundError:
            return None
        return found if found["key"] == self._key else None
