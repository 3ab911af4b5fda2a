"""Configs and names of Hugging Face, old and new, and of GGUF: one decoder."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from aqtlite import checkpoint, llm
from aqtlite.checkpoint import CheckpointError
from aqtlite.checkpoint.quantized_formats.settings import Settings
from aqtlite.llm import hugging_face
from tests.llm.support import (
    FOLDER,
    gguf_names,
    gguf_pairs,
    loaded,
    metadata,
)

pytestmark = pytest.mark.code("quick")

BEFORE = {  # As transformers 4 wrote what the folders have.
    "llama": {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "mistral": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "qwen2": {"rope_theta": 10000.0, "layer_types": None},
    "gemma": {"rope_theta": 10000.0},
    "gemma3": {"rope_theta": 1e6, "rope_local_base_freq": 10000.0},
}


def config_of(values, has_head=True):
    return hugging_face.config_of(Settings(values, "config.json"), has_head=has_head)


@pytest.mark.parametrize("family", BEFORE)
def test_old_configs_say_the_same(family):
    new = metadata(family)
    old = {**new, "rope_parameters": None, **BEFORE[family]}
    assert config_of(old) == config_of(new) == llm.moves_of(FOLDER / family)[0]


def test_theta_beside_the_rope_that_lacks_it():
    values = {**metadata("qwen2"), "rope_theta": 5e5}
    for rope in ({"rope_type": "default"}, {"rope_type": None, "type": "default"}):
        for key in ("rope_parameters", "rope_scaling"):
            given = {**values, "rope_parameters": None, key: rope}
            assert {one.theta for one in config_of(given).ropes} == {5e5}
    gemma = metadata("gemma3") | {"rope_theta": 2e6, "rope_local_base_freq": 3e4}
    kinds = ("full_attention", "sliding_attention")
    gemma["rope_parameters"] = {kind: {"rope_type": "default"} for kind in kinds}
    assert {one.theta for one in config_of(gemma).ropes} == {2e6, 3e4}


def test_of_two_ropes_that_of_transformers_is_taken():
    """As transformers 5.24 reads them."""
    values = {**metadata("qwen2"), "rope_theta": 5e5}
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": 7e5}
    for scaling, theta, factor in (
        ({"rope_type": "linear", "factor": 4.0}, 5e5, 4),
        ({"type": "linear", "factor": 4.0, "rope_theta": 6e5}, 6e5, 4),
        ({}, 7e5, None),
        (None, 7e5, None),
    ):
        (rope,) = set(config_of({**values, "rope_scaling": scaling}).ropes)
        factors = None if factor is None else {factor}
        assert rope.theta == theta
        assert (rope.factors and set(rope.factors)) == factors
    gemma = metadata("gemma3")
    before = config_of(gemma)
    gemma["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    for found, old, window in zip(
        config_of(gemma).ropes, before.ropes, before.windows, strict=True
    ):
        assert found.theta == old.theta
        assert found == old if window else set(found.factors) == {8}


def test_layers_with_windows():
    qwen = {k: v for k, v in metadata("qwen2").items() if k != "layer_types"}
    qwen |= {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    assert config_of(qwen).windows == (None, 7)
    mistral = metadata("mistral")
    assert config_of({**mistral, "sliding_window": None}).windows == (None, None)
    without = {k: v for k, v in mistral.items() if k != "layer_types"}
    for values in (without, {**without, "layer_types": None}):
        assert config_of({**values, "sliding_window": 5}).windows == (5, 5)
    assert config_of({**qwen, "layer_types": None}).windows == (None, 7)
    gemma = metadata("gemma3")
    gemma |= {"layer_types": None, "sliding_window_pattern": 3}
    assert config_of(gemma).windows == (4, 4, None)


def arrays_of(decoder):
    leaves, _ = jax.tree.flatten_with_path(nnx.to_pure_dict(nnx.state(decoder)))
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma", "gemma3", "gpt2"])
def test_gguf_files_hold_the_same_decoder(family, tmp_path):
    names = gguf_names(family)
    wanted = loaded(family)
    is_gemma = family.startswith("gemma")
    weights = {}
    for name, x in checkpoint.load_quantized(FOLDER / family).items():
        x = np.asarray(x, np.float32)
        # As llama.cpp's converter stores them.
        x = x.T if family == "gpt2" and ".c_" in name else x
        weights[names[name]] = x + 1 if is_gemma and "norm" in name else x
    path = tmp_path / "model.gguf"
    pairs = gguf_pairs(family, wanted.cfg)
    checkpoint.save_quantized(path, weights, format="gguf", metadata=pairs)
    got = llm.load(path).decoder
    moved, given = arrays_of(got), arrays_of(wanted)
    assert moved.keys() == given.keys()
    for name, x in given.items():
        is_shifted = is_gemma and "norm" in name
        np.testing.assert_array_equal(moved[name], x + 1 if is_shifted else x, name)
    cfg = dataclasses.replace(got.cfg, eps=wanted.cfg.eps, norm=wanted.cfg.norm)
    if family == "gemma3":  # Its layers have a pattern of six, and its scale is known.
        assert cfg.windows == (4, 4, 4) and cfg.ropes == (llm.Rope(),) * 3
        fields = ("windows", "ropes", "score_scale")
        same = {name: getattr(wanted.cfg, name) for name in fields}
        cfg = dataclasses.replace(cfg, **same)
        path, key = tmp_path / "no_window.gguf", "gemma3.attention.sliding_window"
        given = {**pairs, key: np.uint32(0)}
        checkpoint.save_quantized(path, weights, format="gguf", metadata=given)
        with pytest.raises(CheckpointError, match="sliding_window has to") as raised:
            llm.moves_of(path)
        assert str(raised.value).count(path.name) == 1
    assert cfg == wanted.cfg


def config_of_gguf(folder, family="llama", more=None, **pairs):
    """The config of a model with further tensors and key-value pairs."""
    cfg, _ = llm.moves_of(FOLDER / family)
    names = gguf_names(family)
    weights = {
        names[name]: np.asarray(x, np.float32)
        for name, x in checkpoint.load_quantized(FOLDER / family).items()
    }
    weights |= more or {}
    path = folder / "model.gguf"
    path.unlink(missing_ok=True)
    given = {f"{family}.{key}": value for key, value in pairs.items()}
    given = {**gguf_pairs(family, cfg), **given}
    checkpoint.save_quantized(path, weights, format="gguf", metadata=given)
    return llm.moves_of(path)[0]


@pytest.mark.parametrize(
    ("pairs", "factor"),
    [
        ({}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": np.float32(4)}, 4),
        # As llama.cpp reads them.
        ({"rope.scaling.factor": np.float32(4)}, 4),
        ({"rope.scale_linear": np.float32(4)}, 4),
        ({"rope.scaling.factor": np.float32(0)}, None),
        ({"rope.scaling.type": "none", "rope.scaling.factor": np.float32(4)}, None),
    ],
)
def test_positions_that_a_gguf_file_stretches(pairs, factor, tmp_path):
    (factors,) = {one.factors for one in config_of_gguf(tmp_path, **pairs).ropes}
    assert factors is None if factor is None else set(factors) == {factor}


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ({"final_logit_softcapping": np.float32(30)}, "has to be 0: the models"),
        ({"attn_logit_softcapping": np.float32(50)}, "has to be 0: the models"),
        ({"logit_scale": np.float32(0.5)}, "logit_scale has to be 1"),
        ({"use_parallel_residual": True}, "use_parallel_residual has to be False"),
        ({"expert_count": np.uint32(8)}, "expert_count has to be 0"),
        ({"expert_count": np.array([0, 8], np.uint32)}, "expert_count has to be 0"),
        ({"attention.causal": False}, "attention.causal has to be True"),
        ({"attention.clamp_kqv": np.float32(8)}, "clamp_kqv has to be 0"),
        ({"attention.scale": np.float32(0.5)}, "attention.scale has to be 0.35"),
        ({"attention.scale": "x"}, "attention.scale has to be 0.35"),
        ({"attention.key_length_swa": np.uint32(5)}, "length_swa has to be one of 8"),
        ({"attention.sliding_window_pattern": np.uint32(2)}, "are of gemma3 alone"),
        (
            {"rope.scaling.factor": np.ones(4, np.float32)},
            "factor has to be a positive",
        ),
        (
            {"block_count": np.uint32(2**32 - 1)},
            "block_count has to be an integer from",
        ),
        ({"attention.key_length": np.uint64(2**63)}, "key_length has to be an integer"),
        ({"feed_forward_length": np.uint64(2**63)}, "forward_length has to be an int"),
        ({"attention.sliding_window": np.uint64(2**63)}, "window has to be an integer"),
    ],
    ids=lambda one: "" if isinstance(one, str) else next(iter(one)),
)
def test_keys_of_gguf_files_that_change_the_computation(pairs, message, tmp_path):
    """What a decoder has not is refused, with a line that names the key."""
    with pytest.raises(CheckpointError, match=message) as raised:
        config_of_gguf(tmp_path, **pairs)
    assert "\n" not in str(raised.value)


def test_keys_of_gguf_files_that_say_nothing_new(tmp_path):
    pairs = {
        "final_logit_softcapping": np.float32(0),
        "logit_scale": np.float32(1),
        "expert_count": np.uint32(0),
        "attention.causal": True,
        "attention.scale": np.float32(8**-0.5),
        "use_parallel_residual": False,
    }
    assert config_of_gguf(tmp_path, **pairs) == config_of_gguf(tmp_path)


@pytest.mark.parametrize(
    ("value", "windows"),
    [
        (np.uint32(2), (4, None, 4)),
        (np.uint32(1), (None, None, None)),
        (np.uint32(0), (4, 4, 4)),
        (np.array([False, True, False]), (None, 4, None)),
    ],
)
def test_layers_of_gemma3_in_gguf_files(value, windows, tmp_path):
    key = "attention.sliding_window_pattern"
    found = config_of_gguf(tmp_path, "gemma3", **{key: value})
    assert found.windows == windows
    local = [window is not None for window in windows]
    assert [rope.theta == 1e4 for rope in found.ropes] == local


@pytest.mark.parametrize("value", [-1, 2.5, "x", np.ones(2, bool), np.arange(3)])
def test_patterns_that_are_none(value, tmp_path):
    key = "attention.sliding_window_pattern"
    with pytest.raises(CheckpointError, match=f"{key} has to be (3 bools|an integer)"):
        config_of_gguf(tmp_path, "gemma3", **{key: value})


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ([1, np.nan, 1, 1], "NaN, infinite or not positive"),
        ([1, 0, 1, 1], "NaN, infinite or not positive"),
        ([1, 1, 1, -1], "NaN, infinite or not positive"),
        ([1, 1, 1], "is f32.3., and heads have 4 frequencies"),
        ([[1, 1, 1, 1]], "is f32.1, 4., and heads have 4 frequencies"),
        ([1e-45, 1, 1, 1], "frequencies that are NaN or infinite"),
    ],
)
def test_factors_of_frequencies(factors, message, tmp_path):
    more = {"rope_freqs.weight": np.array(factors, np.float32)}
    with pytest.raises(CheckpointError, match=message) as raised:
        config_of_gguf(tmp_path, more=more)
    assert str(raised.value).count("model.gguf") == 1


@pytest.mark.parametrize("value", [2**40, 2**70])
@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("llama", "num_hidden_layers"),
        ("llama", "head_dim"),
        ("llama", "hidden_size"),
        ("llama", "intermediate_size"),
        ("mistral", "sliding_window"),
        ("gpt2", "n_layer"),
        ("gpt2", "n_inner"),
    ],
)
def test_sizes_that_no_model_has(family, key, value):
    values = {**metadata(family), key: value}
    with pytest.raises(CheckpointError, match=f"{key} has to be an integer from 1 to"):
        config_of(values)


def test_heads_that_are_computed():
    values = {k: v for k, v in metadata("llama").items() if k != "head_dim"}
    values |= {"hidden_size": 2**31 - 1, "num_attention_heads": 1}
    with pytest.raises(CheckpointError, match="channels wide, more than 65536; give"):
        config_of(values)


def test_windows_of_gguf_files(tmp_path):
    key = "attention.sliding_window"
    for value, window in ((5, 5), (0, None)):
        found = config_of_gguf(tmp_path, **{key: np.uint32(value)})
        assert set(found.windows) == {window}
    for value in (np.int32(-1), np.float32(2.5), True, "x"):
        with pytest.raises(CheckpointError, match="sliding_window has to be an int"):
            config_of_gguf(tmp_path, **{key: value})
