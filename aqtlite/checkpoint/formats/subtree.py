"""Parts of a checkpoint, such as the parameters of a training state."""

import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from aqtlite.checkpoint.arrays import ArrayInfo
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.formats import base

_T = TypeVar("_T")


class Subtree(base.Reader):
    """The part of a checkpoint below one or several paths.

    With one path, names are relative to it: ``state/params/kernel`` is ``kernel`` below
    ``state/params``. With several, names keep the last step of the path as their
    collection: ``params/kernel``, ``batch_stats/mean``.
    """

    def __init__(self, whole: base.Reader, subtree: Sequence[str]):
        """Selects paths.

        Args:
            whole: the checkpoint.
            subtree: the paths, with steps joined by slashes.

        Raises:
            CheckpointError: if nothing lies below one of the paths, or two paths end in
                the same step.
        """
        self.path = whole.path
        self.subtree = tuple(path.strip("/") for path in subtree)
        self._whole = whole
        lasts = [path.split("/")[-1] for path in self.subtree]
        if len(set(lasts)) < len(lasts):
            raise CheckpointError(
                f"--subtree {' --subtree '.join(self.subtree)}: several collections "
                "need different names, the last steps of their paths"
            )
        for path in self.subtree:
            if not any(name.startswith(f"{path}/") for name in self._all()):
                raise CheckpointError(
                    f"{self.path} has no subtree {path!r}; there are "
                    f"{', '.join(self._levels()[:8])}"
                )

    def _all(self) -> list[str]:
        return [*self._whole.arrays, *self._whole.others]

    def _levels(self) -> list[str]:
        """Paths of one and two steps."""
        parts = [name.split("/")[:-1] for name in self._all()]
        return sorted({"/".join(p[:n]) for p in parts for n in (1, 2) if p[n - 1 :]})

    def _select(self, leaves: Mapping[str, _T]) -> dict[str, tuple[str, _T]]:
        """Old name and value by new name."""
        selected = {}
        for path in self.subtree:
            kept = "" if len(self.subtree) == 1 else path.split("/")[-1] + "/"
            for name, value in leaves.items():
                if name.startswith(f"{path}/"):
                    selected[kept + name.removeprefix(f"{path}/")] = name, value
        return selected

    @functools.cached_property
    def _arrays(self) -> dict[str, tuple[str, ArrayInfo]]:
        return self._select(self._whole.arrays)

    @property
    def arrays(self) -> Mapping[str, ArrayInfo]:
        return {name: info for name, (_, info) in self._arrays.items()}

    @property
    def others(self) -> Mapping[str, str]:
        selected = self._select(self._whole.others)
        return {name: description for name, (_, description) in selected.items()}

    def read(self, name: str) -> np.ndarray:
        return self._whole.read(self._arrays[name][0])

    def slices(self, name: str) -> base.Sliceable:
        return self._whole.slices(self._arrays[name][0])

    def manifest(self) -> str | None:
        return self._whole.manifest()

    def files(self) -> list[pathlib.Path]:
        return self._whole.files()
