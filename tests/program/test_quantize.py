import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import aqtlite
from aqtlite import Rule, config, quantize_function, statistics
from aqtlite.program.calibration_state import with_gradient_statistics
from tests.common import MATMUL, nearest, normal
from tests.replacing import assert_bits

pytestmark = pytest.mark.code("quick")

INT8 = nearest()
MATMUL_INT8 = aqtlite.make_dot_general(INT8)
DELAYED = config.fp8(delayed=True)
X, W = normal((4, 8)), normal((8, 8), 1)
WS = normal((3, 8, 8), 2)
G = normal((4, 8), 3)


def injected(function, dot_general=MATMUL_INT8):
    """A function that takes a matrix product last, with one of a `dot_general`."""
    return lambda *args: function(*args, lambda x, w: dot_general(x, w, MATMUL))


def by_rules(function, rules=INT8):
    """The same function with that of JAX, quantized by rules."""
    return quantize_function(injected(function, lax.dot_general), rules, params=0)


def value_and_gradients(function):
    """A function of arrays, with its gradients of all of them."""

    def of_arrays(*args):
        out, pull_back = jax.vjp(function, *args)
        return out, pull_back(jnp.sin(out * 3))

    return of_arrays


def matmul(w, x, dot):
    return dot(x, w)


def mlp(w, x, dot):
    return dot(jnp.tanh(dot(x, w)), w)


def scanned(w, x, dot):
    return lax.scan(lambda x, _: (jnp.tanh(dot(x, w)), None), x, None, length=3)[0]


def remat(w, x, dot):
    return jax.checkpoint(functools.partial(mlp, dot=dot))(w, x)


def branches(w, x, dot):
    return lax.cond(x[0, 0] > 9, lambda x: x, lambda x: jnp.tanh(dot(x, w)), x)


# --- Equal to what is injected by hand -----------------------------------------------


@pytest.mark.parametrize("function", [mlp, scanned, remat, branches])
def test_bits_of_injected_contractions(function):
    @jax.jit
    def both(w, x):
        return [
            value_and_gradients(make(function))(w, x) for make in (by_rules, injected)
        ]

    got, wanted = both(W, X)
    assert_bits(got, wanted)
    assert not np.array_equal(got[0], injected(function, lax.dot_general)(W, X))


def test_a_map_inside_is_quantized_as_a_whole():
    """The gradient of what it shares is one contraction, of the whole batch."""

    def function(w, x, dot):
        return jax.vmap(lambda x: jax.jit(lambda x: dot(x[None], w)[0])(x))(x)

    got, mapped, whole = [
        jax.jit(value_and_gradients(one))(W, X)
        for one in (by_rules(function), injected(function), injected(matmul))
    ]
    assert_bits(got[0], mapped[0])
    assert_bits(got, whole)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_bits_of_other_dtypes(dtype):
    w, x = W.astype(dtype), X.astype(dtype)
    got, wanted = [
        jax.jit(value_and_gradients(make(matmul)))(w, x)
        for make in (by_rules, injected)
    ]
    assert_bits(got, wanted)
    assert got[0].dtype == dtype


def test_bits_with_noise():
    """Noise is seeded by operands, which are the same."""
    cfg = config.fully_quantized()
    got, wanted = [
        jax.jit(value_and_gradients(one))(W, X)
        for one in (
            by_rules(matmul, cfg),
            injected(matmul, aqtlite.make_dot_general(cfg)),
        )
    ]
    assert_bits(got, wanted)


def test_the_program_is_the_injected_one():
    """In the number of operations, forward and backward, compiled or not.

    Functions that are called twice are lowered once or twice, by what else was traced.
    """
    lowered, compiled = [], []
    for make in (by_rules, injected):
        program = jax.jit(value_and_gradients(make(mlp))).lower(W, X)
        lowered.append(program.as_text().count(" = "))
        compiled.append(program.compile().as_text().count(" = "))
    assert lowered[0] <= lowered[1]
    assert compiled[0] == compiled[1]


