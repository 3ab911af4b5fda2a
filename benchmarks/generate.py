"""Tokens per second of decoders with random weights, by bits, and memory's speed.

    python -m benchmarks.generate [--parameters 100] [--tokens 32] [--quick]
        [--only int4 llama.cpp]

A Llama-like decoder of about so many million parameters continues a prompt in float32,
int8 and int4, with float32 or int8 keys and values; alternatives take turns, one token
each, and the medians and the best are shown, and the processor's time, which tells more
on a busy machine (with ``--threads 1``: threads of llama.cpp spin while they wait for
each other). The column `of memory` is the share that
the best reaches of the speed at which a sum reads the weights. If they are installed,
`transformers` continues a text with a model of this size in float32, and llama.cpp
(llama-cpp-python) with the same decoder in files of Q8_0 and Q4_0.
"""

import argparse
import dataclasses
import importlib.util
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from aqtlite import config, kv_cache, llm
from aqtlite.checkpoint import save_quantized
from aqtlite.llm.layers import Weight
from aqtlite.llm.loading import quantized_by

VOCABULARY = 32_000


@dataclasses.dataclass(frozen=True)
class Way:
    """How a decoder is served."""

    cfg: config.DotGeneral | None
    cache: config.DotGeneral | None


def in_blocks(cfg: config.DotGeneral) -> config.DotGeneral:
    """Scales for blocks of 32 weights, in 16 bits, as those of GGUF."""
    changes = {"blocks": config.Blocks(size=32), "scale_dtype": "bfloat16"}
    return config.update(
        cfg, {f"fwd.rhs.{name}": value for name, value in changes.items()}
    )


WAYS: Mapping[str, Way] = {
    "float32": Way(None, None),
    "int8 weights": Way(config.weight_only(8), kv_cache.config_for(8)),
    "int8 weights and activations": Way(config.qat(8), kv_cache.config_for(8)),
    "int4 weights, int8 activations": Way(config.w4a8(), kv_cache.config_for(8)),
    "int8 weights in blocks of 32, int8 activations": Way(
        in_blocks(config.qat(8)), kv_cache.config_for(8)
    ),
    "int4 weights in blocks of 32, int8 activations": Way(
        in_blocks(config.w4a8()), kv_cache.config_for(8)
    ),
}

GGUF = {
    "tokens": "token_embd",
    "norm": "output_norm",
    "attention_norm": "attn_norm",
    "attention/q": "attn_q",
    "attention/k": "attn_k",
    "attention/v": "attn_v",
    "attention/out": "attn_output",
    "mlp_norm": "ffn_norm",
    "mlp/gate": "ffn_gate",
    "mlp/up": "ffn_up",
    "mlp/down": "ffn_down",
}
"""Names of llama.cpp for the modules of a decoder, or of its layers."""


def config_of(parameters: int, vocabulary: int = VOCABULARY) -> llm.DecoderConfig:
    """A decoder of about so many parameters, with few and wide layers."""
    layers, size = 1, 64
    while True:
        width = 256 * layers
        layer = width * width * 5 // 2 + 3 * width * 4 * width
        if layers * layer + vocabulary * width >= parameters:
            break
        layers += 1
    heads = width // size
    return llm.DecoderConfig(
        vocabulary=vocabulary,
        width=width,
        heads=heads,
        kv_heads=heads // 4,
        head_size=size,
        hidden=4 * width,
        ropes=(llm.Rope(theta=500_000.0),) * layers,
        windows=(None,) * layers,
        tied=True,
    )


def decoder_of(cfg: llm.DecoderConfig, way: Way) -> llm.Decoder:
    """A decoder with random weights, quantized one after the other."""
    decoder = llm.Decoder(cfg, rngs=nnx.Rngs(0))
    if way.cfg is not None:
        for _, module in nnx.iter_modules(decoder):
            if isinstance(module, Weight):
                weight = module.weight.get_value()
                module.set_quantized(quantized_by(weight, way.cfg.fwd.rhs), way.cfg)
    return decoder


