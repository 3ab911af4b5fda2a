import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from aqtlite import QTensor, Rule, config, convert_function, quantize_function
from aqtlite.flax.nnx import AqtDotGeneral
from aqtlite.program import injected
from aqtlite.program.serving.frozen_parameter import FrozenParameter
from aqtlite.program.serving.placeholder import without_markers
from aqtlite.quantization.states.fixed_scale import FixedScale
from tests.common import (
    check_refused,
    left_in_float,
    mostly_slow,
    nearest,
    normal,
    shapes_of,
)
from tests.replacing import assert_bits

pytestmark = pytest.mark.code("quick")

INT8 = nearest()
X, OTHER = normal((4, 16)), normal((7, 16), 1)
W, SQUARE = normal((16, 8), 2), normal((16, 16), 3)
WS = normal((3, 16, 16), 4)


def is_qtensor(x):
    return isinstance(x, QTensor)


def frozen_weights(serving):
    leaves = jax.tree.leaves(serving["aqt"], is_leaf=is_qtensor)
    return [one for one in leaves if isinstance(one, QTensor)]


def scan(function, x, ws=None, **kwargs):
    return lax.scan(lambda x, w: (jnp.tanh(function(x, w)), None), x, ws, **kwargs)[0]


def scan_of_scans(ws, x):
    return scan(lambda x, ws: scan(jnp.matmul, x, ws), x, ws)


@jax.custom_vjp
def layer(w, x):
    return x @ w


layer.defvjp(lambda w, x: (layer(w, x), None), lambda _, g: (None, None))

# Functions of parameters and X, parameters, and how many bytes serve.
FUNCTIONS = {
    "alone": (lambda w, x: x @ w, W, 16 * 8 + 8 * 4),
    "jit_and_remat": (
        lambda w, x: jax.checkpoint(jax.jit(lambda w, x: x @ w))(w, x),
        W,
        16 * 8 + 8 * 4,
    ),
    "custom_vjp": (lambda w, x: layer(w, x), W, 16 * 8 + 8 * 4),
    "on_the_left": (lambda w, x: w.T @ x.T, W, 16 * 8 + 8 * 4),
    "transposed": (lambda w, x: x @ w.T, W.T.copy(), 16 * 8 + 8 * 4),
    "cast": (
        lambda w, x: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16),
        W,
        16 * 8 + 8 * 4,
    ),
    "tied": (  # Quantized along either axis.
        lambda w, x: jnp.tanh(x @ w) @ w.T,
        W,
        2 * 16 * 8 + 8 * 4 + 16 * 4,
    ),
    "shared": (lambda w, x: jnp.tanh(x @ w) @ w, SQUARE, 16 * 16 + 16 * 4),
    "a_mlp": (
        lambda p, x: jnp.tanh(x * p["scale"] @ p["in"] + p["bias"]) @ p["out"],
        {"in": W, "out": W.T, "bias": normal((8,)), "scale": normal((16,)), "no": None},
        2 * 16 * 8 + 8 * 4 + 16 * 4 + 8 * 4 + 16 * 4,
    ),
    "joined": (
        lambda p, x: x @ jnp.concatenate([p["a"], p["b"]], 1),
        {"a": W, "b": W * 2},
        16 * 16 + 16 * 4,
    ),
    "scan": (lambda w, x: scan(jnp.matmul, x, w), WS, 3 * (16 * 16 + 16 * 4)),
    "scan_of_one": (
        lambda w, x: scan(lambda x, _: x @ w, x, length=3),
        SQUARE,
        16 * 16 + 16 * 4,
    ),
    "scan_of_scans": (scan_of_scans, jnp.stack([WS, -WS]), 6 * (16 * 16 + 16 * 4)),
    "scan_of_the_same_scan": (
        lambda w, x: scan(lambda x, _: scan(jnp.matmul, x, w), x, length=2),
        WS,
        3 * (16 * 16 + 16 * 4),
    ),
    "experts": (
        lambda w, x: jax.vmap(lambda w: x @ w)(w),
        WS,
        3 * (16 * 16 + 16 * 4),
    ),
    "ragged": (
        lambda w, x: lax.ragged_dot(x, w, jnp.array([1, 0, len(x) - 1])),
        WS,
        3 * (16 * 16 + 16 * 4),
    ),
    "a_product": (  # Beside it, the integers of its second factor are kept.
        lambda p, x: x @ (p["a"] @ p["b"]),
        {"a": SQUARE, "b": W},
        2 * (16 * 8 + 8 * 4),
    ),
    "a_number": (
        lambda p, x: x @ p["w"] * p["times"],
        {"w": W, "times": 0.5},
        16 * 8 + 8 * 4,
    ),
    "a_number_in_the_weight": (
        lambda p, x: x @ (p["w"] * p["times"]),
        {"w": W, "times": 0.5},
        16 * 8 + 8 * 4 + 4,  # The number that it was made of is compared.
    ),
    "a_weak_type": (
        lambda p, x: x.astype(jnp.bfloat16) @ (p["w"] * p["times"]),
        {"w": W.astype(jnp.bfloat16), "times": jnp.asarray(0.5)},
        16 * 8 + 8 * 4 + 4 + 4,
    ),
    "integers": (
        lambda p, x: x @ (p["q"] * p["scale"]),
        {"q": jnp.arange(128, dtype=jnp.int8).reshape(16, 8), "scale": normal((8,))},
        16 * 8 + 8 * 4,
    ),
    "nan": (lambda w, x: x @ w, W.at[0, 0].set(jnp.nan), 16 * 8 + 8 * 4),
    "a_key": (
        lambda p, x: x @ p["w"] + jax.random.normal(p["key"], (8,)),
        {"w": W, "key": jax.random.key(0)},
        16 * 8 + 8 * 4 + 8,
    ),
}