def test_a_rule_that_leaves_all_in_float_changes_nothing():
    @jax.jit
    def both(w, x):
        return [
            value_and_gradients(one)(w, x)
            for one in (by_rules(mlp, Rule(cfg=None)), injected(mlp, lax.dot_general))
        ]

    got, wanted = both(W, X)
    assert_bits(got, wanted)


def test_convolutions():
    image, kernel = normal((2, 5, 5, 3)), normal((3, 3, 3, 4), 1)
    args = ((2, 1), "SAME", None, None, ("NHWC", "HWIO", "NHWC"))
    conv = aqtlite.make_conv_general_dilated(INT8)

    @jax.jit
    def both(kernel, image):
        def of_float(kernel, image):
            return lax.conv_general_dilated(image, kernel, *args)

        return [
            value_and_gradients(one)(kernel, image)
            for one in (
                quantize_function(of_float, INT8, params=0),
                lambda kernel, image: conv(image, kernel, *args),
            )
        ]

    got, wanted = both(kernel, image)
    assert_bits(got, wanted)


def test_ragged_contractions():
    ragged = aqtlite.make_ragged_dot(INT8)
    sizes = jnp.array([1, 0, 3])

    @jax.jit
    def both(w, x):
        return [
            value_and_gradients(one)(w, x)
            for one in (
                quantize_function(lambda w, x: lax.ragged_dot(x, w, sizes), INT8),
                lambda w, x: ragged(x, w, sizes),
            )
        ]

    got, wanted = both(WS, X)
    assert_bits(got, wanted)


@pytest.mark.parametrize(
    ("shapes", "dims", "order"),
    [
        (((8, 6), (4, 8)), (((0,), (1,)), ((), ())), (1, 0)),
        (((2, 8, 6), (2, 4, 8)), (((1,), (2,)), ((0,), (0,))), (0, 2, 1)),
        (((3, 8, 6), (4, 5, 8)), (((1,), (2,)), ((), ())), (2, 3, 0, 1)),
    ],
)
def test_a_weight_on_the_left(shapes, dims, order):
    """It is quantized by fwd.rhs, and the axes of the result stay."""
    cfg = config.weight_only(bits=4)
    w, x = normal(shapes[0]), normal(shapes[1], 1)
    (lhs_ca, rhs_ca), (lhs_ba, rhs_ba) = dims
    exchanged = ((rhs_ca, lhs_ca), (rhs_ba, lhs_ba))
    quantized = quantize_function(
        lambda w, x: lax.dot_general(w, x, dims), cfg, params=0
    )
    wanted = aqtlite.make_dot_general(cfg)(x, w, exchanged)
    got = jax.jit(quantized)(w, x)
    assert got.shape == lax.dot_general(w, x, dims).shape
    assert_bits(got, jnp.transpose(wanted, np.argsort(order)))


# --- An ordinary function ------------------------------------------------------------


def test_any_arguments_and_results():
    def function(params, x, *, times, name=None, flag=True):
        assert name == "text" and flag
        return {"out": (x @ params["w"]).reshape(times, -1), "none": None, "one": 1.0}

    quantized = quantize_function(function, INT8, params=0)
    params = {"w": W, "unused": None, "eps": 1e-6}
    out = quantized(params, X, times=2, name="text")
    assert_bits(out["out"], MATMUL_INT8(X, W, MATMUL).reshape(2, -1))
    assert out["none"] is None
    assert isinstance(out["one"], jax.Array)


def test_jit_of_any_params():
    for params in (0, [0], (0,), lambda path: path.startswith("0"), None):
        quantized = quantize_function(lambda w, x: x @ w, INT8, params=params)
        assert jax.jit(quantized)(W, X).shape == (4, 8)


def test_name_of_the_function():
    assert quantize_function(mlp, INT8).__name__ == "mlp"
    assert quantize_function(functools.partial(mlp), INT8).__name__ == "partial"


def test_transformations():
    """The gradient of a map of a scan of it, as of the injected one."""

    def transformed(function):
        def step(x, w):
            return jax.vmap(lambda row: function(w, row[None])[0])(x), None

        return lambda ws, x: lax.scan(jax.checkpoint(step), x, ws)[0]

    @jax.jit
    def both(ws, x):
        return [
            value_and_gradients(transformed(make(matmul)))(ws, x)
            for make in (by_rules, injected)
        ]

    got, wanted = both(WS, X)
    assert_bits(got, wanted)


