"""Damaged files, and files made to do harm: one line that names what is wrong."""

import copy
import json
import random

import numpy as np
import pytest

from aqtlite import checkpoint
from tests.checkpoint.quantized_formats import edited
from tests.checkpoint.quantized_formats.edited import LAYER
from tests.checkpoint.support import refuses

pytestmark = pytest.mark.code("quick")


def read_all(path):
    loaded = checkpoint.load_quantized(path)
    return {name: loaded[name] for name in loaded}


def names_once(folder, message, path):
    """Reading a path is refused by a message that names its folder in one place."""
    with pytest.raises(checkpoint.CheckpointError, match=message) as info:
        read_all(path)
    text = str(info.value)
    assert text.count(str(folder)) == 1 and "\n" not in text


def put(path, value):
    """Sets a field of the config, by dots; None removes it."""

    def change(config):
        *steps, last = path.split(".")
        for step in steps:
            config = config[step]
        config[last] = value
        if value is None:
            del config[last]

    return change


QUANTIZATION = "quantization_config"
WEIGHTS = f"{QUANTIZATION}.config_groups.group_0.weights"


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("awq", put(f"{QUANTIZATION}.quant_method", "quip"), "'quip' is not read; awq"),
        ("awq", put(f"{QUANTIZATION}.quant_method", None), "quant_method has to be"),
        ("awq", put(f"{QUANTIZATION}.quant_method", "gptq"), "sym|scales in .* is"),
        ("awq", put(f"{QUANTIZATION}.version", "gemv"), "version='gemv' of AWQ"),
        ("awq", put(f"{QUANTIZATION}.bits", 3), "bits has to be one of 4, got 3"),
        (
            "awq",
            put(f"{QUANTIZATION}.group_size", 16),
            "scales in .* ask for the shape",
        ),
        (
            "awq",
            put(f"{QUANTIZATION}.modules_to_not_convert", ["mlp"]),
            "is quantized, and modules_to_not_convert of the config says",
        ),
        ("gptq_4", put(f"{QUANTIZATION}.bits", 5), "one of 2, 3, 4, 8, got 5"),
        ("gptq_4", put(f"{QUANTIZATION}.bits", 8), "g_idx is int32"),
        ("gptq_4", put(f"{QUANTIZATION}.bits", True), "bits has to be one of"),
        (
            "gptq_4",
            put(f"{QUANTIZATION}.checkpoint_format", "gptq_v2"),
            "qzeros are not 8, as sym and checkpoint_format",
        ),
        (
            "gptq_4",
            put(f"{QUANTIZATION}.dynamic", {"+:mlp": {"bits": 8}}),
            "dynamic gives modules other widths",
        ),
        (
            "gptq_4",
            put(f"{QUANTIZATION}.dynamic", {r"-:.*\.up_proj": {}}),
            "up_proj is quantized, and dynamic of the config says that it is not",
        ),
        (
            "gptq_4",
            put(f"{QUANTIZATION}.dynamic", {"-:(": {}}),
            "of the config is none",
        ),
        (
            "gptq_4_act_order",
            put(f"{QUANTIZATION}.desc_act", False),
            "g_idx is not in the order of the inputs",
        ),
        (
            "compressed_w4",
            put(f"{QUANTIZATION}.format", "marlin-24"),
            "format has to be",
        ),
        ("compressed_w4", put(f"{WEIGHTS}.num_bits", 8), "are not packed"),
        ("compressed_w4", put(f"{WEIGHTS}.group_size", None), "has no group_size"),
        ("compressed_w4", put(f"{WEIGHTS}.symmetric", False), "lacks .*zero_point"),
        ("compressed_w4_affine", put(f"{WEIGHTS}.symmetric", True), "zero_point in"),
        (
            "compressed_w4_affine",
            put(f"{WEIGHTS}.strategy", "tensor"),
            "zero points for each channel or group, not for a whole tensor|"
            "ask for the shape",
        ),
        ("compressed_w4", put(f"{WEIGHTS}.actorder", "group"), "has no weight_g_idx"),
        (
            "compressed_w4",
            put(f"{QUANTIZATION}.ignore", ["re:.*up_proj"]),
            "is quantized, and ignore of the config says that it is not",
        ),
        ("compressed_w4", put(f"{QUANTIZATION}.ignore", ["re:("]), "of the config is"),
        (
            "compressed_w4",
            put(f"{QUANTIZATION}.config_groups.group_0.targets", ["lm_head"]),
            "no group names .*up_proj",
        ),
        (
            "compressed_w4",
            put(f"{QUANTIZATION}.sparsity_config", {"format": "sparse-bitmask"}),
            "sparse files",
        ),
        ("fp8", put(f"{QUANTIZATION}.weight_block_size", [16, 0]), "two positive"),
        (
            "fp8",
            put(f"{QUANTIZATION}.weight_block_size", [16, 16]),
            "ask for the shape",
        ),
        ("fp8", put(f"{QUANTIZATION}.fmt", "e5m2"), "fmt has to be"),
        (
            "modelopt_nvfp4",
            put("quantization.quant_algo", "W4A8_AWQ"),
            "quant_algo has",
        ),
        (
            "modelopt_nvfp4",
            put("quantization.exclude_modules", ["*up*"]),
            "exclude_modules of the config says",
        ),
        (
            "bnb_nf4",
            put(f"{QUANTIZATION}.llm_int8_skip_modules", ["up_proj"]),
            "llm_int8_skip_modules of the config says",
        ),
    ],
)
def test_contradictory_configs(case, change, message, tmp_path):
    name, config = edited.config_of(case)
    change(config)
    folder = edited.write(tmp_path / "x", edited.tensors_of(case), (name, config))
    names_once(folder, message, folder)


