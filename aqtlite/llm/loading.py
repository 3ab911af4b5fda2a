"""From a checkpoint to a decoder, without a float copy of what is quantized."""

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import aqtlite
from aqtlite import config
from aqtlite.checkpoint import (
    CheckpointError,
    Move,
    QuantizedCheckpoint,
    config_of,
    fill,
    load_quantized,
    move_weights,
)
from aqtlite.checkpoint.arrays import is_finite
from aqtlite.checkpoint.names import path_name
from aqtlite.checkpoint.quantized_formats.settings import Settings, read_json
from aqtlite.llm import gguf, hugging_face, names
from aqtlite.llm.config import DecoderConfig
from aqtlite.llm.decoder import Decoder
from aqtlite.llm.layers import Weight
from aqtlite.llm.linen_decoder import LinenDecoder
from aqtlite.qtensor.qtensor import QTensor, dequantized


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A decoder, and what became of the weights of its file."""

    decoder: Decoder

    kept: tuple[str, ...]
    """Weights whose integers are the file's."""

    rounded: tuple[str, ...]
    """Weights that were floats, and are integers by the config."""

    rounded_again: tuple[str, ...]
    """Weights that were quantized on a grid that contractions do not take (GGUF's with
    minima), or tables in blocks of several rows, and are integers by the config."""

    decoded: tuple[str, ...]
    """Weights like these, without a config: they are floats."""

    def summary(self) -> str:
        """What became of the weights, in a line."""
        counts = {
            "kept as the file's integers": self.kept,
            "rounded": self.rounded,
            "rounded again": self.rounded_again,
            "decoded to floats": self.decoded,
        }
        texts = [f"{len(one)} {text}" for text, one in counts.items() if one]
        return f"matrices: {', '.join(texts) or 'all in float'}"


def moves_of(path: str | os.PathLike) -> tuple[DecoderConfig, tuple[Move, ...]]:
    """The config of a checkpoint's model, and the map to a `Decoder`.

    Args:
        path: a folder of Hugging Face with its ``config.json``, or a GGUF file.

    Raises:
        CheckpointError: if the checkpoint is damaged, or of another family.
    """
    return _moves(load_quantized(path))


def _moves(source: QuantizedCheckpoint) -> tuple[DecoderConfig, tuple[Move, ...]]:
    if source.method == "gguf":
        cfg = gguf.config_of(source)
        _check_layers(cfg, source)
        return cfg, names.of_gguf(cfg)
    folder = source.path if source.path.is_dir() else source.path.parent
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(
            f"{folder} lacks config.json, which says what model the weights are of"
        )
    settings = Settings(read_json(file), str(file))
    cfg = hugging_face.config_of(settings, has_head="lm_head.weight" in source)
    _check_layers(cfg, source)
    family = settings.values["model_type"]
    prefix = "transformer."
    has_prefix = family == "gpt2" and any(name.startswith(prefix) for name in source)
    quantized = {
        name.removeprefix(prefix) if has_prefix else name
        for name, weight in source.weights.items()
        if weight.is_quantized
    }
    moves = names.of_hugging_face(family, cfg, quantized)
    return cfg, names.with_prefix(moves, prefix) if has_prefix else moves


def _check_layers(cfg: DecoderConfig, source: QuantizedCheckpoint) -> None:
    """Refuses layers that cannot be there, before they take the time to be made."""
    if cfg.layers > len(source):
        raise CheckpointError(
            f"{source.path}: the config has {cfg.layers} layers, and the checkpoint "
            f"{len(source)} tensors: it is of another model, or a shard is missing"
        )