def test_a_quantized_function_in_another_one():
    """What is quantized stays so; the rest is named by the rules of the outer one."""
    inner = by_rules(matmul)

    def function(w, x):
        with jax.named_scope("rest"):
            return inner(w, x) @ w

    quantized = quantize_function(function, [Rule(path="rest#?.*", cfg=INT8)])
    wanted = MATMUL_INT8(MATMUL_INT8(X, W, MATMUL), W, MATMUL)
    assert_bits(jax.jit(quantized)(W, X), wanted)


def test_export():
    exported = export.export(jax.jit(by_rules(mlp)))(W, X)
    assert_bits(exported.call(W, X), jax.jit(injected(mlp))(W, X))


def test_export_of_a_symbolic_batch():
    (rows,) = export.symbolic_shape("rows")
    x = jax.ShapeDtypeStruct((rows, X.shape[1]), X.dtype)
    quantized = by_rules(mlp, [Rule(cfg=INT8, min_size=4)])
    exported = export.export(jax.jit(quantized))(W, x)
    assert_bits(exported.call(W, X), jax.jit(quantized)(W, X))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_placements(kind):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("d")))
        w = jax.device_put(W, NamedSharding(mesh, P()))
        out = jax.jit(by_rules(mlp))(w, x)
        assert_bits(out, jax.jit(injected(mlp))(w, x))
        assert out.sharding.is_equivalent_to(x.sharding, 2)


@pytest.mark.parametrize("is_placed", [True, False])
def test_gradients_of_weights_that_are_on_no_mesh(is_placed):
    grad = jax.jit(jax.grad(lambda w, x: by_rules(mlp)(w, x).sum()))
    wanted = grad(W, X)
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(X, NamedSharding(mesh, P("d"))) if is_placed else X
    with jax.set_mesh(mesh):
        assert_bits(grad(W, x), wanted)


def test_inside_a_shard_map():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))

    def function(w, x, dot):
        return jax.shard_map(
            lambda w, x: dot(x, w),
            mesh=mesh,
            in_specs=(P(), P("d")),
            out_specs=P("d"),
        )(w, x)

    got, wanted = [
        jax.jit(value_and_gradients(make(function)))(W, X)
        for make in (by_rules, injected)
    ]
    assert_bits(got, wanted)


def test_states_inside_a_shard_map_are_refused():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    quantized = quantize_function(
        jax.shard_map(
            lambda w, x: x @ w, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d")
        ),
        config.static_int8(),
        params=0,
    )
    with pytest.raises(ValueError, match="states .* inside jax.shard_map.*cfg=None"):
        quantized(quantized.init_state(W, X), W, X)


def test_name_in_messages():
    quantized = quantize_function(two_layers, INT8, params=0)
    assert repr(quantized) == "QuantizedFunction(two_layers, 1 rule)"


def test_custom_gradients_of_the_user_stay():
    @jax.custom_vjp
    def layer(w, x):
        return x @ w

    layer.defvjp(lambda w, x: (layer(w, x), None), lambda _, g: (W * 2, g))
    quantized = quantize_function(lambda w, x: layer(w, x), INT8, params=0)
    out, gradients = jax.jit(value_and_gradients(quantized))(W, X)
    assert_bits(out, jax.jit(MATMUL_INT8, static_argnums=2)(X, W, MATMUL))
    assert_bits(gradients[0], W * 2)


# --- The precision of what stays in float --------------------------------------------

FORWARD_ALONE = config.DotGeneral(fwd=INT8.fwd)


def precisely(w, x, *, dtype=jnp.float32):
    """Sums of float16 on every platform, which others would show."""
    algorithm = lax.DotAlgorithmPreset.F16_F16_F16
    return lax.dot_general(x, w, MATMUL, algorithm, dtype)