def nbytes(tree):
    leaves = jax.tree.leaves(without_markers(tree))
    return sum(x.nbytes for x in leaves if not isinstance(x, float))


@pytest.mark.code("users")
@pytest.mark.parametrize(
    "name",
    mostly_slow(FUNCTIONS, "alone", "tied", "scan", "ragged", "a_product", "integers"),
)
def test_served_is_what_was_trained(name):
    """Bit for bit, compiled, for another batch than the one that was converted."""
    function, params, size = FUNCTIONS[name]
    quantized = quantize_function(function, INT8, params=0)
    serve, serving = convert_function(quantized, params, X)
    assert nbytes(serving) == size
    assert_bits(jax.jit(serve)(serving, OTHER), jax.jit(quantized)(params, OTHER))


@pytest.mark.parametrize("name", ["alone", "tied", "scan", "integers"])
def test_served_eagerly(name):
    function, params, _ = FUNCTIONS[name]
    quantized = quantize_function(function, INT8, params=0)
    serve, serving = convert_function(quantized, params, X)
    assert_bits(serve(serving, X), quantized(params, X))


def converted(function, params, *args, rules=INT8, **kwargs):
    quantized = quantize_function(function, rules, params=0)
    return quantized, *convert_function(quantized, params, *args, **kwargs)


def test_a_function_that_takes_a_gradient():
    """A step of gradient descent: the gradient stays in float, the rest is served."""

    def function(w, x):
        gradient = jax.grad(lambda x: jnp.sum((x @ w["inner"]) ** 2))(x)
        return (x - 0.1 * gradient) @ w["outer"]

    params = {"inner": SQUARE, "outer": W}
    quantized, serve, serving = converted(function, params, X)
    assert [one.path for one in quantized.plan(params, X).quantized()] == ["outer"]
    assert isinstance(serving["params"]["outer"], FrozenParameter)
    assert_bits(jax.jit(serve)(serving, OTHER), jax.jit(quantized)(params, OTHER))


@pytest.mark.parametrize(
    "derivative",
    [
        lambda function, x: jax.jvp(function, (x,), (x,))[1],
        lambda function, x: jax.vjp(function, x)[1](x[:, :8])[0],
        lambda function, x: jax.linearize(function, x)[1](x),
        lambda function, x: jax.jvp(jax.grad(lambda x: function(x).sum()), (x,), (x,)),
    ],
    ids=["jvp", "vjp", "linearize", "of_second_order"],
)
def test_a_function_that_is_a_derivative(derivative):
    """Nothing is left to quantize, or to freeze."""
    quantized = quantize_function(
        lambda w, x: derivative(lambda x: jnp.tanh(x @ w), x), INT8, params=0
    )
    remedy = "quantize the function that is differentiated"
    with pytest.raises(ValueError, match=f"quantize nothing: (.|\n)*{remedy}"):
        quantized(W, X)
    with pytest.raises(ValueError, match=f"nothing to freeze: (.|\n)*{remedy}"):
        convert_function(quantized, W, X)


