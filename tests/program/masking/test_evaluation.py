"""Masks that follow tokens through a program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import aqtlite
from aqtlite.calibration import masks as masks_lib
from aqtlite.jaxpr import counted
from aqtlite.program.masking import gathering

pytestmark = pytest.mark.code("quick")

X = jax.random.normal(jax.random.key(0), (3, 8, 4))
MASK = jnp.arange(8)[None] < jnp.array([8, 5, 2])[:, None]
ORDER = jax.random.permutation(jax.random.key(1), 24)


def mask_of(function, x=X, mask=MASK):
    """Which elements of the result of a function count."""

    def asked(x):
        return counted.counted(function(x), "the result")

    masks = masks_lib.of_leaves(mask, (x,))
    return jax.jit(lambda x: gathering.evaluate(asked, (x,), masks))(x)


def on_rows(x):
    """Rows of tokens in another order."""
    return jnp.sort(x.reshape(24, 4)[ORDER].reshape(8, 3, 2, 2)[:, 1:], -1)


def scanned(x):
    step = lambda carry, one: (0.5 * carry + one, carry * one)  # noqa: E731
    return lax.scan(step, jnp.zeros((3, 4)), x.swapaxes(0, 1), reverse=True)[1]


def looped(x):
    return lax.fori_loop(0, 3, lambda i, y: jnp.roll(y, 1, 1) + y[:, :1] * i, x)


def windowed(x):
    return lax.reduce_window(
        x, -jnp.inf, lax.max, (1, 3, 1), (1, 2, 1), ((0, 0), (2, 1), (0, 0))
    )


def convolved(x, **options):
    dims = ("NWC", "WIO", "NWC")
    kernel = jnp.ones((3, 4 // options.get("feature_group_count", 1), 8))
    options = {"padding": ((2, 0),), "window_strides": (1,), **options}
    return lax.conv_general_dilated(x, kernel, **options, dimension_numbers=dims)


@jax.custom_batching.custom_vmap
def reversed_tokens(x):
    return x[:, ::-1]


@reversed_tokens.def_vmap
def _reversed_tokens_vmap(size, is_batched, x):
    return x[:, :, ::-1], True


MOVED = {
    "elementwise": lambda x: jnp.where(x > 0, x, 2.0) ** 2 + x[:, :, :1] * X,
    "rows": on_rows,
    "merged": lambda x: x.reshape(3, 32).reshape(3, 4, 8) + 1,
    "slices": lambda x: x[:, 1:-1:2, ::-1],
    "token shift": lambda x: x - jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1],
    "parts": lambda x: jnp.concatenate([*jnp.split(x[:, ::-1], 2, 1), X[:, :2]], 1),
    "stack": lambda x: jnp.stack([x[:, :3], X[:, :3], x[:, 2:5]], 2) + x[:, :1, None],
    "unstack": lambda x: jnp.stack(jnp.unstack(x, axis=1)[2:5] * 2, 1),
    "features": lambda x: jnp.stack(jnp.unstack(x, axis=2)[:2], 0),
    "tiles": lambda x: jnp.tile(x, (1, 3, 2)),
    "composite": lambda x: lax.composite(lambda y: y[:, ::-1], "aqtlite.rev")(x),
    "custom vmap": lambda x: reversed_tokens(x) * 2,
    "rotary": lambda x: jnp.concatenate([-x[..., 2:], x[..., :2]], -1),
    "dynamic slice": lambda x: lax.dynamic_slice(x, (1, jnp.int32(2), 0), (2, 4, 4)),
    "cache": lambda x: lax.dynamic_update_slice(jnp.zeros((3, 12, 4)), x, (0, 3, 0)),
    "taken": lambda x: jnp.take_along_axis(x, jnp.array([[[3]], [[4]], [[5]]]), 1),
    "scattered": lambda x: jnp.zeros((30, 4)).at[ORDER + 3].set(x.reshape(24, 4)),
    "added": lambda x: jnp.zeros((3, 10, 4)).at[:, 1:9].add(x) * 2,
    "vmapped": jax.vmap(lambda x: jnp.take(x, jnp.array([5, 0]), 0) @ jnp.eye(4)),
    "called": jax.jit(jax.checkpoint(lambda x: jax.nn.relu(jnp.expand_dims(x, 1)))),
    "scan": scanned,
    "loop": looped,
    "branches": lambda x: lax.cond(x.size > 3, jnp.sin, lambda x: x * 2, x),
    "cumulated": lambda x: jnp.cumsum(x, 1),
    "recurrence": lambda x: lax.associative_scan(jnp.add, x, axis=1),
    "window": windowed,
    "causal": convolved,
    "strided": functools.partial(convolved, window_strides=(2,), rhs_dilation=(2,)),
    "depthwise": functools.partial(convolved, feature_group_count=4),
    "transposed": functools.partial(convolved, lhs_dilation=(2,)),
    "layers": lambda x: lax.scan(lambda y, w: (y @ w, None), x, jnp.ones((2, 4, 4)))[0],
}


@pytest.mark.parametrize("function", MOVED.values(), ids=MOVED)
def test_what_depends_on_padding_does_not_count(function):
    # What is computed from a NaN is one.
    result = jax.jit(function)(jnp.where(MASK[..., None], X, jnp.nan))
    np.testing.assert_array_equal(mask_of(function), ~jnp.isnan(result))


def attended(x, by_key=False):
    """Attention without a mask: keys of padding have weights."""
    scores = jnp.einsum("btd,bsd->bts", x, x)
    weights = jax.nn.softmax(scores, -1)
    return weights if by_key else jnp.einsum("bts,bsd->btd", weights, x)


TOKENS = np.broadcast_to(MASK[:, :, None], X.shape)
REDUCED = {
    "mean": (lambda x: x.mean(1), np.ones((3, 4), bool)),
    "norm": (lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True), TOKENS),
    "attention": (attended, TOKENS),
    "filter": (lambda x: jnp.einsum("btd,ts->bsd", x, jnp.tri(8).T), TOKENS),
    "mixer": (
        lambda x: jnp.einsum("btd,ts->bsd", x, jnp.ones((8, 2))),
        np.broadcast_to(np.asarray(MASK).all(1)[:, None, None], (3, 2, 4)),
    ),
    "weights": (
        functools.partial(attended, by_key=True),
        np.asarray(MASK)[:, :, None] & np.asarray(MASK)[:, None, :],
    ),
    "projection": (lambda x: jnp.einsum("btd,hdk->bhtk", x, jnp.ones((2, 4, 3))), None),
    "best": (lambda x: lax.top_k(x.swapaxes(1, 2) * 0 + jnp.arange(8.0), 3)[0], None),
}


@pytest.mark.parametrize("name", REDUCED)
def test_what_is_reduced_counts_if_anything_in_it_does(name):
    function, wanted = REDUCED[name]
    if name == "projection":
        wanted = np.broadcast_to(MASK[:, None, :, None], (3, 2, 8, 3))
    if name == "best":  # The last three tokens.
        wanted = np.broadcast_to(MASK[:, None, :-4:-1], (3, 4, 3))
    np.testing.assert_array_equal(mask_of(function), wanted)


def dispatched(x):
    """The rows of each expert, and what they give to tokens, by products."""
    chosen = jax.nn.one_hot(jnp.argmax(x, -1), 4)
    place = jax.nn.one_hot(jnp.cumsum(chosen, 1) * chosen - 1, 8)
    rows = jnp.einsum("btec,btd->becd", place, x)
    return rows, jnp.einsum("btec,becd->btd", place, rows)


def test_experts_by_products():
    rows, back = (mask_of(lambda x, i=i: dispatched(x)[i]) for i in range(2))
    np.testing.assert_array_equal(back, TOKENS)
    # Tokens of a sequence come before its padding, so places of these are the last.
    chosen = jax.nn.one_hot(jnp.argmax(X, -1), 4)
    of_all = chosen.sum(1)
    of_tokens = (chosen * MASK[..., None]).sum(1)
    place = jnp.arange(8)
    is_padding = (place >= of_tokens[..., None]) & (place < of_all[..., None])
    np.testing.assert_array_equal(rows[..., 0], ~is_padding)


def test_a_sequence_without_tokens():
    mask = MASK.at[1].set(False)
    pooled = mask_of(lambda x: jnp.broadcast_to(x.max(1), (2, 3, 4)), mask=mask)
    np.testing.assert_array_equal(pooled[0, :, 0], [True, False, True])


def test_embeddings_of_tokens():
    tokens, table = jnp.arange(24).reshape(3, 8) % 5, jnp.ones((5, 4))
    np.testing.assert_array_equal(mask_of(lambda t: table[t], tokens), TOKENS)
    by_one_hot = mask_of(lambda t: jax.nn.one_hot(t, 5) @ table, tokens)
    np.testing.assert_array_equal(by_one_hot, TOKENS)


def test_experts():
    # Rows are sorted by expert, contracted, and brought back.
    def experts(x):
        rows = x.reshape(24, 4)
        chosen = jnp.argmax(rows, -1)
        order = jnp.argsort(chosen)
        out = lax.ragged_dot(
            rows[order], jnp.ones((4, 4, 6)), jnp.bincount(chosen, length=4)
        )
        return out, out[jnp.argsort(order)].reshape(3, 8, 6)

    back = mask_of(lambda x: experts(x)[1])
    np.testing.assert_array_equal(back, np.broadcast_to(MASK[..., None], (3, 8, 6)))
    order = jnp.argsort(jnp.argmax(X.reshape(24, 4), -1))
    in_order = mask_of(lambda x: experts(x)[0])
    np.testing.assert_array_equal(in_order[:, 0], MASK.reshape(24)[order])


def double(x):
    return jax.pure_callback(lambda x: 2 * x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def test_operations_that_cannot_be_followed():
    message = r"the result, of shape \(3, 8, 4\), is computed by pure_callback of"
    with pytest.raises(ValueError, match=message):
        mask_of(lambda x: jnp.sin(double(x)))
    with pytest.raises(ValueError, match="computed by pure_callback"):
        mask_of(lambda x: lax.fori_loop(0, 2, lambda _, y: double(y), x))
    with pytest.raises(ValueError, match="computed by pure_callback"):
        mask_of(lambda x: lax.cond(x[0, 0, 0] > 0, lambda x: x, double, x))
    # Nobody asks for its mask.
    np.testing.assert_array_equal(mask_of(lambda x: x + 0 * double(X)), TOKENS)


def test_a_mask_that_nothing_depends_on():
    with pytest.raises(ValueError, match="no array of which statistics are gathered"):
        mask_of(lambda x: X + 1)


@pytest.mark.parametrize("masks", [MASK, (MASK, None)])
def test_an_array_with_other_axes(masks):
    images = jnp.ones((3, 5, 4))

    def asked(x, images):
        two = {"text": jnp.sin(x), "images": jnp.sin(images)}
        return {name: counted.counted(one, name) for name, one in two.items()}

    def run():
        def update(args):
            return asked(*args)

        args = X, images
        return gathering.evaluate(update, (args,), masks_lib.of_leaves(masks, args))

    if isinstance(masks, tuple):
        found = run()
        np.testing.assert_array_equal(found["text"], TOKENS)
        assert found["images"].all()
    else:
        with pytest.raises(
            ValueError, match="mask= does not say what counts in images"
        ):
            run()


def test_a_registered_operation():
    @jax.jit
    def aqtlite_test_kernel(x):
        return jnp.fft.fft(x, axis=1).real

    aqtlite.register_operation("aqtlite_test_kernel", lambda x: x[:, ::-1])
    found = mask_of(aqtlite_test_kernel)
    np.testing.assert_array_equal(found, TOKENS[:, ::-1])