@pytest.mark.parametrize(
    "function",
    [
        precisely,
        functools.partial(precisely, dtype=jnp.float16),
        # On a CPU, of no consequence: the dtypes of gradients are compared.
        lambda w, x: jnp.matmul(x, w.astype(jnp.bfloat16), precision="highest"),
    ],
    ids=["float32", "float16", "highest"],
)
def test_gradients_in_float_keep_the_precision(function):
    """Equal to those of JAX; rounded less, where it rounds results of 16 bits."""
    cotangent = jnp.asarray(G, jax.eval_shape(function, W, X).dtype)

    def gradients(function):
        return jax.vjp(function, W, X)[1](cotangent)

    quantized = quantize_function(function, FORWARD_ALONE, params=0)
    found, wanted = jax.jit(lambda: (gradients(quantized), gradients(function)))()
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        rounding = 0 if cotangent.dtype == jnp.float32 else 2**-9
        np.testing.assert_allclose(one, other, rtol=rounding, atol=rounding)
    plain = jax.vjp(lambda w, x: x @ w, W, X)[1](G)
    if function is precisely:
        assert (found[0] != plain[0]).any()


def test_a_forward_contraction_in_float_keeps_the_precision():
    """And a convolution; fully quantized ones have none."""

    def function(w, x):
        image = x.reshape(4, 8, 1)
        with jax.named_scope("conv"):
            image = lax.conv_general_dilated(
                image, w[:, :, None], (1,), "SAME", precision="highest"
            )
        return jnp.matmul(image[:, :, 0], w, precision="highest")

    def count(cfg):
        quantized = quantize_function(function, cfg, params=0)
        lowered = jax.jit(quantized).trace(W, X).lower(lowering_platforms=("tpu",))
        return lowered.as_text().count("HIGHEST")

    assert count(INT8) == 0
    # Of both operands of both contractions.
    assert count(config.weight_only()) == count(config.unquantized()) == 4
    assert count([Rule(path="conv", cfg=INT8)]) == 2


# --- What is no function, or has no rules --------------------------------------------


def test_empty_operands_are_no_mistake():
    assert by_rules(mlp)(W, X[:0]).shape == (0, 8)


def test_errors():
    with pytest.raises(TypeError, match="takes a function, got 3"):
        quantize_function(3, INT8)
    with pytest.raises(TypeError, match="got the model Dense: give its apply"):
        quantize_function(nn.Dense(3), INT8)
    with pytest.raises(TypeError, match=r"NNX model Linear.*nnx\.quantize_model"):
        quantize_function(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), INT8)
    for params in ("params", ["w"], 1.5, True):
        with pytest.raises(TypeError, match="params must be the position"):
            quantize_function(mlp, INT8, params=params)
    with pytest.raises(TypeError, match="a sequence of aqtlite.Rule"):
        quantize_function(mlp, "int8")
    with pytest.raises(ValueError, match="matches nothing"):
        by_rules(mlp, [Rule(path="head", cfg=INT8)])(W, X)
    with pytest.raises(ValueError, match="Rule.path='head'|path='head'"):
        jax.jit(by_rules(mlp, [Rule(path="head", cfg=INT8)]))(W, X)


# --- State ---------------------------------------------------------------------------


def two_layers(w, x):
    with jax.named_scope("first"):
        x = jnp.tanh(x @ w)
    with jax.named_scope("second"):
        return x @ w


def loss(quantized, state, w, x):
    out, state = quantized(state, w, x)
    return jnp.sum(out * G), state


def test_static_ranges_are_gathered():
    cfg = config.static_int8()
    quantized = quantize_function(two_layers, cfg, params=0)
    assert quantized.has_state
    state = quantized.init_state(W, X)
    assert {k: sorted(v) for k, v in state.items()} == {
        "aqt_stats": ["first", "second"]
    }
    dot = aqtlite.make_dot_general(cfg)

    @jax.jit
    def by_hand(states, x):
        states = statistics.update_states(cfg, states, x, W, MATMUL)
        return states, dot(x, W, MATMUL, states=states)

    states = statistics.init_states(cfg, X, W, MATMUL)
    one_layer = quantize_function(lambda w, x: x @ w, cfg, params=0)
    state = one_layer.init_state(W, X)
    for x in (X, X * 2):
        states, wanted = by_hand(states, x)
        out, state = jax.jit(one_layer)(state, W, x)
        assert_bits(state["aqt_stats"][""], {"lhs": states.lhs})
        assert_bits(out, wanted)


