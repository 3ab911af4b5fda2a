"""Adapters in the files of PEFT: read from it, written, and files that are refused."""

import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from safetensors import numpy as safetensors

import aqtlite
from aqtlite import Rule, config
from aqtlite.checkpoint import (
    CheckpointError,
    Move,
    load_peft,
    move_weights,
    peft_config,
    save_peft,
)
from aqtlite.flax import quantize_model
from tests.common import normal

pytestmark = pytest.mark.code("quick")

PEFT = pathlib.Path(__file__).parent / "formats_written_by_others" / "peft_lora"
FILE = "adapter_model.safetensors"
HELD = dict(np.load(PEFT / "outputs.npz"))
X, _ = HELD.pop("x"), HELD.pop("y")
LORA = config.Lora(3, 7, is_rank_stabilized=True)
MOVES = [
    Move(
        sources=f"layers.{{i}}.{name}_proj.weight",
        targets=f"params/layer_{{i}}/{name}/kernel",
        axes=(1, 0),
    )
    for name in ("up", "down")
]
STACKED = [
    Move(sources=move.sources, targets=f"params/{name}", axes=(1, 0))
    for name, move in zip(("up", "down"), MOVES, strict=True)
]


def model(params, x):
    for i in range(2):
        layer = params["params"][f"layer_{i}"]
        x = x + jnp.tanh(x @ layer["up"]["kernel"]) @ layer["down"]["kernel"]
    return x


def scanned(params, x):
    def body(x, layer):
        return x + jnp.tanh(x @ layer["up"]) @ layer["down"], None

    return jax.lax.scan(body, x, params["params"])[0]


def nested(weights):
    tree = {}
    for path, weight in weights.items():
        node = tree
        *above, last = path.split("/")
        for step in above:
            node = node.setdefault(step, {})
        node[last] = jnp.asarray(weight)
    return tree


def of(fn, moves, adapter=LORA):
    fn_q = aqtlite.quantize_function(fn, [Rule(cfg=None, adapter=adapter)], params=0)
    params = nested(move_weights(HELD, moves))
    return fn_q, params, fn_q.init_state(params, X)["params"]


@pytest.mark.parametrize(
    ("fn", "moves", "adapter", "folder"),
    [
        (model, MOVES, LORA, PEFT),
        (scanned, STACKED, LORA, PEFT),
        (scanned, STACKED, config.Dora(3, 7), PEFT.parent / "peft_dora"),
    ],
)
def test_adapters_of_peft_give_its_results(fn, moves, adapter, folder, tmp_path):
    assert peft_config(folder) == adapter
    fn_q, params, initial = of(fn, moves, adapter)
    adapters = load_peft(folder, initial, moves=moves)
    out, _ = fn_q({"params": adapters}, params, X)
    wanted = np.load(folder / "outputs.npz")["y"]
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-6)
    save_peft(tmp_path / "mine", adapters, adapter, moves=moves, base_model="tiny")
    assert peft_config(tmp_path / "mine") == adapter
    files = (folder / FILE, tmp_path / "mine" / FILE)
    theirs, mine = map(safetensors.load_file, files)
    assert theirs.keys() == mine.keys()
    for name, x in theirs.items():
        assert mine[name].dtype == np.float32
        np.testing.assert_array_equal(mine[name], x)


def test_magnitudes_of_dora(tmp_path):
    dora = config.Dora(3, 7)
    fn_q = aqtlite.quantize_function(scanned, [Rule(cfg=None, adapter=dora)], params=0)
    params = nested(move_weights(HELD, STACKED))
    adapters = jax.tree.map(
        lambda a: a + 0.1 * normal(a.shape), fn_q.init_state(params, X)["params"]
    )
    save_peft(tmp_path / "x", adapters, dora, moves=STACKED)
    assert peft_config(tmp_path / "x") == dora
    loaded = load_peft(tmp_path / "x", adapters, moves=STACKED)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, loaded, adapters))
    # As PEFT computes it, of its own tensors.
    tensors, x = safetensors.load_file(tmp_path / "x" / FILE), np.asarray(X)
    for i in range(2):
        y = x
        for name in ("up", "down"):
            module = f"layers.{i}.{name}_proj"
            a, b, m = (
                tensors[f"base_model.model.{module}.{one}"]
                for one in ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
            )
            w = HELD[f"{module}.weight"] + 7 / 3 * b @ a
            y = y @ (m / np.linalg.norm(w, axis=1) * w.T)
            y = np.tanh(y) if name == "up" else y
        x = x + y
    out, _ = fn_q({"params": loaded}, params, X)
    np.testing.assert_allclose(out, x, rtol=1e-4, atol=1e-5)
    with pytest.raises(CheckpointError, match="has magnitudes, and the adapter is"):
        save_peft(tmp_path / "y", adapters, config.Lora(3, 7), moves=STACKED)


