"""The mapping of weights: names, order, what is read and when."""

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from aqtlite import checkpoint
from aqtlite.checkpoint.quantized_formats import bits
from tests.checkpoint.quantized_formats import edited
from tests.checkpoint.quantized_formats.edited import LAYER

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


def test_words_that_older_versions_padded(tmp_path):
    """32 // bits codes in each word, with the rest unused."""
    tensors = edited.tensors_of("compressed_w6_channel")
    name = f"{LAYER}.weight_packed"
    _, (rows, words), data = tensors[name]
    stream = np.frombuffer(data, "<i4").reshape(rows, words)
    codes = bits.from_words(stream, 6, 41).astype(np.uint32)
    padded = np.pad(codes, [(0, 0), (0, 4)]).reshape(rows, 9, 5)
    old = (padded << (6 * np.arange(5, dtype=np.uint32))).sum(-1).astype("<u4")
    tensors[name] = "I32", [rows, 9], old.tobytes()
    config_ = edited.config_of("compressed_w6_channel")
    loaded = checkpoint.load_quantized(edited.write(tmp_path / "x", tensors, config_))
    wanted = checkpoint.load_quantized(edited.OTHERS / "compressed_w6_channel")
    got, new = (one[f"{LAYER}.weight"] for one in (loaded, wanted))
    np.testing.assert_array_equal(np.asarray(got.qvalue), np.asarray(new.qvalue))