def test_state_of_loops():
    """Slices of parameters have states of their own, shared ones one that goes on."""

    def function(ws, x):
        def step(x, w):
            with jax.named_scope("layer"):
                return jnp.tanh(x @ w), None

        with jax.named_scope("shared"):
            x, _ = lax.scan(lambda x, _: (jnp.tanh(x @ ws[0]), None), x, None, length=2)
        return lax.scan(step, x, ws)[0]

    quantized = quantize_function(function, config.static_int8(), params=0)
    state = quantized.init_state(WS, X)["aqt_stats"]
    assert state["layer"]["lhs"].batches.shape == (3,)
    assert state["shared"]["lhs"].batches.shape == ()
    _, after = jax.jit(quantized)({"aqt_stats": state}, WS, X)
    np.testing.assert_array_equal(after["aqt_stats"]["layer"]["lhs"].batches, [1] * 3)
    assert after["aqt_stats"]["shared"]["lhs"].batches == 2


def test_delayed_scaling_of_gradients():
    quantized = quantize_function(two_layers, DELAYED, params=0)
    state = quantized.init_state(W, X)
    assert set(state) == {"aqt_stats", "_overwrite_with_gradient"}

    @jax.jit
    def step(state, w, x):
        gradient = jax.grad(loss, (1, 2, 3), has_aux=True, allow_int=True)
        (of_state, *of_arrays), state = gradient(quantized, state, w, x)
        return with_gradient_statistics(state, of_state), of_arrays

    dot = aqtlite.make_dot_general(DELAYED)

    @jax.jit
    def by_hand(first, second, w, x):
        def function(gradients, w, x):
            states = []
            for one, of_gradient in zip((first, second), gradients, strict=True):
                one = statistics.update_states(DELAYED, one, x, w, MATMUL)
                one = one._replace(dlhs=of_gradient[0], drhs=of_gradient[1])
                states.append(one)
                x = dot(x, w, MATMUL, states=one)
                x = jnp.tanh(x) if len(states) == 1 else x
            return jnp.sum(x * G), states

        gradients = [(one.dlhs, one.drhs) for one in (first, second)]
        run = jax.grad(function, argnums=(0, 1, 2), has_aux=True)
        (of_states, *of_arrays), states = run(gradients, w, x)
        states = [
            one._replace(dlhs=dlhs, drhs=drhs)
            for one, (dlhs, drhs) in zip(states, of_states, strict=True)
        ]
        return *states, of_arrays

    states = [statistics.init_states(DELAYED, X, W, MATMUL) for _ in range(2)]
    for scale in (1, 3):
        state, got = step(state, W, X * scale)
        *states, wanted = by_hand(*states, W, X * scale)
        assert_bits(got, wanted)
        for name, one in zip(("first", "second"), states, strict=True):
            assert_bits(state["aqt_stats"][name], {"lhs": one.lhs})
            assert_bits(
                state["_overwrite_with_gradient"][name],
                {"dlhs": one.dlhs, "drhs": one.drhs},
            )
    assert state["_overwrite_with_gradient"]["first"]["drhs"].batches == 2


def test_learned_scales_get_gradients():
    cfg = config.lsq()
    quantized = quantize_function(two_layers, cfg, params=0)
    state = quantized.init_state(W, X)
    assert set(state) == {"params"}

    @jax.jit
    def gradients(state):
        return jax.grad(loss, argnums=1, has_aux=True)(quantized, state, W, X)[0]

    @jax.jit
    def by_hand(one):
        dot = aqtlite.make_dot_general(cfg)
        hidden = jnp.tanh(dot(X, W, MATMUL, states=one["first"]))
        return jnp.sum(dot(hidden, W, MATMUL, states=one["second"]) * G)

    states = {k: statistics.States(**one) for k, one in state["params"].items()}
    wanted = jax.jit(jax.grad(by_hand))(states)
    for name, one in gradients(state)["params"].items():
        assert_bits(one, {"lhs": wanted[name].lhs, "rhs": wanted[name].rhs})
        assert all(np.any(leaf) for leaf in jax.tree.leaves(one))
    first = statistics.init_states(cfg, X, W, MATMUL)
    assert_bits(state["params"]["first"], {"lhs": first.lhs, "rhs": first.rhs})


