"""Reports on converted checkpoints: their weights and sizes."""

import dataclasses
import math
import pathlib
import re
from typing import Any

from aqtlite.checkpoint.arrays import ArrayInfo
from aqtlite.checkpoint.manifest import Frozen, Manifest, Plain


@dataclasses.dataclass(frozen=True)
class Row:
    """One frozen weight."""

    path: str
    origin: tuple[str, ...]
    """Names of the parameters that the weight is computed from."""
    shape: tuple[int, ...]
    """Stored shape."""
    grid: str
    scales: int
    """Number of scales."""
    bytes_before: int
    bytes_after: int
    """Bytes of the arrays on disk, with packed integers."""
    decibels: float | None
    """Signal-to-noise ratio of the quantization in dB; None if there is no noise, or
    before the conversion."""


@dataclasses.dataclass(frozen=True)
class Report:
    """Weights and sizes of a converted checkpoint, or of a planned one."""

    weights: tuple[Row, ...]
    """Frozen weights, in natural order of their paths."""
    kept: int
    """Number of arrays copied unchanged."""
    bytes_kept: int
    bytes_before: int
    bytes_after: int
    """Bytes of all arrays on disk, before a format compresses them."""
    bytes_on_disk: int | None
    """Bytes of the checkpoint's files; None for a planned checkpoint."""
    seconds: float | None
    """Duration of the conversion; None if no conversion was run."""

    def to_dict(self) -> dict[str, Any]:
        """Converts the report to plain data, for JSON."""
        return dataclasses.asdict(self)


def report_of(
    manifest: Manifest, seconds: float | None = None, bytes_on_disk: int | None = None
) -> Report:
    """Summarizes a manifest."""
    rows = []
    kept = []
    origins: dict[str, ArrayInfo] = {}
    for path in sorted(manifest.nodes, key=_natural):
        node = manifest.nodes[path]
        if isinstance(node, Plain):
            kept.append(manifest.arrays[node.array].on_disk.nbytes)
        if not isinstance(node, Frozen):
            continue
        origins.update(node.origin)
        rows.append(
            Row(
                path=path,
                origin=tuple(node.origin),
                shape=manifest.arrays[node.arrays["qvalue"]].info.shape,
                grid=_grid(node, manifest),
                scales=math.prod(manifest.arrays[node.arrays["scale"]].info.shape),
                bytes_before=sum(info.nbytes for info in node.origin.values()),
                bytes_after=sum(
                    manifest.arrays[name].on_disk.nbytes
                    for name in node.arrays.values()
                ),
                decibels=node.decibels,
            )
        )
    # A parameter of two (tied) weights counts once, and not at all if it is also kept.
    plain = {node.array for node in manifest.nodes.values() if isinstance(node, Plain)}
    replaced = sum(info.nbytes for n, info in origins.items() if n not in plain)
    return Report(
        weights=tuple(rows),
        kept=len(kept),
        bytes_kept=sum(kept),
        bytes_before=replaced + sum(kept),
        bytes_after=sum(row.bytes_after for row in rows) + sum(kept),
        bytes_on_disk=bytes_on_disk,
        seconds=seconds,
    )


def size_of(path: pathlib.Path) -> int:
    """Size in bytes of a file, or of all files below a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _grid(node: Frozen, manifest: Manifest) -> str:
    if node.numerics is None:
        return manifest.arrays[node.arrays["qvalue"]].info.dtype.name
    return node.numerics.name


def _natural(path: str) -> list[tuple[int, str]]:
    """Sort key that puts Dense_2 before Dense_10."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part)
        for part in re.split(r"(\d+)", path)
    ]
