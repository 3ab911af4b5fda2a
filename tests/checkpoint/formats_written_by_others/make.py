"""Makes the tiny files of this folder with the formats' own packages.

Run once, outside of CI, where the packages are installed; the files and what the
packages decode (``decoded.npz``) are then compared without them:

    pip install numpy torch transformers gguf==0.19.0 compressed-tensors==0.20.0 \\
        bitsandbytes==0.50.2 nvidia-modelopt==0.47.0
    pip download --no-deps --no-binary :all: autoawq==0.2.9 gptqmodel==7.7.0
    python make.py FOLDER_OF_UNPACKED_AUTOAWQ FOLDER_OF_UNPACKED_GPTQMODEL

GPTQModel and AutoAWQ need a GPU to be installed, but the functions that pack and decode
do not: they are taken from their sources. A key of ``decoded.npz`` is the name of a
weight, followed by ``@`` and the dtype in which the package computes.
"""

import ast
import contextlib
import importlib.util
import json
import math
import pathlib
import sys
import types

import bitsandbytes
import gguf
import numpy as np
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams
from compressed_tensors.quantization.utils.helpers import generate_gparam
from modelopt.torch.quantization.qtensor import MXFP8QTensor, NVFP4QTensor
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

HERE = pathlib.Path(__file__).parent
NAME = "model.layers.0.mlp.up_proj"


