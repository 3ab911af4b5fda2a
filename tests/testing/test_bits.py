"""The checks that bits depend on values alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import aqtlite
from aqtlite.testing import (
    assert_batch_invariant,
    assert_decoded_equals_trained,
    assert_reproducible,
    digest,
)
from tests.common import normal

X = normal((3, 4, 6))


# --- assert_batch_invariant --------------------------------------------------------


INVARIANT = {
    "elementwise": lambda x: 2 * x,
    "a result without examples": lambda x: (x, x.sum()),
    "merged axes": lambda x: x.reshape(-1, 6).reshape(x.shape) * 2,
    "a pytree": lambda x: {"a": [x, None]},
}


@pytest.mark.code("quick")
@pytest.mark.parametrize("fn", INVARIANT.values(), ids=INVARIANT)
def test_invariant_functions_pass(fn):
    assert_batch_invariant(fn, X)


def softmax_of_sums(x):
    with jax.named_scope("head"):
        return jax.nn.softmax(jnp.exp(x) / x.shape[0])


DEPENDENT = {
    "size": (lambda x: x * x.shape[0], "mul of float32[3,4,6], float32[] at"),
    "largest": (lambda x: x - x.max(), "reduce_max of float32[3,4,6] at"),
    "neighbour": (lambda x: x + jnp.roll(x, 1, 0), "slice of float32[3,4,6] at"),
    "scope": (softmax_of_sums, "div of float32[3,4,6], float32[] at 'head', in 24 of"),
    "a loop": (
        lambda x: jax.lax.scan(lambda c, _: (c * len(x), None), x, length=2)[0],
        "mul of float32[3,4,6], float32[] at (no name scope), step 0 of a loop",
    ),
    "a branch": (
        lambda x: jax.lax.cond(x.size > 9, lambda x: x * len(x), jnp.sin, x),
        "mul of float32[3,4,6], float32[] at",
    ),
}


@pytest.mark.code("quick")
@pytest.mark.parametrize("name", DEPENDENT)
def test_the_equation_that_depends_on_the_batch(name):
    fn, wanted = DEPENDENT[name]
    with pytest.raises(AssertionError, match="results of examples depend on") as raised:
        assert_batch_invariant(fn, X)
    assert wanted in str(raised.value)


def test_sums_that_are_added_in_another_order():
    x = normal((5, 1003))
    assert_batch_invariant(aqtlite.invariant(jax.nn.softmax), x)
    with pytest.raises(AssertionError, match="differs is (reduce_sum|div|exp) of"):
        assert_batch_invariant(jax.nn.softmax, x)


@pytest.mark.code("quick")
def test_other_axes_arguments_and_modules():
    mask = np.arange(4) % 2 == 0
    assert_batch_invariant(lambda x, m: jnp.where(m[:, None], x, 0), X[0], mask)
    assert_batch_invariant(jnp.sin, X, axis=1)
    assert_batch_invariant(lambda x, w: x * w, X, normal((4, 6)), argnums=0)
    assert_batch_invariant(nnx.LayerNorm(6, use_bias=False, rngs=nnx.Rngs(0)), 0 * X)


@pytest.mark.code("quick")
@pytest.mark.parametrize(
    ("fn", "args", "message"),
    [
        (jnp.sin, (X[:1],), "no argument has several examples along axis 0"),
        (jnp.sin, (1.0,), "no argument has several examples along axis 0"),
        (jnp.sum, (X,), "no result has 3 examples along axis 0"),
        (jnp.add, (X, X[0]), "different numbers of examples"),
    ],
)
def test_comparisons_of_batches_that_could_not_fail(fn, args, message):
    with pytest.raises(ValueError, match=message):
        assert_batch_invariant(fn, *args)


# --- assert_decoded_equals_trained -------------------------------------------------


TOKENS = np.arange(14).reshape(2, 7) % 5
PARAMS = {"table": jnp.round(8 * normal((5, 4))), "head": jnp.round(8 * normal((4, 5)))}


def attended(params, kept, tokens, start):
    """Uniform attention, whose sums of integers are exact."""
    with jax.named_scope("values"):
        made = params["table"][tokens]
    kept = jax.lax.dynamic_update_slice(kept, made, (0, start, 0))
    mask = jnp.arange(kept.shape[1]) <= start + jnp.arange(tokens.shape[1])[:, None]
    with jax.named_scope("attention"):
        out = jnp.einsum("ts,bsd->btd", mask.astype(kept.dtype), kept)
    return out @ params["head"], kept


def cache(batch):
    return jnp.full((batch, 7, 4), 3.0)


def train(params, tokens):
    return attended(params, jnp.zeros((*tokens.shape, 4)), tokens, 0)[0]


def test_decoding_that_equals_training():
    assert_decoded_equals_trained(train, attended, PARAMS, TOKENS, cache)


def test_the_equation_that_differs_in_decoding():
    def decode(params, kept, tokens, start):
        params = params | {"table": params["table"] + (start > 2)}
        return attended(params, kept, tokens, start)

    with pytest.raises(AssertionError) as raised:
        assert_decoded_equals_trained(train, decode, PARAMS, TOKENS, cache)
    message = str(raised.value)
    assert message.startswith(
        "decoding differs from training. By 1 of 7 tokens at once, with 2 of 2 "
        "sequences, log-probabilities at positions 3 to 3, float32 of shape (2, 1, 5): "
    )
    assert "differs is gather of float32[5,4], int32[2,7,1] at 'values'" in message


def test_a_forward_that_differs_where_its_gradient_is_taken():
    @jax.custom_vjp
    def scaled(x):
        return x

    scaled.defvjp(lambda x: (2 * x, None), lambda _, g: (g,))

    with pytest.raises(AssertionError, match="another one where its gradient is taken"):
        assert_decoded_equals_trained(
            lambda params, tokens: scaled(train(params, tokens)),
            attended,
            PARAMS,
            TOKENS,
            cache,
        )


@pytest.mark.code("quick")
@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"tokens": TOKENS[0]}, TypeError, "pass integers \\(batch, length\\)"),
        ({"tokens": TOKENS * 1.0}, TypeError, "pass integers \\(batch, length\\)"),
        ({"tokens": TOKENS[:, :1]}, ValueError, "sequence of two tokens"),
        ({"cache": cache(2)}, TypeError, "cache is no function"),
        ({"chunks": ()}, ValueError, "numbers of tokens that a step takes"),
        ({"params": {}}, ValueError, "params holds no floats"),
        ({"train": lambda p, t: t}, ValueError, "train returned int32"),
        ({"decode": lambda *args: args[1]}, ValueError, "and the updated cache"),
        (
            {"decode": lambda p, c, t, s: (train(p, t)[..., :2], c)},
            ValueError,
            "decode returned float32\\[2,1,2\\], where log-probabilities have float32",
        ),
    ],
)
def test_wrong_arguments_of_the_comparison_with_training(changed, error, message):
    given = {
        "train": lambda params, tokens: params.get("table", jnp.zeros((5, 4)))[tokens],
        "decode": attended,
        "params": PARAMS,
        "tokens": TOKENS,
        "cache": cache,
    }
    with pytest.raises(error, match=message):
        assert_decoded_equals_trained(**given | changed)


# --- assert_reproducible -----------------------------------------------------------


def test_digests_depend_on_paths_shapes_dtypes_and_bits():
    x = np.arange(6, dtype=np.float32)
    trees = [
        *(x, [x], {"a": x}, x.reshape(2, 3), x.astype(int), x + 1, (x, x)),
        *(jnp.asarray(x, kind) for kind in ("bfloat16", "float16", "int4")),
        *(np.float32(0.0), np.float32(-0.0), jax.random.key(0), True),
    ]
    assert len({digest(tree) for tree in trees}) == len(trees)
    assert digest(x) == digest(jnp.asarray(x)) == digest(np.asfortranarray(x))
    nan = np.array([0x7FC00000, 0xFFC00001], np.uint32).view(np.float32)
    assert digest(nan[:1]) == digest(nan[1:])


def exact(x):
    with jax.named_scope("layer"):
        return jnp.round(x * 8) * 2


def other(x):
    with jax.named_scope("layer"):
        return jnp.ceil(x * 8) * 2


def test_a_golden_digest_and_the_equation_that_differs(tmp_path):
    file = tmp_path / "equations.txt"
    zeros = "0" * 16
    with pytest.raises(AssertionError, match="the results have the digest") as raised:
        assert_reproducible(exact, X, digest=zeros, equations=file)
    assert not file.exists()
    right = digest(exact(X))
    assert f"have the digest {right!r}, not '{zeros}'" in str(raised.value)
    assert_reproducible(exact, X, digest=right, equations=file)
    assert_reproducible(exact, X, digest=right)
    lines = file.read_text().splitlines()
    assert lines[0].endswith(" input 0 float32[3,4,6]")

    def failure(fn, x=X):
        with pytest.raises(AssertionError) as raised:
            assert_reproducible(fn, x, digest=right, equations=file)
        return str(raised.value)

    assert "The arguments are others: input 0 float32[3,4,6]" in failure(exact, X + 1)
    assert (
        "another one from equation 2 on: ceil of float32[3,4,6] at 'layer', which "
        in (failure(other))
    )
    # As if this machine computed another product.
    changed = [line if " round " not in line else f"0{line[1:]}" for line in lines]
    file.write_text("\n".join(changed))
    with pytest.raises(AssertionError) as raised:
        assert_reproducible(exact, X, digest=zeros, equations=file)
    assert str(raised.value).endswith(
        "The first equation whose result differs is round of float32[3,4,6] at 'layer'"
    )


@pytest.mark.parametrize("wrong", ["", None, 3, "0" * 15, "G" * 16])
def test_what_is_no_digest(wrong):
    with pytest.raises(ValueError, match="is no digest: it has 16 hexadecimal digits"):
        assert_reproducible(exact, X, digest=wrong)


def test_nothing_to_digest():
    with pytest.raises(ValueError, match="the pytree has none"):
        digest({})
