"""The file of finished runs, with one line of JSON each."""

import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import os
import pathlib
import zlib
from typing import Any

from aqtlite_demo import corpus as corpus_lib
from benchmarks.quality.presets import Preset
from benchmarks.quality.training import Options, Result

PACKAGES = ("jax", "jaxlib", "flax", "aqtlite")


class RecordsError(Exception):
    """A file of runs cannot be read; the message has the reason."""


@dataclasses.dataclass(frozen=True)
class Record:
    """One finished run."""

    preset: str
    seed: int
    hash: str
    """See `run_hash`."""
    result: Result


def run_hash(preset: Preset, options: Options, corpus: corpus_lib.Corpus) -> str:
    """A hash of all that affects the loss, except the seed and package versions."""
    parts = [preset.identity, json.dumps(dataclasses.asdict(options), sort_keys=True)]
    parts += [str(zlib.crc32(text)) for text in (corpus.training, corpus.validation)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def read(path: pathlib.Path) -> list[Record]:
    """Read the runs in a file; none if the file does not exist.

    A partial last line, left by a killed process, is ignored.

    Raises:
        RecordsError: if any other line is not a run.
    """
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    records = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            fields = json.loads(line)
            result = {f.name: fields[f.name] for f in dataclasses.fields(Result)}
            records.append(
                Record(
                    fields["preset"], fields["seed"], fields["hash"], Result(**result)
                )
            )
        except (ValueError, KeyError, TypeError) as error:
            raise RecordsError(
                f"{path}, line {number} is not a run: {error}"
            ) from error
    return records


def append(
    path: pathlib.Path, record: Record, preset: Preset, options: Options
) -> None:
    """Append a run to the file, with its settings and options."""
    _cut_off_partial_line(path)
    fields: dict[str, Any] = {
        "preset": record.preset,
        "seed": record.seed,
        "hash": record.hash,
        "validation_loss": sum(record.result.validation_losses)
        / len(record.result.validation_losses),
        **dataclasses.asdict(record.result),
        "options": dataclasses.asdict(options),
        "config": preset.settings,
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "finished": datetime.datetime.now(datetime.UTC).isoformat("T", "seconds"),
    }
    with path.open("a") as file:
        file.write(json.dumps(fields) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _cut_off_partial_line(path: pathlib.Path) -> None:
    if path.exists():
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(path, whole)
