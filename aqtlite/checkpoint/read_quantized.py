"""Quantized checkpoints of other libraries: weights by name, read when asked for."""

import contextlib
import os
import pathlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np

from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.formats import local_path
from aqtlite.checkpoint.quantized_formats import (
    awq,
    base,
    bitsandbytes,
    compressed_tensors,
    fp8,
    gguf,
    gptq,
    modelopt,
    mxfp4,
    parts,
    safetensors,
)
from aqtlite.checkpoint.quantized_formats.settings import Settings
from aqtlite.qtensor.qtensor import QTensor

_Plan = Callable[[base.Tensors, Settings], Mapping[str, base.Weight]]

_PLANS: Mapping[str, _Plan] = {
    "awq": awq.plan,
    "bitsandbytes": bitsandbytes.plan,
    "compressed-tensors": compressed_tensors.plan,
    "fp8": fp8.plan,
    "gptq": gptq.plan,
    "modelopt": modelopt.plan,
    "mxfp4": mxfp4.plan,
}
"""Formats by `quant_method` of the config."""


class QuantizedCheckpoint(Mapping[str, QTensor | np.ndarray]):
    """The weights of a checkpoint by the source's own names: a lazy mapping.

    ``checkpoint[name]`` reads one weight, and keeps nothing: memory holds what the
    caller does. `weights` has shapes and kinds without reading.
    """

    def __init__(
        self,
        path: pathlib.Path,
        method: str | None,
        weights: Mapping[str, base.Weight],
        metadata: Mapping[str, Any],
    ):
        self.path = path
        self.method = method
        """Name of the format, as ``quant_method`` or ``gguf``; None for floats."""
        self.weights = weights
        """Shape, kind and size of each weight, by name."""
        self.metadata = metadata
        """The config of the quantization, or the key-value pairs of GGUF."""

    def __getitem__(self, name: str) -> QTensor | np.ndarray:
        # Scales that are not finite are refused.
        with np.errstate(over="ignore", invalid="ignore"), _named(self.path):
            return self.weights[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def load_quantized(path: str | os.PathLike) -> QuantizedCheckpoint:
    """Opens a quantized checkpoint of another library.

    The format is found by the config beside the files: compressed-tensors, GPTQ, AWQ,
    fp8 in blocks, MXFP4 of gpt-oss, ModelOpt, bitsandbytes; or GGUF. Each weight has
    the name and the axes that it has in the source's model, whatever tensors it is
    spread over: a linear layer is (outputs, inputs). What is quantized is a `QTensor`
    with the file's integers, scales and zero points, and its `dequant` returns what the
    format's own decoder computes in float32, bit for bit; other tensors are arrays.

    >>> import pathlib, tempfile
    >>> import aqtlite, numpy as np
    >>> from aqtlite import checkpoint, config, numerics
    >>> q8_0 = config.Tensor(
    ...     numerics=numerics.IntSymmetric(bits=8),
    ...     blocks=config.Blocks(size=32),
    ...     scale_dtype="bfloat16",
    ... )
    >>> q = aqtlite.quantize(np.ones((4, 64), np.float32), q8_0, axes=1)
    >>> path = pathlib.Path(tempfile.mkdtemp(), "tiny.gguf")
    >>> checkpoint.save_quantized(path, {"blk.0.attn_q.weight": q}, format="gguf")
    >>> loaded = checkpoint.load_quantized(path)
    >>> loaded["blk.0.attn_q.weight"]
    QTensor(int8[4,64], scale=float32[4,2], dtype='float32')

    Args:
        path: a ``.gguf`` or ``.safetensors`` file, or a folder of shards in the layout
            of Hugging Face, with their configs.

    Returns:
        A mapping from names to weights, each read when it is asked for.

    Raises:
        CheckpointError: if the format is not known, if tensors are missing, or if their
            dtypes and shapes contradict each other or the config. Reading a weight
            raises it for scales that the format does not allow.
    """
    path = local_path(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    with _named(path):
        return _opened(path)


@contextlib.contextmanager
def _named(path: pathlib.Path) -> Iterator[None]:
    """Names a checkpoint in the errors of its tensors that name no file of it."""
    try:
        yield
    except CheckpointError as error:
        if str(path) in str(error):
            raise
        raise CheckpointError(f"{path}: {error}") from error


def _opened(path: pathlib.Path) -> QuantizedCheckpoint:
    file = _gguf_file(path)
    if file is not None:
        plans, metadata = gguf.plan(file)
        return QuantizedCheckpoint(path, "gguf", plans, metadata)
    if path.is_file() and path.suffix != ".safetensors":
        raise CheckpointError(f"{path} is neither a GGUF nor a .safetensors file")
    method, settings = safetensors.quantization_settings(path)
    if method is not None and method not in _PLANS:
        raise CheckpointError(
            f"{settings.where}: the format {method!r} is not read; "
            f"{', '.join(_PLANS)} and gguf are"
        )
    tensors = safetensors.SafetensorsTensors(path)
    if not tensors.infos:
        raise CheckpointError(f"{path} holds no tensors of safetensors or GGUF")
    if method is None:
        method = _method_of_names(tensors.names)
    found = {} if method is None else _PLANS[method](tensors, settings)
    weights = _with_others(tensors, found, method)
    return QuantizedCheckpoint(path, method, weights, settings.values)


def files_of(path: pathlib.Path) -> list[pathlib.Path]:
    """The files that `load_quantized` reads: parts of a split, configs beside a file.

    Of a folder without GGUF, all that are in it.
    """
    file = _gguf_file(path)
    if file is not None:
        return gguf.parts(file)
    if path.is_file():
        return [path, *safetensors.configs_of(path)]
    return sorted(file for file in path.iterdir() if file.is_file())


def is_quantized(path: pathlib.Path) -> bool:
    """Whether a path says that it is a quantized checkpoint of another library.

    Raises:
        CheckpointError: if it is damaged.
    """
    if _gguf_file(path) is not None:
        return True
    is_folder = path.is_dir() and any(path.glob("*.safetensors"))
    if not is_folder and not (path.is_file() and path.suffix == ".safetensors"):
        return False
    method, _ = safetensors.quantization_settings(path)
    if method is not None:
        return True
    return _method_of_names(safetensors.SafetensorsTensors(path).names) is not None


def _gguf_file(path: pathlib.Path) -> pathlib.Path | None:
    """The GGUF file that a path names: itself, or the only one in a folder."""
    if not path.is_dir():
        is_named = path.suffix == gguf.SUFFIX  # Empty or damaged: the errors say so.
        return path if is_named or gguf.is_file(path) else None
    found = sorted(path.glob(f"*{gguf.SUFFIX}"))
    if not found or any(path.glob("*.safetensors")):
        return None
    if len({gguf.without_part(file) for file in found}) > 1:
        names = ", ".join(file.name for file in found)
        raise CheckpointError(f"{path} holds several models, {names}: name a file")
    return found[0]


def _method_of_names(names: Collection[str]) -> str | None:
    """The format of files that say what they are without a config."""
    if any(".quant_state.bitsandbytes__" in name for name in names):
        return "bitsandbytes"
    for separator in "_.":
        suffix = f"{separator}blocks"
        found = (one.removesuffix(suffix) for one in names if one.endswith(suffix))
        if any(f"{one}{separator}scales" in names for one in found):
            return "mxfp4"
    return None


def _with_others(
    tensors: base.Tensors, found: Mapping[str, base.Weight], method: str | None
) -> Mapping[str, base.Weight]:
    """Adds the tensors that are arrays by themselves.

    Raises:
        CheckpointError: if one is a part of a quantized weight that was not found.
    """
    used = {name for one in found.values() for name in one.tensors}
    weights = dict(found)
    for name, info in tensors.infos.items():
        if name in used:
            continue
        is_expert = method == "mxfp4" and name.endswith(("blocks", "scales"))
        has_config = method is not None
        is_part = parts.is_part(name, info, tensors.infos, has_config=has_config)
        if is_part or is_expert:
            why = f"the config ({method}) does not explain"
            if method is None:
                why = "no config beside it explains"
            raise CheckpointError(
                f"{name} in {tensors.where} is {info}, a part of a quantized weight "
                f"that {why}: other tensors of it are missing, or the "
                "format or layout is another, which is not read"
            )
        if name in weights:
            raise CheckpointError(
                f"{tensors.where} holds {name} quantized and in float"
            )
        read = _reader(tensors, name)
        kind = info.dtype.name
        weights[name] = base.Weight(
            info.shape, kind, (name,), info.nbytes, read, info.dtype, is_quantized=False
        )
    order = {name: place for place, name in enumerate(tensors.infos)}
    return dict(sorted(weights.items(), key=lambda one: order[one[1].tensors[0]]))


def _reader(tensors: base.Tensors, name: str) -> Callable[[], np.ndarray]:
    return lambda: tensors.read(name)
