"""Jobs: the weights to freeze and the arrays to copy."""

import dataclasses
from collections.abc import Callable, Mapping

from aqtlite.checkpoint.manifest import Manifest
from aqtlite.program.serving.conversion import FrozenWeight


@dataclasses.dataclass(frozen=True)
class Task:
    """One weight to freeze."""

    path: str
    """Path of the weight in the serving variables."""

    inputs: tuple[str, ...]
    """Names of the arrays of the source that the weight is a function of."""

    fields: Mapping[str, str]
    """Names of arrays in the target, by field: "qvalue", "scale", ..."""

    make: Callable[..., FrozenWeight]
    """Function from the inputs to the frozen weight."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A planned conversion."""

    manifest: Manifest
    """The manifest of the target, without checksums and noise."""

    tasks: tuple[Task, ...]
    copies: Mapping[str, str]
    """Arrays that stay as they are: name in the target, name in the source."""