def of_bytes(name, data, *, at=0):
    """Writes over the bytes of a tensor."""

    def change(tensors):
        dtype, shape, old = tensors[name]
        tensors[name] = dtype, shape, old[:at] + data + old[at + len(data) :]

    return change


def of_kind(name, dtype, shape=None):
    """Gives a tensor another dtype or shape."""

    def change(tensors):
        _, old, data = tensors[name]
        tensors[name] = dtype, shape or old, data

    return change


NAN = np.float32(np.nan).tobytes()
NAN16 = np.float16(np.nan).tobytes()
STATE = f"{LAYER}.weight.quant_state.bitsandbytes__nf4"


def other_state(**fields):
    def change(tensors):
        state = json.loads(tensors[STATE][2]) | fields
        text = json.dumps(state).encode()
        tensors[STATE] = "U8", [len(text)], text

    return change


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("gptq_4", of_bytes(f"{LAYER}.scales", NAN16), "a scale that is NaN"),
        ("gptq_4", of_bytes(f"{LAYER}.scales", b"\0\xc0"), "a negative scale"),
        ("gptq_4", of_kind(f"{LAYER}.scales", "I16"), "not of float32 or float16"),
        ("gptq_4", of_bytes(f"{LAYER}.qzeros", b"\x66"), "qzeros are not 7"),
        (
            "gptq_4_act_order",
            of_bytes(f"{LAYER}.g_idx", b"\xff" * 4),
            "g_idx names groups outside 0 to 2",
        ),
        (
            "compressed_w4",
            of_bytes(f"{LAYER}.weight_shape", b"\xff" * 8),
            "weight_shape holds .*no shape",
        ),
        (
            "compressed_w4",
            of_bytes(f"{LAYER}.weight_shape", b"\xff" * 6, at=8),
            "are not packed",
        ),
        (
            "compressed_nvfp4",
            of_bytes(f"{LAYER}.weight_global_scale", bytes(4)),
            "is 0, and divides",
        ),
        (
            "compressed_mxfp4",
            of_bytes(f"{LAYER}.weight_scale", b"\xff"),
            "the scale NaN .255 in E8M0",
        ),
        ("fp8", of_bytes(f"{LAYER}.weight_scale_inv", NAN), "a scale that is NaN"),
        ("fp8", of_kind(f"{LAYER}.weight", "I8"), "not of float8_e4m3fn"),
        ("fp8", of_kind(f"{LAYER}.weight", "F4", [48, 128]), "of dtype F4"),
        (
            "gpt_oss",
            of_kind(
                "model.layers.0.mlp.experts.gate_up_proj_blocks", "U8", [2, 9, 2, 16]
            ),
            "ask for the shape",
        ),
        ("bnb_nf4", other_state(shape=[10, 1 << 60]), "is not 4 bits for each element"),
        ("bnb_nf4", other_state(shape=[10, -64]), "a list of positive integers"),
        ("bnb_nf4", other_state(blocksize=0), "an integer of at least 1"),
        ("bnb_nf4", other_state(quant_type="fp4"), "quant_type has to be"),
        ("bnb_nf4", of_bytes(STATE, b"[" * 20), "is no JSON"),
        ("bnb_nf4", of_bytes(f"{LAYER}.weight.quant_map", NAN), "quant_map holds NaN"),
        ("bnb_int8", of_bytes(f"{LAYER}.weight_format", b"\1"), "the layout of rows"),
    ],
)
def test_damaged_tensors(case, change, message, tmp_path):
    tensors = edited.tensors_of(case)
    change(tensors)
    folder = edited.write(tmp_path / "x", tensors, edited.config_of(case))
    names_once(folder, message, folder)


