"""Maps from the names of checkpoints to the variables of a `Decoder`, as tables.

Each line is a `checkpoint.Move`. A line for a part that a model lacks matches nothing,
and moves nothing; `checkpoint.move_weights` checks that nothing is left over.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

from aqtlite.checkpoint import CheckpointError, Move
from aqtlite.llm.config import DecoderConfig

_PARTS = ("weight", "bias")
_HF = "model.layers.{i}"
_OUR = "layers/{i}"

_TOP = {
    "model.embed_tokens.weight": "tokens/weight",
    "model.norm.weight": "norm/weight",
    f"{_HF}.input_layernorm.weight": f"{_OUR}/attention_norm/weight",
    f"{_HF}.self_attn.q_norm.weight": f"{_OUR}/attention/q_norm/weight",
    f"{_HF}.self_attn.k_norm.weight": f"{_OUR}/attention/k_norm/weight",
}

_LINEAR = {
    "self_attn.q_proj": "attention/q",
    "self_attn.k_proj": "attention/k",
    "self_attn.v_proj": "attention/v",
    "self_attn.o_proj": "attention/out",
    "mlp.gate_proj": "mlp/gate",
    "mlp.up_proj": "mlp/up",
    "mlp.down_proj": "mlp/down",
}

_LLAMA_NORMS = {"post_attention_layernorm": "mlp_norm"}

_GEMMA3_NORMS = {
    "post_attention_layernorm": "attention_post_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}

_UNUSED = (
    *("input_scale", "input_global_scale", "input_zero_point", "activation_scale"),
    *("output_scale", "q_scale", "k_scale", "v_scale", "k_zero_point", "v_zero_point"),
)
"""Scales and zero points of activations and caches that quantized checkpoints hold, of
a layer or of attention."""

_GGUF = {
    "token_embd.weight": "tokens/weight",
    "position_embd.weight": "positions/weight",
    "output_norm.{x}": "norm/{x}",
    "blk.{i}.attn_norm.{x}": "layers/{i}/attention_norm/{x}",
    "blk.{i}.attn_q.{x}": "layers/{i}/attention/q/{x}",
    "blk.{i}.attn_k.{x}": "layers/{i}/attention/k/{x}",
    "blk.{i}.attn_v.{x}": "layers/{i}/attention/v/{x}",
    "blk.{i}.attn_output.{x}": "layers/{i}/attention/out/{x}",
    "blk.{i}.attn_q_norm.weight": "layers/{i}/attention/q_norm/weight",
    "blk.{i}.attn_k_norm.weight": "layers/{i}/attention/k_norm/weight",
    "blk.{i}.post_attention_norm.weight": "layers/{i}/attention_post_norm/weight",
    "blk.{i}.ffn_norm.{x}": "layers/{i}/mlp_norm/{x}",
    "blk.{i}.ffn_gate.{x}": "layers/{i}/mlp/gate/{x}",
    "blk.{i}.ffn_up.{x}": "layers/{i}/mlp/up/{x}",
    "blk.{i}.ffn_down.{x}": "layers/{i}/mlp/down/{x}",
    "blk.{i}.post_ffw_norm.weight": "layers/{i}/mlp_post_norm/weight",
}

_GPT2 = {
    "wte.weight": "tokens/weight",
    "wpe.weight": "positions/weight",
    "ln_f.{x}": "norm/{x}",
    "h.{i}.ln_1.{x}": "layers/{i}/attention_norm/{x}",
    "h.{i}.ln_2.{x}": "layers/{i}/mlp_norm/{x}",
}

_GPT2_LINEAR = {
    "h.{i}.attn.c_proj": "layers/{i}/attention/out",
    "h.{i}.mlp.c_fc": "layers/{i}/mlp/up",
    "h.{i}.mlp.c_proj": "layers/{i}/mlp/down",
}


def of_hugging_face(
    family: str, cfg: DecoderConfig, quantized: Collection[str]
) -> tuple[Move, ...]:
    """The map of a family of Hugging Face, by `model_type`.

    Args:
        family: the `model_type`.
        cfg: config of the decoder.
        quantized: names of the quantized weights.

    Raises:
        CheckpointError: if a matrix of GPT-2 is quantized in some layers alone.
    """
    if family == "gpt2":
        return _gpt2(cfg, quantized)
    norms = _GEMMA3_NORMS if family == "gemma3_text" else _LLAMA_NORMS
    renamed = dict(_TOP)
    for theirs, ours in norms.items():
        renamed[f"{_HF}.{theirs}.weight"] = f"{_OUR}/{ours}/weight"
    for theirs, ours in _LINEAR.items():
        renamed[f"{_HF}.{theirs}.{{x}}"] = f"{_OUR}/{ours}/{{x}}"
    gate_up = {"gate": cfg.hidden, "up": cfg.hidden}
    return (
        *_renames(renamed),
        *_split(f"{_HF}.self_attn.qkv_proj", f"{_OUR}/attention", _qkv(cfg)),
        *_split(f"{_HF}.mlp.gate_up_proj", f"{_OUR}/mlp", gate_up),
        _head("lm_head.weight", cfg),
        Move(sources="model.layers.{i}.self_attn.rotary_emb.inv_freq", targets=()),
        *_unused(_HF),
    )


def _unused(layer: str) -> Iterator[Move]:
    """Leaves out what is of activations, in a layer of this name."""
    for name in _UNUSED:
        for place in ("{block}", "{block}.{layer}"):
            yield Move(sources=f"{layer}.{place}.{name}", targets=())


def of_gguf(cfg: DecoderConfig) -> tuple[Move, ...]:
    """The map of a GGUF file."""
    return (
        *_renames(_GGUF),
        *_split("blk.{i}.attn_qkv", f"{_OUR}/attention", _qkv(cfg)),
        _head("output.weight", cfg),
        Move(sources="rope_freqs.weight", targets=()),
    )


def _gpt2(cfg: DecoderConfig, quantized: Collection[str]) -> tuple[Move, ...]:
    """GPT-2's float matrices are (inputs, outputs), and q, k and v one of them."""

    def is_quantized(weight: str) -> bool:
        layers = [weight.format(i=i) in quantized for i in range(cfg.layers)]
        if any(layers) and not all(layers):
            raise CheckpointError(
                f"{weight} is quantized in some layers alone, and is (outputs, inputs) "
                "there, (inputs, outputs) in the others: such files are not read"
            )
        return any(layers)

    moves = [*_renames(_GPT2), _head("lm_head.weight", cfg)]
    for theirs, ours in _GPT2_LINEAR.items():
        weight = f"{theirs}.weight"
        axes = None if is_quantized(weight) else (1, 0)
        moves.append(Move(sources=weight, targets=f"{ours}/weight", axes=axes))
        moves.append(Move(sources=f"{theirs}.bias", targets=f"{ours}/bias"))
    parts = [f"layers/{{i}}/attention/{one}" for one in "qkv"]
    weight = "h.{i}.attn.c_attn.weight"
    in_order = is_quantized(weight)
    moves.append(
        Move(
            sources=weight,
            targets=tuple(f"{one}/weight" for one in parts),
            split_axis=0 if in_order else 1,
            axes=None if in_order else (1, 0),
        )
    )
    targets = tuple(f"{one}/bias" for one in parts)
    moves.append(Move(sources="h.{i}.attn.c_attn.bias", targets=targets))
    # Masks that old files hold.
    moves.append(Move(sources="h.{i}.attn.bias", targets=()))
    moves.append(Move(sources="h.{i}.attn.masked_bias", targets=()))
    moves += _unused("h.{i}")
    return tuple(moves)


