import functools

import hypothesis
import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas
from jax.experimental.layout import Format, Layout
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import primitives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from aqtlite.jaxpr import rewriting, sites
from aqtlite.jaxpr.replacement import Replacement
from tests.common import normal
from tests.replacing import assert_bits, evaluated_with, itself, replaced

pytestmark = pytest.mark.code("quick")

X, W = normal((3, 4)), normal((4, 4), 1)
WS = normal((3, 4, 4), 2)


def loss(function):
    """A number to differentiate, of all floats that a function returns."""

    def total(x):
        has_aux = jax.tree.leaves(function(x))
        return sum(jnp.sum(jnp.sin(one)) for one in has_aux if one.dtype == jnp.float32)

    return total


def layer(x, w=W):
    return jnp.tanh(x @ w)


@jax.custom_jvp
def with_jvp(x, times):
    return layer(x) * times


@with_jvp.defjvp
def _with_jvp(primals, tangents):
    return with_jvp(*primals), tangents[0] * 3 + jnp.cos(primals[0])


@jax.custom_vjp
def with_vjp(x, times):
    return layer(x) * times


with_vjp.defvjp(
    lambda x, times: (with_vjp(x, times), x), lambda x, g: (g * 3 + jnp.cos(x), None)
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def with_static(function, x):
    return function(x) @ W


with_static.defvjp(
    lambda function, x: (with_static(function, x), x),
    lambda function, x, g: (g * function(x),),
)

MESH = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
PLACED = NamedSharding(MESH, P("d"))


def over_mesh(**kwargs):
    return jax.shard_map(
        lambda x: lax.psum(layer(x), "d"),
        mesh=MESH,
        in_specs=P("d"),
        out_specs=P(),
        **kwargs,
    )


def with_keys(x):
    def step(carry, key):
        x, carried = carry
        x = layer(x) + jax.random.normal(carried, x.shape)
        x += jax.random.normal(key, x.shape)
        return (x, jax.random.fold_in(carried, 1)), key

    keys = jax.random.split(jax.random.key(1), 2)
    (x, _), keys = lax.scan(step, (x, jax.random.key(2)), keys)
    return x, keys


def with_a_reference(x):
    reference = jax.new_ref(x)

    def step(count, w):
        reference[...] = layer(reference[...], w)
        return count + 1, None

    lax.scan(step, 0, WS)
    return reference[...]


def scan(step, x, xs=None, **kwargs):
    return lax.scan(step, x, xs, **kwargs)


# Functions of X whose gradient exists.
FUNCTIONS = {
    "alone": layer,
    "jit": lambda x: jax.jit(layer)(x),
    "jit_with_placements": lambda x: jax.jit(
        layer, in_shardings=PLACED, out_shardings=PLACED
    )(x),
    "jit_of_unused": lambda x: jax.jit(lambda x, y: layer(x), keep_unused=True)(x, x),
    "jit_inline": lambda x: jax.jit(layer, inline=True)(x),
    "jit_of_an_expression": lambda x: layer(jax.jit(lambda x: layer(x) + 1)(x * 2)),
    "scan": lambda x: scan(lambda c, w: (layer(c, w), c), x, WS),
    "scan_of_constants": lambda x: scan(lambda c, _: (layer(c), None), x, length=2),
    "scan_reversed": lambda x: scan(
        lambda c, w: (layer(c, w), c @ w), x, WS, reverse=True, unroll=2
    ),
    "scan_of_nothing": lambda x: scan(lambda c, _: (layer(c), c), x, length=0),
    "scan_of_scans": lambda x: scan(
        lambda c, w: scan(lambda c, v: (layer(c, v @ w), None), c, WS), x, WS
    ),
    "scan_of_a_literal": lambda x: scan(
        lambda c, _: ((layer(c[0]) * c[1].astype(x.dtype), c[1]), 1),
        (x, jnp.bfloat16(2)),
        length=2,
    ),
    "fori": lambda x: lax.fori_loop(0, 3, lambda i, x: layer(x) * (i + 1), x),
    "cond": lambda x: lax.cond(x.sum() > 0, layer, lambda x: x, x),
    "cond_not_taken": lambda x: lax.cond(x.sum() > 99, layer, lambda x: x, x),
    "switch": lambda x: lax.switch(
        jnp.argmax(x[0]), [layer, lambda x: x, lambda x: layer(layer(x))], x
    ),
    "platform": lambda x: lax.platform_dependent(
        x, cpu=layer, default=lambda x: x @ W @ W
    ),
    "remat": lambda x: jax.checkpoint(lambda x: layer(layer(x)))(x),
    "remat_with_a_policy": lambda x: jax.checkpoint(
        lambda x: layer(layer(x)), policy=jax.checkpoint_policies.dots_saveable
    )(x),
    "custom_jvp": lambda x: with_jvp(x, 2),
    "custom_vjp": lambda x: with_vjp(x, 2),
    "custom_vjp_of_integers": lambda x: with_vjp(x, jnp.arange(4)),
    "custom_vjp_of_a_function": lambda x: with_static(jnp.cos, x),
    "custom_vjp_twice_the_same": lambda x: with_vjp(x, x),
    "shard_map": over_mesh(),
    "shard_map_unchecked": over_mesh(check_vma=False),
    "vmap": lambda x: jax.vmap(
        lambda x: lax.cond(x.sum() > 0, layer, lambda x: x, lax.psum(x, "i")),
        axis_name="i",
    )(x),
    "keys": with_keys,
    "a_constant_key": lambda x: layer(x) + jax.random.normal(jax.random.key(3), (4,)),
    "a_reference": with_a_reference,
    "a_gradient": lambda x: jax.grad(lambda x: jnp.sum(layer(layer(x))))(x),
    "a_gradient_of_remat": lambda x: jax.grad(
        lambda x: jnp.sum(jax.checkpoint(lambda x: layer(layer(x)))(x))
    )(x),
    "constants_and_inputs": lambda x: (x @ W, x, jnp.float32(1), np.arange(3), {}),
}


@pytest.mark.parametrize(
    ("primitive", "body_of"),
    [
        (primitives.closed_call_p, lambda closed: closed),
        (primitives.call_p, lambda closed: closed.jaxpr),
    ],
)
def test_calls_that_no_public_function_makes(primitive, body_of):
    closed = jax.make_jaxpr(jax.jit(lambda x, w: x @ w))(X, W)
    (eqn,) = closed.eqns
    body = body_of(eqn.params["jaxpr"])
    eqn = eqn.replace(primitive=primitive, params={"call_jaxpr": body})
    closed = closed.replace(jaxpr=closed.jaxpr.replace(eqns=[eqn]))
    (site,) = sites.find(closed).contractions
    assert site.obstacle is None
    (out,), _ = rewriting.evaluate(closed, [X, W], {site.location: itself(site)})
    assert_bits(out, X @ W)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_bits_stay(function):
    @jax.jit
    def both(x):
        return [
            (one(x), jax.grad(loss(one))(x)) for one in (function, replaced(function))
        ]

    wanted, got = both(X)
    assert_bits(got, wanted)


def test_eagerly():
    for name in ("jit", "scan", "remat", "custom_vjp", "a_reference"):
        function = FUNCTIONS[name]
        assert_bits(replaced(function)(X), function(X))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: lax.while_loop(
            lambda c: c[1] < 3, lambda c: (layer(c[0]), c[1] + 1), (x, 0)
        ),
        lambda x: lax.fori_loop(0, jnp.argmax(x[0]) + 1, lambda i, x: layer(x) * i, x),
        # Rows stop after other numbers of steps.
        jax.vmap(
            lambda x: lax.while_loop(
                lambda c: c[1] < jnp.argmax(x) + 1,
                lambda c: (layer(c[0]), c[1] + 1, jax.random.split(c[2])[0]),
                (x[None], 0, jax.random.key(0)),
            )
        ),
        lambda x: lax.custom_linear_solve(
            lambda v: v @ W, layer(x)[0], lambda _, b: b @ W
        ),
    ],
    ids=["while", "fori", "while_of_rows", "linear_solve"],
)
def test_bits_stay_without_a_gradient(function):
    wanted, got = jax.jit(lambda x: (function(x), replaced(function)(x)))(X)
    assert_bits(got, wanted)