def test_what_is_left():
    _, _, serving = converted(*FUNCTIONS["a_mlp"][:2], X)
    assert set(serving) == {"params", "aqt", "state"}
    left = serving["params"]
    assert isinstance(left["in"], FrozenParameter)
    assert (left["in"].shape, left["in"].dtype) == ((16, 8), jnp.float32)
    assert isinstance(left["bias"], jax.Array)
    assert left["no"] is None
    assert {one.qvalue.dtype for one in frozen_weights(serving)} == {jnp.dtype("int8")}


def test_serving_parameters_are_given_to_the_quantized_function():
    quantized, _, serving = converted(lambda p, x: x @ p["a"], {"a": W}, X)
    for given in (serving, serving["params"]):
        with pytest.raises(
            TypeError, match="'a' is frozen.*: call what the conversion"
        ):
            jax.jit(quantized)(given, X)
    with pytest.raises(TypeError, match="'a' is frozen: call what the conversion"):
        X @ serving["params"]["a"]
    check_refused(serving["params"]["a"])


def test_what_something_else_reads_stays():
    def function(w, x):
        return x @ w + jnp.sum(w)

    reports = []
    quantized, serve, serving = converted(function, W, X, report=reports.append)
    assert isinstance(serving["params"], jax.Array)
    assert "something else reads it" in str(reports[0])
    assert_bits(jax.jit(serve)(serving, X), jax.jit(quantized)(W, X))


def test_frozen_weights_are_under_the_scopes():
    def function(p, x):
        with jax.named_scope("block"):
            with jax.named_scope("in"):
                x = x @ p["a"]
            with jax.named_scope("out"):
                return x @ p["b"]

    _, _, serving = converted(function, {"a": W, "b": W.T}, X)
    assert list(serving["aqt"]) == ["block/in", "block/out"]


def test_rules_say_what_is_frozen():
    def function(p, x):
        with jax.named_scope("in"):
            x = x @ p["a"]
        with jax.named_scope("out"):
            return x @ p["b"]

    rules = [Rule(path="out", cfg=INT8)]
    params = {"a": W, "b": W.T}
    quantized, serve, serving = converted(function, params, X, rules=rules, strict=True)
    assert isinstance(serving["params"]["a"], jax.Array)
    assert len(frozen_weights(serving)) == 1
    assert_bits(jax.jit(serve)(serving, X), jax.jit(quantized)(params, X))


def test_some_leaves_are_parameters():
    """Of variables with statistics, say, that are no parameters."""

    def function(variables, x):
        return (x - variables["stats"]) @ variables["params"]["w"]

    quantized = quantize_function(
        function, INT8, params=lambda path: path.startswith("0/params/")
    )
    variables = {"params": {"w": W}, "stats": normal((16,))}
    serve, serving = convert_function(quantized, variables, X)
    assert isinstance(serving["params"]["params"]["w"], FrozenParameter)
    assert_bits(jax.jit(serve)(serving, X), jax.jit(quantized)(variables, X))


# --- Arguments -----------------------------------------------------------------------


def test_other_arguments_than_those_converted():
    def function(w, x, heads, *, scale=1.0, is_causal=False):
        out = (x * scale @ w).reshape(x.shape[0], heads, -1)
        return out - 1 if is_causal else out

    quantized, serve, serving = converted(function, W, X, 2, scale=2.0)
    for args, kwargs in (
        ((X, 2), {"scale": 2.0}),
        ((OTHER, 4), {"scale": jnp.float32(3)}),
        ((X.astype(jnp.bfloat16), 2), {"is_causal": True}),
    ):
        assert_bits(serve(serving, *args, **kwargs), quantized(W, *args, **kwargs))