def test_adapters_without_magnitudes_are_none_of_dora(tmp_path):
    dora, adapters = config.Dora(3, 7), of(scanned, STACKED)[2]
    with pytest.raises(CheckpointError, match="has no magnitudes.*config.Lora$"):
        save_peft(tmp_path / "x", adapters, dora, moves=STACKED)
    save_peft(tmp_path / "x", adapters, LORA, moves=STACKED)
    path = tmp_path / "x" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "use_dora": True}))
    with pytest.raises(CheckpointError, match="has no magnitudes.*make the rule"):
        load_peft(tmp_path / "x", adapters, moves=STACKED)


def test_parts_of_a_weight_have_one_first_matrix(tmp_path):
    fused = [Move(sources="fused.weight", targets=("a/w", "b/w"), axes=(1, 0))]
    fn = lambda p, x: x @ p["a"]["w"] + x @ p["b"]["w"]  # noqa: E731
    params = {"a": {"w": jnp.ones((8, 4))}, "b": {"w": jnp.ones((8, 4))}}
    fn_q = aqtlite.quantize_function(fn, [Rule(cfg=None, adapter=LORA)], params=0)
    adapters = fn_q.init_state(params, X)["params"]
    with pytest.raises(CheckpointError, match="is one matrix"):
        save_peft(tmp_path / "x", adapters, LORA, moves=fused)
    a = adapters["a/w"]["adapter"]
    b = {"lora_a": a["lora_a"], "lora_b": a["lora_b"] + 1}
    adapters = {"a/w": {"adapter": a}, "b/w": {"adapter": b}}
    save_peft(tmp_path / "x", adapters, LORA, moves=fused)
    assert safetensors.load_file(tmp_path / "x" / FILE)[
        "base_model.model.fused.lora_B.weight"
    ].shape == (8, 3)
    loaded = load_peft(tmp_path / "x", adapters, moves=fused)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, loaded, adapters))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "IA3"),
        ("use_dora", "yes"),
        ("bias", "all"),
        ("modules_to_save", ["head"]),
        ("rank_pattern", {"up": 4}),
        ("layer_replication", [[0, 2], [1, 2]]),
        ("trainable_token_indices", [1]),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "olora"),
        ("r", 0),
        ("r", 4),
        ("lora_alpha", "7"),
        ("use_rslora", 1),
    ],
)
def test_other_configs_are_refused(field, value, tmp_path):
    folder = shutil.copytree(PEFT, tmp_path / "x")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(CheckpointError, match=f"{field}|rank 4") as raised:
        load_peft(folder, of(model, MOVES)[2], moves=MOVES)
    assert str(raised.value).count("adapter_config.json") < 2


def changed(tensors, case):
    name = "base_model.model.layers.0.up_proj.lora_A.weight"
    if case == "missing":
        del tensors[name]
    elif case == "not finite":
        tensors[name] = tensors[name] * np.float32(np.nan)
    elif case == "unknown":
        tensors["base_model.model.head.lora_embedding_A"] = tensors[name]
    else:
        tensors[name.replace("layers.0", "layers.7")] = tensors[name]
    return tensors


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("missing", "has no .*up_proj.lora_A"),
        ("not finite", "NaN or infinities"),
        ("unknown", "lora_embedding_A, which is no part of an adapter"),
        ("unused", r"layers\.7.*no adapter for it"),
    ],
)
def test_other_tensors_are_refused(case, text, tmp_path):
    folder = shutil.copytree(PEFT, tmp_path / "x")
    tensors = changed(safetensors.load_file(folder / FILE), case)
    (folder / FILE).unlink()
    safetensors.save_file(tensors, folder / FILE)
    with pytest.raises(CheckpointError, match=text):
        load_peft(folder, of(model, MOVES)[2], moves=MOVES)