@pytest.mark.parametrize("case", edited.CASES)
def test_a_missing_tensor(case, tmp_path):
    """Of a quantized weight, each part but g_idx and the layout is needed."""
    optional = ("g_idx", "weight_format", "bias", "norm.weight")
    for missing in edited.tensors_of(case):
        tensors = edited.tensors_of(case)
        del tensors[missing]
        folder = edited.write(tmp_path / "x", tensors, edited.config_of(case))
        if missing.endswith(optional) and case != "gptq_4_act_order":
            read_all(folder)
        elif not missing.endswith(("bias", "norm.weight")):
            message = "lacks|has no g_idx|a part of a quantized|holds no|not of float32"
            refuses(message, read_all, folder)


EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"
FP8_EXPERTS = {EXPERTS: ("F8_E4M3", [2, 8, 32], bytes(512))}
NVFP4_EXPERTS = {
    EXPERTS: ("U8", [2, 8, 16], bytes(256)),
    f"{EXPERTS}_weight_scale": ("F8_E4M3", [2, 8, 2], bytes(32)),
    f"{EXPERTS}_weight_scale_2": ("F32", [2], bytes(8)),
}
GROUP = {"targets": ["Linear"], "format": "pack-quantized", "weights": {"num_bits": 4}}


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {"quant_method": "fp8", "weight_block_size": [8, 32]},
        {"quant_method": "gptq", "bits": 4, "group_size": 32},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUP}},
        None,
    ],
    ids=lambda one: "none" if one is None else one["quant_method"],
)
@pytest.mark.parametrize(
    "tensors",
    [
        FP8_EXPERTS,
        {**FP8_EXPERTS, f"{EXPERTS}_weight_scale": ("F32", [2], bytes(8))},
        NVFP4_EXPERTS,
        {EXPERTS: ("I8", [2, 8, 16], bytes(256)), f"{EXPERTS}_scale": ("F32", [], NAN)},
    ],
    ids=["fp8", "fp8_scale", "nvfp4", "int8"],
)
def test_experts_in_one_tensor(tensors, quantization, tmp_path):
    """Their codes have no name that ends in .weight, and are no weights."""
    config = None
    if quantization is not None:
        config = "config.json", {"quantization_config": quantization}
    folder = edited.write(tmp_path / "x", tensors, config)
    message = f"{EXPERTS}.* is .*, a part of a quantized weight that"
    names_once(folder, message, folder)


def test_scales_without_codes(tmp_path):
    name = f"{EXPERTS}_weight_scale"
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}
    tensors = {name: ("F32", [2], bytes(8))}
    folder = edited.write(tmp_path / "x", tensors, ("config.json", config))
    names_once(folder, f"{name}.* is float32.2., a part", folder)


