"""Maps from the names of a source to the variables of a model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx, traverse_util

import aqtlite
from aqtlite import checkpoint, config, numerics
from aqtlite.checkpoint import Move, move_weights
from aqtlite.qtensor.qtensor import QTensor
from tests.checkpoint.support import refuses

pytestmark = pytest.mark.code("quick")

RNG = np.random.default_rng(0)
HEADS, DEPTH, WIDTH, LAYERS = 2, 3, 6, 3


def of_source():
    """As a file of Hugging Face names them: (outputs, inputs)."""
    arrays = {"model.embed.weight": (5, WIDTH), "model.norm.weight": (WIDTH,)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for name in "qkv":
            arrays[f"{layer}.{name}.weight"] = (WIDTH, WIDTH)
        arrays[f"{layer}.gate_up.weight"] = (8, WIDTH)
        arrays[f"{layer}.rotary"] = (2,)
    return {
        name: RNG.normal(size=shape).astype(np.float32)
        for name, shape in arrays.items()
    }


SOURCE = of_source()
MOVES = [
    Move(sources="model.embed.weight", targets="params/embed/embedding"),
    Move(sources="model.embed.weight", targets="params/head/kernel", axes=(1, 0)),
    Move(sources="model.norm.weight", targets="params/norm/scale"),
    Move(
        sources=[f"model.layers.{{i}}.{name}.weight" for name in "qkv"],
        targets="params/layers/qkv/kernel",
        axes=(1, 0),
        shape=(WIDTH, 3, HEADS, DEPTH),
    ),
    Move(
        sources="model.layers.{i}.gate_up.weight",
        targets=("params/layers_{i}/gate/kernel", "params/layers_{i}/up/kernel"),
        split_sizes=(3, 5),
        axes=(1, 0),
    ),
    Move(sources="model.layers.{i}.rotary", targets=()),
]


def variables():
    shapes = {
        "params/embed/embedding": (5, WIDTH),
        "params/head/kernel": (WIDTH, 5),
        "params/norm/scale": (WIDTH,),
        "params/layers/qkv/kernel": (LAYERS, WIDTH, 3, HEADS, DEPTH),
    }
    for i in range(LAYERS):
        shapes[f"params/layers_{i}/gate/kernel"] = (WIDTH, 3)
        shapes[f"params/layers_{i}/up/kernel"] = (WIDTH, 5)
    structs = {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in shapes.items()}
    return traverse_util.unflatten_dict(structs, sep="/")


def test_joins_splits_transposes_and_stacks():
    moved = move_weights(SOURCE, MOVES, variables())
    assert len(moved) == len(jax.tree.leaves(variables()))
    qkv = moved["params/layers/qkv/kernel"]
    for i, name in enumerate("qkv"):
        wanted = SOURCE[f"model.layers.2.{name}.weight"].T
        got = qkv[2, :, i].reshape(WIDTH, WIDTH)
        np.testing.assert_array_equal(got, wanted)
    up = SOURCE["model.layers.1.gate_up.weight"][3:].T
    np.testing.assert_array_equal(moved["params/layers_1/up/kernel"], up)
    np.testing.assert_array_equal(
        moved["params/head/kernel"], moved["params/embed/embedding"].T
    )


def test_as_json():
    text = checkpoint.moves_to_json(MOVES)
    assert checkpoint.moves_from_json(text) == tuple(MOVES)
    for bad in ("{", "3", '[{"sources": "a"}]', "[" * 100_000, '[{"x": 1}]', "[[]]"):
        refuses("the map is", checkpoint.moves_from_json, bad)


def decoded(q):
    """The floats that integers stand for."""
    assert isinstance(q, QTensor)
    scale = np.asarray(q.scale)
    for axis, block in enumerate(q.blocks):
        if scale.shape[axis] > 1:
            scale = scale.repeat(block, axis)
    return np.asarray(q.qvalue).astype(np.float32) * scale


def test_quantized_weights_keep_their_integers():
    tensor = config.Tensor(
        numerics=numerics.IntSymmetric(bits=4), blocks=config.Blocks(size=2)
    )
    source = {
        name: aqtlite.quantize(x, tensor, axes=1) if x.ndim == 2 else x
        for name, x in SOURCE.items()
    }
    moved = move_weights(source, MOVES, variables())
    floats = {name: decoded(x) if x.ndim == 2 else x for name, x in source.items()}
    wanted = move_weights(floats, MOVES, variables())
    for name in wanted:
        if "norm" not in name:
            values = decoded(moved[name])
            np.testing.assert_array_equal(values, wanted[name], err_msg=name)
    # A split cuts these blocks: dequantized.
    w = {"w": source["model.embed.weight"].T}
    parts = Move(sources="w", targets=("a", "b"), split_sizes=(1, 5))
    shapes = {"a": jax.ShapeDtypeStruct((1, 5), jnp.float32), "b": jnp.zeros((5, 5))}
    moved = move_weights(w, [parts], shapes)
    np.testing.assert_array_equal(moved["b"], decoded(w["w"])[1:])


def test_models_of_linen_and_nnx():
    source = {"fc.weight": RNG.normal(size=(3, 4)).astype("f"), "fc.bias": np.ones(3)}
    x = np.ones((2, 4), np.float32)
    wanted = x @ source["fc.weight"].T + 1
    model = nn.Dense(3)
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)
    moves = [
        Move(sources="fc.weight", targets="params/kernel", axes=(1, 0)),
        Move(sources="fc.bias", targets="params/bias"),
    ]
    filled = traverse_util.unflatten_dict(
        dict(move_weights(source, moves, shapes)), sep="/"
    )
    np.testing.assert_allclose(model.apply(filled, x), wanted, rtol=1e-6)
    module = nnx.eval_shape(lambda: nnx.Linear(4, 3, rngs=nnx.Rngs(0)))
    moves = [
        Move(sources="fc.weight", targets="kernel", axes=(1, 0)),
        Move(sources="fc.bias", targets="bias"),
    ]
    pure = nnx.to_pure_dict(nnx.state(module))
    filled = traverse_util.unflatten_dict(
        {k: jnp.asarray(v, "f") for k, v in move_weights(source, moves, pure).items()},
        sep="/",
    )
    state = nnx.state(module)
    nnx.replace_by_pure_dict(state, filled)
    nnx.update(module, state)
    np.testing.assert_allclose(module(x), wanted, rtol=1e-6)


def one(targets="a", **fields):
    return [Move(sources="w", targets=targets, **fields)]


@pytest.mark.parametrize(
    ("moves", "names", "message"),
    [
        (one(), ["w", "v"], "no line of the map moves v"),
        (one("b"), ["w"], "makes the variable a"),
        (one(("a", "b")), ["w"], "makes b, which is no variable"),
        (one() * 2, ["w"], "two lines of the map make a"),
        (one(axes=(1, 0)), ["w"], r"a of shape \(3, 2\), and the variable has"),
        (one(axes=(0, 2)), ["w"], r"a cannot be made from \('w',\) of shapes"),
        (one(shape=(4, 2)), ["w"], "a cannot be made from"),
        (
            [Move(sources="w{i}", targets="a")],
            ["w0", "w2"],
            r"layers to be stacked are \['0', '2'\]",
        ),
        ([Move(sources=("w", "v"), targets="a")], ["w"], "there are only .'w'"),
    ],
)
def test_refuses_a_map_that_is_not_complete(moves, names, message):
    source = {name: np.ones((2, 3)) for name in names}
    refuses(message, move_weights, source, moves, {"a": np.ones((2, 3))})


@pytest.mark.parametrize(
    "fields",
    [
        {"sources": (), "targets": "a"},
        {"sources": "a", "targets": "b{i}"},
        {"sources": "a{i}{j}", "targets": "b"},
        {"sources": ("a{i}", "b"), "targets": "b"},
        {"sources": 3, "targets": "b"},
    ],
)
def test_refuses_placeholders_that_do_not_fit(fields):
    with pytest.raises((ValueError, TypeError)):
        Move(**fields)