def test_a_folder_without_safetensors_is_refused(tmp_path):
    folder = shutil.copytree(PEFT, tmp_path / "x")
    (folder / FILE).unlink()
    adapters = of(model, MOVES)[2]
    with pytest.raises(CheckpointError, match="x has no adapter_model.safetensors$"):
        load_peft(folder, adapters, moves=MOVES)
    (folder / "adapter_model.bin").write_bytes(b"pickled")
    with pytest.raises(CheckpointError, match="adapter_model.bin is not read: it is"):
        load_peft(folder, adapters, moves=MOVES)


def of_one(lora, inputs=8, outputs=4):
    """A function of one weight, this weight, and adapters that are not zero."""
    rule = Rule(cfg=None, adapter=lora)
    fn_q = aqtlite.quantize_function(lambda p, x: x @ p["w"], [rule], params=0)
    params = {"w": normal((inputs, outputs))}
    ones = jnp.ones((1, inputs))
    if lora.init == "pissa":
        params, state = aqtlite.with_initial_adapters(fn_q, params, ones)
    else:
        state = fn_q.init_state(params, ones)
    return fn_q, params, state["params"]


@pytest.mark.parametrize(
    "other",
    [
        config.Lora(3, 8, is_rank_stabilized=True),
        config.Lora(3, 7),
        config.Lora(2, 7, is_rank_stabilized=True),
        config.Dora(3, 7, is_rank_stabilized=True),
    ],
    ids=repr,
)
def test_the_adapter_of_another_rule_is_refused(other, tmp_path):
    adapters = of_one(LORA)[2]
    save_peft(tmp_path / "x", adapters, LORA)
    load_peft(tmp_path / "x", adapters, lora=LORA)
    with pytest.raises(CheckpointError, match="make the rule with peft_config"):
        load_peft(tmp_path / "x", adapters, lora=other)


@pytest.mark.parametrize(
    ("rank", "inputs", "outputs"), [(2, 8, 4), (4, 6, 3), (3, 8, 6), (3, 4, 8)]
)
def test_other_shapes_are_refused(rank, inputs, outputs, tmp_path):
    """Some have as many elements."""
    save_peft(tmp_path / "x", of_one(LORA)[2], LORA)
    others = of_one(config.Lora(rank, 7), inputs, outputs)[2]
    with pytest.raises(CheckpointError, match=r"has the shape .* of w the shape"):
        load_peft(tmp_path / "x", others)


@pytest.mark.parametrize("is_rank_stabilized", [False, True])
def test_directions_of_the_weights_are_written_for_the_weights_of_before(
    is_rank_stabilized, tmp_path
):
    lora = config.Lora(2, 6, init="pissa", is_rank_stabilized=is_rank_stabilized)
    fn_q, rest, initial = of_one(lora)
    adapters = jax.tree.map(lambda a: a + 0.1 * normal(a.shape, 1), initial)
    with pytest.raises(CheckpointError, match="give initial=, the adapters as they"):
        save_peft(tmp_path / "x", adapters, lora)
    with pytest.raises(CheckpointError, match="no tree of arrays like the adapters"):
        save_peft(tmp_path / "x", adapters, lora, initial={"w": jnp.ones(3)})
    with pytest.raises(CheckpointError, match="no tree of arrays like the adapters"):
        other = of_one(lora, inputs=6)[2]
        save_peft(tmp_path / "x", adapters, lora, initial=other)
    assert not (tmp_path / "x").exists()
    save_peft(tmp_path / "x", adapters, lora, initial=initial)
    of_file = peft_config(tmp_path / "x")
    assert (of_file.rank, of_file.scale) == (4, pytest.approx(lora.scale))
    wanted, _ = fn_q({"params": adapters}, rest, jnp.eye(8))
    before, params, started = of_one(of_file)
    loaded = load_peft(tmp_path / "x", started, lora=of_file)
    found, _ = before({"params": loaded}, params, jnp.eye(8))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    # For weights that are saved as they remained, the adapters are written as they are.
    save_peft(tmp_path / "y", adapters, dataclasses.replace(lora, init="zero"))
    loaded = load_peft(tmp_path / "y", adapters, lora=lora)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, loaded, adapters))


