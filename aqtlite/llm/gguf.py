"""The config of a decoder, from the key-value pairs of a GGUF file."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from aqtlite.checkpoint import CheckpointError, QuantizedCheckpoint
from aqtlite.checkpoint.quantized_formats.settings import Settings
from aqtlite.llm.config import DecoderConfig, Rope, linear_factors
from aqtlite.llm.sizes import (
    LARGEST,
    count_of_layers,
    number,
    size_of,
    size_of_heads,
)

_FAMILIES = ("llama", "qwen2", "qwen3", "gemma", "gemma3", "gpt2")
_FACTORS = "rope_freqs.weight"
_SCALINGS = "rope.scaling.factor", "rope.scale_linear"
_LAYERS_OF_27B = 62
_WINDOW = "attention.sliding_window"
_PATTERN = "attention.sliding_window_pattern"

_ABSENT: Mapping[str, tuple[float, ...]] = {
    "final_logit_softcapping": (0,),
    "attn_logit_softcapping": (0,),
    "router_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "use_parallel_residual": (False,),
    "swin_norm": (False,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "nextn_predict_layers": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0, 1),
    "attention.shared_kv_layers": (0,),
    "rope.scaling.attn_factor": (1,),
}
"""Keys for features that a decoder does not have, with the values that turn them off.
"""


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
    _check_absent(settings)
    width, heads = (
        size_of(settings, key) for key in ("embedding_length", "attention.head_count")
    )
    head = size_of_heads(settings, "attention.key_length", width // heads)
    for key in ("attention.key_length_swa", "rope.dimension_count_swa"):
        settings.one_of(key, (head,), head)
    count = count_of_layers(settings, "block_count")
    has_bias = f"blk.0.{'attn_qkv' if family == 'gpt2' else 'attn_q'}.bias"
    eps = "layer_norm" if family == "gpt2" else "layer_norm_rms"
    fields: dict[str, Any] = {
        "vocabulary": table.shape[0],
        "width": width,
        "heads": heads,
        "kv_heads": size_of(settings, "attention.head_count_kv", heads),
        "head_size": head,
        "hidden": size_of(settings, "feed_forward_length"),
        "length": size_of(settings, "context_length"),
        "eps": number(settings, f"attention.{eps}_epsilon", None),
        "qkv_bias": has_bias in source.weights,
        "out_bias": "blk.0.attn_output.bias" in source.weights,
        "mlp_bias": "blk.0.ffn_up.bias" in source.weights,
        "ropes": (_rope(source, settings, head, family),) * count,
        # 0 is none.
        "windows": (settings.integer(_WINDOW, 0, 0, LARGEST) or None,) * count,
        "tied": "output.weight" not in source.weights,
    }
    if family != "gemma3" and settings.values.get(_PATTERN) is not None:
        raise settings.wrong(
            _PATTERN, "missing: patterns of windows are of gemma3 alone"
        )
    fields |= _of_family(family, fields, settings)
    _check_scale(settings, fields)
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
        window = size_of(settings, _WINDOW)
        is_full = _full_layers(settings, count)
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


def _check_absent(settings: Settings) -> None:
    """Refuses what changes the computation, and is no part of a decoder."""
    for key, values in _ABSENT.items():
        given = settings.values.get(key)
        if given is None:
            continue
        if not all(one in values for one in np.ravel(given).tolist()):
            raise settings.wrong(
                key, f"{values[-1]}: the models that are read have no other"
            )


def _check_scale(settings: Settings, fields: dict[str, Any]) -> None:
    """Checks that the factor of scores, if it is given, is that of the family."""
    wanted = fields.get("score_scale") or fields["head_size"] ** -0.5
    given = settings.values.get("attention.scale")
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if given is None or (is_number and given == 0):  # As in llama.cpp.
        return
    if not is_number or not math.isclose(given, wanted, rel_tol=1e-6):
        raise settings.wrong("attention.scale", f"{wanted:.6g}, that of the family")


def _full_layers(settings: Settings, count: int) -> list[bool]:
    """Which layers of Gemma 3 have no window: each sixth, or by a key.

    As in llama.cpp, the key is how many layers end in a full one, 0 for none at all; or
    has a bool for each layer, whether it has a window.
    """
    given = settings.values.get(_PATTERN, 6)
    if isinstance(given, np.ndarray):
        if given.shape != (count,) or not np.isin(given, (0, 1)).all():
            raise settings.wrong(_PATTERN, f"{count} bools")
        return [not one for one in given.tolist()]
    period = settings.integer(_PATTERN, 0, 6)
    return [period != 0 and (i + 1) % period == 0 for i in range(count)]


def _rope(
    source: QuantizedCheckpoint, settings: Settings, size: int, family: str
) -> Rope:
    """The rotary embedding; that of Llama rotates pairs of adjacent channels."""
    default = 1_000_000.0 if family == "gemma3" else 10_000.0
    theta = number(settings, "rope.freq_base", default)
    if settings.integer("rope.dimension_count", 1, size) != size:
        raise settings.wrong("rope.dimension_count", f"{size}, whole heads")
    # As in llama.cpp, a factor alone is linear, and older files have another key.
    given = [key for key in _SCALINGS if not _is_zero(settings.values.get(key))]
    default_kind = "linear" if given else "none"
    kind = settings.one_of("rope.scaling.type", ("none", "linear"), default_kind)
    factors = None
    if kind == "linear":
        factor = number(settings, given[0] if given else _SCALINGS[0], None)
        factors = linear_factors(factor, size)
    if _FACTORS in source.weights:
        factors = _factors(source, size // 2)
    return Rope(theta=theta, factors=factors, interleaved=family == "llama")


def _is_zero(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and value == 0)


def _factors(source: QuantizedCheckpoint, count: int) -> tuple[float, ...]:
    """What the file divides frequencies by.

    Raises:
        CheckpointError: if there is not a positive number for each.
    """
    weight = source.weights[_FACTORS]
    if weight.is_quantized or weight.shape != (count,):
        raise CheckpointError(
            f"{_FACTORS} in {source.path} is {weight}, and heads have {count} "
            "frequencies: it has to be an array of as many factors"
        )
    factors = np.asarray(source[_FACTORS], np.float64)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise CheckpointError(
            f"{_FACTORS} in {source.path} divides frequencies, and holds numbers that "
            "are NaN, infinite or not positive: the file is damaged"
        )
    return tuple(factors.tolist())
