"""What a conversion has to do, whoever decided it."""

import dataclasses
from collections.abc import Callable, Mapping

from aqtlite.checkpoint.arrays import ArrayInfo
from aqtlite.checkpoint.manifest import Manifest
from aqtlite.serving.conversion import FrozenWeight


@dataclasses.dataclass(frozen=True)
class Task:
    """One weight to freeze."""

    path: str
    """Of its node in the serving variables."""

    inputs: tuple[str, ...]
    """The source's arrays that it is made of."""

    fields: Mapping[str, tuple[str, ArrayInfo]]
    """Of "qvalue" and "scale", the name in the target, and what is stored there."""

    make: Callable[..., FrozenWeight]
    """Takes the inputs."""


@dataclasses.dataclass(frozen=True)
class Job:
    """All weights to freeze and all arrays to copy, and the manifest of both."""

    manifest: Manifest
    """Of the target, but for what is known only when it is written."""

    tasks: tuple[Task, ...]
    copies: Mapping[str, str]
    """Arrays that stay as they are: name in the target, name in the source."""
