"""Serialization of manifests as JSON, and validation when they are read."""

import dataclasses
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import aqtlite
from aqtlite import config
from aqtlite.checkpoint import manifest_digest
from aqtlite.checkpoint import sample as sample_lib
from aqtlite.checkpoint.arrays import ArrayInfo
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.manifest import (
    DOUBLE_SCALES,
    FIELDS,
    FRAMEWORKS,
    LINEN,
    NNX,
    Frozen,
    Manifest,
    Node,
    Plain,
    Stored,
)
from aqtlite.checkpoint.names import check_tree
from aqtlite.checkpoint.packing import Packing, packing_of
from aqtlite.config.json import json_text, registry, serialization
from aqtlite.flax.linen.frozen_kernel import FrozenKernel
from aqtlite.numerics import Numerics
from aqtlite.operations import SIDES
from aqtlite.program.serving.frozen_record import FrozenRecord, Operand
from aqtlite.program.serving.identity import Identity
from aqtlite.qtensor.packed_values import PackedValues
from aqtlite.quantization.states.stored_statistics import is_obsolete

FORMAT = 4
"""Version of the format, incremented by every change that older readers cannot read."""

_WITHOUT_DOUBLE_SCALES = 3
"""Version of manifests without scales in 8 bits, the oldest that is read."""


def to_json(manifest: Manifest) -> str:
    """Writes a manifest; the length of the text does not depend on measured values.

    Measured values are the checksums and the signal-to-noise ratios.
    """
    configs: list[config.DotGeneral] = []
    nodes = {path: _encode_node(node, configs) for path, node in manifest.nodes.items()}
    has_double_scales = any(DOUBLE_SCALES[0] in node for node in nodes.values())
    data = {
        "format": FORMAT if has_double_scales else _WITHOUT_DOUBLE_SCALES,
        "version": manifest.version,
        "framework": manifest.framework,
        "model": manifest.model,
        "sample": manifest.sample,
        "configs": [json.loads(config.to_json(cfg)) for cfg in configs],
        "nodes": nodes,
        "arrays": {name: _encode_stored(one) for name, one in manifest.arrays.items()},
    }
    return json.dumps(manifest_digest.added(data))


def from_json(text: str, where: str) -> Manifest:
    """Reads a manifest.

    Args:
        text: the JSON.
        where: path of the checkpoint, for error messages.

    Raises:
        CheckpointError: if the text is not a manifest, was changed after it was
            written, is of another format version, or names a class that is not
            registered.
    """
    try:
        data = json_text.read(text)
        found = data["format"]
        if type(found) is not int:
            raise TypeError(f"a format of {found!r}")
        if found > FORMAT:
            raise CheckpointError(
                f"{where} was written in format {found} by aqtlite {data['version']}; "
                f"this is aqtlite {aqtlite.__version__}, which reads formats up to "
                f"{FORMAT}: upgrade it"
            )
        if found < _WITHOUT_DOUBLE_SCALES:
            raise CheckpointError(
                f"{where} was written in format {found} by aqtlite {data['version']}, "
                f"which this aqtlite {aqtlite.__version__} does not read: convert again"
            )
        manifest_digest.check(data, where)
        configs = [serialization.from_data(cfg) for cfg in data["configs"]]
        nodes, arrays = (
            {k: v for k, v in data[part].items() if not is_obsolete(k, data[part])}
            for part in ("nodes", "arrays")
        )
        manifest = Manifest(
            nodes={k: _decode_node(v, configs) for k, v in nodes.items()},
            arrays={k: _decode_stored(v) for k, v in arrays.items()},
            model=str(data["model"]),
            sample=data["sample"],
            framework=str(data.get("framework", LINEN)),
            version=str(data["version"]),
        )
        if manifest.framework not in FRAMEWORKS:
            raise ValueError(f"a model of the framework {manifest.framework!r}")
        check_tree(manifest.nodes, f"the manifest of {where}")
        _check_references(manifest)
        if manifest.sample is not None or manifest.framework == NNX:
            sample_lib.check(manifest.sample)
    except CheckpointError:
        raise
    except registry.UnknownClassError as error:
        raise CheckpointError(
            f"{where} names a class of a user's own, which this program does not know: "
            "import the module that registers it first (aqtlite show --import MODULE); "
            f"{error}"
        ) from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise CheckpointError(
            f"the manifest of {where} is damaged: {type(error).__name__}: {error}"
        ) from error
    return manifest