def test_arguments_by_which_a_weight_is_made_otherwise():
    def function(w, x, is_scaled=False):
        return x @ (w * 2 if is_scaled else w)

    _, serve, serving = converted(function, W, X)
    with pytest.raises(ValueError, match="in another way, or"):
        serve(serving, X, is_scaled=True)


LOOPS = {
    "cond": lambda x, w: lax.cond(x[0, 0] < 99, lambda x: x @ w, lambda x: x, x),
    "while": lambda x, w: lax.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] @ w), (0, x)
    )[1],
    "scan": lambda x, w: scan(lambda x, _: x @ w, x, length=2),
    "shard_map": lambda x, w: jax.shard_map(
        lambda w, x: x @ w,
        mesh=jax.make_mesh((1,), ("d",), (jax.sharding.AxisType.Auto,)),
        in_specs=(P(), P("d")),
        out_specs=P("d"),
    )(w, x),
}


@pytest.mark.parametrize("loop", ["cond", "while", "scan"])
def test_frozen_weights_in_the_loops_of_another_call(loop):
    """Such as those of generation, where prefill was converted."""

    def function(w, x, loop=None):
        return x @ w if loop is None else LOOPS[loop](x, w)

    quantized, serve, serving = converted(function, SQUARE, X)
    assert not left_in_float(serving["params"])
    run, trained = (
        jax.jit(functools.partial(one, loop=loop)) for one in (serve, quantized)
    )
    assert_bits(run(serving, X), trained(SQUARE, X))


@pytest.mark.parametrize("loop", LOOPS)
def test_a_frozen_parameter_that_a_loop_reads_in_float(loop):
    def function(w, x, loop=None):
        return x @ w if loop is None else LOOPS[loop](x, jnp.sin(w) @ jnp.cos(w))

    _, serve, serving = converted(function, SQUARE, X)
    with pytest.raises(ValueError, match="parameter 'params' is frozen, but"):
        serve(serving, X, loop=loop)


def test_transformations_of_what_is_served():
    quantized, serve, serving = converted(*FUNCTIONS["alone"][:2], X)
    rows = jax.jit(jax.vmap(serve, in_axes=(None, 0)))(serving, X[:, None])
    assert_bits(rows[:, 0], jax.jit(quantized)(W, X))
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(serve(serving, x))))(X)
    assert gradient.shape == X.shape
    assert np.isfinite(gradient).all()


def test_shapes_in_place_of_arrays():
    function, params, _ = FUNCTIONS["a_mlp"]
    _, serve, abstract = converted(function, *shapes_of((params, X)))
    _, _, serving = converted(function, params, X)
    assert jax.tree.structure(abstract) == jax.tree.structure(serving)
    wanted = [(x.shape, x.dtype) for x in jax.tree.leaves(serving)]
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(abstract)] == wanted
    assert jax.eval_shape(serve, abstract, OTHER).shape == (7, 16)


def test_conversion_under_jit():
    quantized = quantize_function(lambda w, x: x @ w, INT8, params=0)
    compiled = jax.jit(lambda w: convert_function(quantized, w, X)[1])(W)
    assert_bits(compiled, convert_function(quantized, W, X)[1])


# --- State ---------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["static_int8", "lsq"])
@pytest.mark.parametrize("params", [W, {"w": W}], ids=["array", "tree"])
def test_a_state_is_served(preset, params):
    """Learned scales are kept apart from the parameters of the function."""

    def function(params, x):
        (w,) = jax.tree.leaves(params)
        with jax.named_scope("in"):
            x = jnp.tanh(x @ w)
        with jax.named_scope("out"):
            return x @ w.T

    quantized = quantize_function(function, getattr(config, preset)(), params=0)
    out, state = jax.jit(quantized)(quantized.init_state(params, X), params, X)
    serve, serving = convert_function(quantized, params, X, state=state)
    assert len(frozen_weights(serving)) == 2
    assert not left_in_float(serving["params"])
    assert_bits(jax.jit(serve)(serving, X), out)


def fixed_scales(serving):
    leaves = jax.tree.leaves(serving["state"], is_leaf=is_fixed)
    return [one for one in leaves if is_fixed(one)]


def is_fixed(x):
    return isinstance(x, FixedScale)