def test_the_difference_to_the_start_of_stacked_layers(tmp_path):
    _, _, initial = of(scanned, STACKED)
    adapters = jax.tree.map(lambda a: a + normal(a.shape), initial)
    save_peft(tmp_path / "x", adapters, LORA, moves=STACKED, initial=initial)
    tensors = safetensors.load_file(tmp_path / "x" / FILE)
    for name in ("up", "down"):
        (found,) = (one for path, one in adapters.items() if name in path)
        (start,) = (one for path, one in initial.items() if name in path)
        now, before = (
            np.asarray(one["adapter"]["lora_a"] @ one["adapter"]["lora_b"])
            for one in (found, start)
        )
        for i in range(2):
            a, b = (
                tensors[f"base_model.model.layers.{i}.{name}_proj.lora_{x}.weight"]
                for x in "AB"
            )
            difference = (now - before)[i].T
            np.testing.assert_allclose(b @ a, difference, rtol=1e-4, atol=1e-5)


def test_what_has_no_place_is_refused(tmp_path):
    adapters = of(model, MOVES)[2]
    with pytest.raises(CheckpointError, match="no line of the map"):
        load_peft(PEFT, adapters, moves=MOVES[:1])
    with pytest.raises(CheckpointError, match="2 lines of the map"):
        load_peft(PEFT, adapters, moves=[*MOVES, *MOVES])
    with pytest.raises(CheckpointError, match="no parameter of an adapter"):
        load_peft(PEFT, {"kernel": jnp.ones(3)}, moves=MOVES)
    with pytest.raises(CheckpointError, match="rank is 2"):
        save_peft(tmp_path / "x", adapters, config.Lora(2, 1), moves=MOVES)
    with pytest.raises(CheckpointError, match="no common matrix"):
        joined = Move(
            sources=("layers.{i}.a.weight", "layers.{i}.b.weight"),
            targets="params/layer_{i}/up/kernel",
        )
        save_peft(tmp_path / "x", adapters, LORA, moves=[joined, MOVES[1]])
    with pytest.raises(CheckpointError, match="cannot be read"):
        peft_config(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("count", [3, 2], ids=["", "as many as the rank"])
def test_experts_have_no_adapters_in_a_file(count, tmp_path):
    def moe(params, x):
        return jnp.einsum("ebd,edf->ebf", x, params["experts"])

    lora = config.Lora(2, 4)
    rule = Rule(cfg=None, adapter=lora)
    fn = aqtlite.quantize_function(moe, [rule], params=0)
    params, x = {"experts": normal((count, 8, 4))}, normal((count, 5, 8))
    adapters = fn.init_state(params, x)["params"]
    match = r"rank is 2: their weights are stacked.*\{i\}.*PEFT has no .* experts"
    with pytest.raises(CheckpointError, match=match):
        save_peft(tmp_path / "x", adapters, lora)
    assert not any(tmp_path.iterdir())


def test_the_layer_of_a_model_that_is_one_gets_its_name_from_the_map(tmp_path):
    net, x = nn.Dense(4), np.ones((3, 8), np.float32)
    variables = net.init(jax.random.key(0), x)
    adapters = quantize_model(net, [Rule(cfg=None, adapter=LORA)]).init_adapters(
        variables, x
    )
    with pytest.raises(CheckpointError, match="that is one layer.* by moves="):
        save_peft(tmp_path / "x", adapters, LORA)
    with pytest.raises(CheckpointError, match="that is one layer.* by moves="):
        load_peft(PEFT, adapters)
    with pytest.raises(CheckpointError, match="no line of the map .* is one layer"):
        save_peft(tmp_path / "x", adapters, LORA, moves=MOVES)
    moves = [
        Move(sources="head.weight", targets="params/kernel", axes=(1, 0)),
        Move(sources="head.bias", targets="params/bias"),
    ]
    save_peft(tmp_path / "x", adapters, LORA, moves=moves)
    loaded = load_peft(tmp_path / "x", adapters, moves=moves)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, loaded, adapters))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_adapters_that_are_not_finite_are_refused(value, tmp_path):
    adapters = of_one(LORA)[2]
    broken = jax.tree.map(lambda a: jnp.full_like(a, value), adapters)
    with pytest.raises(CheckpointError, match="lora_a of w holds NaN or infinities"):
        save_peft(tmp_path / "x", broken, LORA)
    with pytest.raises(CheckpointError, match="lora_a of w holds NaN or infinities"):
        save_peft(tmp_path / "x", adapters, LORA, initial=broken)
    assert not any(tmp_path.iterdir())
