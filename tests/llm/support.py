"""The folders that transformers wrote, and quantized copies of them."""

import functools
import json
import pathlib

import numpy as np
from flax import nnx

import aqtlite
from aqtlite import checkpoint, config, llm, numerics

FOLDER = pathlib.Path(__file__).parent / "written_by_transformers"
FAMILIES = sorted(path.parent.name for path in FOLDER.glob("*/logits.npz"))


@nnx.jit
def logits_of(decoder, tokens, start=0):
    return decoder(tokens, start)


@functools.cache
def reference(family):
    """Tokens, and logits of them, of transformers."""
    found = np.load(FOLDER / family / "logits.npz")
    return found["tokens"], found["logits"]


@functools.cache
def loaded(family):
    return llm.load(FOLDER / family).decoder


def check_close(got, wanted, tolerance=1e-4):
    largest = np.abs(wanted).max()
    np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance * largest)


def quantized(weight, bits=8):
    tensor = config.Tensor(
        numerics=numerics.IntSymmetric(bits=bits),
        blocks=config.Blocks(size=32),
        scale_dtype="bfloat16",
    )
    return aqtlite.quantize(np.asarray(weight, np.float32), tensor, axes=1)


def quantized_weights(family, names, bits=8):
    """The weights of a family, those matrices quantized that `names` says."""
    weights = {}
    for name, x in checkpoint.load_quantized(FOLDER / family).items():
        fits = x.ndim == 2 and x.shape[1] % 32 == 0 and names(name)
        weights[name] = quantized(x, bits) if fits else np.asarray(x, np.float32)
    return weights


def metadata(family):
    return json.loads((FOLDER / family / "config.json").read_text())


def as_gguf(weights, heads, kv_heads):
    """Llama's weights by the names of GGUF, rows of q and k paired as it pairs them."""
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "model.layers": "blk",
    }
    found = {}
    for name, x in weights.items():
        for heads_of, part in ((heads, ".q_proj."), (kv_heads, ".k_proj.")):
            if part in name:
                size = x.shape[0] // heads_of // 2
                halves = x.reshape(heads_of, 2, size, x.shape[1])
                x = halves.swapaxes(1, 2).reshape(x.shape)
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        found[name] = x
    return found