def test_bytes_that_are_no_codes(tmp_path):
    """Masks of old files, tables of a float checkpoint, and scales of activations."""
    tensors = {
        "h.0.attn.bias": ("U8", [1, 1, 4, 4], bytes(16)),
        "h.0.causal_mask": ("U8", [4, 4], bytes(16)),
        f"{EXPERTS}_input_scale": ("F32", [2], bytes(8)),
    }
    config = {"quantization_config": {"quant_method": "fp8"}}
    folder = edited.write(tmp_path / "x", tensors, ("config.json", config))
    assert read_all(folder).keys() == tensors.keys()
    tensors["table"] = "U8", [4, 4], bytes(16)
    folder = edited.write(tmp_path / "y", tensors, None)
    assert read_all(folder).keys() == tensors.keys()


class TestFolders:
    """Shards, indices and configs."""

    def folder(self, tmp_path, weight_map):
        path = edited.write(
            tmp_path / "x", edited.tensors_of("fp8"), edited.config_of("fp8")
        )
        index = path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
        return path

    def test_a_shard_is_missing(self, tmp_path):
        path = self.folder(tmp_path, {"a": "model-2.safetensors"})
        refuses("names model-2.safetensors, which is missing", read_all, path)

    def test_a_file_outside(self, tmp_path):
        path = self.folder(tmp_path, {"a": "../x/model.safetensors"})
        refuses("outside its folder", read_all, path)

    def test_another_place(self, tmp_path):
        path = self.folder(tmp_path, {f"{LAYER}.weight": "model.safetensors"})
        refuses("weight_scale_inv is in no file, and it is in", read_all, path)

    @pytest.mark.parametrize("name", ["x" * 5000, "\0", "", ".."])
    def test_names_that_no_file_has(self, name, tmp_path):
        path = self.folder(tmp_path, {"a": name})
        refuses("index.json names .*, which is missing", read_all, path)

    def test_no_map(self, tmp_path):
        refuses("weight_map has to be", read_all, self.folder(tmp_path, [1]))

    def test_several_shards(self, tmp_path):
        """A weight and its scale in different files, and a file that is not listed."""
        tensors = edited.tensors_of("fp8")
        path = tmp_path / "x"
        places = {}
        for i, (name, one) in enumerate(tensors.items()):
            edited.write(path, {name: one}, edited.config_of("fp8"))
            file = f"model-{i + 1}.safetensors"
            (path / "model.safetensors").rename(path / file)
            places[name] = file
        edited.write(path, {"x": ("F32", [1], bytes(4))}, None)
        index = path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": places}))
        loaded = checkpoint.load_quantized(path)
        wanted = np.load(edited.OTHERS / "fp8" / "decoded.npz")
        assert list(loaded) == [f"{LAYER}.weight"]
        got = loaded[f"{LAYER}.weight"].dequant()
        np.testing.assert_array_equal(got, wanted[f"{LAYER}.weight@float32"])

    @pytest.mark.parametrize("text", ["[" * 200_000, "[]", "{", '{"a":' * 200_000])
    def test_configs(self, text, tmp_path):
        path = edited.write(tmp_path / "x", edited.tensors_of("fp8"), None)
        (path / "config.json").write_text(text)
        refuses("nested too deeply|not an object|is no JSON", read_all, path)

    def test_without_a_config(self, tmp_path):
        """Nothing is guessed: words are no weights."""
        path = edited.write(tmp_path / "x", edited.tensors_of("gptq_4"), None)
        refuses("that no config beside it explains", read_all, path)

    def test_other_paths(self, tmp_path):
        refuses("does not exist", read_all, tmp_path / "x")
        refuses("holds no tensors", read_all, tmp_path)
        file = tmp_path / "x.bin"
        file.write_bytes(b"GGU")
        refuses("neither a GGUF nor a .safetensors file", read_all, file)


GGUF = (edited.OTHERS / "gguf" / "tiny.gguf").read_bytes()


def number(value, size=8):
    return value.to_bytes(size, "little")


