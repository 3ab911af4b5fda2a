"""Reads what ``tests.checkpoint.quantized_formats.written_here`` wrote.

It needs the packages that ``make.py`` needs, and decodes with them:

    python read_back.py FOLDER FOLDER_OF_UNPACKED_GPTQMODEL
"""

import json
import pathlib
import sys

import gguf
import make
import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file


def check(name, got, wanted):
    np.testing.assert_array_equal(got.float().numpy(), wanted, err_msg=name)
    print("equal:", name)


def of_module(tensors, name):
    module = name.removesuffix("weight")
    return {k.removeprefix(module): x for k, x in tensors.items() if module in k}


def compressed_tensors(folder):
    path = folder / "compressed-tensors"
    tensors = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    # The package writes these after its own config.
    config.pop("quant_method")
    parsed = QuantizationConfig.model_validate(config)
    for name, wanted in np.load(folder / "compressed-tensors.npz").items():
        module = name.removesuffix(".weight")
        groups = parsed.config_groups.values()
        (scheme,) = (one for one in groups if module in one.targets)
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        decoded = compressor.decompress(of_module(tensors, name), scheme)["weight"]
        check(name, decoded, wanted)


def gptq(folder, source):
    path = folder / "gptq"
    tensors = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    for name, wanted in np.load(folder / "gptq.npz").items():
        stored = of_module(tensors, name)
        zeros = stored["qzeros"].numpy().view(np.uint32)
        one = sum(1 << (config["bits"] * i) for i in range(32 // config["bits"]))
        stored["qzeros"] = torch.from_numpy((zeros + np.uint32(one)).view(np.int32))
        decoded = make.decode_gptq(source, stored, config["bits"])
        check(name, decoded.T, wanted)


def of_gguf(folder):
    reader = gguf.GGUFReader(folder / "tiny.gguf")
    wanted = np.load(folder / "gguf.npz")
    for tensor in reader.tensors:
        decoded = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if tensor.name in wanted:
            check(tensor.name, torch.from_numpy(decoded), wanted[tensor.name])
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    assert tokens == ["a", "b c", "ß"], tokens
    assert reader.fields["llama.rope.freq_base"].contents() == 1e4


if __name__ == "__main__":
    folder, source = map(pathlib.Path, sys.argv[1:])
    compressed_tensors(folder)
    gptq(folder, source)
    of_gguf(folder)
