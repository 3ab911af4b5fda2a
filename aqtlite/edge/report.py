"""Report of an exported file."""

import collections
import dataclasses
from typing import Any

import rich.box
import rich.console
import rich.table
from rich import filesize

from aqtlite.edge.flatbuffer import File, FileOperator, Tensor


@dataclasses.dataclass(frozen=True)
class Report:
    """The operators and integers of an exported file; it prints as a table."""

    file: File = dataclasses.field(repr=False)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The inputs of the file, with the scales and zero points of integers."""
        return self.file.inputs

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """The outputs of the file."""
        return self.file.outputs

    @property
    def float_operators(self) -> tuple[FileOperator, ...]:
        """The operators that take or give floats."""
        return tuple(
            one
            for one in self.file.operators
            if any(t is not None and t.is_float for t in (*one.inputs, *one.outputs))
        )

    def counts(self) -> dict[str, int]:
        """Number of operators by name."""
        return dict(collections.Counter(one.name for one in self.file.operators))

    def summary(self) -> str:
        """The numbers of operators and bytes."""
        return (
            f"{len(self.file.operators)} operators, {len(self.float_operators)} of "
            f"them in float, {filesize.decimal(self.file.size)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "bytes": self.file.size,
            "inputs": [_as_dict(tensor) for tensor in self.inputs],
            "outputs": [_as_dict(tensor) for tensor in self.outputs],
            "operators": [
                {
                    "name": one.name,
                    "inputs": [_as_dict(t) for t in one.inputs if t is not None],
                    "outputs": [_as_dict(t) for t in one.outputs],
                }
                for one in self.file.operators
            ],
        }

    def __rich__(self) -> rich.table.Table:
        table = rich.table.Table(box=rich.box.SIMPLE_HEAD, title=self.summary())
        for name in ("operator", "inputs", "output", "scale", "zero point"):
            table.add_column(name, overflow="fold")
        for one in self.file.operators:
            output = one.outputs[0]
            table.add_row(
                one.name,
                ", ".join(_type(t) for t in one.inputs if t is not None),
                _type(output),
                "" if output.scale is None else f"{output.scale[0]:.6g}",
                "" if output.zero_point is None else str(output.zero_point[0]),
            )
        return table

    def __str__(self) -> str:
        return text_of(self)


def text_of(table: Any) -> str:
    """A table as text of 120 columns."""
    console = rich.console.Console(width=120, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _as_dict(tensor: Tensor) -> dict[str, Any]:
    return {
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "scale": None if tensor.scale is None else [float(x) for x in tensor.scale],
        "zero_point": (
            None if tensor.zero_point is None else [int(x) for x in tensor.zero_point]
        ),
    }


def _type(tensor: Tensor) -> str:
    return f"{tensor.dtype}[{','.join(map(str, tensor.shape))}]"
