"""Quantized files: integers that are kept, rounded, rounded again, or refused."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from aqtlite import checkpoint, config, llm, numerics
from aqtlite.checkpoint import CheckpointError
from aqtlite.llm.layers import Weight
from aqtlite.qtensor.qtensor import QTensor
from tests.common import normal
from tests.llm.support import (
    FOLDER,
    as_gguf_of_llama,
    check_close,
    gguf_pairs,
    loaded,
    logits_of,
    metadata,
    quantized,
    quantized_weights,
    reference,
)

pytestmark = pytest.mark.code("quick")


@pytest.fixture(scope="module")
def of_llama():
    return quantized_weights("llama", lambda name: True)


@pytest.fixture(scope="module")
def decoded(of_llama):
    """Logits of the weights' floats, in float."""
    tokens, _ = reference("llama")
    decoder = llm.load(FOLDER / "llama").decoder
    moved = checkpoint.move_weights(of_llama, llm.moves_of(FOLDER / "llama")[1])
    for name, x in moved.items():
        floats = x.dequant() if isinstance(x, QTensor) else jnp.asarray(x)
        node = decoder
        for step in name.split("/"):
            node = node[int(step)] if step.isdecimal() else getattr(node, step)
        node.set_value(floats)
    return logits_of(decoder, jnp.asarray(tokens))


def test_integers_of_a_folder_are_contracted_as_they_are(of_llama, decoded, tmp_path):
    path = tmp_path / "quantized"
    checkpoint.save_quantized(
        path, of_llama, format="compressed-tensors", metadata=metadata("llama")
    )
    found = llm.load(path)
    assert len(found.kept) == 14 and not found.rounded and not found.rounded_again
    q = found.decoder.layers[1].mlp.up.weight.get_value()
    wanted = of_llama["model.layers.1.mlp.up_proj.weight"]
    np.testing.assert_array_equal(q.qvalue, wanted.qvalue)
    np.testing.assert_array_equal(q.scale, wanted.scale)
    tokens, _ = reference("llama")
    check_close(logits_of(found.decoder, jnp.asarray(tokens)), decoded, 1e-5)


def test_a_gguf_file_has_the_logits_of_its_folder(of_llama, decoded, tmp_path):
    path = tmp_path / "model.gguf"
    weights = as_gguf_of_llama(of_llama, {"q_proj": 4, "k_proj": 2})
    cfg, _ = llm.moves_of(FOLDER / "llama")
    rope = cfg.ropes[0]
    pairs = {**gguf_pairs("llama", cfg), "llama.rope.freq_base": np.float32(5e5)}
    weights["rope_freqs.weight"] = np.asarray(rope.factors, np.float32)
    checkpoint.save_quantized(path, weights, format="gguf", metadata=pairs)
    found = llm.load(path)
    assert len(found.kept) == 14
    tokens, _ = reference("llama")
    check_close(logits_of(found.decoder, jnp.asarray(tokens)), decoded, 1e-5)


def test_a_preset_rounds_matrices_and_the_tied_table():
    found = llm.load(FOLDER / "qwen2", config.weight_only(8))
    assert len(found.rounded) == 2 * 7 + 1 and "tokens/weight" in found.rounded
    table = found.decoder.tokens.weight.get_value()
    wanted = loaded("qwen2").tokens.weight.get_value()
    error = np.abs(table.dequant() - wanted)
    assert (error <= 0.51 * table.scale).all() and error.any()
    assert found.summary() == "matrices: 15 rounded"


