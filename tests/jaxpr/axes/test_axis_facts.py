"""Facts about the axes of values: where they come from, and what masks set to zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from aqtlite.jaxpr import sites
from tests.common import normal

pytestmark = pytest.mark.code("quick")

X, W = normal((2, 3, 4)), normal((4, 5), 1)


def facts(function, *args, parameters=()):
    """Facts about the result of a function, as the operand of a contraction."""

    def contracted(*args):
        out = function(*args)
        return jnp.tensordot(out, out, ((), ()))

    closed = jax.make_jaxpr(contracted)(*args)
    names = {i: f"w{i}" for i in parameters}
    return sites.find(closed, names).contractions[-1].operands[0].facts


def sources(function, *args, parameters=()):
    found = facts(function, *args, parameters=parameters)
    return [sorted(axis.sources) for axis in found.axes]


def test_axes_come_from_inputs():
    assert sources(lambda x: x, X) == [[(0, 0)], [(0, 1)], [(0, 2)]]
    assert sources(lambda x: x.T, X) == [[(0, 2)], [(0, 1)], [(0, 0)]]
    assert sources(lambda x: x.sum(1), X) == [[(0, 0)], [(0, 2)]]
    assert sources(lambda x: x[:, None], X) == [[(0, 0)], [], [(0, 1)], [(0, 2)]]
    assert sources(lambda x: x.reshape(6, 4), X) == [[(0, 0), (0, 1)], [(0, 2)]]
    assert sources(lambda x, y: x + y.T, X, X.T) == [
        [(0, 0), (1, 2)],
        [(0, 1), (1, 1)],
        [(0, 2), (1, 0)],
    ]


def test_features_come_from_no_input():
    layer = sources(lambda w, x: jnp.tanh(x @ w), W, X, parameters=[0])
    assert layer == [[(1, 0)], [(1, 1)], []]
    tokens = jnp.zeros((2, 3), int)
    embedded = sources(lambda w, t: w[t], W, tokens, parameters=[0])
    assert embedded == [[(1, 0)], [(1, 1)], []]
    scores = sources(lambda x: jnp.einsum("bsd,btd->bst", x, x), X)
    assert scores == [[(0, 0)], [(0, 1)], [(0, 1)]]


def test_axes_survive_loops_branches_and_calls():
    def scanned(x):
        return lax.scan(lambda c, y: (c + y, jnp.tanh(y)), x[:, 0], x.swapaxes(0, 1))

    assert sources(lambda x: scanned(x)[0], X) == [[(0, 0)], [(0, 2)]]
    assert sources(lambda x: scanned(x)[1], X) == [[(0, 1)], [(0, 0)], [(0, 2)]]
    branch = sources(lambda x: lax.cond(True, jnp.sin, jnp.cos, x), X)
    loop = sources(lambda x: lax.fori_loop(0, 3, lambda _, y: 2 * y, x), X)
    called = sources(jax.jit(jax.checkpoint(jnp.tanh)), X)
    assert branch == loop == called == [[(0, 0)], [(0, 1)], [(0, 2)]]


MASK = np.tril(np.ones((3, 3), bool))
SCORES = normal((2, 3, 3), 2)
MASKS = {
    "where": lambda x: jnp.where(MASK, x, 0),
    "where, of an iota": lambda x: jnp.tril(x),
    "product with a constant": lambda x: x * MASK.astype(np.float32),
    "product with booleans": lambda x: x * jnp.tril(jnp.ones((3, 3), bool)),
    "exponential": lambda x: jnp.exp(jnp.where(MASK, x, -1e30)),
    "exponential of minus infinity": lambda x: jnp.exp(jnp.where(MASK, x, -jnp.inf)),
    "softmax": lambda x: jax.nn.softmax(jnp.where(MASK, x, -1e9)),
    "added": lambda x: jax.nn.softmax(x + jnp.where(MASK, 0.0, -1e9)),
    "sigmoid": lambda x: jax.nn.sigmoid(jnp.where(MASK, x, -1e9)),
    "rectified": lambda x: jax.nn.relu(jnp.where(MASK, x, 0)) ** 2,
    "scaled afterwards": lambda x: -2 * jnp.where(MASK, x, 0) / 3,
}


@pytest.mark.parametrize("function", MASKS.values(), ids=MASKS)
def test_masks_set_elements_to_zero(function):
    found = facts(function, SCORES)
    assert [axis.has_zeros for axis in found.axes] == [False, True, True]


def integer_products(x):
    x = x.astype(jnp.int8)
    return jnp.matmul(x, x, preferred_element_type=jnp.int32)


UNMASKED = {
    "none": lambda x: x,
    "a residual beside it": lambda x: x + jnp.where(MASK, x, 0),
    "of cosines": lambda x: jnp.cos(jnp.where(MASK, x, 0)),
    "choice": lambda x: jnp.where(MASK, x, 2 * x),
    "another constant": lambda x: jnp.where(MASK, x, 1.0),
    "added to large ones": lambda x: jnp.where(MASK, x, -1e9),
    "integer sums": lambda x: 2.0 * integer_products(x),
    "rounded": lambda x: (
        jnp.round(x.astype(jnp.bfloat16)).astype(jnp.int8).astype(jnp.float32)
    ),
    "a choice of integer sums": lambda x: (
        jnp.where(MASK, integer_products(x), integer_products(2 * x)) * 2.0
    ),
}


@pytest.mark.parametrize("function", UNMASKED.values(), ids=UNMASKED)
def test_other_values_have_no_zeros(function):
    assert not any(axis.has_zeros for axis in facts(function, SCORES).axes)


def test_integers_of_an_input_are_a_mask_of_rounded_numbers():
    def masked(x, mask):
        return (jnp.round(x).astype(jnp.int8) * mask).astype(jnp.float32)

    found = facts(masked, SCORES, jnp.asarray(MASK[None], jnp.int8))
    assert [axis.has_zeros for axis in found.axes] == [True, True, True]


def test_padding_of_tokens_is_a_mask_along_one_axis():
    def padded(x, lengths):
        return jnp.where((jnp.arange(3) < lengths[:, None])[..., None], x, 0)

    found = facts(padded, X, jnp.array([1, 3]))
    assert [axis.has_zeros for axis in found.axes] == [True, True, False]


def test_probabilities_are_known_along_their_axis():
    for function in (
        jax.nn.softmax,
        lambda x: jnp.exp(x - x.max(-1, keepdims=True)),
        lambda x: jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True),
    ):
        assert facts(function, X).is_softmax(2)
        assert not facts(function, X).is_softmax(1)
    # Normalization of features is no softmax.
    assert not facts(lambda x: x / (x**2).mean(-1, keepdims=True), X).is_softmax(2)


def test_padding_around_an_axis():
    def edges(function, x=X):
        return [axis.padding for axis in facts(function, x).axes]

    assert edges(lambda x: jnp.pad(x, ((0, 0), (2, 1), (0, 0))))[1] == (2, 1)
    assert edges(lambda x: jnp.concatenate([x[:, :2], x], 1))[1] == (2, 0)
    assert edges(lambda x: jnp.tanh(jnp.pad(x, ((0, 0), (2, 0), (0, 0)))))[1] == (2, 0)
    assert edges(lambda x: jnp.pad(x, ((0, 0), (2, 0), (0, 0))).reshape(-1, 4)) == [
        (0, 0),
        (0, 0),
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "complex64", "bool"])
def test_constants_of_any_type(dtype):
    constant = np.ones((3, 3), jnp.dtype(dtype))
    found = facts(lambda x: x + constant.astype("float32").real, SCORES)
    assert len(found.axes) == 3
    key = jax.random.key(0)
    assert facts(lambda x: x + jax.random.normal(key, (3,)), SCORES).axes


SLOTS, TYPES = jnp.zeros((2, 3, 2), int), jnp.zeros((2, 3), int)


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        (  # Slots that a token chooses twice: most of them are zero.
            lambda i, w: jnp.einsum("btks,btk->bts", jax.nn.one_hot(i, 5), w),
            (SLOTS, normal((2, 3, 2))),
            [True, True, True],
        ),
        (
            lambda i, w: (w[:, :, None] @ jax.nn.one_hot(i, 5))[:, :, 0],
            (SLOTS, normal((2, 3, 2))),
            [True, True, True],
        ),
        (  # A number for each type, and every token has one.
            lambda i, w: jnp.einsum("btk,k->bt", jax.nn.one_hot(i, 5), w),
            (TYPES, normal((5,))),
            [False, False],
        ),
        (  # What positions see, weighted.
            lambda m, w: jnp.einsum("bts,bs->bt", m.astype(float), w),
            (jnp.ones((2, 3, 3), bool), normal((2, 3))),
            [False, False],
        ),
        (
            lambda m, w: jnp.einsum("bsd,bs->bd", jnp.where(m[..., None], X, 0), w),
            (jnp.ones((2, 3), bool), normal((2, 3))),
            [False, False],
        ),
    ],
)
def test_sums_of_weighted_choices_keep_zeros(function, args, expected):
    found = facts(function, *args)
    assert [axis.has_zeros for axis in found.axes] == expected
