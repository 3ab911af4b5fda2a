"""Reports on converted checkpoints: their weights and sizes, also as tables."""

import dataclasses
import itertools
import math
import pathlib
import re
from collections.abc import Collection, Sequence
from typing import Any

import rich.box
import rich.console
import rich.table
import rich.text
from rich import filesize

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
    integers: str | None = None
    """What became of the integers of a quantized source, "kept" or "rounded again";
    None if the source is in float, and once the conversion is done."""
    scale_dtype: str = "float32"
    """Dtype of the stored scales: "uint8" for double scales."""


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
    manifest: Manifest,
    seconds: float | None = None,
    bytes_on_disk: int | None = None,
    quantized: Collection[str] = (),
) -> Report:
    """Summarizes a manifest.

    Args:
        manifest: the manifest.
        seconds: duration of the conversion that has just been run.
        bytes_on_disk: size of its files.
        quantized: paths of the weights that it made of quantized ones.
    """
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
        scales = manifest.arrays[node.scales].info
        rows.append(
            Row(
                path=path,
                origin=tuple(node.origin),
                shape=node.shape(manifest.arrays),
                grid=_grid(node, manifest),
                scales=math.prod(scales.shape),
                scale_dtype=scales.dtype.name,
                bytes_before=sum(info.nbytes for info in node.origin.values()),
                bytes_after=sum(
                    manifest.arrays[name].on_disk.nbytes
                    for name in node.arrays.values()
                ),
                decibels=node.decibels,
                integers=_integers(node) if path in quantized else None,
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
    if node.numerics is None and node.packed is not None:
        return node.packed.dtype.name
    if node.numerics is None:
        return manifest.arrays[node.arrays["qvalue"]].info.dtype.name
    return node.numerics.name


def _integers(node: Frozen) -> str:
    return "kept" if node.decibels is None else "rounded again"


def _natural(path: str) -> list[tuple[int, str]]:
    """Sort key that puts Dense_2 before Dense_10."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part)
        for part in re.split(r"(\d+)", path)
    ]


_NARROWEST = 16
"""Smallest width of the column of paths, even if the table exceeds the terminal."""


def table(report: Report) -> rich.console.Group:
    """Lays out a report: a row for each weight, and a summary.

    Steps shared by all paths are shown once, and paths are folded if the terminal is
    too narrow.
    """
    result = rich.table.Table(
        box=rich.box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 0, 0, 1),
    )
    shared, paths = without_constant_steps([row.path for row in report.weights])
    head = f"weight in {shared}" if shared else "weight"
    result.add_column(head, overflow="fold", min_width=_NARROWEST)
    for head in ("stored", "grid", "scales", "before", "after", "dB"):
        result.add_column(head, no_wrap=True, justify="right")
    has_integers = any(row.integers for row in report.weights)
    if has_integers:
        result.add_column("integers", no_wrap=True)
    for path, row in zip(paths, report.weights, strict=True):
        result.add_row(
            path,
            "x".join(map(str, row.shape)),
            row.grid,
            f"{row.scales} in 8 bits"
            if row.scale_dtype == "uint8"
            else str(row.scales),
            filesize.decimal(row.bytes_before),
            filesize.decimal(row.bytes_after),
            "" if row.decibels is None else f"{row.decibels:.1f}",
            *([row.integers or ""] if has_integers else []),
        )
    return rich.console.Group(result, "", rich.text.Text(summary(report)))


def summary(report: Report) -> str:
    """Summarizes a report in two lines."""
    ratio = report.bytes_after / max(report.bytes_before, 1)
    before, after = map(filesize.decimal, (report.bytes_before, report.bytes_after))
    sizes = f"{before} to {after}, {ratio:.2f} of the float size"
    if report.bytes_on_disk is not None:
        sizes += f" ({filesize.decimal(report.bytes_on_disk)} of files)"
    parts = [f"{len(report.weights)} frozen, {report.kept} kept"]
    known = [row.decibels for row in report.weights if row.decibels is not None]
    if known:
        mean = sum(known) / len(known)
        parts.append(f"SNR {min(known):.1f} dB worst, {mean:.1f} dB mean")
    if report.seconds is not None:
        parts.append(f"{report.seconds:.1f} s")
    return "; ".join(parts) + "\n" + sizes


def without_constant_steps(paths: Sequence[str]) -> tuple[str, list[str]]:
    """Removes the common first steps of all paths, and the side if all have the same.

    >>> without_constant_steps(["aqt/a/Dense_0/kernel/rhs", "aqt/a/Dense_1/kernel/rhs"])
    ('a', ['Dense_0/kernel', 'Dense_1/kernel'])

    Returns:
        The removed first steps, without the collection; and the shortened paths.
    """
    if not paths:
        return "", []
    steps = [path.split("/")[1:] for path in paths]
    if len({s[-1] for s in steps}) == 1:
        steps = [s[:-1] for s in steps]
    above = [s[:-1] for s in steps] if len(steps) > 1 else [[]]
    same = (len(set(column)) == 1 for column in zip(*above, strict=False))
    count = sum(itertools.takewhile(bool, same))
    return "/".join(steps[0][:count]), ["/".join(s[count:]) for s in steps]