def _check_references(manifest: Manifest) -> None:
    """Checks that each array belongs to one node, with a name below the node's path."""
    unused = set(manifest.arrays)
    for path, node in manifest.nodes.items():
        named: dict[str, str] = {}
        grids: dict[str, Any] = {}
        if isinstance(node, Plain):
            named = {path: node.array}
        elif isinstance(node, Frozen):
            named = {
                f"{path}/{field.replace('.', '/')}": name
                for field, name in node.arrays.items()
            }
            grids = dict.fromkeys(node.on_grid, node.numerics)
        for above, name in named.items():
            if name not in unused:
                raise ValueError(f"{path} names an array {name!r} that is not there")
            if name != above and not name.startswith(f"{above}/"):
                raise ValueError(f"{path} names an array of another node, {name!r}")
            unused.remove(name)
            stored = manifest.arrays[name]
            if not _is_packed(stored, grids.get(name)):
                raise ValueError(
                    f"{name}, {stored.info}, is packed as {stored.packing}"
                )
        if isinstance(node, Frozen):
            shape = node.shape(manifest.arrays)
            _check_axes(path, node.order, node.padding, shape)
    if unused:
        raise ValueError(f"no node names the array {min(unused)!r}")


def _is_packed(stored: Stored, grid: Any) -> bool:
    """Whether an array is packed as it is today, or was once.

    All were once packed along the last axis, and values of unsigned grids of 2 bits in
    as many bits as their dtype has. Integers of several bytes, as zero points are in
    memory, were not packed.
    """
    expected = packing_of(stored.info, grid)
    if stored.packing is None:
        return expected is None or stored.info.dtype.itemsize > 1
    if expected is None:
        return False
    several = filter(None, (expected, packing_of(stored.info)))
    return any(
        stored.packing in (one, dataclasses.replace(one, axis=-1)) for one in several
    )


def _check_axes(
    path: str,
    order: tuple[int, ...] | None,
    padding: tuple[int, ...] | None,
    shape: tuple[int, ...],
) -> None:
    """Checks the axis order and the padding of a frozen weight."""
    rank = len(padding or order or ())
    order = tuple(range(rank)) if order is None else order
    if sorted(order) != list(range(len(order))) or len(order) > len(shape):
        raise ValueError(f"{path} of shape {shape} has its axes in the order {order}")
    if padding is None:
        return
    stored = shape[len(shape) - rank :]
    if rank != len(order) or not all(
        isinstance(padding[axis], int) and 0 <= padding[axis] <= size
        for axis, size in zip(order, stored, strict=True)
    ):
        raise ValueError(f"{path} of shape {shape} is padded by {padding}")


def _encode_stored(stored: Stored) -> dict[str, Any]:
    packing = stored.packing
    packed: dict[str, Any] = {}
    if packing is not None:
        packed = {"packed": dataclasses.asdict(packing)}
        if packing.axis == -1:
            del packed["packed"]["axis"]
    return {
        **_encode_info(stored.info),
        **packed,
        "crc32": f"{stored.checksum or 0:08x}",
    }


def _decode_stored(data: Any) -> Stored:
    info = _decode_info(data)
    packing = Packing(**data["packed"]) if "packed" in data else None
    return Stored(info, packing, int(data["crc32"], 16))


def _encode_info(info: ArrayInfo) -> dict[str, Any]:
    return {"shape": info.shape, "dtype": info.dtype.name}


def _decode_info(data: Any) -> ArrayInfo:
    shape = tuple(int(size) for size in data["shape"])
    if min(shape, default=0) < 0:
        raise ValueError(f"a shape of {shape}")
    return ArrayInfo(shape, json_text.dtype(data["dtype"]))


def _encode_node(node: Node, configs: list[config.DotGeneral]) -> dict[str, Any]:
    match node:
        case Plain():
            return {"kind": "array", "array": node.array}
        case Frozen():
            decibels = float("nan") if node.decibels is None else node.decibels
            return {
                "kind": "frozen",
                **node.arrays,
                "dtype": node.dtype.name,
                "order": node.order,
                **({} if node.padding is None else {"padding": node.padding}),
                **({} if node.packed is None else _encode_packed(node.packed)),
                "numerics": _encode_numerics(node.numerics),
                "origin": {k: _encode_info(v) for k, v in node.origin.items()},
                "decibels": f"{decibels:8.2f}",
            }
        case FrozenKernel():
            info = ArrayInfo(node.shape, np.dtype(node.dtype))
            return {
                "kind": "kernel",
                **_encode_info(info),
                "number": node.number,
                "sliced": node.sliced,
                **({} if node.marker is None else {"marker": node.marker.shape}),
            }
        case FrozenRecord():
            if node.cfg not in configs:
                configs.append(node.cfg)
            return {
                "kind": "site",
                "config": configs.index(node.cfg),
                "side": node.operand.side,
                "shape": node.operand.shape,
                "contracting": node.operand.contracting,
                "dtype": np.dtype(node.operand.dtype).name,
                "identity": node.identity,
                "made_of": node.made_of,
                "beside_floats": node.beside_floats,
                "removed": node.removed,
                "state": node.state,
            }