def load(
    path: str | os.PathLike,
    cfg: config.DotGeneral | None = None,
    *,
    dtype: Any = jnp.float32,
) -> Loaded:
    """Loads the decoder of a checkpoint, one weight after the other.

    All names and shapes are checked before a weight is read. Integers of a quantized
    file are contracted as they are: no float copy is made of them, not even for a
    moment, where they are only moved.

    Args:
        path: a folder of Hugging Face (``config.json`` and ``.safetensors``), in float
            or quantized as `checkpoint.load_quantized` reads it; or a GGUF file. The
            families are Llama, Mistral, Qwen 2 and 3, Gemma 1 and 3, and GPT-2.
        cfg: how matrices are contracted, such as ``config.weight_only(4)``: float ones
            are quantized by ``cfg.fwd.rhs``; for integers of the file, activations are
            quantized by ``cfg.fwd.lhs``. None leaves float ones in float, and
            contracts floats with integers.
        dtype: dtype of float weights, activations and float caches.

    Raises:
        CheckpointError: if the checkpoint is damaged, of another family, or not
            complete.
        ValueError: if `cfg` needs statistics, rotates, smooths or quantizes results, or
            has blocks of several rows, and the table of embeddings gives the logits.
    """
    if cfg is not None:
        check_config(cfg)
    source = load_quantized(path)
    of_decoder, moves = _moves(source)
    make = functools.partial(Decoder, of_decoder, dtype=dtype)
    decoder = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
    shapes = nnx.to_pure_dict(nnx.state(decoder))
    weights = move_weights(source, moves, shapes)
    matrices = {
        "/".join(map(str, path)): module
        for path, module in nnx.iter_modules(decoder)
        if isinstance(module, Weight)
    }
    fates: dict[str, list[str]] = {"kept": [], "rounded": [], "again": [], "off": []}
    for name in weights:
        module, _, leaf = name.rpartition("/")
        value = weights[name]
        _check_finite(name, value, source)
        if leaf == "weight" and module in matrices:
            fate = _put(matrices[module], module, of_decoder, value, cfg, dtype)
            if fate is not None:
                fates[fate].append(name)
            continue
        _variable(decoder, name).set_value(_float(value, dtype))
    return Loaded(
        decoder, *(tuple(fates[key]) for key in ("kept", "rounded", "again", "off"))
    )


def load_linen(
    path: str | os.PathLike, *, dtype: Any = jnp.float32, scan_layers: bool = False
) -> tuple[LinenDecoder, dict[str, Any]]:
    """Loads a checkpoint as a Linen model, quantized weights as `QTensor`s.

    A model of a float file is called as it is; `aqtlite.flax.convert` freezes both, and
    keeps the integers of a quantized file where the rules' config has its grid and
    blocks (`checkpoint.config_of`), stacked layers too.

    Args:
        path: as in `load`.
        dtype: dtype of weights and activations.
        scan_layers: whether weights of layers are stacked, for a scan over them.

    Returns:
        The model, and its variables.

    Raises:
        CheckpointError: if the checkpoint is damaged, of another family, or not
            complete.
    """
    source = load_quantized(path)
    of_decoder, moves = _moves(source)
    model = LinenDecoder(of_decoder, dtype=dtype, scan_layers=scan_layers)
    token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), token)
    to_linen = names.of_linen(moves, scan_layers=scan_layers)
    variables: dict[str, Any] = fill(shapes, move_weights(source, to_linen, shapes))
    leaves = jax.tree.leaves_with_path(
        variables, is_leaf=lambda x: isinstance(x, QTensor)
    )
    for keys, value in leaves:
        _check_finite(path_name(keys), value, source)
    return model, variables


def _check_finite(name: str, value: Any, source: QuantizedCheckpoint) -> None:
    """Checks a float weight, as the scales of quantized ones are when they are read.

    A decoder with one NaN would generate the token 0 for ever.
    """
    if not isinstance(value, QTensor) and not is_finite(np.asarray(value)):
        raise CheckpointError(
            f"{source.path}: the weight {name} holds NaN or infinities: the checkpoint "
            "is damaged, or its training diverged"
        )


