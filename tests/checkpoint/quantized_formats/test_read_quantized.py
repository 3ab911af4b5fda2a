"""The mapping of weights: names, order, what is read and when."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

import aqtlite
from aqtlite import checkpoint, config
from aqtlite.checkpoint.quantized_formats import bits
from aqtlite.numerics import IntSymmetric
from tests.checkpoint.quantized_formats import edited
from tests.checkpoint.quantized_formats.edited import LAYER
from tests.checkpoint.support import refuses

pytestmark = pytest.mark.code("quick")


def test_a_weight_is_read_when_it_is_asked_for(tmp_path):
    """A scale that is refused lets all other weights be read."""
    tensors = edited.tensors_of("fp8")
    dtype, shape, data = tensors[f"{LAYER}.weight_scale_inv"]
    tensors[f"{LAYER}.weight_scale_inv"] = dtype, shape, b"\xff" * len(data)
    tensors["model.norm.weight"] = "F32", [2], np.ones(2, np.float32).tobytes()
    tensors[f"{LAYER}.input_scale"] = "F32", [], bytes(4)
    path = edited.write(tmp_path / "x", tensors, edited.config_of("fp8"))
    loaded = checkpoint.load_quantized(path)
    assert loaded.method == "fp8" and loaded.metadata["weight_block_size"] == [16, 32]
    assert set(loaded) == {
        *(f"{LAYER}.weight", f"{LAYER}.input_scale", "model.norm.weight")
    }
    np.testing.assert_array_equal(loaded["model.norm.weight"], np.ones(2))
    match = f"{path}: .*weight_scale_inv has a scale that is NaN"
    with pytest.raises(ValueError, match=match):
        loaded[f"{LAYER}.weight"]
    with pytest.raises(KeyError):
        loaded["other"]


def test_a_float_checkpoint(tmp_path):
    arrays = {"a.weight": np.ones((2, 3), np.float32), "layer_scales": np.ones(2)}
    safetensors_numpy.save_file(arrays, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    loaded = checkpoint.load_quantized(tmp_path)
    assert loaded.method is None and loaded.keys() == arrays.keys()
    np.testing.assert_array_equal(loaded["a.weight"], arrays["a.weight"])


def test_fp8_with_one_scale_for_a_weight(tmp_path):
    weight = edited.tensors_of("fp8")[f"{LAYER}.weight"]
    tensors = {
        f"{LAYER}.weight": weight,
        f"{LAYER}.weight_scale": ("F32", [1], np.float32(0.5).tobytes()),
    }
    quantization = {"quant_method": "fp8", "activation_scheme": "static"}
    config_ = "config.json", {"quantization_config": quantization}
    loaded = checkpoint.load_quantized(edited.write(tmp_path / "x", tensors, config_))
    q = loaded[f"{LAYER}.weight"]
    wanted = np.asarray(q.qvalue).astype(np.float32) * 0.5
    np.testing.assert_array_equal(q.dequant(), wanted)


def test_experts_of_openai(tmp_path):
    """Their names have a dot, and their axes are those of OpenAI's model."""
    name = "model.layers.0.mlp.experts.gate_up_proj"
    there = edited.tensors_of("gpt_oss")
    tensors = {
        f"block.0.mlp.mlp1_weight.{part}": there[f"{name}_{part}"]
        for part in ("blocks", "scales")
    }
    loaded = checkpoint.load_quantized(edited.write(tmp_path / "x", tensors, None))
    q = loaded["block.0.mlp.mlp1_weight"]
    of_hugging_face = checkpoint.load_quantized(edited.OTHERS / "gpt_oss")[name]
    assert q.shape == (2, 6, 96) and of_hugging_face.shape == (2, 96, 6)
    np.testing.assert_array_equal(q.dequant().mT, of_hugging_face.dequant())


def test_groups_of_modules(tmp_path):
    """A group that names a module decides, then one for classes."""
    tensors = edited.tensors_of("compressed_w4")
    int8 = edited.tensors_of("compressed_int8")
    tensors |= {name.replace("up", "down"): one for name, one in int8.items()}
    config_ = edited.config_of("compressed_w4")
    quantization = config_[1]["quantization_config"]
    quantization["format"] = "mixed-precision"
    groups = quantization["config_groups"]
    groups["group_0"]["format"] = "pack-quantized"
    other = edited.config_of("compressed_int8")[1]["quantization_config"]
    groups["group_1"] = other["config_groups"]["group_0"]
    groups["group_1"] |= {"format": "int-quantized", "targets": ["re:.*down_proj"]}
    loaded = checkpoint.load_quantized(edited.write(tmp_path / "x", tensors, config_))
    assert loaded[f"{LAYER}.weight"].qvalue.dtype == jnp.int4
    assert loaded[f"{LAYER.replace('up', 'down')}.weight"].qvalue.dtype == np.int8