@pytest.mark.parametrize(
    ("function", "params", "shape"),
    [
        (lambda w, x: x @ w, W, (1, 1)),
        (lambda w, x: w.T @ x.T, W, (1, 1)),
        (lambda ws, x: scan(jnp.matmul, x, ws), WS, (3, 1, 1)),
        (lambda w, x: scan(lambda x, _: x @ w, x, length=3), SQUARE, (1, 1)),
    ],
    ids=["alone", "on_the_left", "scan", "scan_of_one"],
)
def test_scales_take_the_place_of_statistics(function, params, shape):
    quantized = quantize_function(function, config.static_int8(), params=0)
    _, state = jax.jit(quantized)(quantized.init_state(params, X), params, X)
    out = jax.jit(lambda state, params: quantized.evaluate(state, (params, X), {}))(
        state, params
    )
    serve, serving = convert_function(quantized, params, X, state=state)
    (fixed,) = fixed_scales(serving)
    assert fixed.scale.shape == shape
    assert len(jax.tree.leaves(serving["state"])) == 1
    assert_bits(jax.jit(serve)(serving, X), out)
    shapes = jax.eval_shape(lambda state: state, state)
    _, abstract = convert_function(quantized, params, X, state=shapes)
    assert jax.tree.structure(abstract) == jax.tree.structure(serving)


def test_statistics_of_no_batch():
    quantized = quantize_function(lambda w, x: x @ w, config.static_int8(), params=0)
    with pytest.raises(ValueError, match="have seen no batch: call what is quantized"):
        convert_function(quantized, W, X, state=quantized.init_state(W, X))


def beside_a_scanned_bias(p, x):
    """Every step has statistics of its own, and they share the weight."""
    return scan(lambda x, bias: x @ p["w"] + bias, x, p["biases"])


@pytest.mark.parametrize("preset", ["static_int8", "lsq"])
@pytest.mark.parametrize(
    ("function", "params", "count"),
    [
        (lambda ws, x: scan(jnp.matmul, x, ws), WS, 3),
        (beside_a_scanned_bias, {"w": SQUARE, "biases": normal((3, 16))}, 1),
    ],
    ids=["sliced", "shared"],
)
def test_a_state_of_every_step(function, params, count, preset):
    quantized = quantize_function(function, getattr(config, preset)(), params=0)
    out, state = jax.jit(quantized)(quantized.init_state(params, X), params, X)
    # A learned step of the weight for each step of the scan gives it a weight, too.
    frozen = 3 if preset == "lsq" else count
    serve, serving = convert_function(quantized, params, X, state=state)
    weights = frozen_weights(serving)
    assert sum(one.qvalue.size for one in weights) == frozen * SQUARE.size
    assert_bits(jax.jit(serve)(serving, X), out)


# --- What cannot be frozen -----------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            lambda w, x: lax.cond(x[0, 0] > 9, lambda x: x, lambda x: x @ w, x),
            "a branch of lax.cond",
        ),
        (
            lambda w, x: lax.while_loop(
                lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] @ w), (0, x)
            )[1],
            "a lax.while_loop",
        ),
        (
            lambda w, x: jax.shard_map(
                lambda w, x: x @ w,
                mesh=jax.make_mesh((1,), ("d",), (jax.sharding.AxisType.Auto,)),
                in_specs=(P(), P("d")),
                out_specs=P("d"),
            )(w, x),
            "a jax.shard_map",
        ),
    ],
    ids=["cond", "while", "shard_map"],
)
def test_weights_that_stay_in_float(function, words):
    quantized, serve, serving = converted(function, SQUARE, X)
    assert isinstance(serving["params"], jax.Array)
    assert_bits(jax.jit(serve)(serving, X), jax.jit(quantized)(SQUARE, X))
    with pytest.raises(ValueError, match=rf"of \(no name scope\): .*{words}"):
        convert_function(quantized, SQUARE, X, strict=True)


def test_weights_that_depend_on_the_input():
    def function(w, x):
        return x @ w, x @ (w * x[0, 0])

    _, _, serving = converted(function, W, X)
    assert len(frozen_weights(serving)) == 1
    assert isinstance(serving["params"], jax.Array)


