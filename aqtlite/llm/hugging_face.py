"""The config of a decoder, from the ``config.json`` of Hugging Face."""

import math
from collections.abc import Callable
from typing import Any

from aqtlite.checkpoint import CheckpointError
from aqtlite.checkpoint.quantized_formats.settings import Settings
from aqtlite.llm.config import DecoderConfig, Rope, linear_factors, llama3_factors
from aqtlite.llm.sizes import count_of_layers, number, size_of, size_of_heads

_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def config_of(settings: Settings, *, has_head: bool) -> DecoderConfig:
    """Reads the config of a decoder.

    What a config leaves out has the default of its class in `transformers`.

    Args:
        settings: contents of ``config.json``.
        has_head: whether the checkpoint holds a matrix for logits.

    Raises:
        CheckpointError: if the family is another, a field is missing or of another
            type, or the model has a part that the decoder lacks.
    """
    family = settings.one_of("model_type", tuple(_FAMILIES))
    if settings.values.get("tie_word_embeddings") is not None:
        has_head = not settings.flag("tie_word_embeddings", default=False)
    fields = {**_FAMILIES[family](settings), "tied": not has_head}
    try:
        return DecoderConfig(**fields)
    except ValueError as error:
        raise CheckpointError(f"{settings.where}: {error}") from error