_LAYERS = "layers/{i}/"
_TABLES = ("tokens", "positions")


def of_linen(moves: Sequence[Move], *, scan_layers: bool) -> tuple[Move, ...]:
    """The map to a `LinenDecoder`, of one to a `Decoder`.

    Args:
        moves: the map to a `Decoder`.
        scan_layers: as in `LinenDecoder`; layers are then stacked.
    """
    layers = "layers/" if scan_layers else "layers_{i}/"
    return tuple(_to_linen(move, layers) for move in moves)


def _to_linen(move: Move, layers: str) -> Move:
    """Kernels of Linen are (inputs, outputs); tables are as in files."""
    if not move.targets:
        return move
    targets, axes = [], move.axes
    for target in move.targets:
        module, _, leaf = target.removeprefix(_LAYERS).rpartition("/")
        if leaf == "weight" and module in _TABLES:
            leaf = "embedding"
        elif leaf == "weight" and not module.endswith("norm"):
            leaf = "kernel"
        below = layers if target.startswith(_LAYERS) else ""
        targets.append(f"params/{below}{module}/{leaf}")
    if targets[0].endswith("/kernel"):
        axes = (1, 0) if axes is None else None
    return dataclasses.replace(move, targets=tuple(targets), axes=axes)


def with_prefix(moves: tuple[Move, ...], prefix: str) -> tuple[Move, ...]:
    """The map with a prefix before the sources' names, but that of the head."""

    def named(name: str) -> str:
        return name if name.startswith("lm_head.") else prefix + name

    return tuple(
        dataclasses.replace(move, sources=tuple(map(named, move.sources)))
        for move in moves
    )


def _renames(names: Mapping[str, str]) -> Iterator[Move]:
    for source, target in names.items():
        for x in _PARTS if "{x}" in source else ("",):
            yield Move(
                sources=source.replace("{x}", x), targets=target.replace("{x}", x)
            )


def _split(source: str, layer: str, parts: Mapping[str, int]) -> Iterator[Move]:
    """Splits a matrix, and its bias, into parts of some sizes."""
    for x in _PARTS:
        targets = tuple(f"{layer}/{part}/{x}" for part in parts)
        sizes = tuple(parts.values())
        yield Move(sources=f"{source}.{x}", targets=targets, split_sizes=sizes)


def _qkv(cfg: DecoderConfig) -> dict[str, int]:
    of_keys = cfg.kv_heads * cfg.head_size
    return {"q": cfg.heads * cfg.head_size, "k": of_keys, "v": of_keys}


def _head(name: str, cfg: DecoderConfig) -> Move:
    """A tied head may be in the file once more."""
    return Move(sources=name, targets=() if cfg.tied else "head/weight")
