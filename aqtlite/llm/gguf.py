"""The config of a decoder, from the key-value pairs of a GGUF file."""

import math
from typing import Any

import numpy as np

from aqtlite.checkpoint import CheckpointError, QuantizedCheckpoint
from aqtlite.checkpoint.quantized_formats.settings import Settings
from aqtlite.llm.config import DecoderConfig, Rope, linear_factors
from aqtlite.llm.hugging_face import number

_FAMILIES = ("llama", "qwen2", "qwen3", "gemma", "gemma3", "gpt2")
_FACTORS = "rope_freqs.weight"
_SCALINGS = "rope.scaling.factor", "rope.scale_linear"
_LAYERS_OF_27B = 62


def config_of(source: QuantizedCheckpoint) -> DecoderConfig:
    """Reads the config of a decoder, by ``general.architecture``.

    Raises:
        CheckpointError: if the architecture is another, or a key is missing or of
            another type.
    """
    every = Settings(source.metadata, str(source.path))
    family = every.one_of("general.architecture", _FAMILIES)
    prefix = f"{family}."
    own = {
        key.removeprefix(prefix): value
        for key, value in source.metadata.items()
        if key.startswith(prefix)
    }
    settings = Settings(own, f"{source.path}: {family}")
    table = source.weights.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise CheckpointError(f"{source.path} lacks the matrix token_embd.weight")
    width, heads = (
        settings.integer(key, 1) for key in ("embedding_length", "attention.head_count")
    )
    size = settings.integer("attention.key_length", 1, max(width // heads, 1))
    count = settings.integer("block_count", 1)
    has_bias = f"blk.0.{'attn_qkv' if family == 'gpt2' else 'attn_q'}.bias"
    eps = "layer_norm" if family == "gpt2" else "layer_norm_rms"
    fields: dict[str, Any] = {
        "vocabulary": table.shape[0],
        "width": width,
        "heads": heads,
        "kv_heads": settings.integer("attention.head_count_kv", 1, heads),
        "head_size": size,
        "hidden": settings.integer("feed_forward_length", 1),
        "length": settings.integer("context_length", 1),
        "eps": number(settings, f"attention.{eps}_epsilon", None),
        "qkv_bias": has_bias in source.weights,
        "out_bias": "blk.0.attn_output.bias" in source.weights,
        "mlp_bias": "blk.0.ffn_up.bias" in source.weights,
        "ropes": (_rope(source, settings, size, family),) * count,
        # 0 is none.
        "windows": (settings.integer("attention.sliding_window", 0, 0) or None,)
        * count,
        "tied": "output.weight" not in source.weights,
    }
    fields |= _of_family(family, fields, settings)
    try:
        return DecoderConfig(**fields)
    except ValueError as error:
        raise CheckpointError(f"{settings.where}: {error}") from error


def _of_family(
    family: str, fields: dict[str, Any], settings: Settings
) -> dict[str, Any]:
    count = len(fields["ropes"])
    of_gemma = {
        "activation": "gelu_tanh",
        "embedding_scale": math.sqrt(fields["width"]),
    }
    if family == "gpt2":
        return {
            "norm": "layer",
            "activation": "gelu_tanh",
            "gated": False,
            "positions": fields["length"],
            "ropes": (None,) * count,
        }
    if family == "qwen3":
        return {"qk_norm": True}
    if family == "gemma":
        return of_gemma
    if family == "gemma3":
        window = settings.integer("attention.sliding_window", 1)
        is_full = [(i + 1) % 6 == 0 for i in range(count)]
        local = Rope(theta=number(settings, "rope.freq_base_swa", 10_000.0))
        scale = None
        if count == _LAYERS_OF_27B:  # The only size that scales by another width.
            scale = (fields["width"] / fields["heads"]) ** -0.5
        return {
            **of_gemma,
            "score_scale": scale,
            "qk_norm": True,
            "post_norms": True,
            "windows": tuple(None if full else window for full in is_full),
            "ropes": tuple(
                rope if full else local
                for rope, full in zip(fields["ropes"], is_full, strict=True)
            ),
        }
    return {}


def _rope(
    source: QuantizedCheckpoint, settings: Settings, size: int, family: str
) -> Rope:
    """The rotary embedding; that of Llama rotates pairs of adjacent channels."""
    default = 1_000_000.0 if family == "gemma3" else 10_000.0
    theta = number(settings, "rope.freq_base", default)
    if settings.integer("rope.dimension_count", 1, size) != size:
        raise settings.wrong("rope.dimension_count", f"{size}, whole heads")
    # As in llama.cpp, a factor alone is linear, and older files have another key.
    given = [key for key in _SCALINGS if settings.values.get(key)]
    default_kind = "linear" if given else "none"
    kind = settings.one_of("rope.scaling.type", ("none", "linear"), default_kind)
    factors = None
    if kind == "linear":
        factor = number(settings, given[0] if given else _SCALINGS[0], None)
        factors = linear_factors(factor, size)
    if _FACTORS in source.weights:
        factors = tuple(np.asarray(source[_FACTORS], np.float64).tolist())
    return Rope(theta=theta, factors=factors, interleaved=family == "llama")
