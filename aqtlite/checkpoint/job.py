"""Jobs: the weights to freeze and the arrays to copy."""

import dataclasses
from collections.abc import Callable, Mapping

from aqtlite.checkpoint.manifest import Manifest
from aqtlite.program.serving.conversion import FrozenWeight


@dataclasses.dataclass(frozen=True)
class Task:
    """One weight to freeze."""

    path: str
    """Path of its node in the serving variables."""

    inputs: tuple[str, ...]
    """The arrays of the source that it is a function of."""

    fields: Mapping[str, str]
    """The names of its arrays in the target: of "qvalue", "scale", ..."""

    make: Callable[..., FrozenWeight]
    """The function of the inputs."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A planned conversion."""

    manifest: Manifest
    """The manifest of the target, without checksums and noise."""

    tasks: tuple[Task, ...]
    copies: Mapping[str, str]
    """Arrays that stay as they are: name in the target, name in the source."""
