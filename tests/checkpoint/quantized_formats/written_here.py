"""Weights quantized here, written in each format.

    python -m tests.checkpoint.quantized_formats.written_here FOLDER

writes them with what they decode to, and ``read_back.py`` beside the files of others
reads them with the formats' own packages.
"""

import pathlib
import sys

import jax.numpy as jnp
import numpy as np

import aqtlite
from aqtlite import calibration, checkpoint, config
from aqtlite.numerics import Float, IntAffine, IntSymmetric
from aqtlite.qtensor.qtensor import QTensor

X = np.random.default_rng(0).normal(size=(32, 96)).astype(np.float32)
X[1], X[2, 3] = 0, 9


def quantized(grid, block=None, **fields):
    """`X`, with a scale for each row, or each block of a row."""
    blocks = None if block is None else config.Blocks(size=block)
    tensor = config.Tensor(numerics=grid, blocks=blocks, **fields)
    return aqtlite.quantize(X, tensor, axes=1)


BF16 = {"scale_dtype": "bfloat16"}
POWER = {"scale_dtype": "float8_e8m0fnu"}
E2M1 = Float.from_dtype("float4_e2m1fn")
INT4 = quantized(IntSymmetric(bits=4), 32, **BF16)
INT8 = quantized(IntSymmetric(bits=8), **BF16)
MXFP4 = quantized(E2M1, 32, **POWER)
AFFINE = quantized(IntAffine(bits=4), 32, calibration=calibration.MinMax(), **POWER)

WEIGHTS: dict[str, dict[str, QTensor]] = {
    "compressed-tensors": {
        "int4": INT4,
        "int8": INT8,
        "int3": quantized(IntSymmetric(bits=3), 32),
        "affine": AFFINE,
        "fp8": quantized(Float.from_dtype("float8_e4m3fn")),
        "mxfp4": MXFP4,
    },
    "gptq": {"int4": INT4},
    "gguf": {"int4": INT4, "int8": INT8, "affine": AFFINE, "mxfp4": MXFP4},
}
METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.rope.freq_base": 1e4,
    "tokenizer.ggml.tokens": ["a", "b c", "ß"],
    "tokenizer.ggml.scores": [-1.0, 0.5],
    "tokenizer.ggml.add_bos_token": True,
}


def weights(format_):
    """Quantized weights and floats by name."""
    layers = WEIGHTS[format_].items()
    return {
        **{f"model.layers.0.{name}.weight": q for name, q in layers},
        "model.norm.weight": np.ones(96, np.float32),
        "lm_head.weight": X.astype(jnp.bfloat16),
    }


def write(folder: pathlib.Path, format_: str) -> pathlib.Path:
    """Writes them; returns the path."""
    is_gguf = format_ == "gguf"
    path = folder / ("tiny.gguf" if is_gguf else format_)
    metadata = METADATA if is_gguf else {"model_type": "llama"}
    checkpoint.save_quantized(path, weights(format_), format=format_, metadata=metadata)
    return path


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    for format_ in WEIGHTS:
        write(folder, format_)
        decoded = {
            name: np.asarray(q.dequant())
            for name, q in weights(format_).items()
            if isinstance(q, QTensor)
        }
        np.savez(folder / f"{format_}.npz", **decoded)
