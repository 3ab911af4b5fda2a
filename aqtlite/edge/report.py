"""Operators and tensors of an exported file, and a report of them."""

import collections
import dataclasses
from typing import Any, Literal, NamedTuple

import numpy as np
import rich.box
import rich.console
import rich.table
from rich import filesize

from aqtlite.output import rich_tables
from aqtlite.shapes.sharding import describe

Processors = Literal["any", "vnni"]
"""Processors on which a file's results are right: any, or of those of x86-64 only the
ones with AVX512-VNNI or AVX-VNNI."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Name of the dtype, such as "int8" or "float32"."""

    scale: np.ndarray | None
    """Scale, float32, per-tensor or per-channel; None if not quantized."""

    zero_point: np.ndarray | None
    axis: int
    data: bytes | None = dataclasses.field(repr=False)
    """Bytes of a constant; None if the tensor is computed."""

    @property
    def is_float(self) -> bool:
        """Whether the tensor has a floating dtype."""
        return self.dtype.startswith(("float", "bfloat"))

    def array(self) -> np.ndarray:
        """Decodes the elements of a constant."""
        if self.data is None:
            raise ValueError(f"the tensor {self.name!r} is computed")
        if self.dtype in ("int4", "int2"):
            return _unpacked(self.data, int(self.dtype[3:]), self.shape)
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


@dataclasses.dataclass(frozen=True, repr=False)
class FileOperator:
    """An operator of a file; prints as its name, with the types of its tensors."""

    name: str
    """Name of the operator in LiteRT or ONNX, such as "CONV_2D"."""

    inputs: tuple[Tensor | None, ...]
    outputs: tuple[Tensor, ...]

    def __repr__(self) -> str:
        types = ", ".join(describe(one) for one in self.inputs if one is not None)
        outputs = ", ".join(f"{one.name!r} {describe(one)}" for one in self.outputs)
        return f"{self.name}({types}) -> {outputs}"


@dataclasses.dataclass(frozen=True)
class File:
    """The operators and tensors of a file."""

    operators: tuple[FileOperator, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    size: int
    """Size in bytes."""


class Contraction(NamedTuple):
    """A contraction of a program, and what its file runs it in."""

    path: str
    """Name of the output: the name scopes around the operator, and its name."""

    operator: str
    """Name of the operator, such as "conv_2d"."""

    asked: str
    """Integers that the rules or configs ask for; "float32" for none."""

    runs_in: str
    """Operator of the runtime, with the dtypes of its operands where the file has them;
    "float32" if there is no operator of integers."""


@dataclasses.dataclass(frozen=True)
class Report:
    """Operators and integers of an exported file; prints as a table."""

    file: File = dataclasses.field(repr=False)
    contractions: tuple[Contraction, ...] = ()
    processors: Processors = "any"
    """Where the results of the file are right, as for `aqtlite.edge.export`."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Inputs of the file, with scale and zero point if they are integers."""
        return self.file.inputs

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """Outputs of the file, with scale and zero point if they are integers."""
        return self.file.outputs

    @property
    def float_operators(self) -> tuple[FileOperator, ...]:
        """Operators with float inputs or outputs."""
        return tuple(
            one
            for one in self.file.operators
            if any(t is not None and t.is_float for t in (*one.inputs, *one.outputs))
        )

    def counts(self) -> dict[str, int]:
        """Number of operators of each name."""
        return dict(collections.Counter(one.name for one in self.file.operators))

    def summary(self) -> str:
        """Summarizes the numbers of operators and bytes as text."""
        where = ", wrong on x86-64 without VNNI" * (self.processors == "vnni")
        return (
            f"{len(self.file.operators)} operators, {len(self.float_operators)} of "
            f"them in float, {filesize.decimal(self.file.size)}{where}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Converts the report to plain data, for JSON."""
        return {
            "bytes": self.file.size,
            "processors": self.processors,
            "inputs": [_as_dict(tensor) for tensor in self.inputs],
            "outputs": [_as_dict(tensor) for tensor in self.outputs],
            "contractions": [one._asdict() for one in self.contractions],
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
                ", ".join(describe(t) for t in one.inputs if t is not None),
                describe(output),
                "" if output.scale is None else f"{output.scale[0]:.6g}",
                "" if output.zero_point is None else str(output.zero_point[0]),
            )
        return table

    def __str__(self) -> str:
        return rich_tables.as_text(self, width=120)


def _as_dict(tensor: Tensor) -> dict[str, Any]:
    return {
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "scale": None if tensor.scale is None else [float(x) for x in tensor.scale],
        "zero_point": (
            None if tensor.zero_point is None else [int(x) for x in tensor.zero_point]
        ),
    }


def _unpacked(data: bytes, bits: int, shape: tuple[int, ...]) -> np.ndarray:
    """Unpacks integers narrower than a byte, the first from the lowest bits."""
    raw = np.frombuffer(data, np.uint8)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    parts = (raw[:, None] >> shifts) & ((1 << bits) - 1)
    values = parts.reshape(-1)[: int(np.prod(shape))].astype(np.int8)
    return np.where(values >= 1 << (bits - 1), values - (1 << bits), values).reshape(
        shape
    )