def _encode_packed(packed: PackedValues) -> dict[str, Any]:
    info = ArrayInfo(packed.shape_of_one, packed.dtype)
    return {"packed": {**_encode_info(info), "contracted": packed.contracted}}


def _decode_packed(data: Any) -> PackedValues:
    info, contracted = _decode_info(data), int(data["contracted"])
    if info.dtype.name not in ("int4", "int8") or not 0 < contracted < len(info.shape):
        raise ValueError(f"{info} packed with {contracted} contracted axes")
    return PackedValues(None, info.shape, contracted, info.dtype)


def _encode_numerics(numerics: Numerics | None) -> Any:
    """Encodes a grid as in the JSON of a `config.Tensor`."""
    if numerics is None:
        return None
    return json.loads(config.to_json(config.Tensor(numerics=numerics)))["numerics"]


def _decode_numerics(data: Any) -> Numerics | None:
    if data is None:
        return None
    numerics = serialization.object_from_data(data, "numerics")
    if not isinstance(numerics, Numerics):
        raise TypeError(f"a grid of {data!r}")
    return numerics


def _decode_node(data: Any, configs: list[Any]) -> Node:
    match data["kind"]:
        case "array":
            return Plain(str(data["array"]))
        case "frozen":
            decibels = float(data["decibels"])
            dtype = json_text.dtype(data["dtype"])
            if not jnp.issubdtype(dtype, jnp.floating):
                raise ValueError(f"a frozen weight of {dtype}")
            fields = [one for one in FIELDS if one in data]
            if fields[:2] != ["qvalue", "scale"] and fields[:4] != [
                "qvalue",
                *DOUBLE_SCALES,
            ]:
                raise ValueError(f"a frozen weight of {sorted(data)}")
            return Frozen(
                arrays={one: str(data[one]) for one in fields},
                dtype=dtype,
                order=None if data["order"] is None else tuple(data["order"]),
                numerics=_decode_numerics(data["numerics"]),
                origin={k: _decode_info(v) for k, v in data["origin"].items()},
                padding=tuple(data["padding"]) if "padding" in data else None,
                packed=_decode_packed(data["packed"]) if "packed" in data else None,
                decibels=None if np.isnan(decibels) else decibels,
            )
        case "kernel":
            info = _decode_info(data)
            sliced = tuple(bool(one) for one in data["sliced"])
            if len(sliced) not in (0, len(info.shape)):
                raise ValueError(f"a kernel of {info} is sliced along {sliced}")
            kernel = FrozenKernel(info.shape, info.dtype, int(data["number"]), sliced)
            marker = jax.ShapeDtypeStruct(_marker_shape(data, kernel), np.float32)
            return dataclasses.replace(kernel, marker=marker)
        case "site":
            info = _decode_info(data)
            identity, side = data["identity"], data["side"]
            if side not in SIDES:
                raise ValueError(f"an operand of the unknown side {side!r}")
            return FrozenRecord(
                cfg=configs[data["config"]],
                operand=Operand(
                    side,
                    info.shape,
                    tuple(int(axis) for axis in data["contracting"]),
                    info.dtype,
                ),
                identity=_decode_identity(identity),
                made_of=tuple(str(name) for name in data["made_of"]),
                beside_floats=bool(data["beside_floats"]),
                removed=_decode_removed(data.get("removed")),
                # Absent in older manifests.
                state=tuple(str(step) for step in data.get("state", ())),
            )
        case kind:
            raise ValueError(f"a node of unknown kind {kind!r}")


_LARGEST_MARKER = 2**20
"""Number of elements that no marker of a model has: Flax slices along few axes."""


def _marker_shape(data: Any, kernel: FrozenKernel) -> tuple[int, ...]:
    """Decodes the shape of a marker, of the axes along which Flax slices a kernel."""
    if "marker" not in data:
        # Written before. Weights are slices along every axis along which Flax slices.
        sliced = kernel.sliced or (False,) * len(kernel.shape)
        sizes = zip(kernel.shape, sliced, strict=True)
        shape = tuple(n if is_sliced else 1 for n, is_sliced in sizes)
        return shape if math.prod(shape) <= _LARGEST_MARKER else ()
    shape = tuple(int(n) for n in data["marker"])
    fits = not shape or (
        len(shape) == len(kernel.shape)
        and all(n in (1, size) for n, size in zip(shape, kernel.shape, strict=True))
    )
    if not fits or math.prod(shape) > _LARGEST_MARKER:
        raise ValueError(f"a kernel of shape {kernel.shape} with a marker of {shape}")
    return shape


def _decode_removed(data: Any) -> tuple[str, ...] | None:
    """Decodes the names of removed parameters; None for manifests without them."""
    return None if data is None else tuple(str(name) for name in data)


def _decode_identity(data: Any) -> Identity | None:
    if data is None or isinstance(data, str):
        return data
    return tuple(None if x is None else float(x) for x in data)
