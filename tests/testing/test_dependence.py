"""The checks of causality and independence that users run on their own functions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from aqtlite.testing import assert_causal, assert_independent
from tests.common import normal
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

X = normal((3, 6, 4))
TOKENS = np.arange(18).reshape(3, 6) % 7


def shifted(x):
    """Every position sees the next."""
    return jnp.concatenate([x[:, 1:], jnp.zeros_like(x[:, :1])], 1)


CAUSAL = {
    "elementwise": jnp.sin,
    "sums": lambda x: jnp.cumsum(x, 1),
    "sums by a tree": lambda x: jax.lax.associative_scan(jnp.add, x, axis=1),
    "a result with no axis beside one": lambda x: (jnp.cumsum(x, 1), x.sum()),
    "NaN": lambda x: jnp.where(jnp.arange(6)[:, None] < 3, jnp.nan, x),
    "a pytree": lambda x: {"a": [x, None]},
    "sign of zero": lambda x: (x, jnp.where(x[:, -1:] > 0, 0.0, -0.0) * (x == x)),
}
NOT_CAUSAL = {
    "mean": lambda x: x - x.mean(1, keepdims=True),
    "largest": lambda x: x / jnp.abs(x).max(),
    "sums from the end": lambda x: jax.lax.cumsum(x, 1, reverse=True),
    "shifted": shifted,
    "the last of several results": lambda x: (x, x.sum(-1), {"c": shifted(x)}),
    "integers": lambda x: jnp.round(3 * x + x.max()).astype(jnp.int8),
    "only if loud": lambda x: x + (jnp.abs(x).max() > 5),
}


@pytest.mark.parametrize("fn", CAUSAL.values(), ids=CAUSAL)
def test_causal_functions_pass(fn):
    assert_causal(fn, X)


@pytest.mark.parametrize("fn", NOT_CAUSAL.values(), ids=NOT_CAUSAL)
def test_other_functions_fail(fn):
    with pytest.raises(AssertionError, match="results depend on later positions"):
        assert_causal(fn, X)


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_a_single_position_that_sees_the_next_is_found(cut):
    def fn(x):
        return x.at[:, cut - 1].add(x[:, cut])

    with pytest.raises(AssertionError, match=f"positions from {cut} on"):
        assert_causal(fn, X)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_every_pair_of_examples_is_compared(count):
    x = normal((count, 4))
    assert_independent(lambda x: 2 * x, x)
    for reader in range(count):
        for seen in set(range(count)) - {reader}:
            with pytest.raises(AssertionError, match=f"first at \\({reader}, 0\\)"):
                assert_independent(lambda x, i=reader, j=seen: x.at[i].add(x[j]), x)


def test_the_message_says_what_changed():
    def fn(x):
        return {"out": x + x.sum(1, keepdims=True)}

    with pytest.raises(AssertionError) as raised:
        assert_causal(fn, jnp.ones((1, 4, 2)))
    assert str(raised.value) == (
        "results depend on later positions. With other values at positions from 2 on "
        "(axis 1), those before change in output['out'], float32 of shape (1, 4, 2): "
        "4 of 4 elements differ, by up to 42 (relative 8.4); the first at (0, 0, 0), "
        "5.0 before and -37.0 after. The changes get there in reduce_sum of "
        "float32[1,4,2] at (no name scope), and reach no contraction"
    )


def test_the_message_says_what_became_nan():
    with pytest.raises(AssertionError, match="9 of them in being NaN or infinite"):
        assert_causal(lambda x: x + 0 * jnp.exp(x).sum(), jnp.full((1, 6, 3), -5.0))


def test_other_axes():
    for axis in (0, 1, 2, -1, -2):
        assert_causal(functools.partial(jnp.cumsum, axis=axis), X, axis=axis)
        assert_independent(jnp.sin, X, axis=axis)
        with pytest.raises(AssertionError, match=f"axis {axis}"):
            assert_causal(lambda x, a=axis: x - x.mean(a, keepdims=True), X, axis=axis)


def test_integers_stay_in_the_range_that_occurs():
    def fn(tokens):
        # A token that never occurs would give its example NaN.
        table = jnp.array([2.0, 1.0, 5.0, 0.0, 3.0, 4.0, 6.0])
        return jnp.cumsum(table.at[tokens].get(mode="fill", fill_value=jnp.nan), 1)

    assert_causal(fn, TOKENS)
    with pytest.raises(AssertionError, match="output, float32"):
        assert_causal(lambda x: fn(x)[:, ::-1], TOKENS)
    assert_causal(lambda x: jax.nn.one_hot(x, 256), TOKENS.astype(np.uint8))


def test_what_has_no_other_values_stays():
    mask = np.ones((3, 6), bool)
    keys = jax.random.split(jax.random.key(0), (3, 6))

    def fn(x, mask, keys, scale, name, nothing):
        noise = jax.vmap(jax.vmap(jax.random.normal))(keys)
        assert name == "name" and nothing is None
        return scale * jnp.where(mask.all(), x, x.max()) + noise.max()

    assert_causal(fn, X[..., 0], mask, keys, 2.0, "name", None)


def test_arrays_with_one_place_are_shared():
    assert_independent(lambda x, shift: x + shift, X, X[:1])
    assert_causal(lambda x, w: x * w, X, normal((1, 1, 4)))


def test_arguments_are_chosen():
    weights = normal((4, 5))

    def fn(x, weights):
        return x @ weights

    with pytest.raises(ValueError, match=r"axis 1: args\[0\] 6, args\[1\] 5. Name"):
        assert_causal(fn, X, weights)
    for argnums in (0, [0], -2):
        assert_causal(fn, X, weights, argnums=argnums)
    with pytest.raises(ValueError, match=r"argnums=2 names the argument 2, and 2 "):
        assert_causal(fn, X, weights, argnums=2)
    positions = np.arange(6)[None].repeat(3, 0)

    def attend(x, positions):
        seen = positions[:, :, None] >= positions[:, None]
        return jnp.einsum("bts,bsd->btd", seen.astype(x.dtype), x)

    assert_causal(attend, X, positions, argnums=0)


@pytest.mark.parametrize(
    ("fn", "args", "message"),
    [
        (jnp.sin, (X[:, :1],), "no argument has several positions along axis 1"),
        (jnp.sin, (X[:, 0, 0],), r"args\[0\] float32\[3\]: pass another axis="),
        (lambda: X, (), "no arrays"),
        (lambda x: x + 1, (X > 0,), "no argument has several positions"),
        (lambda x: x.sum(1), (X,), "no result has 6 positions along axis 1"),
        (lambda x: 0 * jnp.ones_like(x), (X,), "no result changes"),
        (lambda x: x, (0 * TOKENS,), "no result changes"),
        (lambda x: x * jnp.nan, (X,), "All of a result is NaN"),
    ],
)
def test_a_comparison_that_could_not_fail(fn, args, message):
    with pytest.raises(ValueError, match=message):
        assert_causal(fn, *args)


def test_a_model_with_its_variables_bound():
    model = nn.Dense(5)
    apply = functools.partial(model.apply, init(model, X))
    assert_causal(apply, X)
    assert_independent(apply, X)
    assert_independent(jax.grad(lambda x: jnp.sum(apply(x) ** 2)), X)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.complex64])
def test_other_dtypes(dtype):
    x = X.astype(dtype)
    assert_causal(lambda x: jnp.cumsum(x, 1), x)
    with pytest.raises(AssertionError, match=f"output, {jnp.dtype(dtype)} of shape"):
        assert_causal(lambda x: x + x.sum(1, keepdims=True), x)


def test_assertions_share_the_program_of_a_jitted_function(events):
    fn = jax.jit(lambda x: jnp.cumsum(jnp.sin(x), 1))
    assert_causal(fn, X)
    before = events.copy()
    assert_causal(fn, X)
    compiled = "/jax/core/compile/backend_compile_duration"
    assert events[compiled] == before[compiled] > 0