def test_scales_of_another_dtype():
    """Rounded scales would change every product."""
    _, serve, serving = converted(lambda w, x: x @ w, W, X)
    cast = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, serving
    )
    with pytest.raises(ValueError, match="'params' is bfloat16, but scales are"):
        serve(cast, X)


class Dense:
    """A layer of a framework that has no adapter."""

    def __init__(self, cfg):
        self.dot_general = AqtDotGeneral(cfg)

    def __call__(self, w, x):
        return self.dot_general(x, w, (((1,), (0,)), ((), ())))


@pytest.mark.parametrize("cfg", [INT8, config.static_int8()], ids=["int8", "static"])
def test_injected_into_any_framework(cfg):
    layer = Dense(cfg)

    def apply(w, x):
        with injected.marking():
            return layer(w, x)

    quantized = quantize_function(apply, (), params=0)
    state = quantized.init_state(W, X)
    if state:
        _, state = jax.jit(quantized)(state, W, X)
        with pytest.raises(ValueError, match="was not given"):
            convert_function(quantized, W, X)
    else:
        assert_bits(jax.jit(quantized)(W, X), quantized(W, X))
    serve, serving = convert_function(quantized, W, X, state=state or None)
    assert len(frozen_weights(serving)) == 1
    trained = jax.jit(lambda state, w, x: quantized.evaluate(state, (w, x), {}))
    assert_bits(jax.jit(serve)(serving, X), trained(state, W, X))


def test_errors():
    quantized, _, serving = converted(lambda w, x: x @ w, W, X)
    with pytest.raises(ValueError, match="they are converted already"):
        convert_function(quantized, serving, X)
    quantized = quantize_function(lambda w, x: x @ w, INT8, params=0)
    with pytest.raises(
        TypeError, match="takes what aqtlite.quantize_function returned"
    ):
        convert_function(lambda w, x: x @ w, W, X)
    for params in (None, 1, (0, 1)):
        wrong = quantize_function(lambda w, x: x @ w, INT8, params=params)
        with pytest.raises(ValueError, match="quantize it with params=0"):
            convert_function(wrong, W, X)
    with pytest.raises(ValueError, match="which have none"):
        convert_function(quantized, W, X, state={"aqt_stats": {"0": {}}})
    convert_function(quantized, W, X, state=quantized.init_state(W, X))
    with_state = quantize_function(lambda w, x: x @ w, config.static_int8(), params=0)
    with pytest.raises(ValueError, match="was not given"):
        convert_function(with_state, W, X)
    with pytest.raises(ValueError, match="nothing to freeze: the rules"):
        convert_function(quantize_function(lambda w, x: x @ w, [], params=0), W, X)
    with pytest.raises(ValueError, match="nothing to freeze(.|\n)*an operand is empty"):
        convert_function(quantized, W[:0], X[:, :0])
    closed_over = quantize_function(lambda _, x: x @ W, INT8, params=0)
    with pytest.raises(ValueError, match="nothing to freeze: none of the 1 contr.*clo"):
        convert_function(closed_over, {}, X)
    serve, serving = convert_function(quantized, W, X)
    with pytest.raises(TypeError):
        serve(serving)
    for wrong in (W, {"w": W}, serving["params"]):
        with pytest.raises(TypeError, match="takes the serving parameters"):
            serve(wrong, X)


def test_name_of_the_served_function():
    quantized, serve, _ = converted(scan_of_scans, jnp.stack([WS, WS]), X)
    assert (quantized.__name__, serve.__name__) == (
        "scan_of_scans",
        "serve_scan_of_scans",
    )


@pytest.mark.parametrize(
    "paths, second, count",
    [("scopes", "", 1), ("parameters", "b", 1), ("scopes", "b", 2)],
)
def test_a_weight_of_several_contractions_is_frozen_once_for_each_path(
    paths, second, count
):
    def function(w, x):
        with jax.named_scope("a"):
            x = x @ w
        with jax.named_scope(second or "a"):
            return x @ w

    w, x = normal((8, 8)), normal((2, 8), 1)
    quantized = quantize_function(function, nearest(), params=0, paths=paths)
    serve, serving = convert_function(quantized, w, x)
    assert len(frozen_weights(serving)) == count
    assert_bits(jax.jit(serve)(serving, x), jax.jit(quantized)(w, x))
