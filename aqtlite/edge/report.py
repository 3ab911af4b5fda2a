"""The operators and tensors of an exported file, and a report of them."""

import collections
import dataclasses
from typing import Any

import numpy as np
import rich.box
import rich.console
import rich.table
from rich import filesize


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Such as "int8" or "float32"."""

    scale: np.ndarray | None
    """float32, one or one for each channel; None if it is not quantized."""

    zero_point: np.ndarray | None
    axis: int
    data: bytes | None = dataclasses.field(repr=False)
    """The bytes of a constant."""

    @property
    def is_float(self) -> bool:
        """True for a tensor of floats."""
        return self.dtype.startswith(("float", "bfloat"))

    def array(self) -> np.ndarray:
        """The elements of a constant."""
        if self.data is None:
            raise ValueError(f"the tensor {self.name!r} is computed")
        if self.dtype in ("int4", "int2"):
            return _unpacked(self.data, int(self.dtype[3:]), self.shape)
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class FileOperator:
    """An operator of a file."""

    name: str
    """Name in LiteRT or ONNX, such as "CONV_2D"."""

    inputs: tuple[Tensor | None, ...]
    outputs: tuple[Tensor, ...]


@dataclasses.dataclass(frozen=True)
class File:
    """The program of a file."""

    operators: tuple[FileOperator, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    size: int
    """Size in bytes."""


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


def _unpacked(data: bytes, bits: int, shape: tuple[int, ...]) -> np.ndarray:
    """Integers narrower than a byte, the first of a byte in its lowest bits."""
    raw = np.frombuffer(data, np.uint8)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    parts = (raw[:, None] >> shifts) & ((1 << bits) - 1)
    values = parts.reshape(-1)[: int(np.prod(shape))].astype(np.int8)
    return np.where(values >= 1 << (bits - 1), values - (1 << bits), values).reshape(
        shape
    )