def test_learned_scales_in_a_scan_add_up():
    def function(w, x):
        return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=2)[0]

    quantized = quantize_function(function, config.lsq(), params=0)
    state = quantized.init_state(W, X)
    gradient = jax.jit(
        lambda s: jax.grad(loss, argnums=1, has_aux=True)(quantized, s, W, X)[0]
    )(state)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradient))


def test_branches_that_are_not_taken_leave_the_state():
    def function(w, x):
        return lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x, x)

    quantized = quantize_function(function, config.static_int8(), params=0)
    positive = jnp.abs(X) + 1
    state = quantized.init_state(W, X)
    run = jax.jit(quantized)
    (_, same), (_, other) = run(state, W, -positive), run(state, W, positive)
    assert_bits(same, state)
    assert other["aqt_stats"][""]["lhs"].batches == 1


def test_first_states_of_what_does_not_run():
    """In a branch that is not taken, a loop of no steps: as of zeros, of any step."""

    def function(ws, x):
        def step(x, w):
            return lax.cond(x[0, 0] > 99, lambda x: x @ w, lambda x: x, x), None

        x, _ = lax.scan(step, x, ws)
        return lax.while_loop(lambda x: x[0, 0] > 99, lambda x: x @ ws[0], x)

    for cfg in (config.lsq(), config.static_int8()):
        quantized = quantize_function(function, cfg, params=0)
        state = quantized.init_state(WS, X)
        (collection,) = state.values()
        zeros = statistics.init_states(cfg, X * 0, W * 0, MATMUL)
        zeros = {field: getattr(zeros, field) for field in collection[""]}
        assert_bits(jax.tree.map(lambda x: x[1], collection[""]), zeros)
        assert_bits(collection["#1"], zeros)
        assert jax.tree.leaves(collection[""])[0].shape[0] == 3


def user_layer(w, x):
    layer = jax.custom_vjp(lambda w, x: x @ w)
    layer.defvjp(lambda w, x: (x @ w, None), lambda _, g: (None, g))
    return layer(w, x)


@pytest.mark.parametrize(
    ("function", "cfg", "words"),
    [
        (user_layer, config.lsq(), "a derivative of its own"),
        (user_layer, DELAYED, "a derivative of its own"),
        (
            lambda w, x: lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x, x),
            DELAYED,
            "a branch",
        ),
        (
            lambda w, x: lax.scan(lambda x, _: (x @ w, None), x, None, length=2)[0],
            DELAYED,
            "a scan whose steps share parameters",
        ),
    ],
    ids=["learned", "custom_vjp", "cond", "scan"],
)
def test_states_that_would_get_no_gradient(function, cfg, words):
    quantized = quantize_function(function, [Rule(cfg=cfg)], params=0)
    for make in (quantized.plan, quantized.init_state):
        with pytest.raises(ValueError, match=words):
            make(W, X)


def test_calls_without_the_state():
    quantized = quantize_function(two_layers, config.static_int8(), params=0)
    for params in (W, {"w": W}):
        with pytest.raises(TypeError, match="init_state"):
            quantized(params, X)
    with pytest.raises(ValueError, match="nothing for the contraction 'first'"):
        quantized({}, W, X)
    of_one = quantize_function(jnp.matmul, config.static_int8())
    with pytest.raises(ValueError, match=r"the contraction \(no name scope\) in"):
        of_one({}, X, W)
    with pytest.raises(ValueError, match="'second' in 'aqt_stats'"):
        state = quantized.init_state(W, X)
        del state["aqt_stats"]["second"]
        quantized(state, W, X)


def test_the_state_is_not_changed_in_place():
    quantized = quantize_function(two_layers, config.static_int8(), params=0)
    state = quantized.init_state(W, X)
    before = jax.tree.map(np.asarray, state)
    _, after = quantized(state, W, X)
    assert_bits(jax.tree.map(np.asarray, state), before)
    assert after is not state