def weights(rows, columns, seed=0):
    """Random weights with a row of zeros and an outlier."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    x[1] = 0
    x[2, 3] = 9
    return x


def write(case, tensors, config, decoded, config_name="config.json"):
    folder = HERE / case
    folder.mkdir(exist_ok=True)
    held = {name: x.contiguous() for name, x in tensors.items()}
    save_file(held, folder / "model.safetensors")
    if config is not None:
        (folder / config_name).write_text(json.dumps(config, indent=1) + "\n")
    write_decoded(folder, decoded)


def write_decoded(folder, decoded):
    arrays = {
        name: x.float().numpy() if isinstance(x, torch.Tensor) else x
        for name, x in decoded.items()
    }
    np.savez_compressed(folder / "decoded.npz", **arrays)


def of_layer(tensors):
    return {f"{NAME}.{name}": x for name, x in tensors.items()}


# compressed-tensors


def bounds(x, args):
    rows, columns = x.shape
    if args.strategy in ("group", "tensor_group"):
        grouped = x.reshape(rows, -1, args.group_size)
        return grouped.amin(-1), grouped.amax(-1)
    if args.strategy == "channel":
        return x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    if args.strategy == "block":
        r, c = args.block_structure
        tiles = x.reshape(rows // r, r, columns // c, c)
        return tiles.amin((1, 3)), tiles.amax((1, 3))
    return x.amin().reshape(1), x.amax().reshape(1)


def compressed(case, format_, rows, columns, **fields):
    args = QuantizationArgs(**fields)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    x = weights(rows, columns)
    state = {"weight": x}
    top = None
    if format_.startswith("nvfp4"):
        top = generate_gparam(x.amin(), x.amax()).reshape(1)
        state["weight_global_scale"] = top
    scale, zero = calculate_qparams(*bounds(x, args), args, global_scale=top)
    state["weight_scale"], state["weight_zero_point"] = scale, zero
    compressor = BaseCompressor.get_value_from_registry(format_)
    stored = compressor.compress(state, scheme)
    decoded = compressor.decompress(stored, scheme)["weight"]
    key = f"{NAME}.weight@{str(decoded.dtype).removeprefix('torch.')}"
    results = {key: decoded}
    if format_.startswith("nvfp4"):
        values = unpack_fp4_from_uint8(
            stored["weight_packed"], rows, columns, dtype=torch.float32
        )
        results[f"{NAME}.weight@float32"] = dequantize(
            values,
            scale=stored["weight_scale"].float(),
            args=args,
            global_scale=top,
            dtype=torch.float32,
        )
    config = {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": format_,
            "quantization_status": "compressed",
            "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
            "ignore": ["lm_head"],
        }
    }
    tensors = of_layer(stored) | {"model.norm.weight": torch.ones(4)}
    write(f"compressed_{case}", tensors, config, results)


def all_compressed():
    pack, group = "pack-quantized", {"strategy": "group", "group_size": 32}
    affine = {"symmetric": False}
    compressed("w4", pack, 10, 96, num_bits=4, **group)
    compressed("w4_affine", pack, 10, 96, num_bits=4, **group, **affine)
    compressed("w3_affine", pack, 10, 64, num_bits=3, **group, **affine)
    compressed("w6_channel", pack, 10, 41, num_bits=6, strategy="channel")
    int8 = "int-quantized"
    compressed("int8", int8, 10, 41, num_bits=8, strategy="channel")
    compressed("int8_affine", int8, 10, 41, num_bits=8, strategy="channel", **affine)
    e4m3 = {"num_bits": 8, "type": "float"}
    block = {"strategy": "block", "block_structure": [8, 16]}
    compressed("fp8_tensor", "float-quantized", 10, 41, strategy="tensor", **e4m3)
    compressed("fp8_channel", "float-quantized", 10, 41, strategy="channel", **e4m3)
    compressed("fp8_block", "float-quantized", 24, 48, **block, **e4m3)
    e2m1 = {"num_bits": 4, "type": "float"}
    compressed(
        *("nvfp4", "nvfp4-pack-quantized", 10, 64),
        **e2m1,
        strategy="tensor_group",
        group_size=16,
        scale_dtype=torch.float8_e4m3fn,
        zp_dtype=torch.float8_e4m3fn,
    )
    mx = {**group, "scale_dtype": torch.uint8, "zp_dtype": torch.uint8}
    compressed("mxfp4", "mxfp4-pack-quantized", 10, 64, **e2m1, **mx)
    compressed("mxfp8", "mxfp8-quantized", 10, 64, **e4m3, **mx)


# GPTQ and AWQ


def functions_of(path, names, **scope):
    """Functions of a source file, without importing it."""
    tree = ast.parse(path.read_text())
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    space = {"t": torch, "torch": torch, "np": np, "math": math, **scope}
    for node in found:
        node.decorator_list, node.returns = [], None
        for argument in node.args.args:
            argument.annotation = None
    exec(compile(ast.Module(found, []), str(path), "exec"), space)
    return space


def gptqmodel(source):
    """The functions of GPTQModel that pack and decode."""
    limits = types.SimpleNamespace(threadpool_limits=contextlib.nullcontext)
    return functions_of(
        source / "gptqmodel" / "nn_modules" / "qlinear" / "__init__.py",
        ("pack_original", "dequantize_weight", "_dequantize_from_codes"),
        THREADPOOLCTL=limits,
        nn=torch.nn,
        _ConvNd=torch.nn.modules.conv._ConvNd,
        transformers=transformers,
        _torch_right_shift=torch.bitwise_right_shift,
        _torch_left_shift=torch.bitwise_left_shift,
    )


def gptq_layer(rows, columns, bits):
    layer = torch.nn.Module()
    layer.bits, layer.maxq, layer.planar = bits, 2**bits - 1, False
    layer.pack_factor, layer.pack_dtype_bits = 32 // bits, 32
    layer.in_features, layer.out_features = columns, rows
    layer.dequant_dtype = layer.pack_dtype = torch.int32
    layer.pack_np_math_dtype, layer.pack_np_dtype = np.uint32, np.int32
    return layer


def decode_gptq(source, stored, bits):
    """Decodes with GPTQModel, (inputs, outputs)."""
    scope = gptqmodel(source)
    layer = gptq_layer(stored["scales"].shape[1], len(stored["g_idx"]), bits)
    for name, x in stored.items():
        setattr(layer, name, x)
    if bits == 3:
        rows = [[*range(0, 31, 3), 0], [0, *range(1, 32, 3)], [0, *range(2, 30, 3), 0]]
        shifts = torch.tensor(rows, dtype=torch.int32).reshape(1, 3, 12)
    else:
        shifts = torch.arange(0, 32, bits, dtype=torch.int32).unsqueeze(0)
    layer.wf_unsqueeze_zero = shifts.unsqueeze(0)
    layer.wf_unsqueeze_neg_one = shifts.unsqueeze(-1)
    layer._init_wf_unsqueeze_buffers = lambda: None
    decode = scope["_dequantize_from_codes"]
    layer._dequantize_from_codes = types.MethodType(decode, layer)
    return scope["dequantize_weight"](layer)


def gptq(case, source, bits, *, symmetric, version, order=None):
    rows, columns, group = 32, 96, 32
    x = weights(rows, columns)
    index = torch.arange(columns, dtype=torch.int32) // group
    if order is not None:
        index = index[order]
    top = 2**bits - 1
    scale, zero = torch.zeros(2, rows, columns // group)
    for i in range(columns // group):
        part = x[:, index == i]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scale[:, i] = ((high - low) / top).clamp(min=1e-3).half().float()
        middle = torch.full_like(low, (top + 1) // 2)
        zero[:, i] = middle if symmetric else torch.round(-low / scale[:, i])
    scope = gptqmodel(source)
    layer = gptq_layer(rows, columns, bits)
    linear = torch.nn.Linear(columns, rows, bias=False)
    linear.weight.data = x
    scope["pack_original"](layer, linear, scale, zero, index)
    stored = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales")}
    stored["g_idx"] = index
    decoded = decode_gptq(source, stored, bits).T
    if version == "gptq":
        # Version 1 holds zero points less 1.
        one = sum(1 << (bits * i) for i in range(32 // bits))
        words = stored["qzeros"].numpy().view(np.uint32) - np.uint32(one)
        stored["qzeros"] = torch.from_numpy(words.view(np.int32))
    config = {
        "quantization_config": {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group,
            "desc_act": order is not None,
            "sym": symmetric,
            "lm_head": False,
            "checkpoint_format": version,
        }
    }
    tensors = of_layer(stored) | {f"{NAME}.bias": torch.ones(rows).half()}
    write(f"gptq_{case}", tensors, config, {f"{NAME}.weight@float16": decoded})


def all_gptq(source):
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1))
    gptq("4", source, 4, symmetric=True, version="gptq")
    gptq("4_affine", source, 4, symmetric=False, version="gptq_v2")
    gptq("2_affine", source, 2, symmetric=False, version="gptq_v2")
    gptq("3", source, 3, symmetric=True, version="gptq_v2")
    gptq("8", source, 8, symmetric=True, version="gptq")
    gptq("4_act_order", source, 4, symmetric=False, version="gptq_v2", order=order)


def awq(source):
    path = source / "awq" / "utils" / "packing_utils.py"
    spec = importlib.util.spec_from_file_location("packing_utils", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    inputs, outputs, group = 64, 24, 32
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (inputs, outputs))
    zeros = rng.integers(0, 16, (inputs // group, outputs))
    scales = torch.from_numpy(rng.uniform(0.01, 0.1, zeros.shape)).half()

    def packed(x):
        eights = x.reshape(len(x), -1, 8)[..., module.AWQ_ORDER].astype(np.int64)
        words = (eights << (4 * np.arange(8))).sum(-1).astype(np.uint32)
        return torch.from_numpy(words.view(np.int32))

    stored = {"qweight": packed(codes), "qzeros": packed(zeros), "scales": scales}
    decoded = module.dequantize_gemm(*stored.values(), 4, group).T
    config = {
        "quantization_config": {
            "quant_method": "awq",
            "bits": 4,
            "group_size": group,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
        }
    }
    write("awq", of_layer(stored), config, {f"{NAME}.weight@float16": decoded})


# Hugging Face fp8, gpt-oss, ModelOpt


def fp8():
    x = weights(48, 64).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 2, generator=torch.Generator().manual_seed(2)) + 0.5
    decoded = Fp8Dequantize(None)._dequantize_one(x, scale, torch.float32)
    config = {
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [16, 32],
        }
    }
    stored = {"weight": x, "weight_scale_inv": scale}
    write("fp8", of_layer(stored), config, {f"{NAME}.weight@float32": decoded})
    powers = torch.from_numpy(np.array([[120, 127], [128, 126], [124, 131]], np.uint8))
    decoded = Fp8Dequantize(None)._dequantize_one(x, powers, torch.float32)
    stored["weight_scale_inv"] = powers.view(torch.float8_e8m0fnu)
    config["quantization_config"]["scale_fmt"] = "ue8m0"
    write("fp8_powers", of_layer(stored), config, {f"{NAME}.weight@float32": decoded})


def gpt_oss():
    rng = np.random.default_rng(0)
    blocks = torch.from_numpy(rng.integers(0, 256, (2, 6, 3, 16), dtype=np.uint8))
    scales = torch.from_numpy(rng.integers(110, 130, (2, 6, 3), dtype=np.uint8))
    decoded = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    stored = {f"{name}_blocks": blocks, f"{name}_scales": scales}
    write("gpt_oss", stored, config, {f"{name}@float32": decoded})


def modelopt():
    x = weights(10, 64)
    q, scale, top = NVFP4QTensor.quantize(x, 16)
    stored = {
        "weight": q._quantized_data,
        "weight_scale": scale,
        "weight_scale_2": top.reshape(()),
    }
    decoded = q.dequantize(
        dtype=torch.float32, scale=scale, double_scale=top, block_sizes={-1: 16}
    )
    config = {
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": ["lm_head"],
        },
    }
    file = "hf_quant_config.json"
    results = {f"{NAME}.weight@float32": decoded}
    write("modelopt_nvfp4", of_layer(stored), config, results, file)
    q, scale = MXFP8QTensor.quantize(x)
    stored = {"weight": q._quantized_data, "weight_scale": scale}
    config["quantization"].update(quant_algo="MXFP8", group_size=32)
    results = {f"{NAME}.weight@float32": q.dequantize(torch.float32, scale=scale)}
    write("modelopt_mxfp8", of_layer(stored), config, results, file)


# bitsandbytes


def four_bits(case, kind, nested, rows, columns):
    x = weights(rows, columns)
    layer = bitsandbytes.nn.Linear4bit(
        columns, rows, bias=False, quant_type=kind, compress_statistics=nested
    )
    layer.weight = bitsandbytes.nn.Params4bit(
        x, requires_grad=False, quant_type=kind, compress_statistics=nested
    )
    layer.weight = layer.weight._quantize("cpu")
    state = layer.weight.quant_state
    decoded = bitsandbytes.functional.dequantize_4bit(layer.weight.data, state)
    stored = of_layer(layer.state_dict())
    config = {
        "quantization_config": {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": kind,
            "bnb_4bit_use_double_quant": nested,
        }
    }
    write(f"bnb_{case}", stored, config, {f"{NAME}.weight@float32": decoded})


def eight_bits():
    x = weights(10, 41)
    codes, scale, _ = bitsandbytes.functional.int8_vectorwise_quant(x.half())
    decoded = bitsandbytes.functional.int8_vectorwise_dequant(codes, scale)
    stored = {
        "weight": codes,
        "SCB": scale,
        "weight_format": torch.zeros((), dtype=torch.uint8),
    }
    config = {
        "quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}
    }
    write("bnb_int8", of_layer(stored), config, {f"{NAME}.weight@float32": decoded})


# GGUF

QUANTIZED_BY_THE_PACKAGE = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("TQ1_0", "TQ2_0", "MXFP4"),
)
FLOAT16_FIELDS = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "NVFP4": (),
}


def of_gguf():
    folder = HERE / "gguf"
    folder.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(folder / "tiny.gguf", "llama")
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_token_list(["a", "b c", "ß"])
    decoded = {}
    rng = np.random.default_rng(0)
    for name in (*QUANTIZED_BY_THE_PACKAGE, *FLOAT16_FIELDS):
        kind = gguf.GGMLQuantizationType[name]
        size, nbytes = gguf.GGML_QUANT_SIZES[kind]
        columns = max(64, size)
        if name in FLOAT16_FIELDS:
            data = rng.integers(0, 256, (3, columns // size, nbytes), dtype=np.uint8)
            for at in FLOAT16_FIELDS[name]:
                half = rng.uniform(-0.1, 0.1, data.shape[:2]).astype(np.float16)
                data[..., at : at + 2] = half[..., None].view(np.uint8)
            if name == "NVFP4":
                data[..., :4] &= 127
            data = data.reshape(3, -1)
        else:
            data = gguf.quants.quantize(weights(3, columns).numpy(), kind)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
        values = gguf.quants.dequantize(data, kind)
        decoded[f"{name}.weight@float32"] = values.astype(np.float32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write_decoded(folder, decoded)


if __name__ == "__main__":
    of_awq, of_gptq = map(pathlib.Path, sys.argv[1:])
    all_compressed()
    all_gptq(of_gptq)
    awq(of_awq)
    fp8()
    gpt_oss()
    modelopt()
    four_bits("nf4", "nf4", False, 10, 64)
    four_bits("nf4_over_rows", "nf4", True, 20, 40)
    four_bits("nf4_nested", "nf4", True, 40, 512)
    four_bits("fp4", "fp4", False, 10, 64)
    eight_bits()
    of_gguf()
