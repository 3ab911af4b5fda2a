"""Manifests: the static part of serving variables, stored beside their arrays.

A manifest is enough to assemble the variables without the model. It also records the
parameters of each frozen weight, and its signal-to-noise ratio.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

import aqtlite
from aqtlite.checkpoint.arrays import ArrayInfo
from aqtlite.checkpoint.names import path_name
from aqtlite.checkpoint.packing import Packing, packing_of
from aqtlite.flax.linen.frozen_kernel import FrozenKernel
from aqtlite.numerics import Numerics
from aqtlite.program.serving.frozen_record import FrozenRecord
from aqtlite.qtensor.packed_values import PackedValues
from aqtlite.qtensor.qtensor import QTensor

DOUBLE_SCALES = ("scale.qvalue", "scale.scale", "scale.offset")
"""Fields in place of "scale" where scales are held in 8 bits."""

FIELDS = ("qvalue", "scale", *DOUBLE_SCALES, "zero_point", "sums")
"""Fields of a `QTensor` that are arrays, of which each has some."""

ON_GRID = ("qvalue", "zero_point")
"""Fields whose values are stored values of the grid."""

LINEN, NNX = "linen", "nnx"
FRAMEWORKS = (LINEN, NNX)


@dataclasses.dataclass(frozen=True)
class Stored:
    """One array of the checkpoint."""

    info: ArrayInfo
    """Shape and dtype in memory."""

    packing: Packing | None = None
    """Packing of integers on disk; None if the array is stored unpacked."""

    checksum: int | None = None
    """CRC-32 of the bytes on disk, in row-major order; None before they are written."""

    @property
    def on_disk(self) -> ArrayInfo:
        """Shape and dtype on disk."""
        return self.packing.packed(self.info) if self.packing else self.info


@dataclasses.dataclass(frozen=True)
class Plain:
    """A node that is a single array, such as a parameter left in float."""

    array: str


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A node that is a `QTensor`."""

    arrays: Mapping[str, str]
    """Names of the arrays, by field of the `QTensor`: at least "qvalue", and "scale" or
    `DOUBLE_SCALES`."""

    dtype: np.dtype
    order: tuple[int, ...] | None
    numerics: Numerics | None
    """Number grid of the integers; None if unknown."""

    origin: Mapping[str, ArrayInfo]
    """Shapes and dtypes of the parameters that the weight is computed from, by name."""

    padding: tuple[int, ...] | None = None
    """Padding of the `QTensor`."""

    packed: PackedValues | None = None
    """The integers of the `QTensor` without their array, if they are packed."""

    decibels: float | None = None
    """Signal-to-noise ratio of the quantization in dB; None if there is no noise, or
    before the weight is quantized."""

    @property
    def on_grid(self) -> list[str]:
        """Names of the arrays whose values are stored values of the grid."""
        fields = [one for one in ON_GRID if one in self.arrays]
        if self.packed is not None:
            fields.remove("qvalue")
        return [self.arrays[one] for one in fields]

    def shape(self, arrays: Mapping[str, Stored]) -> tuple[int, ...]:
        """Returns the shape of the integers.

        Args:
            arrays: the arrays of the checkpoint.
        """
        info = arrays[self.arrays["qvalue"]].info
        if self.packed is None:
            return info.shape
        return dataclasses.replace(self.packed, panels=info).shape

    @property
    def scales(self) -> str:
        """Name of the array with an element for each scale."""
        return self.arrays["scale" if "scale" in self.arrays else "scale.qvalue"]


Node = Plain | Frozen | FrozenKernel | FrozenRecord


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint, and the model that they were converted for."""

    nodes: Mapping[str, Node]
    """Nodes by path in the tree of serving variables, as written by `names.name_of`."""

    arrays: Mapping[str, Stored]
    """Arrays by name in the checkpoint."""

    model: str = ""
    """The `repr` of the model."""

    sample: Any = None
    """Shapes of the sample inputs that the model was traced with, as JSON data."""

    framework: str = LINEN
    """Framework of the model, one of `FRAMEWORKS`."""

    version: str = aqtlite.__version__
    """Version of aqtlite that wrote the manifest."""

    def source_dtypes(self) -> dict[str, Any]:
        """The dtypes of the source's variables, by name."""
        dtypes = {name: one.info.dtype for name, one in self.arrays.items()}
        for node in self.nodes.values():
            if isinstance(node, Frozen):
                dtypes.update({name: info.dtype for name, info in node.origin.items()})
        return dtypes


def completed(
    manifest: Manifest,
    checksums: Mapping[str, int],
    decibels: Mapping[str, float | None],
) -> Manifest:
    """Fills in the checksums of arrays and the signal-to-noise ratios of nodes."""
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


def info_of(leaf: Any) -> ArrayInfo:
    """Shape and dtype of an array or a `jax.ShapeDtypeStruct`."""
    return ArrayInfo(tuple(leaf.shape), jnp.dtype(leaf.dtype))


def describe(serving: Any) -> tuple[dict[str, Node], dict[str, Stored]]:
    """Lists the nodes of abstract serving variables, and their arrays."""
    nodes: dict[str, Node] = {}
    arrays: dict[str, Stored] = {}

    def is_node(x: Any) -> bool:
        return isinstance(x, QTensor | FrozenRecord) or nn.meta.is_axis_metadata(x)

    for key_path, node in jax.tree.leaves_with_path(serving, is_node):
        path = path_name(key_path)
        if isinstance(node, FrozenRecord | FrozenKernel):
            nodes[path] = node
            continue
        named = {
            "/".join(filter(None, (path, path_name(below)))): info_of(leaf)
            for below, leaf in jax.tree.leaves_with_path(node)
        }
        arrays.update(
            {name: Stored(info, packing_of(info)) for name, info in named.items()}
        )
        if isinstance(node, QTensor):
            arrays_of = {_field_of(path, name): name for name in named}
            fields = {one: arrays_of[one] for one in FIELDS if one in arrays_of}
            packed = None
            if isinstance(node.qvalue, PackedValues):
                packed = dataclasses.replace(node.qvalue, panels=None)
            found = Frozen(
                fields,
                jnp.dtype(node.dtype),
                node.order,
                node.numerics,
                origin={},
                padding=node.padding,
                packed=packed,
            )
            for name in found.on_grid:
                packing = packing_of(named[name], node.numerics)
                arrays[name] = Stored(named[name], packing)
            nodes[path] = found
        else:
            (name,) = named
            nodes[path] = Plain(name)
    return nodes, arrays


def _field_of(path: str, name: str) -> str:
    """The field of an array of a `QTensor`; a box adds a step below it."""
    first, *below = name.removeprefix(f"{path}/").split("/")
    inner = ".".join((first, *below[:1]))
    return inner if inner in FIELDS else first
