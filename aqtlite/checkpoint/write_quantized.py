"""Quantized checkpoints in the formats of other libraries, written."""

import collections
import functools
import json
import os
import pathlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from aqtlite.checkpoint import one_process
from aqtlite.checkpoint.arrays import ArrayInfo, LazyArray
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.formats import local_path
from aqtlite.checkpoint.formats.safetensors import SafetensorsWriter
from aqtlite.checkpoint.names import name_of, steps_of
from aqtlite.checkpoint.new_path import new_path
from aqtlite.checkpoint.quantized_formats import (
    parts,
    write_compressed_tensors,
    write_gguf,
    write_gptq,
)
from aqtlite.qtensor.qtensor import QTensor

Format = Literal["compressed-tensors", "gptq", "gguf"]

_Weights = Mapping[str, Any]
_Spread = Callable[[str, QTensor], tuple[Any, dict[str, np.ndarray]]]


def save_quantized(
    path: str | os.PathLike,
    weights: _Weights,
    *,
    format: Format,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Writes weights in a format that servers of other libraries read.

    Integers, scales and zero points are stored as they are, and never rounded: weights
    that a format cannot hold exactly are refused. `load_quantized` reads the result.

    ================== ======================================================
    format             quantized weights
    ================== ======================================================
    compressed-tensors integers of 1 to 8 bits by output or group, fp8, MXFP4
    gptq               integers of 2, 3, 4 or 8 bits, all alike
    gguf               Q8_0, Q4_0, Q4_1, MXFP4
    ================== ======================================================

    GPTQ and GGUF have scales of 16 bits: quantize with ``scale_dtype="bfloat16"``.

    Args:
        path: a new file for GGUF, a new folder for the others.
        weights: `QTensor`s and arrays by name. Quantized weights of compressed-tensors
            and GPTQ are (outputs, inputs) and named ``MODULE.weight``: a JAX kernel is
            transposed (`QTensor.T`). A lazy mapping is read twice, one at a time.
        format: the format.
        metadata: ``config.json`` of the model without its quantization, or the
            key-value pairs of GGUF, of which llama.cpp needs ``general.architecture``;
            fractions of Python become float32, which it reads, and NumPy's stay.

    Raises:
        CheckpointError: if the path exists, or a weight does not fit the format, or has
            parts in other processes.
        UnwritableError: if the disk is full, or the folder cannot be written into.
    """
    path = local_path(path)
    if format not in get_args(Format):
        names = ", ".join(get_args(Format))
        raise CheckpointError(f"format={format!r} is not written; {names} are")
    for name in weights:
        if not isinstance(name, str) or not _is_unicode(name):
            raise CheckpointError(f"names of weights are texts in UTF-8, not {name!r}")
    write = _write_gguf if format == "gguf" else _write_folder
    with new_path(path) as unfinished:
        write(unfinished, weights, format, metadata or {})


def _is_unicode(text: str) -> bool:
    """Whether a text has no half of a pair of code units."""
    return text.encode(errors="replace") == text.encode(errors="ignore")


def _write_gguf(
    path: pathlib.Path, weights: _Weights, format_: str, metadata: Mapping[str, Any]
) -> None:
    del format_
    write_gguf.write(path, list(weights), functools.partial(_own, weights), metadata)


def _write_folder(
    path: pathlib.Path, weights: _Weights, format_: str, metadata: Mapping[str, Any]
) -> None:
    spread: _Spread = write_compressed_tensors.pieces
    if format_ == "gptq":
        spread = write_gptq.pieces
    _json(metadata)  # Checked before weights are read.
    arrays: list[LazyArray] = []
    schemes: dict[str, Any] = {}
    in_float = []
    for name in weights:
        if not {*"/%"}.isdisjoint(name):
            raise CheckpointError(
                f"{name}: {format_} separates the levels of names by dots, and has no "
                "'/' or '%'; rename it"
            )
        weight = _own(weights, name)
        module = name.removesuffix(".weight")
        if isinstance(weight, QTensor):
            if module == name:
                raise CheckpointError(
                    f"{name} is quantized: {format_} names such weights MODULE.weight"
                )
            schemes[module], pieces = spread(module, weight)
            arrays += _lazy(weights, name, module, spread, pieces)
        else:
            info = ArrayInfo(np.shape(weight), np.asarray(weight).dtype)
            _check_no_part(name, info, weights, format_)
            arrays.append(LazyArray(_name(name), info, _reader(weights, name)))
            if module != name and len(info.shape) >= 2:
                in_float.append(module)
    if not schemes:
        raise CheckpointError(f"no weight is quantized, and {format_} is for those")
    if format_ == "gptq":
        quantization = _common(schemes).config(in_float)
    else:
        quantization = write_compressed_tensors.config(schemes, in_float)
    _check_names(arrays, schemes, format_)
    SafetensorsWriter().check({array.name: array.info for array in arrays})
    path.mkdir()
    SafetensorsWriter().write(path / "model.safetensors", arrays, str)
    config = {**metadata, "quantization_config": quantization}
    (path / "config.json").write_text(_json(config) + "\n")


def _json(values: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(values), indent=2)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"metadata is what config.json has besides, in JSON: {error}; give numbers "
            "of Python, texts, lists and dicts with texts as keys"
        ) from error


def _check_no_part(name: str, info: ArrayInfo, weights: _Weights, format_: str) -> None:
    """Refuses an array that a reader takes for a part of a quantized weight."""
    if parts.is_part(name, info, weights, has_config=True):
        raise CheckpointError(
            f"{name}, {info}, would be read as a part of a quantized weight, by its "
            f"name or dtype ({format_}): rename it, leave it out, or make it float32"
        )


def _check_names(
    arrays: Sequence[LazyArray], modules: Collection[str], format_: str
) -> None:
    """Refuses an array that has the name of a tensor of a quantized weight."""
    counts = collections.Counter(array.name for array in arrays)
    for name, count in counts.items():
        if count > 1:
            key = ".".join(steps_of(name))
            module = next(one for one in modules if key.startswith(f"{one}."))
            raise CheckpointError(
                f"{key} is an array, and {format_} stores a part of {module}.weight, "
                "which is quantized, under this name: rename one of the two"
            )


def _own(weights: _Weights, name: str) -> Any:
    return one_process.own(weights[name], name)


def _lazy(
    weights: _Weights,
    name: str,
    module: str,
    spread: _Spread,
    pieces: Mapping[str, np.ndarray],
) -> Iterator[LazyArray]:
    """The tensors of a weight, made once more when they are written."""
    made: dict[str, np.ndarray] = {}

    def read(part: str) -> np.ndarray:
        if part not in made:
            made.update(spread(module, weights[name])[1])
        return made.pop(part)

    for part, array in pieces.items():
        info = ArrayInfo(array.shape, array.dtype)
        full = _name(f"{module}.{part}")
        yield LazyArray(full, info, functools.partial(read, part))


def _name(key: str) -> str:
    return name_of(key.split("."))


def _reader(weights: _Weights, name: str) -> Callable[[], np.ndarray]:
    return lambda: np.asarray(weights[name])


def _common(schemes: Mapping[str, write_gptq.Scheme]) -> write_gptq.Scheme:
    (first, one), *others = schemes.items()
    for module, scheme in others:
        if scheme != one:
            raise CheckpointError(
                f"GPTQ has one width and group size for all weights: {first} has "
                f"{one}, and {module} {scheme}"
            )
    return one