@pytest.mark.parametrize(
    "case", ["compressed_fp8_block", "gptq_4_act_order", "bnb_nf4_over_rows"]
)
def test_grids_and_blocks_of_files_are_contracted(case):
    folder = FOLDER.parent.parent / "checkpoint" / "formats_written_by_others" / case
    q = checkpoint.load_quantized(folder)["model.layers.0.mlp.up_proj.weight"]
    cfg = config.update(
        config.weight_only(), {"fwd.rhs": checkpoint.config_of(q, axes=1)}
    )
    weight = Weight(*q.shape, dtype=jnp.float32, rngs=nnx.Rngs(0))
    weight.set_quantized(jax.tree.map(jnp.asarray, q), cfg)
    x = normal((2, q.shape[1]))
    check_close(weight.contract(x), x @ q.dequant().T, 1e-5)
    if case == "compressed_fp8_block":  # In blocks of rows, no table stays so.
        return
    tokens = jnp.array([[3, 0]])
    np.testing.assert_array_equal(weight.rows(tokens), q.dequant()[tokens])


def edited(family, folder, **changes):
    shutil.copytree(FOLDER / family, folder)
    file = folder / "config.json"
    values = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in values.items() if v != "removed"}))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type has to be one of 'llama'"),
        ({"hidden_size": "removed"}, "hidden_size has to be an integer"),
        ({"hidden_size": 64}, "the map makes .* and the variable has"),
        ({"num_hidden_layers": 3}, "no line of the map makes .*layers/2"),
        ({"num_hidden_layers": 4096}, "has 4096 layers, and the checkpoint 21 tensors"),
        ({"num_hidden_layers": 1}, "layers/1.*which is no variable"),
        ({"num_key_value_heads": 3}, "no multiple of kv_heads=3"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps has to be a positive number"),
        ({"hidden_act": "relu"}, "hidden_act has to be one of 'silu'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type has to be one of"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor has to be 1"),
    ],
)
def test_configs_that_do_not_fit_are_refused(changes, message, tmp_path):
    with pytest.raises(CheckpointError, match=message) as raised:
        llm.load(edited("llama", tmp_path / "edited", **changes))
    assert str(raised.value).count("config.json") < 2


def test_quantized_matrices_of_gpt2_are_the_other_way_round(tmp_path):
    weights, decoded = {}, {}
    for name, x in checkpoint.load_quantized(FOLDER / "gpt2").items():
        x = np.asarray(x, np.float32)
        is_matrix = ".c_" in name and x.ndim == 2
        weights[name] = q = quantized(x.T) if is_matrix else x
        decoded[name] = np.ascontiguousarray(q.dequant().T) if is_matrix else x
    save = functools.partial(
        checkpoint.save_quantized,
        format="compressed-tensors",
        metadata=metadata("gpt2"),
    )
    save(tmp_path / "quantized", weights)
    found = llm.load(tmp_path / "quantized")
    assert len(found.kept) == 2 * 6
    shutil.copytree(FOLDER / "gpt2", tmp_path / "float")
    save_file(decoded, tmp_path / "float" / "model.safetensors")
    tokens = jnp.asarray(reference("gpt2")[0])
    wanted = logits_of(llm.load(tmp_path / "float").decoder, tokens)
    check_close(logits_of(found.decoder, tokens), wanted, 1e-5)
    model, variables = llm.load_linen(tmp_path / "quantized")
    leaves, structure = jax.tree.flatten(
        variables, is_leaf=lambda x: isinstance(x, QTensor)
    )
    floats = [x.dequant() if isinstance(x, QTensor) else x for x in leaves]
    variables = jax.tree.unflatten(structure, floats)
    check_close(model.apply(variables, tokens), wanted, 1e-5)
    one = "transformer.h.1.attn.c_proj.weight"
    save(tmp_path / "mixed", {**weights, one: decoded[one]})
    with pytest.raises(CheckpointError, match="is quantized in some layers alone"):
        llm.load(tmp_path / "mixed")


