"""What a converted checkpoint holds, as a table and as JSON."""

import dataclasses
import math
from typing import Any

import rich.table

from aqtlite.checkpoint.arrays import ArrayInfo
from aqtlite.checkpoint.manifest import Frozen, Manifest, Plain


@dataclasses.dataclass(frozen=True)
class Row:
    """One frozen weight."""

    path: str
    origin: tuple[str, ...]
    """The parameters that it was made of."""
    shape: tuple[int, ...]
    """As it is stored."""
    grid: str
    scales: int
    """How many scales it has."""
    bytes_before: int
    bytes_after: int
    decibels: float | None
    """Signal-to-noise ratio of the quantization; None if there is no noise, or if it
    is not converted yet."""


@dataclasses.dataclass(frozen=True)
class Report:
    """The whole checkpoint."""

    weights: tuple[Row, ...]
    kept: int
    """How many arrays stay as they were."""
    bytes_kept: int
    bytes_before: int
    bytes_after: int
    seconds: float | None
    """How long the conversion took; None if none was run."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return dataclasses.asdict(self)

    def table(self) -> rich.table.Table:
        """For people, the worst weight and the mean last."""
        table = rich.table.Table(
            "weight", "of", "stored", "grid", "scales", "MB before", "after", "SNR, dB"
        )
        for row in self.weights:
            table.add_row(
                row.path.removeprefix("aqt/"),
                ", ".join(row.origin),
                " x ".join(map(str, row.shape)),
                row.grid,
                str(row.scales),
                _megabytes(row.bytes_before),
                _megabytes(row.bytes_after),
                "" if row.decibels is None else f"{row.decibels:.1f}",
            )
        table.add_section()
        known = [row.decibels for row in self.weights if row.decibels is not None]
        if known:
            worst, mean = min(known), sum(known) / len(known)
            noise = f"{worst:.1f} worst, {mean:.1f} mean"
        else:
            noise = ""
        table.add_row(
            f"{len(self.weights)} frozen, {self.kept} kept",
            *[""] * 4,
            _megabytes(self.bytes_before),
            _megabytes(self.bytes_after),
            noise,
        )
        ratio = self.bytes_after / max(self.bytes_before, 1)
        seconds = "" if self.seconds is None else f" in {self.seconds:.1f} s"
        table.caption = f"{ratio:.2f} of the float size{seconds}"
        return table


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.2f}"


def report_of(manifest: Manifest, seconds: float | None) -> Report:
    """Reads a report off a manifest."""
    rows = []
    kept = []
    origins: dict[str, ArrayInfo] = {}
    for path, node in manifest.nodes.items():
        if isinstance(node, Plain):
            kept.append(manifest.arrays[node.array].info.nbytes)
        if not isinstance(node, Frozen):
            continue
        qvalue, scale = (manifest.arrays[n].info for n in (node.qvalue, node.scale))
        origins.update(node.origin)
        rows.append(
            Row(
                path=path,
                origin=tuple(node.origin),
                shape=qvalue.shape,
                grid=node.grid,
                scales=math.prod(scale.shape),
                bytes_before=sum(info.nbytes for info in node.origin.values()),
                bytes_after=qvalue.nbytes + scale.nbytes,
                decibels=node.decibels,
            )
        )
    # A parameter of two weights (tied ones) counts once, and not if it is kept too.
    plain = {node.array for node in manifest.nodes.values() if isinstance(node, Plain)}
    replaced = sum(info.nbytes for n, info in origins.items() if n not in plain)
    return Report(
        weights=tuple(rows),
        kept=len(kept),
        bytes_kept=sum(kept),
        bytes_before=replaced + sum(kept),
        bytes_after=sum(row.bytes_after for row in rows) + sum(kept),
        seconds=seconds,
    )