def test_every_contraction_was_replaced():
    """What computes zeros shows that replacements are used at all."""

    def nothing(site):
        aval = site.eqn.outvars[0].aval
        return Replacement(
            lambda values, given: ([jnp.zeros(aval.shape, aval.dtype)], given),
            per_step=site.per_step,
        )

    for name in ("jit", "scan", "fori", "remat", "custom_jvp", "custom_vjp", "keys"):
        function = FUNCTIONS[name]
        wanted = jax.tree.leaves(jax.jit(lambda x, f=function: f(x))(X))[0]
        got = jax.tree.leaves(jax.jit(replaced(function, nothing))(X))[0]
        assert not np.array_equal(got, wanted), name


# --- jit -----------------------------------------------------------------------------


def test_jit_keeps_what_it_was_told():
    jitted = jax.jit(
        lambda x, y: layer(x), donate_argnums=0, keep_unused=True, out_shardings=PLACED
    )
    (eqn,) = jax.make_jaxpr(replaced(lambda x, y: jitted(x, y)))(X, X).eqns
    assert eqn.params["donated_invars"] == (True, False)
    assert eqn.params["keep_unused"]
    assert eqn.params["out_shardings"] == (PLACED,)
    assert eqn.params["name"] == "<lambda>"


def test_jit_keeps_layouts():
    columns, here = Layout((1, 0)), X.sharding
    jitted = jax.jit(
        lambda x, w: layer(x, w),
        in_shardings=(None, Format(columns, here)),
        out_shardings=Format(columns, here),
    )
    (eqn,) = jax.make_jaxpr(replaced(lambda x, w: jitted(x, w)))(X, W).eqns
    assert eqn.params["in_layouts"] == (None, columns)
    assert eqn.params["out_layouts"] == (columns,)
    assert eqn.params["out_shardings"] == (here,)