def _common(
    settings: Settings, *, eps: float = 1e-6, bias: bool = False, kv: int | None = None
) -> dict[str, Any]:
    """The fields that Llama and its descendants share."""
    width = size_of(settings, "hidden_size")
    heads = size_of(settings, "num_attention_heads")
    bias = settings.flag("attention_bias", bias)
    head = size_of_heads(settings, "head_dim", width // heads)
    fields = {
        "vocabulary": size_of(settings, "vocab_size"),
        "width": width,
        "heads": heads,
        "kv_heads": size_of(settings, "num_key_value_heads", kv or heads),
        "head_size": head,
        "hidden": size_of(settings, "intermediate_size"),
        "length": size_of(settings, "max_position_embeddings", 2048),
        "eps": number(settings, "rms_norm_eps", eps),
        "activation": _activation(settings, "hidden_act", "silu"),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": settings.flag("mlp_bias", default=False),
    }
    rope = _rope(settings, head, 10_000.0)
    return {**fields, **_layers(settings, rope)}


def _llama(settings: Settings) -> dict[str, Any]:
    return _common(settings)


def _mistral(settings: Settings) -> dict[str, Any]:
    fields = _common(settings, kv=8)
    if settings.values.get("layer_types") is not None:
        return fields
    return {**fields, "windows": (_window(settings, 4096),) * len(fields["ropes"])}


def _qwen2(settings: Settings) -> dict[str, Any]:
    fields = _common(settings, kv=32)
    return {**_qwen_windows(settings, fields), "qkv_bias": True, "out_bias": False}


def _qwen3(settings: Settings) -> dict[str, Any]:
    fields = _common(settings, kv=32)
    if settings.values.get("head_dim") is None:
        fields["head_size"] = 128
        rope = _rope(settings, 128, 10_000.0)
        fields["ropes"] = (rope,) * len(fields["ropes"])
    return {**_qwen_windows(settings, fields), "qk_norm": True}


def _qwen_windows(settings: Settings, fields: dict[str, Any]) -> dict[str, Any]:
    """Layers from ``max_window_layers`` on have windows, if any do."""
    if settings.values.get("layer_types") is not None:
        return fields
    window = None
    if settings.flag("use_sliding_window", default=False):
        window = _window(settings, 4096)
    first, count = settings.integer("max_window_layers", 0, 28), len(fields["ropes"])
    windows = tuple(window if i >= first else None for i in range(count))
    return {**fields, "windows": windows}


def _gemma(settings: Settings) -> dict[str, Any]:
    fields = _common(settings, kv=16)
    if settings.values.get("head_dim") is None:
        raise settings.wrong("head_dim", "an integer of at least 1")
    key = "hidden_activation"
    if settings.values.get(key) is None:
        activation: Any = "gelu_tanh"  # As `transformers` reads "gelu" of old files.
    else:
        activation = _activation(settings, key, "gelu_pytorch_tanh")
    return {
        **fields,
        "norm": "rms_plus_one",
        "activation": activation,
        "embedding_scale": math.sqrt(fields["width"]),
    }


def _gemma3(settings: Settings) -> dict[str, Any]:
    fields = _gemma(settings)
    settings.one_of("use_bidirectional_attention", (False,), False)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if settings.values.get(key) is not None:
            raise settings.wrong(key, "null: scores and logits are not capped here")
    count, size = len(fields["ropes"]), fields["head_size"]
    types = settings.strings("layer_types")
    if not types:
        pattern = settings.integer("sliding_window_pattern", 1, 6)
        types = tuple(
            "full_attention" if (i + 1) % pattern == 0 else "sliding_attention"
            for i in range(count)
        )
    window = _window(settings, 4096)
    by_type = settings.inner("rope_parameters")
    thetas = {
        "full_attention": number(settings, "rope_theta", 1_000_000.0),
        "sliding_attention": number(settings, "rope_local_base_freq", 10_000.0),
    }
    full = None if by_type is None else by_type.inner("full_attention")
    if by_type is not None and full is not None:
        # transformers changes what full attention has by the field of before.
        scaling = settings.inner("rope_scaling")
        if scaling is not None:
            full = Settings({**full.values, **scaling.values}, scaling.where)
        by_kind = {
            "full_attention": full,
            "sliding_attention": by_type.inner("sliding_attention") or by_type,
        }
        ropes = {
            kind: _rope_of(by_kind[kind], size, theta) for kind, theta in thetas.items()
        }
    else:
        ropes = {
            "full_attention": _rope(settings, size, thetas["full_attention"]),
            "sliding_attention": Rope(theta=thetas["sliding_attention"]),
        }
    return {
        **fields,
        "windows": _windows_of(settings, types, window, count),
        "ropes": tuple(ropes[one] for one in types),
        "qk_norm": True,
        "post_norms": True,
        "score_scale": number(settings, "query_pre_attn_scalar", 256.0) ** -0.5,
    }


def _gpt2(settings: Settings) -> dict[str, Any]:
    width, heads = size_of(settings, "n_embd"), size_of(settings, "n_head")
    for key, only in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        settings.one_of(key, (only,), only)
    positions = size_of(settings, "n_positions", 1024)
    count = count_of_layers(settings, "n_layer")
    return {
        "vocabulary": size_of(settings, "vocab_size"),
        "width": width,
        "heads": heads,
        "kv_heads": heads,
        "head_size": width // heads,
        "hidden": size_of(settings, "n_inner", 4 * width),
        "positions": positions,
        "length": positions,
        "norm": "layer",
        "eps": number(settings, "layer_norm_epsilon", 1e-5),
        "activation": _activation(settings, "activation_function", "gelu_new"),
        "gated": False,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "ropes": (None,) * count,
        "windows": (None,) * count,
    }


_FAMILIES: dict[str, Callable[[Settings], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
}
"""Fields of a `DecoderConfig`, by `model_type`."""


def _layers(settings: Settings, rope: Rope) -> dict[str, Any]:
    """The fields with an entry for each layer."""
    count = count_of_layers(settings, "num_hidden_layers")
    windows: tuple[int | None, ...] = (None,) * count
    types = settings.strings("layer_types")
    if types:
        window = _window(settings, None) if "sliding_attention" in types else None
        windows = _windows_of(settings, types, window, count)
    return {"ropes": (rope,) * count, "windows": windows}


def _windows_of(
    settings: Settings, types: tuple[str, ...], window: int | None, count: int
) -> tuple[int | None, ...]:
    kinds = {"full_attention": None, "sliding_attention": window}
    if len(types) != count or not set(types) <= set(kinds):
        raise settings.wrong("layer_types", f"{count} of {', '.join(kinds)}")
    return tuple(kinds[one] for one in types)


def _window(settings: Settings, default: int | None) -> int | None:
    """The window of attention; None where the config says null."""
    if "sliding_window" not in settings.values:
        return default
    if settings.values["sliding_window"] is None:
        return None
    return size_of(settings, "sliding_window")


def _activation(settings: Settings, key: str, default: str) -> str:
    return _ACTIVATIONS[settings.one_of(key, tuple(_ACTIVATIONS), default)]


def _rope(settings: Settings, size: int, theta: float) -> Rope:
    """The rotary embedding: ``rope_parameters``, or the two fields of before.

    Of a config that has both, transformers takes those of before.
    """
    _check_whole_heads(settings)
    theta = number(settings, "rope_theta", theta)
    found = settings.inner("rope_scaling")
    if found is None or not found.values:
        found = settings.inner("rope_parameters")
    return Rope(theta=theta) if found is None else _rope_of(found, size, theta)


def _check_whole_heads(settings: Settings) -> None:
    if number(settings, "partial_rotary_factor", 1.0) != 1.0:
        raise settings.wrong("partial_rotary_factor", "1: whole heads are rotated")


def _rope_of(settings: Settings, size: int, theta: float) -> Rope:
    theta = number(settings, "rope_theta", theta)
    _check_whole_heads(settings)
    key = "type" if settings.values.get("rope_type") is None else "rope_type"
    kind = settings.one_of(key, ("default", "linear", "llama3"), "default")
    if kind == "default":
        return Rope(theta=theta)
    factor = number(settings, "factor", None)
    if kind == "linear":
        return Rope(theta=theta, factors=linear_factors(factor, size))
    low, high = (
        number(settings, f"{name}_freq_factor", None) for name in ("low", "high")
    )
    if high <= low:
        raise settings.wrong("high_freq_factor", f"above low_freq_factor, {low}")
    length = number(settings, "original_max_position_embeddings", None)
    factors = llama3_factors(
        theta, size, factor=factor, low=low, high=high, length=length
    )
    return Rope(theta=theta, factors=factors)
