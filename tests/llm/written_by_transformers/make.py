"""Makes the tiny folders of this folder, and the logits of their own models.

Run once, outside of CI, where the packages are installed; the decoder's logits are then
compared with those of ``logits.npz`` without them:

    pip install numpy torch transformers tokenizers gguf==0.19.0
    python make.py
"""

import json
import pathlib

import gguf
import numpy as np
import tokenizers
import torch
import transformers

HERE = pathlib.Path(__file__).parent
WORDS = "the cat sat on a mat and the dog lay on the rug . "
TOKENS = [[3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 3]]
SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


def without(key):
    return {name: size for name, size in SIZES.items() if name != key}


CASES = {
    "llama": transformers.LlamaConfig(
        **{**SIZES, "vocab_size": 272},
        rope_parameters=LLAMA3,
        tie_word_embeddings=False,
    ),
    "mistral": transformers.MistralConfig(
        **SIZES, sliding_window=5, rope_parameters=LINEAR
    ),
    "qwen2": transformers.Qwen2Config(**without("head_dim"), tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**SIZES, tie_word_embeddings=False),
    "gemma": transformers.GemmaConfig(**{**SIZES, "num_key_value_heads": 1}),
    "gemma3": transformers.Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 3},
        sliding_window=4,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gpt2": transformers.GPT2Config(
        vocab_size=48,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=4,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
    ),
}


def with_noise(model):
    """Moves norms and biases away from the ones and zeros that they begin as."""
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        if weight.ndim == 1:
            weight.data += 0.2 * torch.randn(weight.shape, generator=generator)


def main():
    for name, config in CASES.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with_noise(model)
        folder = HERE / name
        model.to(torch.bfloat16).save_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            logits = model.eval()(torch.tensor(TOKENS)).logits
        (folder / "gguf_names.json").write_text(json.dumps(gguf_names(name, model)))
        np.savez_compressed(
            folder / "logits.npz", tokens=np.array(TOKENS), logits=logits.numpy()
        )
        print(name, float(logits.abs().max()), sorted(p.name for p in folder.iterdir()))
    for case, made in (("llama", byte_level()), ("mistral", pieces())):
        made.save(str(HERE / case / "tokenizer.json"))


def gguf_names(family, model):
    """The names that llama.cpp's converter gives to the weights."""
    arch = "LLAMA" if family == "mistral" else family.upper()
    layers = model.config.num_hidden_layers
    found = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch), layers)
    ends = (".weight", ".bias")
    return {name: found.get_name(name, ends) for name in model.state_dict()}


def byte_level():
    """A tokenizer of bytes, as that of Llama 3."""
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator([WORDS * 9], 272, special_tokens=["<s>", "</s>"])
    return made


def pieces():
    """A tokenizer of pieces, as that of Mistral."""
    made = tokenizers.SentencePieceBPETokenizer()
    made.train_from_iterator([WORDS * 9], 48, special_tokens=["<unk>", "<s>", "</s>"])
    return made


if __name__ == "__main__":
    main()