def test_jit_with_options_of_the_compiler_is_refused():
    """JAX takes them outermost alone: none are lost."""
    jitted = jax.jit(layer, compiler_options={"xla_embed_ir_in_executable": True})
    with pytest.raises(ValueError, match="only be passed to top-level `jax.jit`"):
        replaced(lambda x: jitted(x))(X)


def test_donated_arrays_are_gone():
    jitted = jax.jit(lambda x: layer(x), donate_argnums=0)
    x = X + 1
    wanted = layer(X + 1)
    assert_bits(replaced(lambda x: jitted(x))(x), wanted)
    assert x.is_deleted()


def test_context_of_computations_is_kept():
    def with_metadata(x):
        with set_xla_metadata(group="of_a_layer"):
            return jax.jit(layer)(x) @ W

    texts = [
        jax.jit(function).lower(X).as_text()
        for function in (with_metadata, replaced(with_metadata))
    ]
    assert texts[0].count("of_a_layer") == texts[1].count("of_a_layer")
    assert "of_a_layer" in texts[1]


# --- Branches ------------------------------------------------------------------------


def test_branches_of_other_platforms_are_not_lowered():
    def copy(of, to):
        to[...] = of[...]

    def on_tpu(x):  # which a CPU cannot lower
        return pallas.pallas_call(copy, out_shape=x)(x) @ W

    def function(x):
        return lax.platform_dependent(x, tpu=on_tpu, default=layer)

    assert_bits(jax.jit(replaced(function))(X), jax.jit(function)(X))


# --- Residuals, rules of users -------------------------------------------------------


def saved(capsys, function):
    """The types of what is kept for the backward pass."""
    jax.ad_checkpoint.print_saved_residuals(function, X)
    lines = capsys.readouterr().out.splitlines()
    return sorted(line.split()[0] for line in lines if "constant" not in line)


@pytest.mark.parametrize(
    "policy", ["nothing_saveable", "dots_saveable", "everything_saveable", None]
)
def test_remat_saves_what_it_saved(policy, capsys):
    policy = policy and getattr(jax.checkpoint_policies, policy)

    @functools.partial(jax.checkpoint, policy=policy)
    def function(x):
        return jnp.sum(layer(layer(x)))

    wanted = saved(capsys, function)
    assert saved(capsys, replaced(function)) == wanted


def test_remat_by_name_saves_what_has_the_name(capsys):
    policy = jax.checkpoint_policies.save_only_these_names("hidden")

    @functools.partial(jax.checkpoint, policy=policy)
    def function(x):
        hidden = jax.ad_checkpoint.checkpoint_name(layer(x), "hidden")
        return jnp.sum(layer(hidden))

    wanted = saved(capsys, function)
    assert saved(capsys, replaced(function)) == wanted
    assert len(wanted) > len(saved(capsys, jax.checkpoint(function.__wrapped__)))


def test_custom_vjp_is_told_what_is_perturbed():
    seen = []

    @jax.custom_vjp
    def function(x, y):
        return x @ W + y, x

    def forward(x, y):
        seen.append((x.perturbed, y.perturbed))
        return (x.value @ W + y.value, x.value), None

    function.defvjp(forward, lambda _, g: (g[0] @ W.T, g[0]), symbolic_zeros=True)
    run = replaced(lambda x: function(x, X)[0])
    wanted = jnp.ones_like(X) @ W.T
    np.testing.assert_array_equal(jax.grad(lambda x: run(x).sum())(X), wanted)
    assert seen == [(True, False)]