class TestGguf:
    """Lengths, counts, types and offsets."""

    @pytest.mark.parametrize(
        ("at", "data", "message"),
        [
            (4, number(1, 4), "version is 1"),
            (4, b"\0\0\0\3", "version is 50331648"),
            (8, number(1 << 63), "too short for 9223372036854775808 entries"),
            (16, number(1 << 40), "too short for 1099511627776 entries"),
            (24, number(1 << 63), "it ends within"),
        ],
    )
    def test_header(self, at, data, message, tmp_path):
        self.refused(GGUF[:at] + data + GGUF[at + len(data) :], message, tmp_path)

    @pytest.mark.parametrize(
        ("after", "skip", "data", "message"),
        [
            ("general.architecture", 0, number(13, 4), "a value of type 13"),
            ("general.architecture", 0, number(9, 4) * 2, "arrays of arrays"),
            ("Q4_0.weight", 0, number(5, 4), "has 5 axes"),
            ("Q4_0.weight", 4, number(33), "no blocks of 32 elements"),
            ("Q4_0.weight", 12, number(1 << 62), "lies outside the file"),
            ("Q4_0.weight", 20, number(16, 4), "is of type IQ2_XXS, which is not read"),
            ("Q4_0.weight", 20, number(99, 4), "is of type number 99"),
            ("Q4_0.weight", 24, number(1), "is not aligned"),
            ("Q4_0.weight", 24, number(1 << 63), "lies outside the file"),
            ("Q4_0.weight", 24, number(0), "lie on the same bytes"),
        ],
    )
    def test_entries(self, after, skip, data, message, tmp_path):
        at = GGUF.index(after.encode()) + len(after) + skip
        self.refused(GGUF[:at] + data + GGUF[at + len(data) :], message, tmp_path)

    def test_a_name_twice(self, tmp_path):
        self.refused(
            GGUF.replace(b"Q4_1.w", b"Q4_0.w"), "'Q4_0.weight' twice", tmp_path
        )

    def test_every_truncation_of_the_header(self, tmp_path):
        end = GGUF.index(b"IQ4_XS.weight") + 40
        for size in (0, 3, *range(4, end, 37)):
            self.refused(GGUF[:size], "is damaged, or no GGUF file", tmp_path)

    def test_a_scale(self, tmp_path):
        loaded = checkpoint.load_quantized(edited.OTHERS / "gguf")
        start = loaded.weights["Q8_0.weight"].read.args[2].start
        data = GGUF[:start] + NAN16 + GGUF[start + 2 :]
        self.refused(data, "Q8_0.weight has a scale that is NaN", tmp_path)

    def test_a_part_is_missing(self, tmp_path):
        path = tmp_path / "a-00001-of-00002.gguf"
        path.write_bytes(GGUF)
        refuses("is one of 2 parts, and .*00002.gguf is missing", read_all, path)
        (tmp_path / "a-00002-of-00002.gguf").write_bytes(GGUF)
        refuses("is in several parts", read_all, tmp_path)
        (tmp_path / "b.gguf").write_bytes(GGUF)
        refuses("several models, .* name a file", read_all, tmp_path)

    def refused(self, data, message, tmp_path):
        path = tmp_path / "x.gguf"
        path.write_bytes(data)
        names_once(tmp_path, message, path)


VALUES = (None, True, 0, -1, 3, 8, 1 << 70, 0.5, "", "re:(", [], [0, 1], {}, "tensor")


def test_mutations(tmp_path):
    """Whatever is changed, the file is read, or refused in one line."""
    random_ = random.Random(0)
    refused = 0
    for i in range(150):
        case = random_.choice(edited.CASES)
        tensors, config = edited.tensors_of(case), copy.deepcopy(edited.config_of(case))
        if random_.random() < 0.5:
            section = config[1].get(QUANTIZATION) or config[1]["quantization"]
            section[random_.choice(list(section))] = random_.choice(VALUES)
        else:
            name = random_.choice(list(tensors))
            dtype, shape, data = tensors[name]
            places = [random_.randrange(len(data)) for _ in range(3 if data else 0)]
            changed = bytearray(data)
            for at in places:
                changed[at] = random_.choice((0, 127, 128, 255))
            shape = random_.choice((shape, shape[::-1], [1, *shape]))
            tensors[name] = dtype, shape, bytes(changed)
        folder = edited.write(tmp_path / str(i), tensors, config)
        try:
            weights = read_all(folder)
            assert all(isinstance(w.shape, tuple) for w in weights.values())
        except checkpoint.CheckpointError as error:
            refused += 1
            assert "\n" not in str(error)
    assert 30 < refused < 140