@pytest.mark.parametrize(
    ("family", "names"),
    [
        (
            "llama",
            (
                *("model.layers.0.self_attn.k_scale", "model.layers.1.mlp.x.k_scale"),
                *(f"model.layers.0.self_attn.{one}_zero_point" for one in "kv"),
                "model.layers.0.self_attn.k_proj.output_scale",
                "model.layers.1.mlp.up_proj.activation_scale",
                "model.layers.1.mlp.up_proj.input_zero_point",
            ),
        ),
        (
            "gpt2",
            ("transformer.h.0.attn.v_scale", "transformer.h.1.mlp.c_fc.input_scale"),
        ),
    ],
)
def test_scales_of_activations_are_left_out(family, names, tmp_path):
    folder = tmp_path / "scaled"
    shutil.copytree(FOLDER / family, folder)
    arrays = load_file(folder / "model.safetensors")
    arrays |= {name: np.ones(1, np.float32) for name in names}
    save_file(arrays, folder / "model.safetensors")
    tokens, wanted = reference(family)
    got = logits_of(llm.load(folder).decoder, jnp.asarray(tokens))
    check_close(got, wanted)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight"])
def test_weights_that_are_no_numbers_are_refused(name, value, tmp_path):
    """A decoder would generate the token 0 for ever."""
    folder = tmp_path / "damaged"
    shutil.copytree(FOLDER / "llama", folder)
    arrays = load_file(folder / "model.safetensors")
    arrays[name].flat[3] = value
    save_file(arrays, folder / "model.safetensors")
    for load in (llm.load, llm.load_linen):
        with pytest.raises(CheckpointError, match="holds NaN or infinities"):
            load(folder)
    with pytest.raises(CheckpointError, match="holds NaN or infinities"):
        llm.load(folder, config.weight_only(8))


def test_a_folder_without_a_config_is_refused(tmp_path):
    shutil.copy(FOLDER / "llama" / "model.safetensors", tmp_path)
    with pytest.raises(CheckpointError, match=r"lacks config\.json"):
        llm.load(tmp_path)


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (config.static_int8(), r"fwd\.lhs\.calibration"),
        (config.gptq(), r"fwd\.rhs\.rounding"),
        (config.update(config.qat(8), {"fwd.rotation": config.Hadamard()}), "rotation"),
        (
            config.update(
                config.weight_only(4),
                {
                    "fwd.rhs.blocks": config.Blocks(size=8),
                    "fwd.rhs.double_scales": config.DoubleScales(),
                },
            ),
            r"fwd\.rhs\.double_scales=DoubleScales\(.* takes a conversion",
        ),
        (
            config.update(
                config.qat(8), {"out.numerics": numerics.IntSymmetric(bits=8)}
            ),
            r"out=Tensor\(.* leave it float",
        ),
    ],
)
def test_configs_that_loading_does_not_follow_are_refused(cfg, message):
    with pytest.raises(ValueError, match=message):
        llm.load(FOLDER / "llama", cfg)


def test_a_tied_table_in_blocks_of_rows_is_refused():
    """Rows are looked up in it; a head of its own has no lookups."""
    cfg = config.nvfp4()
    with pytest.raises(ValueError, match=r"set fwd\.rhs\.blocks\.remaining_size=1"):
        llm.load(FOLDER / "gemma", cfg)
    rows = config.update(cfg, {"fwd.rhs.blocks.remaining_size": 1})
    for family, one in (("gemma", rows), ("llama", cfg)):
        tokens, wanted = reference(family)
        found = llm.load(FOLDER / family, one).decoder
        assert isinstance((found.head or found.tokens).weight.get_value(), QTensor)
        assert logits_of(found, jnp.asarray(tokens)).shape == wanted.shape


def test_the_map_of_a_family_is_plain_data():
    cfg, moves = llm.moves_of(FOLDER / "gpt2")
    moved = checkpoint.move_weights(checkpoint.load_quantized(FOLDER / "gpt2"), moves)
    assert moved["layers/1/attention/k/weight"].shape == (32, 32)
    assert checkpoint.moves_from_json(checkpoint.moves_to_json(moves)) == moves
    assert cfg.positions == 32
