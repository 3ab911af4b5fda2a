"""Measured times of contractions, kept in a file for each processor.

A file holds the times of one kind of machine: processor, number of threads, version of
JAX, and code of this library. It grows by every contraction that is measured, and is
read once before any is measured.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
import platform
from typing import Any

import jax
from absl import logging

from aqtlite.output import files

_FORMAT = "aqtlite.times.1"


@dataclasses.dataclass(frozen=True)
class Times:
    """Times of a contraction, in seconds.

    Raises:
        ValueError: if a time is not a positive number.
    """

    measured_for: float
    """Time for the calls from which the others were taken."""

    resolution: float
    """Least time that is told from none, and from another time."""

    in_float: float
    """Time in float."""

    quantized: float
    """Time with both operands quantized in the call."""

    served: float | None = None
    """Time with a frozen weight; None in training, and without a weight."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_missing = field.name == "served" and value is None
            if not is_missing and not _is_time(value):
                raise ValueError(
                    f"{field.name} must be a positive, finite float, got {value}"
                )


def _is_time(value: Any) -> bool:
    return isinstance(value, float) and 0 < value < math.inf


@dataclasses.dataclass(frozen=True)
class KeptTimes:
    """The times that a file held when it was opened (`in_folder`)."""

    path: pathlib.Path
    machine: dict[str, str]
    """What the times depend on beside the contraction (`this_machine`)."""

    known: dict[str, Times]

    def find(self, what: str, seconds: float) -> Times | None:
        """Returns the times of a contraction; None if they are not known.

        Args:
            what: text that contractions of equal programs share.
            seconds: time for which they must have been measured, at least.
        """
        found = self.known.get(_key(what))
        is_enough = found is not None and found.measured_for >= seconds
        return found if is_enough else None

    def keep(self, what: str, times: Times) -> None:
        """Adds the times of a contraction to the file, and replaces it at once.

        What others have added since it was opened stays.
        """
        known = {**_read(self.path, self.machine), _key(what): times}
        fields = {
            "format": _FORMAT,
            "machine": self.machine,
            "contractions": {
                key: dataclasses.asdict(one) for key, one in known.items()
            },
        }
        files.write(json.dumps(fields, indent=1).encode(), self.path)


def path_in(folder: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the path of the file in a folder that holds the times of this machine."""
    name = f"times-{_key(json.dumps(this_machine()))[:16]}.json"
    return pathlib.Path(folder).expanduser() / name


def in_folder(folder: str | os.PathLike[str]) -> KeptTimes:
    """Reads the times of this machine that a folder keeps; makes the folder.

    Args:
        folder: path of the folder.

    Raises:
        OSError: if the folder cannot be made, or the file not read.
    """
    machine, path = this_machine(), path_in(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    return KeptTimes(path, machine, _read(path, machine))


def _read(path: pathlib.Path, machine: dict[str, str]) -> dict[str, Times]:
    """Reads a file; one that does not hold times is moved, and counts as none."""
    try:
        return _times_in(path.read_text(), machine)
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, RecursionError) as error:
        aside = path.with_suffix(".unreadable")
        with contextlib.suppress(FileNotFoundError):  # Another process moved it.
            path.replace(aside)
        logging.warning(
            "%s held no times of this machine (%s): it is %s now, and times are "
            "measured anew",
            *(path, error, aside.name),
        )
        return {}


def user_folder() -> pathlib.Path:
    """The folder of this library in the user's cache: ``~/.cache/aqtlite``.

    ``XDG_CACHE_HOME`` stands for ``~/.cache`` if it is an absolute path (XDG Base
    Directory Specification).

    Raises:
        FileNotFoundError: if the user has no home, as in some containers.
    """
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
        try:
            cache = pathlib.Path.home() / ".cache"
        except RuntimeError as error:
            raise FileNotFoundError(f"{error}: set HOME or XDG_CACHE_HOME") from error
    return cache / "aqtlite"


def this_machine() -> dict[str, str]:
    """Describes what runs programs here: the device, its threads, and the code."""
    device = jax.devices()[0]
    return {
        "device": f"{device.platform}: {device.device_kind}",
        "processor": _processor(pathlib.Path("/proc/cpuinfo")),
        "threads": str(_num_threads()),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "jax": jax.__version__,
        "aqtlite": _code(pathlib.Path(__file__).parents[2]),
    }


@functools.cache
def _code(package: pathlib.Path) -> str:
    """Digest of a package's code: a change of it may change how programs run."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


_NAMES = (
    "model name",
    "cpu family",
    "model",
    "stepping",
    "CPU implementer",
    "CPU part",
)
"""Lines of Linux's ``/proc/cpuinfo`` that tell processors apart (x86-64 and Arm)."""


def _processor(cpuinfo: pathlib.Path) -> str:
    """What a file like ``/proc/cpuinfo`` says about the processor."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    pairs = (line.partition(":") for line in lines)
    known = {name.strip(): value.strip() for name, _, value in pairs}
    parts = [f"{name} {known[name]}" for name in _NAMES if name in known]
    return ", ".join([platform.machine(), *parts])


def _num_threads() -> int:
    """The number of threads of XLA:CPU, which is the number of cores without NPROC."""
    given = os.environ.get("NPROC", "")
    if given.isdecimal():
        return int(given)
    has_affinity = hasattr(os, "sched_getaffinity")  # Linux
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def _key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _times_in(text: str, machine: dict[str, str]) -> dict[str, Times]:
    """Reads the contents of a file.

    Raises:
        ValueError: if it is not JSON, or of another format or machine.
        TypeError: if its fields are others.
    """
    fields: Any = json.loads(text)
    if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
        raise ValueError(f"its format is not {_FORMAT}")
    if fields.get("machine") != machine:
        raise ValueError(f"it is of {fields.get('machine')}")
    contractions: Any = fields.get("contractions")
    return {key: Times(**one) for key, one in dict(contractions).items()}
