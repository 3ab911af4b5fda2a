"""Finished measurements, a file of JSON for each network."""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
import zlib
from collections.abc import Mapping
from typing import Any

from benchmarks.pretrained.measuring import Figures
from benchmarks.pretrained.tasks.task import Task

PACKAGES = ("jax", "jaxlib", "aqtlite", "onnxruntime")


class RecordsError(Exception):
    """A file of measurements cannot be read; the message has the reason."""


@dataclasses.dataclass(frozen=True)
class Record:
    """What is known of one contestant on one network."""

    contestant: str
    hash: str
    """See `identity`."""
    figures: Figures | None
    """None if the contestant refused the network."""
    refused: str | None = None
    """The error message."""


def identity(task: Task, network: pathlib.Path, contestant: str) -> str:
    """A hash of what affects the figures, except times and versions of packages."""
    parts = [contestant, str(zlib.crc32(network.read_bytes()))]
    for batch in (*task.calibration, *task.batches):
        parts += [str(zlib.crc32(array.tobytes())) for array in batch]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def read(path: pathlib.Path) -> dict[str, Record]:
    """The records of a file by hash; none if the file does not exist.

    Raises:
        RecordsError: if the file is not one of records.
    """
    if not path.exists():
        return {}
    try:
        entries = json.loads(path.read_text())["contestants"]
        records = [_record(one) for one in entries]
    except (ValueError, KeyError, TypeError) as error:
        raise RecordsError(f"{path} has no measurements: {error}") from error
    return {one.hash: one for one in records}


def _record(fields: Mapping[str, Any]) -> Record:
    figures = fields["figures"]
    return Record(**{**fields, "figures": figures and Figures(**figures)})


def write(path: pathlib.Path, records: Mapping[str, Record]) -> None:
    """Writes all records of a network; the file is replaced at once."""
    document = {
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "contestants": [dataclasses.asdict(one) for one in records.values()],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(new, path)