@pytest.mark.parametrize("width", range(1, 9))
def test_streams_of_bits(width):
    rng = np.random.default_rng(width)
    for count in (0, 1, 31, 32, 45):
        codes = rng.integers(0, 2**width, (3, count), dtype=np.uint8)
        words = bits.to_words(codes, width)
        assert words.shape == (3, bits.words_of(count, width))
        np.testing.assert_array_equal(bits.from_words(words, width, count), codes)
        # Bit i of the stream is bit i % 32 of word i // 32.
        number = sum(int(code) << (width * i) for i, code in enumerate(codes[0]))
        wanted = sum((int(word) % 2**32) << (32 * i) for i, word in enumerate(words[0]))
        assert number == wanted


def padded(codes, width):
    """Codes as versions before 0.18 packed them: 32 // width in each word."""
    each = 32 // width
    *leading, count = codes.shape
    missing = [(0, 0)] * len(leading) + [(0, -count % each)]
    rows = np.pad(codes.astype(np.uint32), missing).reshape(*leading, -1, each)
    return (rows << (width * np.arange(each, dtype=np.uint32))).sum(-1).astype("<u4")


def of_package(case):
    """The tensors of a file of the package by their parts, and its config."""
    tensors = edited.tensors_of(case)
    words, zeros = (
        None
        if name not in tensors
        else np.frombuffer(tensors[name][2], "<i4").reshape(tensors[name][1])
        for name in (f"{LAYER}.weight_packed", f"{LAYER}.weight_zero_point")
    )
    return tensors, words, zeros, edited.config_of(case)


def test_words_that_older_versions_padded(tmp_path):
    tensors, words, _, config_ = of_package("compressed_w6_channel")
    old = padded(bits.from_words(words, 6, 41), 6)
    tensors[f"{LAYER}.weight_packed"] = "I32", list(old.shape), old.tobytes()
    loaded = checkpoint.load_quantized(edited.write(tmp_path / "x", tensors, config_))
    wanted = checkpoint.load_quantized(edited.OTHERS / "compressed_w6_channel")
    got, new = (one[f"{LAYER}.weight"] for one in (loaded, wanted))
    np.testing.assert_array_equal(np.asarray(got.qvalue), np.asarray(new.qvalue))


@pytest.mark.parametrize("times", [1, 2, 5])
def test_zero_points_that_older_versions_padded(times, tmp_path):
    """Zero points are packed along the outputs, and as their weight is.

    Of 20 outputs, both layouts have two words.
    """
    tensors, words, zeros, config_ = of_package("compressed_w3_affine")
    rows, columns = np.frombuffer(tensors[f"{LAYER}.weight_shape"][2], "<i8").tolist()
    codes = bits.from_words(words, 3, columns)
    of_zeros = bits.from_words(np.ascontiguousarray(zeros.T), 3, rows)
    wanted = checkpoint.load_quantized(edited.OTHERS / "compressed_w3_affine")

    def put(part, dtype, x):
        tensors[f"{LAYER}.{part}"] = dtype, list(x.shape), x.tobytes()

    put("weight_shape", "I64", np.array([times * rows, columns]))
    put("weight_packed", "I32", padded(np.tile(codes, (times, 1)), 3))
    old = padded(np.tile(of_zeros, (1, times)), 3).T
    put("weight_zero_point", "I32", np.ascontiguousarray(old))
    dtype, shape, data = tensors[f"{LAYER}.weight_scale"]
    tensors[f"{LAYER}.weight_scale"] = dtype, [times * rows, shape[1]], data * times
    loaded = checkpoint.load_quantized(edited.write(tmp_path / "x", tensors, config_))
    got = loaded[f"{LAYER}.weight"].dequant()
    whole = np.tile(wanted[f"{LAYER}.weight"].dequant(), (times, 1))
    np.testing.assert_array_equal(got, whole)


def of_channels(shape, **fields):
    """A file in 4 bits, 0 to 7 in each of 4 rows, with zero points, in groups of 4."""
    codes = np.tile(np.arange(8, dtype=np.uint8), (4, 1))
    zeros = bits.to_words(np.full((shape[-1] if len(shape) > 1 else 1, 4), 8, "u1"), 4)
    scale = np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
    index = np.arange(8, dtype=np.int32)[::-1] // 4
    arrays = {
        "weight_packed": ("I32", bits.to_words(codes, 4)),
        "weight_scale": ("F32", scale),
        "weight_shape": ("I64", np.array([4, 8])),
        "weight_zero_point": ("I32", np.ascontiguousarray(zeros.T)),
        "weight_g_idx": ("I32", np.ascontiguousarray(index)),
    }
    if fields.get("symmetric", True):
        del arrays["weight_zero_point"]
    tensors = {
        f"{LAYER}.{part}": (dtype, list(x.shape), x.tobytes())
        for part, (dtype, x) in arrays.items()
    }
    config_ = edited.config_of("compressed_w4")
    groups = config_[1]["quantization_config"]["config_groups"]
    groups["group_0"]["weights"] |= {"num_bits": 4, "group_size": None, **fields}
    return codes.astype(np.float32) - 8, scale, (tensors, config_)


