"""Measure the peak memory of converting quantized checkpoints of other libraries.

    python -m benchmarks.convert_quantized [--gigabytes 4] [--only gptq awq]
        [--outputs 2048] [--inputs 6144] [--folder /var/tmp]

For each family of formats, writes a file of about so many gigabytes with random weights
of layers of one shape, and converts it to a serving checkpoint in a process of its own,
with a map that keeps the integers. Reports the peak of that process's resident memory
over that when everything is imported, beside the bytes of one weight as it is stored
and in float32. Free space on the disk is checked first.
"""

import argparse
import json
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

_CHILD = "--child"
_LAYER = "model.layers.{i}.mlp.up_proj"
_GROUP = 128

Arrays = dict[str, np.ndarray]


def integers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random bits as int32."""
    return rng.integers(-(2**31), 2**31, shape, np.int32)


def scales(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> np.ndarray:
    """Random scales around 0.01."""
    return (0.01 * (0.5 + rng.random(shape, np.float32))).astype(dtype)


def compressed_tensors(rng: np.random.Generator, outputs: int, inputs: int) -> Arrays:
    """Integers of 4 bits in groups, as vLLM's compressor packs them."""
    return {
        "weight_packed": integers(rng, outputs, inputs // 8),
        "weight_scale": scales(rng, outputs, inputs // _GROUP),
        "weight_shape": np.asarray([outputs, inputs], np.int64),
    }


def gptq(rng: np.random.Generator, outputs: int, inputs: int) -> Arrays:
    """GPTQ of 4 bits in groups of 128, symmetric."""
    zeros = np.full((inputs // _GROUP, outputs // 8), 0x77777777, np.int32)
    return {
        "qweight": integers(rng, inputs // 8, outputs),
        "qzeros": zeros,
        "scales": scales(rng, inputs // _GROUP, outputs, dtype="float16"),
        "g_idx": np.arange(inputs, dtype=np.int32) // _GROUP,
    }


def awq(rng: np.random.Generator, outputs: int, inputs: int) -> Arrays:
    """AWQ of 4 bits in groups of 128, with zero points."""
    return {
        "qweight": integers(rng, inputs, outputs // 8),
        "qzeros": integers(rng, inputs // _GROUP, outputs // 8),
        "scales": scales(rng, inputs // _GROUP, outputs, dtype="float16"),
    }


def bitsandbytes(rng: np.random.Generator, outputs: int, inputs: int) -> Arrays:
    """bitsandbytes' nf4 in blocks of 64."""
    from aqtlite import numerics

    size = outputs * inputs
    state = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "float32",
        "shape": [outputs, inputs],
    }
    return {
        "weight": rng.integers(0, 256, (size // 2, 1), np.uint8),
        "weight.absmax": scales(rng, size // 64),
        "weight.quant_map": np.asarray(numerics.NormalFloat().decode(np.arange(16))),
        "weight.quant_state.bitsandbytes__nf4": np.frombuffer(
            json.dumps(state).encode(), np.uint8
        ),
    }


def fp8(rng: np.random.Generator, outputs: int, inputs: int) -> Arrays:
    """Floats of 8 bits in blocks of 128 x 128, as DeepSeek's."""
    import jax.numpy as jnp

    values = rng.integers(0, 0x7F, (outputs, inputs), np.uint8)
    return {
        "weight": values.view(jnp.float8_e4m3fn),
        "weight_scale_inv": scales(rng, -(-outputs // 128), -(-inputs // 128)),
    }


def floats(rng: np.random.Generator, outputs: int, inputs: int) -> Arrays:
    """float32."""
    return {"weight": rng.standard_normal((outputs, inputs), np.float32)}


def gguf(rng: np.random.Generator, outputs: int, inputs: int) -> Any:
    """Q4_0 of GGUF, as a `QTensor`."""
    from aqtlite import config, numerics, quantize

    tensor = config.Tensor(
        numerics=numerics.IntSymmetric(bits=4),
        blocks=config.Blocks(size=32),
        scale_dtype="bfloat16",
    )
    return quantize(rng.standard_normal((outputs, inputs), np.float32), tensor, axes=1)


FAMILIES: Mapping[str, tuple[Callable[..., Any], dict[str, Any] | None, float]] = {
    "compressed-tensors": (
        compressed_tensors,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 4,
                        "type": "int",
                        "symmetric": True,
                        "strategy": "group",
                        "group_size": _GROUP,
                    },
                }
            },
        },
        0.5 + 4 / _GROUP,
    ),
    "gptq": (
        gptq,
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": _GROUP,
            "sym": True,
            "desc_act": False,
        },
        0.5 + 2.5 / _GROUP,
    ),
    "awq": (
        awq,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": _GROUP,
            "zero_point": True,
            "version": "gemm",
        },
        0.5 + 2.5 / _GROUP,
    ),
    "gguf": (gguf, None, 0.5 + 2 / 32),
    "bitsandbytes": (
        bitsandbytes,
        {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": False,
        },
        0.5 + 4 / 64,
    ),
    "fp8": (
        fp8,
        {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
        },
        1 + 4 / 128**2,
    ),
    "float32": (floats, None, 4.0),
}
"""For each family, a layer's arrays, the quantization of ``config.json``, and the bytes
of a parameter."""


class _Layers(Mapping[str, Any]):
    """Weights of GGUF, made when they are read."""

    def __init__(self, layers: int, outputs: int, inputs: int):
        self._one = gguf(np.random.default_rng(0), outputs, inputs)
        self._names = [f"blk.{i}.ffn_up.weight" for i in range(layers)]

    def __getitem__(self, name: str) -> Any:
        return self._one

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def write(path: pathlib.Path, family: str, layers: int, shape: Sequence[int]) -> None:
    """Writes the checkpoint; layers other than the first repeat its bits."""
    from aqtlite.checkpoint import save_quantized
    from aqtlite.checkpoint.arrays import ArrayInfo, LazyArray
    from aqtlite.checkpoint.formats import writer_for

    if family == "gguf":
        save_quantized(path, _Layers(layers, *shape), format="gguf")
        return
    make, quantization, _ = FAMILIES[family]
    arrays = make(np.random.default_rng(0), *shape)
    path.mkdir()
    if quantization is not None:
        (path / "config.json").write_text(
            json.dumps({"quantization_config": quantization})
        )
    lazy = [
        LazyArray(
            f"{_LAYER.format(i=i)}.{part}".replace(".", "/"),
            ArrayInfo(x.shape, x.dtype),
            lambda x=x: x,
        )
        for i in range(layers)
        for part, x in arrays.items()
    ]
    file = path / "model.safetensors"
    writer_for(file).write(file, lazy, lambda: "")


def child(source: str, target: str, family: str, layers: int) -> None:
    """Converts, and prints the bytes of the peak over the start, and seconds."""
    import jax
    from flax import linen as nn

    from aqtlite import config
    from aqtlite.checkpoint import Move, config_of, convert_checkpoint, load_quantized
    from aqtlite.flax import AqtDotGeneral

    name = "blk.{i}.ffn_up.weight" if family == "gguf" else f"{_LAYER}.weight"
    weights = load_quantized(source)
    outputs, inputs = weights.weights[name.format(i=0)].shape
    cfg = config.weight_only(4)
    if family != "float32":
        own = config_of(weights[name.format(i=0)], axes=1)
        cfg = config.update(cfg, {"fwd.rhs": own})

    class Beside(nn.Module):
        """Layers of one shape, added."""

        @nn.compact
        def __call__(self, x: Any) -> Any:
            """Maps ``(rows, inputs)`` to ``(rows, outputs)``."""
            return sum(
                nn.Dense(
                    outputs,
                    use_bias=False,
                    dot_general=AqtDotGeneral(cfg),
                    name=f"layers_{i}",
                )(x)
                for i in range(layers)
            )

    moves = [Move(sources=name, targets="params/layers_{i}/kernel", axes=(1, 0))]
    x = jax.ShapeDtypeStruct((1, inputs), "float32")
    start, began = resident(), time.perf_counter()
    report = convert_checkpoint(source, target, Beside(), x, moves=moves)
    seconds = time.perf_counter() - began
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fates = {row.integers for row in report.weights}
    (fate,) = fates
    print(json.dumps({"peak": peak - start, "seconds": seconds, "integers": fate}))


def resident() -> int:
    """Resident memory of this process in bytes."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def measure(
    folder: pathlib.Path, family: str, gigabytes: float, shape: Sequence[int]
) -> list[str]:
    """Writes and converts a checkpoint, and returns a row of the table."""
    _, _, per_parameter = FAMILIES[family]
    stored = per_parameter * shape[0] * shape[1]
    layers = max(1, round(gigabytes * 1e9 / stored))
    needed = 4 * layers * stored
    free = shutil.disk_usage(folder).free
    if free < needed:
        sys.exit(f"{folder} has {free / 1e9:.0f} GB free, and needs {needed / 1e9:.0f}")
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        suffix = ".gguf" if family == "gguf" else ""
        source = pathlib.Path(inside, f"source{suffix}")
        write(source, family, layers, shape)
        target = f"{inside}/target.safetensors"
        words = [_CHILD, str(source), target, family, str(layers)]
        process = subprocess.run(
            [sys.executable, "-m", "benchmarks.convert_quantized", *words],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    found = json.loads(process.stdout.splitlines()[-1])
    in_float = 4 * shape[0] * shape[1]
    return [
        family,
        f"{layers * stored / 1e9:.1f}",
        f"{stored / 1e6:.0f}",
        f"{in_float / 1e6:.0f}",
        f"{found['peak'] / 1e6:.0f}",
        f"{found['peak'] / in_float:.1f}",
        f"{found['integers'] or 'floats'}",
        f"{found['seconds']:.0f}",
    ]


HEADS = [
    "file",
    "GB",
    "a weight, MB",
    "in float32",
    "peak over the start, MB",
    "x float32",
    "integers",
    "seconds",
]


def main() -> None:
    """Prints the table in Markdown, a row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--outputs", type=int, default=2048)
    parser.add_argument("--inputs", type=int, default=6144)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("/var/tmp"))
    parser.add_argument(_CHILD, nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        *words, layers = options.child
        child(*words, int(layers))
        return
    for row in (HEADS, ["---"] * len(HEADS)):
        print("| " + " | ".join(row) + " |", flush=True)
    shape = options.outputs, options.inputs
    for family in options.only:
        row = measure(options.folder, family, options.gigabytes, shape)
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
