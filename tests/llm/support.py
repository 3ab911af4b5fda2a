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


def gguf_names(family):
    """What llama.cpp's converter calls the weights."""
    return json.loads((FOLDER / family / "gguf_names.json").read_text())


def as_gguf_of_llama(weights, heads):
    """Llama's weights for GGUF, which pairs the rows of q and k as it rotates them.

    Args:
        weights: the weights by name.
        heads: number of heads of ``q_proj`` and ``k_proj``.
    """
    found, names = {}, gguf_names("llama")
    for name, x in weights.items():
        count = heads.get(name.split(".")[-2])
        if count is not None:
            halves = x.reshape(count, 2, x.shape[0] // count // 2, x.shape[1])
            x = halves.swapaxes(1, 2).reshape(x.shape)
        found[names[name]] = x
    return found


# Keys of GGUF by fields of the decoder; what a family lacks, its file need not have.
GGUF_KEYS = {
    "context_length": "length",
    "embedding_length": "width",
    "feed_forward_length": "hidden",
    "attention.head_count": "heads",
    "attention.head_count_kv": "kv_heads",
    "attention.key_length": "head_size",
}


def gguf_pairs(family, cfg):
    """The key-value pairs that llama.cpp's converter writes."""
    eps = "layer_norm" if family == "gpt2" else "layer_norm_rms"
    own = {key: np.uint32(getattr(cfg, name)) for key, name in GGUF_KEYS.items()}
    own["block_count"] = np.uint32(cfg.layers)
    own[f"attention.{eps}_epsilon"] = np.float32(cfg.eps)
    if family == "gemma3":
        own["attention.sliding_window"] = np.uint32(4)
    pairs = {f"{family}.{key}": value for key, value in own.items()}
    return {"general.architecture": family, **pairs}