def _put(
    matrix: Weight,
    name: str,
    of_decoder: DecoderConfig,
    value: Any,
    cfg: config.DotGeneral | None,
    dtype: Any,
) -> str | None:
    """Gives a matrix its weight; returns what became of it."""
    is_contracted = name != "positions" and (name != "tokens" or of_decoder.tied)
    if isinstance(value, QTensor) and _stays(value, name):
        base = config.weight_only() if cfg is None else cfg
        own = config.update(base, {"fwd.rhs": config_of(value, axes=1)})
        arrays = jax.tree.map(jnp.asarray, value)
        matrix.set_quantized(arrays.astype(dtype), own)
        return "kept"
    was_quantized = isinstance(value, QTensor)
    floats = _float(value, dtype)
    if cfg is None or not cfg.fwd.rhs.is_quantized or not is_contracted:
        matrix.weight.set_value(floats)
        return "off" if was_quantized else None
    rounded = quantized_by(floats, cfg.fwd.rhs)
    if name == "tokens" and _has_blocks_of_rows(rounded):
        raise ValueError(
            f"fwd.rhs.blocks={cfg.fwd.rhs.blocks!r} gives several rows of a matrix one "
            "scale, and this model computes logits with its table of embeddings, of "
            "which single rows are looked up: set fwd.rhs.blocks.remaining_size=1"
        )
    matrix.set_quantized(rounded, cfg)
    return "again" if was_quantized else "rounded"


def _stays(q: QTensor, name: str) -> bool:
    """Whether the integers of a file can be contracted, and looked up in a table."""
    is_table = name in ("tokens", "positions")
    return q.offset is None and not (is_table and _has_blocks_of_rows(q))


def _has_blocks_of_rows(q: QTensor) -> bool:
    return q.in_own_order().scale.shape[0] not in (1, q.shape[0])


@functools.partial(jax.jit, static_argnums=1)
def quantized_by(x: jax.Array, tensor: config.Tensor) -> QTensor:
    """Quantizes a matrix (outputs, inputs)."""
    return aqtlite.quantize(x, tensor, axes=1)


def _float(value: Any, dtype: Any) -> jax.Array:
    return jnp.asarray(np.asarray(dequantized(value)).astype(dtype))


def _variable(model: nnx.Module, name: str) -> nnx.Variable:
    """The variable at a path."""
    node: Any = model
    for step in name.split("/"):
        node = node[int(step)] if step.isdecimal() else getattr(node, step)
    variable: nnx.Variable = node
    return variable


def check_config(cfg: config.DotGeneral) -> None:
    """Checks that weights can be quantized by a config without data.

    Raises:
        TypeError: if it is no `config.DotGeneral`.
        ValueError: if it needs statistics, learned scales, the weights of pairs or a
            conversion, or quantizes results.
    """
    if not isinstance(cfg, config.DotGeneral):
        raise TypeError(f"cfg is a config.DotGeneral, got {type(cfg).__name__}")
    fwd = cfg.fwd
    given: Mapping[str, Any] = {
        "fwd.rotation": fwd.rotation,
        "fwd.smoothing": fwd.smoothing,
        "fwd.rhs.rounding": fwd.rhs.rounding,
        "fwd.rhs.double_scales": fwd.rhs.double_scales,
    }
    for path, value in given.items():
        if value is not None:
            raise ValueError(
                f"{path}={value!r} takes a conversion (aqtlite convert); leave it None "
                "to quantize weights as they are loaded"
            )
    if cfg.out.is_quantized:
        raise ValueError(
            f"out={cfg.out!r} would quantize the results of matrices, which a decoder "
            "computes with; leave it float"
        )
    for path, one in (("fwd.lhs", fwd.lhs), ("fwd.rhs", fwd.rhs)):
        if one.calibration.needs_state:
            raise ValueError(
                f"{path}.calibration={one.calibration!r} takes statistics or training "
                "(aqtlite convert); calibration.AbsMax() looks at the array alone"
            )
