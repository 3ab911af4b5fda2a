"""Manifests: the static part of serving variables, stored beside their arrays.

With it they are assembled again without the model. It also records the parameters of
each frozen weight, and the noise of its quantization.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

import aqtlite
from aqtlite.checkpoint.arrays import ArrayInfo
from aqtlite.checkpoint.packing import Packing
from aqtlite.flax.linen.frozen_kernel import FrozenKernel
from aqtlite.numerics import Numerics
from aqtlite.program.serving.frozen_record import FrozenRecord

LINEN, NNX = "linen", "nnx"
FRAMEWORKS = (LINEN, NNX)


@dataclasses.dataclass(frozen=True)
class Stored:
    """One array of the checkpoint."""

    info: ArrayInfo
    """Shape and dtype in memory."""

    packing: Packing | None = None
    """Packing of integers on disk; None if they are stored as they are."""

    checksum: int | None = None
    """CRC-32 of the bytes on disk, in row-major order; None until they are written."""

    @property
    def on_disk(self) -> ArrayInfo:
        """Shape and dtype on disk."""
        return self.packing.packed(self.info) if self.packing else self.info


@dataclasses.dataclass(frozen=True)
class Plain:
    """A node that is an array: a parameter that stayed in float."""

    array: str


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A node that is a `QTensor`."""

    qvalue: str
    """Name of an array, as are the next three."""

    scale: str
    zero_point: str | None
    sums: str | None
    dtype: np.dtype
    order: tuple[int, ...] | None
    numerics: Numerics | None
    """Grid of the integers; None if it is not known."""

    origin: Mapping[str, ArrayInfo]
    """Parameters that the weight is a function of."""

    padding: tuple[int, ...] | None = None
    """Padding of the `QTensor`."""

    decibels: float | None = None
    """Signal-to-noise ratio of the quantization; None without noise, and until it is
    known."""

    def fields(self) -> dict[str, str]:
        """Names of the arrays, by field of the `QTensor`."""
        names = {
            "qvalue": self.qvalue,
            "scale": self.scale,
            "zero_point": self.zero_point,
            "sums": self.sums,
        }
        return {field: name for field, name in names.items() if name is not None}


Node = Plain | Frozen | FrozenKernel | FrozenRecord


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The nodes and arrays of a checkpoint, and their origin."""

    nodes: Mapping[str, Node]
    """Nodes by path in the tree of serving variables, as `names.name_of` writes it."""

    arrays: Mapping[str, Stored]
    """Arrays by name in the checkpoint."""

    model: str = ""
    """The `repr` of the model."""

    sample: Any = None
    """The shapes of the inputs with which the model was traced, as JSON."""

    framework: str = LINEN
    """Framework of the model, one of `FRAMEWORKS`."""

    version: str = aqtlite.__version__
    """The version of the library that wrote it."""


def completed(
    manifest: Manifest,
    checksums: Mapping[str, int],
    decibels: Mapping[str, float | None],
) -> Manifest:
    """Completes a manifest by checksums of arrays and decibels of nodes."""
    nodes = {
        path: dataclasses.replace(node, decibels=decibels.get(path))
        if isinstance(node, Frozen)
        else node
        for path, node in manifest.nodes.items()
    }
    arrays = {
        name: dataclasses.replace(one, checksum=checksums.get(name))
        for name, one in manifest.arrays.items()
    }
    return dataclasses.replace(manifest, nodes=nodes, arrays=arrays)