@pytest.mark.parametrize(
    ("shape", "fields"),
    [
        ((4,), {"strategy": "channel", "symmetric": False}),
        ((4, 1), {"strategy": "channel", "symmetric": False}),
        ((4,), {"strategy": "channel"}),
        ((1,), {"strategy": "tensor"}),
        ((), {"strategy": "tensor"}),
    ],
)
@pytest.mark.parametrize("has_index", [True, False])
def test_scales_of_fewer_axes(shape, fields, has_index, tmp_path):
    """An order of groups says nothing where all inputs of a row share a scale."""
    wanted, scale, (tensors, config_) = of_channels(shape, **fields)
    name = f"{LAYER}.weight_g_idx"
    tensors[name] = "I32", [8], bytes(32)
    if not has_index:
        del tensors[name]
    loaded = checkpoint.load_quantized(edited.write(tmp_path / "x", tensors, config_))
    got = loaded[f"{LAYER}.weight"].dequant()
    np.testing.assert_array_equal(got, wanted * scale.reshape(-1, 1))


def test_an_order_of_groups(tmp_path):
    wanted, scale, (tensors, config_) = of_channels(
        (4, 2), strategy="group", group_size=4
    )
    loaded = checkpoint.load_quantized(edited.write(tmp_path / "x", tensors, config_))
    got = loaded[f"{LAYER}.weight"].dequant()
    np.testing.assert_array_equal(got, wanted * scale[:, ::-1].repeat(4, 1))
    wanted, scale, files = of_channels((2, 2), strategy="block", block_structure=[2, 4])
    loaded = checkpoint.load_quantized(edited.write(tmp_path / "y", *files))
    refuses("g_idx orders groups, .* blocks", lambda: loaded[f"{LAYER}.weight"])
    wanted, scale, files = of_channels((4,), strategy="channel")
    loaded = checkpoint.load_quantized(edited.write(tmp_path / "z", *files))
    refuses("g_idx names groups that are not", lambda: loaded[f"{LAYER}.weight"])


def test_blocks_beyond_the_weight(tmp_path):
    """They take no memory for what is not there."""
    tensors, config_ = edited.tensors_of("bnb_nf4_nested"), None
    (name,) = (name for name in tensors if "quant_state" in name)
    state = json.loads(tensors[name][2])
    outer = f"{LAYER}.weight.nested_absmax"
    first = tensors[outer][2][:4]
    decoded = []
    for size in (state["nested_blocksize"], 1 << 33, 1 << 70):
        count = 2 if size == state["nested_blocksize"] else 1
        text = json.dumps(state | {"nested_blocksize": size}).encode()
        tensors[name] = "U8", [len(text)], text
        tensors[outer] = "F32", [count], first * count
        folder = edited.write(tmp_path / str(size), tensors, config_)
        decoded.append(checkpoint.load_quantized(folder)[f"{LAYER}.weight"].dequant())
    for one in decoded[1:]:
        np.testing.assert_array_equal(one, decoded[0])


CODES = np.random.default_rng(0).integers(0, 8, (4, 20), dtype=np.uint8)


@pytest.mark.parametrize(
    ("version", "words", "is_read"),
    [
        ("0.17.1", padded(CODES, 3), True),
        ("0.9.4.a20250101", padded(CODES, 3), True),
        ("0.18.0", bits.to_words(CODES, 3), True),
        ("1.0", bits.to_words(CODES, 3), True),
        (None, bits.to_words(CODES, 3), False),
        ("new", padded(CODES, 3), False),
    ],
)
def test_words_that_fit_both_ways(version, words, is_read, tmp_path):
    """20 codes of 3 bits are 2 words in either layout: the version decides."""
    config_ = edited.config_of("compressed_w3_affine")
    quantization = config_[1]["quantization_config"]
    quantization["version"] = version
    given = quantization["config_groups"]["group_0"]["weights"]
    given |= {"symmetric": True, "strategy": "channel", "group_size": None}
    scale = np.ones((4, 1), np.float32)
    shape = np.array(CODES.shape)
    tensors = {
        f"{LAYER}.weight_packed": ("I32", [4, 2], words.tobytes()),
        f"{LAYER}.weight_scale": ("F32", [4, 1], scale.tobytes()),
        f"{LAYER}.weight_shape": ("I64", [2], shape.tobytes()),
    }
    path = edited.write(tmp_path / "x", tensors, config_)
    if is_read:
        got = checkpoint.load_quantized(path)[f"{LAYER}.weight"].dequant()
        np.testing.assert_array_equal(got, CODES.astype(np.float32) - 4)
        return
    message = "20 codes of 3 bits are 2 words in both layouts .* has no version"
    refuses(message, checkpoint.load_quantized, path)


def test_files_written_here_say_how_they_are_packed(tmp_path):
    q = aqtlite.quantize(
        CODES.astype(np.float32), config.Tensor(numerics=IntSymmetric(bits=3)), axes=1
    )
    path = tmp_path / "x"
    checkpoint.save_quantized(path, {"a.weight": q}, format="compressed-tensors")
    got = checkpoint.load_quantized(path)["a.weight"]
    np.testing.assert_array_equal(got.dequant(), q.dequant())