def test_custom_jvp_is_told_what_is_perturbed():
    seen = []

    @jax.custom_jvp
    def function(x, y):
        return x @ W + y

    def rule(primals, tangents):
        zero = jax.custom_derivatives.SymbolicZero
        seen.append([isinstance(one, zero) for one in tangents])
        return function(*primals), tangents[0] @ W * 2

    function.defjvp(rule, symbolic_zeros=True)
    run = replaced(lambda x: function(x, X))
    _, tangent = jax.jvp(run, (X,), (X,))
    np.testing.assert_array_equal(tangent, X @ W * 2)
    assert seen == [[False, True]]


def test_custom_vjp_that_closes_over_arrays():
    """Arrays are fine; a value that is differentiated is an error, as in JAX."""

    def function(w, x):
        run = jax.custom_vjp(lambda x: x @ w)
        run.defvjp(lambda x: (x @ w, None), lambda _, g: (g * 5,))
        return jnp.sum(run(x))

    np.testing.assert_array_equal(
        jax.grad(replaced(lambda x: function(W, x)))(X), jnp.full_like(X, 5)
    )
    with pytest.raises(ValueError, match="closes over"):
        jax.grad(replaced(function))(W, X)


def second_derivative(function):
    return jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(loss(function))(x))))(X)


def test_custom_rules_under_transformations():
    """Second derivatives, forward mode, vmap, and float0 for integers."""
    run = replaced(lambda x: with_vjp(x, 2))
    function = FUNCTIONS["custom_vjp"]
    assert_bits(second_derivative(run), second_derivative(function))
    run = replaced(lambda x: with_jvp(x, 2))
    function = FUNCTIONS["custom_jvp"]
    assert_bits(second_derivative(run), second_derivative(function))
    assert_bits(jax.jvp(run, (X,), (X,)), jax.jvp(function, (X,), (X,)))
    assert_bits(jax.vmap(run)(X[:, None]), jax.vmap(function)(X[:, None]))
    integers = jnp.arange(4)
    gradients = jax.grad(
        lambda x, i: jnp.sum(replaced(with_vjp)(x, i)), argnums=(0, 1), allow_int=True
    )(X, integers)
    assert gradients[1].dtype == jax.dtypes.float0


# --- Effects -------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [False, True])
def test_effects_come_once_and_in_order(ordered, capfd):
    def function(x):
        def step(x, w):
            jax.debug.print("step {}", w[0, 0], ordered=ordered)
            return layer(x, w), None

        jax.debug.print("before", ordered=ordered)
        x, _ = lax.scan(step, x, jnp.stack([W * 0, W * 0 + 1]))
        x = jax.jit(lambda x: (jax.debug.print("inside", ordered=ordered), x @ W)[1])(x)
        jax.debug.print("after", ordered=ordered)
        return x

    jax.block_until_ready(jax.jit(replaced(function))(X))
    jax.effects_barrier()
    lines = capfd.readouterr().out.split("\n")[:-1]
    wanted = ["before", "step 0.0", "step 1.0", "inside", "after"]
    assert (lines if ordered else sorted(lines)) == (
        wanted if ordered else sorted(wanted)
    )


# --- What replacements are given, and leave ------------------------------------------


def adding(given, has_aux=True):
    """Adds what is given to the product, and has_aux one more of it."""

    def replacement(site):
        def function(values, given):
            (out,) = [site.eqn.primitive.bind(*values, **site.eqn.params)]
            return [out + given], given + 1

        return Replacement(function, given, has_aux, site.per_step)

    return replacement


ONE = jnp.float32(1)


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda x: jax.jit(lambda x: x @ W)(x), 2),
        (lambda x: jax.checkpoint(lambda x: x @ W)(x), 2),
        (lambda x: with_vjp(x, 2), 2),
        (lambda x: with_jvp(x, 2), 2),
        (lambda x: lax.scan(lambda x, _: (x @ W, None), x, None, length=3), 4),
        (lambda x: lax.fori_loop(0, 2 + x.argmax(), lambda i, x: x @ W, x), None),
        (lambda x: lax.cond(x[0, 0] < 99, lambda x: x @ W, lambda x: x, x), 2),
        (lambda x: lax.cond(x[0, 0] > 99, lambda x: x @ W, lambda x: x, x), 1),
    ],
    ids=["jit", "remat", "vjp", "jvp", "scan", "while", "taken", "not_taken"],
)
def test_what_is_left(function, wanted):
    _, left = jax.jit(lambda x: evaluated_with(function, adding(ONE), x))(X)
    (value,) = left.values()
    assert value == (wanted or 1 + 2 + X.argmax())


