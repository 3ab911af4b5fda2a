"""Contents of checkpoints: trees of arrays, and steps."""

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import rich.box
import rich.table
from rich import filesize

from aqtlite.checkpoint.arrays import ArrayInfo
from aqtlite.checkpoint.formats import open_reader
from aqtlite.checkpoint.names import name_of, steps_of
from aqtlite.checkpoint.quantized_formats.base import Weight
from aqtlite.checkpoint.read_quantized import is_quantized, load_quantized


@dataclasses.dataclass(frozen=True)
class Contents:
    """Arrays of a checkpoint by path, without their values."""

    path: pathlib.Path
    arrays: Mapping[str, ArrayInfo | Weight]
    others: Mapping[str, str]
    """Descriptions of the leaves that are not arrays in dictionaries, by path."""
    is_converted: bool
    steps: tuple[int, ...] = ()
    """All steps of the checkpoint manager, if this is its latest step."""
    format: str | None = None
    """Format of a quantized checkpoint of another library."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        arrays = [
            {
                "path": name,
                "shape": list(info.shape),
                "dtype": info.kind if isinstance(info, Weight) else info.dtype.name,
                "bytes": info.nbytes,
            }
            for name, info in self.arrays.items()
        ]
        return {
            "path": str(self.path),
            "steps": list(self.steps),
            "format": self.format,
            "bytes": sum(info.nbytes for info in self.arrays.values()),
            "arrays": arrays,
            "others": dict(self.others),
        }

    def table(self, depth: int | None = None) -> rich.table.Table:
        """Lays out the tree, with the size of each subtree.

        Args:
            depth: number of levels to show; None for all.
        """
        result = rich.table.Table(
            box=rich.box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            padding=(0, 0, 0, 1),
        )
        result.add_column("subtree or array", overflow="fold")
        for head in ("holds", "size"):
            result.add_column(head, no_wrap=True, justify="right")
        leaves: dict[str, _Leaf] = {**self.arrays, **self.others}
        result.add_row(*_summed("(all)", leaves.values()))
        for row in _rows({steps_of(k): v for k, v in leaves.items()}, 0, depth):
            result.add_row(*row)
        return result


def contents(path: pathlib.Path) -> Contents:
    """Lists the arrays of a checkpoint, or of the latest step of a manager.

    Args:
        path: a checkpoint in any format that `convert_checkpoint` or `load_quantized`
            reads, or the folder of an Orbax `CheckpointManager`.

    Raises:
        CheckpointError: if `path` is not a checkpoint, or cannot be read.
    """
    if is_quantized(path):
        loaded = load_quantized(path)
        weights = {
            name_of(name.split(".")): one for name, one in loaded.weights.items()
        }
        return Contents(path, weights, {}, is_converted=False, format=loaded.method)
    steps = _steps_in(path)
    if steps:
        path = steps[max(steps)]
    reader = open_reader(path)
    is_converted = reader.manifest() is not None
    found = tuple(sorted(steps))
    return Contents(path, reader.arrays, reader.others, is_converted, found)


def _steps_in(path: pathlib.Path) -> dict[int, pathlib.Path]:
    """A checkpoint manager's step folders, named ``STEP`` or ``PREFIX_STEP``."""
    if not path.is_dir() or (path / "_CHECKPOINT_METADATA").exists():
        return {}
    found = {}
    for folder in path.iterdir():
        number = folder.name.rpartition("_")[2]
        if number.isdecimal() and (folder / "_CHECKPOINT_METADATA").exists():
            found[int(number)] = folder
    return found


_Leaf = ArrayInfo | Weight | str
_Leaves = Mapping[tuple[str, ...], _Leaf]


def _rows(leaves: _Leaves, level: int, depth: int | None) -> Iterator[tuple[str, ...]]:
    if level == depth:
        return
    below: dict[str, dict[tuple[str, ...], _Leaf]] = {}
    for steps, one in leaves.items():
        below.setdefault(steps[0], {})[steps[1:]] = one
    for step, inner in below.items():
        name = "  " * level + step
        leaf = inner.get(())
        if isinstance(leaf, str):
            yield name, leaf, ""
        elif leaf is not None:
            yield name, str(leaf), filesize.decimal(leaf.nbytes)
        else:
            yield _summed(name, inner.values())
            yield from _rows(inner, level + 1, depth)


def _summed(name: str, leaves: Iterable[_Leaf]) -> tuple[str, str, str]:
    found = list(leaves)
    sizes = [leaf.nbytes for leaf in found if not isinstance(leaf, str)]
    kinds = {"array": len(sizes), "other": len(found) - len(sizes)}
    holds = ", ".join(f"{n} {kind}{'s' * (n > 1)}" for kind, n in kinds.items() if n)
    return name, holds or "nothing", filesize.decimal(sum(sizes)) if sizes else ""