def bytes_of(decoder: llm.Decoder) -> float:
    """Bytes of the weights, those of int4 as they are packed for the processor."""
    leaves = jax.tree.leaves(nnx.state(decoder))
    widths = {jnp.dtype("int4"): 0.5}
    return sum(x.size * widths.get(x.dtype, x.dtype.itemsize) for x in leaves)


def memory_speed(size: int = 1 << 28, rounds: int = 5) -> float:
    """Bytes per second that a sum of float32 reads."""
    x = jnp.ones(size // 4, jnp.float32)
    add = jax.jit(jnp.sum)
    add(x).block_until_ready()
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        add(x).block_until_ready()
        taken.append(time.perf_counter() - start)
    return size / min(taken)


def tokens_of(
    decoder: llm.Decoder, way: Way, prompt: int, tokens: int
) -> Callable[[], Iterator[int]]:
    """A function that begins a text."""
    generation = llm.compile_generation(decoder, prompt, tokens, cache=way.cache)
    given = np.arange(prompt) % decoder.cfg.vocabulary
    return lambda: generation.tokens(given.tolist())


def with_transformers(
    cfg: llm.DecoderConfig, prompt: int, tokens: int
) -> Callable[[], Iterator[int]]:
    """The same decoder by transformers, in float32."""
    import torch
    import transformers

    theirs = transformers.LlamaConfig(
        vocab_size=cfg.vocabulary,
        hidden_size=cfg.width,
        num_hidden_layers=cfg.layers,
        num_attention_heads=cfg.heads,
        num_key_value_heads=cfg.kv_heads,
        intermediate_size=cfg.hidden,
        tie_word_embeddings=True,
    )
    model = transformers.AutoModelForCausalLM.from_config(theirs).eval()

    def begin() -> Iterator[int]:
        given, past = torch.arange(prompt)[None], None
        with torch.no_grad():
            for _ in range(tokens):
                made = model(given, past_key_values=past, use_cache=True)
                given, past = made.logits[:, -1:].argmax(-1), made.past_key_values
                yield int(given)

    return begin


def with_llama_cpp(
    cfg: llm.DecoderConfig, path: pathlib.Path, prompt: int, tokens: int, count: int
) -> Callable[[], Iterator[int]]:
    """The same decoder by llama.cpp, on some number of threads."""
    import llama_cpp

    model = llama_cpp.Llama(
        str(path),
        n_ctx=prompt + tokens,
        n_batch=prompt,
        n_threads=count,
        n_threads_batch=count,
        verbose=False,
    )

    def begin() -> Iterator[int]:
        given = (np.arange(prompt) % cfg.vocabulary).tolist()
        model.reset()
        for _ in range(tokens):
            model.eval(given)
            logits = model._ctx.get_logits_ith(-1)
            found = int(np.ctypeslib.as_array(logits, (cfg.vocabulary,)).argmax())
            yield found
            given = [found]

    return begin


def write_gguf(path: pathlib.Path, cfg: llm.DecoderConfig, bits: int) -> None:
    """Writes a decoder with random weights as Q8_0 or Q4_0, without a tokenizer."""
    tensor = in_blocks(config.weight_only(bits)).fwd.rhs
    decoder = decoder_of(cfg, Way(None, None))
    weights: dict[str, Any] = {}
    for variable_path, variable in nnx.to_flat_state(nnx.state(decoder)):
        *steps, leaf = map(str, variable_path)
        name = GGUF[steps[0]] if steps[0] in GGUF else GGUF["/".join(steps[2:])]
        if steps[0] == "layers":
            name = f"blk.{steps[1]}.{name}"
        x = variable.get_value()
        value = quantized_by(x, tensor) if x.ndim == 2 else np.asarray(x)
        weights[f"{name}.{leaf}"] = value
    rope = cfg.ropes[0]
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "no_vocab",
        "llama.vocab_size": np.uint32(cfg.vocabulary),
        "llama.context_length": np.uint32(4096),
        "llama.embedding_length": np.uint32(cfg.width),
        "llama.block_count": np.uint32(cfg.layers),
        "llama.feed_forward_length": np.uint32(cfg.hidden),
        "llama.attention.head_count": np.uint32(cfg.heads),
        "llama.attention.head_count_kv": np.uint32(cfg.kv_heads),
        "llama.attention.layer_norm_rms_epsilon": np.float32(cfg.eps),
        "llama.rope.dimension_count": np.uint32(cfg.head_size),
        "llama.rope.freq_base": np.float32(rope.theta if rope else 1e4),
    }
    save_quantized(path, weights, format="gguf", metadata=metadata)