def test_every_step_has_its_own():
    """Of an outer scan of which every step has one, and an inner one that shares it."""

    def function(x, ws):
        def step(x, w):
            return lax.scan(lambda x, _: (x @ w, None), x, None, length=2)[0], None

        return lax.scan(step, x, ws)[0]

    closed = jax.make_jaxpr(function)(X, WS)
    (site,) = sites.find(closed, {1: "ws"}).contractions
    assert site.per_step == (True, False)
    given = jnp.asarray([1.0, 2.0, 3.0])
    replacements = {site.location: adding(given)(site)}
    out, left = jax.jit(lambda *args: rewriting.evaluate(closed, args, replacements))(
        X, WS
    )
    np.testing.assert_array_equal(left[site.location], given + 2)
    x = X
    for w, first in zip(WS, (1, 2, 3), strict=True):
        x = (x @ w + first) @ w + first + 1
    np.testing.assert_allclose(out[0], x, rtol=1e-5)


def test_what_is_left_where_nothing_was_given():
    def replacement(site):
        def function(values, given):
            out = site.eqn.primitive.bind(*values, **site.eqn.params)
            return [out], {"largest": jnp.max(values[0])}

        return Replacement(function, has_aux=True, per_step=site.per_step)

    def function(x):
        return lax.scan(lambda x, _: (x * 2, x @ W), x, None, length=3)

    _, left = evaluated_with(function, replacement, X)
    assert list(left.values()) == [{"largest": jnp.max(X) * 4}]


def test_gradients_of_what_is_given():
    def function(given, x):
        def run(x):
            return lax.scan(lambda x, w: (layer(x, w), None), x, WS)[0]

        return jnp.sum(evaluated_with(jax.checkpoint(run), adding(given), x)[0][0])

    gradient = jax.grad(function)(ONE, X)
    step = 1e-2
    rise = function(ONE + step, X) - function(ONE - step, X)
    np.testing.assert_allclose(gradient, rise / (2 * step), rtol=1e-2)


def test_no_arrays_inside_of_a_shard_map():
    with pytest.raises(ValueError, match="shard_map"):
        evaluated_with(over_mesh(), adding(ONE), X)


# --- Any composition -----------------------------------------------------------------


@jax.custom_vjp
def clipped(x):
    return x @ W


clipped.defvjp(lambda x: (x @ W, x), lambda x, g: (jnp.clip(g, -1, 1) @ W.T + x,))

TRANSFORMATIONS = {
    "jit": jax.jit,
    "scan": lambda f: lambda x: lax.scan(lambda x, s: (f(x) * s, x), x, jnp.ones(2))[0],
    "shared": lambda f: lambda x: f(lax.scan(lambda x, w: (f(x) @ w, None), x, WS)[0]),
    "cond": lambda f: lambda x: lax.cond(x.sum() > 0, f, lambda x: x @ W, x),
    "while": lambda f: lambda x: lax.fori_loop(0, 2, lambda _, x: f(x), x),
    "remat": jax.checkpoint,
    "remat_of_dots": lambda f: jax.checkpoint(
        f, policy=jax.checkpoint_policies.dots_saveable
    ),
    "vmap": lambda f: lambda x: jax.vmap(lambda r: f(r[None])[0])(x),
    "grad": lambda f: lambda x: jax.grad(lambda x: jnp.sum(jnp.sin(f(x))))(x),
    "custom_vjp": lambda f: lambda x: clipped(f(x)),
}


@pytest.mark.code("users")  # compares bits of one function, compiled three times
@hypothesis.given(st.lists(st.sampled_from(sorted(TRANSFORMATIONS)), max_size=3))
@hypothesis.example(["custom_vjp", "cond", "vmap"])  # what it closes over has rows
@hypothesis.example(["remat", "grad"])
@hypothesis.settings(max_examples=6, deadline=None)
def test_any_composition(names):
    def function(x):
        return layer(x)

    for name in names:
        function = TRANSFORMATIONS[name](function)

    def nothing_is_replaced(x):
        closed = jax.make_jaxpr(function)(x)
        return rewriting.evaluate(closed, [x], {})[0][0]

    @jax.jit
    def all_of_them(x):
        return [
            (one(x), jax.grad(loss(one))(x))
            for one in (function, nothing_is_replaced, replaced(function))
        ]

    wanted, *others = all_of_them(X)
    for got in others:
        assert_bits(got, wanted)
