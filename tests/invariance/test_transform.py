"""Operations evaluated in forms whose bits depend on values alone."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import aqtlite
from aqtlite import config, invariant
from tests.common import mostly_slow, normal

X = normal((5, 37))
POSITIVE = jnp.abs(X) + 0.1


def _pooled(x):
    zero = np.zeros((), x.dtype)
    return lax.reduce_window(x, zero, lax.add, (1, 3), (1, 2), "SAME")


def _convolved(x):
    """A depthwise convolution along rows, and one that mixes features."""
    dims = ("NCW", "OIW", "NWC")
    x = jnp.stack([x, x[:, ::-1]], 1)
    both = [
        lax.conv_general_dilated(
            x, normal(shape, dtype=x.dtype), (2,), [(3, -1)], (1,), (2,), dims, n
        )
        for shape, n in (((6, 1, 4), 2), ((3, 2, 5), 1))
    ]
    return jnp.concatenate([one.reshape(len(x), -1) for one in both], 1)


def _in_groups(x):
    return lax.ragged_dot(
        x, normal((3, 37, 4), dtype=x.dtype) / 16, jnp.array([0, len(x), 0])
    )


def _gradient_of_max_pooling(x):
    def loss(x):
        out = lax.reduce_window(x, -np.inf, lax.max, (1, 3), (1, 2), "SAME")
        return (out**2).sum()

    return jax.grad(loss)(jnp.round(2 * x))


def _scattered(x):
    """Several elements of a row are added to one, and taken off another."""
    numbers = np.arange(37) % 5
    out = jnp.zeros((len(x), 5), x.dtype).at[:, numbers].add(x)
    return out.at[:, numbers[:7]].subtract(x[:, :7])


FUNCTIONS = {
    "exp": (jnp.exp, np.exp, X),
    "exp2": (jnp.exp2, np.exp2, X),
    "expm1": (jnp.expm1, np.expm1, X),
    "log": (jnp.log, np.log, POSITIVE),
    "log1p": (jnp.log1p, np.log1p, POSITIVE),
    "logistic": (jax.nn.sigmoid, lambda x: 1 / (1 + np.exp(-x)), X),
    "tanh": (jnp.tanh, np.tanh, X),
    "erf": (lax.erf, None, X),
    "erfc": (lax.erfc, None, X),
    "erf_inv": (lax.erf_inv, None, X / 5),
    "sin": (jnp.sin, np.sin, 100 * X),
    "cos": (jnp.cos, np.cos, 100 * X),
    "sqrt": (jnp.sqrt, np.sqrt, POSITIVE),
    "rsqrt": (lax.rsqrt, lambda x: 1 / np.sqrt(x), POSITIVE),
    "pow": (lambda x: 10000.0**x, lambda x: 10000.0**x, X),
    "mean": (lambda x: x.mean(-1), lambda x: x.mean(-1), X),
    "cumulative sum": (lambda x: x.cumsum(-1), lambda x: x.cumsum(-1), X),
    "pooling": (_pooled, None, X),
    "cube and inverse": (lambda x: x**3 + x**-2, lambda x: x**3 + x**-2.0, POSITIVE),
    "softmax": (jax.nn.softmax, None, X),
    "logsumexp": (functools.partial(jax.nn.logsumexp, axis=-1), None, X),
    "gelu": (functools.partial(jax.nn.gelu, approximate=False), None, X),
    "norm": (lambda x: x * lax.rsqrt((x * x).mean(-1, keepdims=True)), None, X),
    "contraction": (lambda x: x @ x.T, lambda x: x @ x.T, X),
}
OF_SHAPES = {
    "convolution": (_convolved, None, X),
    "contraction in groups": (_in_groups, None, X),
    "gradient of max pooling": (_gradient_of_max_pooling, None, X),
    "scattered": (_scattered, None, X),
}


@pytest.mark.slow
def test_constants_have_the_results_of_arguments():
    """XLA computes what it knows while it compiles, and rewrites around it."""
    named = {**FUNCTIONS, "quotient": (lambda x: x / 3.3, None, X)}

    def all_of(xs):
        return {name: invariant(f)(xs[name]) for name, (f, *_) in named.items()}

    xs = {name: x for name, (*_, x) in named.items()}
    as_arguments, as_constants = jax.jit(all_of)(xs), jax.jit(lambda: all_of(xs))()
    equal = jax.tree.map(np.array_equal, as_arguments, as_constants)
    assert all(equal.values()), equal


def test_values_of_no_input_are_computed_in_tracing():
    """As the frequencies of rotary embeddings: NumPy has the bits of the program."""
    names = "exp", "expm1", "log", "tanh", "erf", "sin", "cos", "rsqrt", "pow", "gelu"
    known = {name: FUNCTIONS[name][0] for name in names}
    vanishing = {"subnormal": lambda x: jnp.exp(-80 * x), "NaN": lambda x: jnp.log(-x)}

    def numbers():
        return 0.05 + jnp.arange(150.0).reshape(5, 30) / 33.3

    def all_of(functions, x):
        return {name: f(x) for name, f in functions.items()}

    @jax.jit
    @invariant
    def of_nothing():
        called = jax.jit(functools.partial(all_of, {**known, **vanishing}))
        return called(numbers()), numbers()

    found, x = of_nothing()
    wanted = jax.jit(invariant(functools.partial(all_of, {**known, **vanishing})))(x)
    equal = jax.tree.map(
        functools.partial(np.array_equal, equal_nan=True), found, wanted
    )
    assert all(equal.values()), equal
    of_known = jax.jit(invariant(lambda: all_of(known, numbers())))
    assert "stablehlo.multiply" not in of_known.lower().as_text()


SOME = ("exp", "pow", "softmax", "convolution")


ALL = {**FUNCTIONS, **OF_SHAPES}


@pytest.mark.parametrize("name", mostly_slow(ALL, *SOME, "contraction"))
def test_values_are_those_of_the_function(name):
    function, exact, x = ALL[name]
    out = jax.jit(invariant(function))(x)
    if exact is None:
        with jax.enable_x64(True):
            wanted = function(jnp.asarray(x, jnp.float64))
    else:
        wanted = exact(np.asarray(x, np.float64))
    np.testing.assert_allclose(out, wanted, rtol=2e-6, atol=2e-7)


OF_ROWS = [name for name in ALL if name != "contraction"]


@pytest.mark.parametrize("name", mostly_slow(OF_ROWS, *SOME))
def test_a_row_is_the_same_alone(name):
    function, _, x = ALL[name]
    run = jax.jit(invariant(function))
    whole = run(x)
    for row in (0, 3):
        np.testing.assert_array_equal(run(x[row : row + 1])[0], whole[row])


@pytest.mark.parametrize("name", ["exp", "log", "erf", "sin"])
def test_an_element_is_the_same_in_arrays_of_any_size(name):
    function, _, x = FUNCTIONS[name]
    run = jax.jit(invariant(function))
    whole = run(x.reshape(-1))
    for size in (1, 3, 7, 15, 64):
        np.testing.assert_array_equal(run(x.reshape(-1)[:size]), whole[:size])


EDGES = np.array([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 200, -200, 0.5], "f")


@pytest.mark.code("quick")
@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [
        jnp.exp,
        jnp.exp2,
        jnp.expm1,
        jnp.log,
        jnp.log1p,
        jnp.tanh,
        lax.erf,
        lax.erfc,
        jax.nn.sigmoid,
        jnp.sin,
        jnp.cos,
        jnp.sqrt,
        lax.rsqrt,
    ],
)
def test_edges(function):
    x = EDGES[:-3] if function in (jnp.sin, jnp.cos) else EDGES
    np.testing.assert_allclose(
        jax.jit(invariant(function))(x), jax.jit(function)(x), rtol=1e-5
    )


@pytest.mark.code("quick")
def test_angles_of_any_size():
    rng = np.random.default_rng(0)
    near = np.float32(1e5) + rng.uniform(-9, 9, 50)  # Reduced in another way from here.
    powers = rng.uniform(-2, 2, 400) * 2.0 ** rng.integers(0, 127, 400)
    worst = 16367173 * 2.0**72  # Closest to a multiple of pi / 2.
    x = np.array([*near, *powers, worst, 2**24, 2**24 - 1, 3e38, -3e38], "f")
    run = jax.jit(invariant(lambda x: (jnp.sin(x), jnp.cos(x))))
    for out, function in zip(run(x), (np.sin, np.cos), strict=True):
        np.testing.assert_allclose(out, function(x.astype("d")), rtol=4e-7)
    no_angles = np.array([np.nan, np.inf, -np.inf], "f")
    assert np.isnan(run(no_angles)).all()


@pytest.mark.code("quick")
def test_edges_of_powers():
    bases, exponents = np.meshgrid(EDGES, np.array([*EDGES, 2, 3, -3], "f"))
    with np.errstate(all="ignore"):
        wanted = np.power(bases, exponents)
    out = jax.jit(invariant(lax.pow))(bases, exponents)
    np.testing.assert_allclose(out, wanted, rtol=1e-6)


@pytest.mark.parametrize("axis", [0, 1])
def test_sums_do_not_see_padding_shifts_or_rotations(axis):
    run = jax.jit(invariant(functools.partial(jnp.sum, axis=axis)))
    wanted = run(X)
    widths = [(0, 0), (0, 0)]
    for before, after in ((0, 1), (0, 91), (5, 22), (64, 0)):
        widths[axis] = before, after
        padded = jnp.pad(X, widths)
        np.testing.assert_array_equal(run(padded), wanted)
    widths[axis] = 0, 64 - X.shape[axis]
    ring = jnp.pad(X, widths)
    for shift in (1, 17, 40):
        np.testing.assert_array_equal(run(jnp.roll(ring, shift, axis)), wanted)


def test_contractions_do_not_see_zeros_anywhere():
    run = jax.jit(invariant(jnp.matmul))
    x, y = normal((3, 19)), normal((19, 4))
    wanted = run(x, y)
    places = np.sort(np.random.default_rng(0).permutation(50)[:19])
    wide_x = jnp.zeros((3, 50)).at[:, places].set(x)
    wide_y = jnp.full((50, 4), 7.0).at[places].set(y)
    np.testing.assert_array_equal(run(wide_x, wide_y), wanted)
    np.testing.assert_array_equal(run(x[:1], y), wanted[:1])


def test_contractions_in_any_form_add_in_one_order():
    x, w = normal((2, 9, 3)), normal((4, 1, 3))
    dims = ("NWC", "WIO", "NWC")
    conv = invariant(
        lambda x: lax.conv_general_dilated(
            x, w, (1,), [(3, 0)], dimension_numbers=dims, feature_group_count=3
        )
    )
    step = invariant(lambda kept: jnp.einsum("bkd,kd->bd", kept, w[:, 0]))
    np.testing.assert_array_equal(step(x[:, 4:8]), conv(x)[:, 7])
    x, matrices = normal((7, 37)), normal((3, 37, 4))
    ragged = invariant(lambda x, w: lax.ragged_dot(x, w, jnp.array([2, 0, 4])))
    out, dot = ragged(x, matrices), invariant(jnp.matmul)
    np.testing.assert_array_equal(out[2:6], dot(x[2:6], matrices[2]))
    assert (out[6] == 0).all()


@pytest.mark.code("quick")
@pytest.mark.slow
def test_gradients_of_contractions_in_other_forms_are_theirs():
    def loss(form, x, w):
        return (form(x, w) ** 2).sum()

    def conv(x, w):
        dims, padding = ("NHWC", "HWIO", "NCHW"), [(1, 1), (2, -1)]
        return lax.conv_general_dilated(x, w, (2, 1), padding, (1, 2), (1, 1), dims)

    def ragged(x, w):
        return lax.ragged_dot(x, w, jnp.array([2, 0, 4]))

    for form, *shapes in (
        (conv, (2, 5, 6, 3), (3, 3, 3, 4)),
        (ragged, (7, 37), (3, 37, 4)),
    ):
        of = jax.grad(functools.partial(loss, form), (0, 1))
        x, w = map(normal, shapes)
        for one, other in zip(jax.jit(invariant(of))(x, w), of(x, w), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_a_product_beside_a_sum_changes_nothing():
    a, b, c = (normal((999,), seed) for seed in range(3))
    wanted = np.asarray(a) * np.asarray(b) + np.asarray(c)
    alone = jax.jit(invariant(lambda a, b, c: a * b + c))
    beside = jax.jit(invariant(lambda a, b, c: (a * b + c, a * b)))
    np.testing.assert_array_equal(alone(a, b, c), wanted)
    np.testing.assert_array_equal(beside(a, b, c)[0], wanted)


def test_constants_are_not_added_first():
    tiny = jnp.full((3,), 1e-8)
    assert (jax.jit(invariant(lambda x: (x + 1) - 1))(tiny) == 0).all()
    thirds = jax.jit(invariant(lambda x: (x * 3) * np.float32(1 / 3)))
    x = np.asarray(X)
    np.testing.assert_array_equal(thirds(X), x * np.float32(3) * np.float32(1 / 3))


def _looped(x):
    def step(carry, row):
        carry = jnp.tanh(carry) + row
        return carry, lax.cond(row.sum() > 0, jnp.exp, jnp.sin, row)

    last, rows = lax.scan(step, x[0], x)
    total = lax.fori_loop(0, 3, lambda i, y: y + y.mean() * i, last)
    return total, rows


CALLS = {
    "loops and branches": _looped,
    "remat": jax.checkpoint(lambda x: jnp.exp(x).sum(-1)),
    "vmap": jax.vmap(lambda row: jax.nn.softmax(row) @ row),
    "custom derivative": lambda x: jax.nn.relu(jax.nn.silu(x)).mean(0),
    "contraction of integers": lambda x: aqtlite.make_dot_general(
        config.fully_quantized()
    )(jnp.exp(x), x, (((1,), (1,)), ((), ()))),
}


@pytest.mark.code("quick")
@pytest.mark.parametrize("name", mostly_slow(CALLS, "loops and branches"))
def test_calls_and_their_derivatives(name):
    function = CALLS[name]
    out = jax.jit(invariant(function))(X)
    wanted = jax.jit(function)(X)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), out, wanted
    )

    def loss(function, x):
        return sum(jnp.sum(y * y) for y in jax.tree.leaves(function(x)))

    gradients = [
        jax.jit(jax.grad(functools.partial(loss, one)))(X)
        for one in (invariant(function), function)
    ]
    np.testing.assert_allclose(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_are_rounded_at_every_step(dtype):
    x = X.astype(dtype)
    run = jax.jit(invariant(lambda x: (x * x + x).sum(-1)))
    product = (x.astype("f") * x.astype("f")).astype(dtype).astype("f")
    total = (product + x.astype("f")).astype(dtype).astype("f")
    wanted = jax.jit(invariant(lambda x: x.sum(-1)))(total).astype(dtype)
    np.testing.assert_array_equal(run(x).astype("f"), wanted.astype("f"))
    assert run(x).dtype == dtype


DERIVED = {
    "exp and softmax": (lambda x: jnp.exp(x) * jax.nn.softmax(x), X),
    "powers of two": (lambda x: jnp.exp2(x) + jnp.expm1(x), X),
    "logarithms": (lambda x: jnp.log(x) + jnp.log1p(x), POSITIVE),
    "roots": (lambda x: jnp.sqrt(x) * lax.rsqrt(x + 1), POSITIVE),
    "powers": (lambda x: x**x, POSITIVE),
    "sigmoids": (lambda x: jax.nn.silu(x) + jnp.tanh(x), X),
    "errors": (lambda x: lax.erf(x) - lax.erfc(x / 2) + lax.erf_inv(x / 5), X),
    "angles": (lambda x: jnp.sin(x) * jnp.cos(x), X),
}


@pytest.mark.code("quick")
@pytest.mark.parametrize("name", mostly_slow(DERIVED, "exp and softmax"))
def test_derivatives_are_made_of_the_values(name):
    function, x = DERIVED[name]

    def loss(function, x):
        return jnp.sum(function(x) * jnp.arange(37))

    gradient = jax.jit(jax.grad(functools.partial(loss, invariant(function))))
    wanted = jax.jit(jax.grad(functools.partial(loss, function)))(x)
    np.testing.assert_allclose(gradient(x), wanted, rtol=1e-5, atol=1e-5)
    text = gradient.lower(x).as_text()
    assert not re.findall(
        r"stablehlo\.(exp|log|sine|cos|tanh|power)\w*|chlo\.\w+", text
    )


def test_ties_are_chosen_by_place():
    x = jnp.exp(jnp.round(X))
    run = jax.jit(invariant(lambda x: lax.top_k(jax.nn.softmax(x), 5)))
    whole, alone = run(x), run(x[3:4])
    jax.tree.map(np.testing.assert_array_equal, [x[3:4] for x in whole], list(alone))


REFUSED = {
    "cumprod": lambda x: jnp.cumprod(x, 1),
    "digamma": jax.scipy.special.digamma,
    "lgamma": lambda x: x * lax.lgamma(2.5),  # of no input
    "condition of a while loop": lambda x: lax.while_loop(
        lambda y: jnp.exp(y).sum() < 10, lambda y: y + 1, x
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_other_operations_by_name_and_scope(name):
    def function(x):
        with jax.named_scope("layer"):
            return REFUSED[name](x)

    with pytest.raises(ValueError, match=f"layer.*: .*{name}"):
        jax.jit(invariant(function))(X)