def measured(
    begins: Mapping[str, Callable[[], Iterator[int]]], tokens: int
) -> dict[str, tuple[float, float, float, float]]:
    """Seconds by name: the prompt; a token, median and least; the processor."""
    for begin in begins.values():
        list(begin())
    texts = {name: begin() for name, begin in begins.items()}
    taken: dict[str, list[float]] = {name: [] for name in begins}
    worked: dict[str, list[float]] = {name: [] for name in begins}
    for _ in range(tokens):
        for name, text in texts.items():
            start, busy = time.perf_counter(), time.process_time()
            next(text)
            taken[name].append(time.perf_counter() - start)
            worked[name].append(time.process_time() - busy)
    return {
        name: (
            one[0],
            float(np.median(one[1:])),
            min(one[1:]),
            float(np.median(worked[name][1:])),
        )
        for name, one in taken.items()
    }


def table(
    parameters: int,
    prompt: int,
    tokens: int,
    folder: pathlib.Path,
    wanted: Callable[[str], bool],
    threads: int,
) -> list[list[str]]:
    """Rows of the table, the first with the names of the columns.

    Args:
        parameters: about how many the decoder has.
        prompt: tokens of the prompt.
        tokens: tokens after it.
        folder: folder for files of llama.cpp.
        wanted: whether the row of a name is measured.
        threads: number of threads of llama.cpp.
    """
    cfg = config_of(parameters)
    speed = memory_speed()
    shapes = nnx.eval_shape(lambda: llm.Decoder(cfg, rngs=nnx.Rngs(0)))
    in_float = bytes_of(shapes)
    begins: dict[str, Callable[[], Iterator[int]]] = {}
    sizes: dict[str, float] = {}
    for name, way in WAYS.items():
        if not wanted(name):
            continue
        decoder = decoder_of(cfg, way)
        begins[name] = tokens_of(decoder, way, prompt, tokens)
        sizes[name] = bytes_of(decoder)
    name = "transformers, float32"
    if wanted(name) and importlib.util.find_spec("transformers") is not None:
        begins[name] = with_transformers(cfg, prompt, tokens)
    for bits in (8, 4):
        name = f"llama.cpp, Q{bits}_0"
        if wanted(name) and importlib.util.find_spec("llama_cpp") is not None:
            path = folder / f"q{bits}.gguf"
            write_gguf(path, cfg, bits)
            begins[name] = with_llama_cpp(cfg, path, prompt, tokens, threads)
            sizes[name] = path.stat().st_size
    rows = [["weights", "MB", "prompt, tokens/s", "tokens/s", "best", "of memory"]]
    rows[0].append("processor, ms")
    for name, (first, each, best, work) in measured(begins, tokens).items():
        size = sizes.get(name, in_float)
        cells = [f"{size / 1e6:.0f}", f"{prompt / first:.0f}", f"{1 / each:.1f}"]
        cells += [f"{1 / best:.1f}", f"{size / speed / best:.2f}"]
        rows.append([name, *cells, f"{1e3 * work:.1f}"])
    print(
        f"{cfg.layers} layers of width {cfg.width}, {in_float / 4e6:.0f} million "
        f"parameters; memory {speed / 1e9:.1f} GB/s"
    )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=100, help="millions")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument(
        "--only", nargs="+", default=[""], help="rows whose names contain one of these"
    )
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="threads of llama.cpp"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    options = parser.parse_args(argv)
    millions = 3 if options.quick else options.parameters
    with tempfile.TemporaryDirectory() as folder:
        first, *rest = table(
            int(millions * 1e6),
            options.prompt,
            options.tokens,
            pathlib.Path(folder),
            lambda name: any(one in name for one in options.only),
            options.threads,
        )
    for row in (first, ["---"] * len(first), *rest):
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
