"""Examples as JAX's documentation has them, by rules that quantize nothing: equal bits.

After "Control flow and logical operators with JIT", "Custom derivative rules",
"Gradient checkpointing", the sharp bits, and docstrings of `jax.lax`. Some have a
matrix product in place of a product of numbers. A body without a quantized contraction
is not entered: what computes every contraction by itself enters those that have one.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from aqtlite import Rule, quantize_function
from tests.common import normal
from tests.replacing import assert_bits, replaced

pytestmark = pytest.mark.code("quick")

A = normal((3, 3)) / 4 + 2 * jnp.eye(3)
B, X = normal((3,), 1), normal((4, 3), 2)
NOTHING = [Rule(cfg=None, is_required=False)]


@jax.custom_jvp
def log1pexp(x):
    return jnp.log(1.0 + jnp.exp(x))


@log1pexp.defjvp
def _log1pexp(primals, tangents):
    (x,), (t,) = primals, tangents
    return log1pexp(x), (1 - 1 / (1 + jnp.exp(x))) * t


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def app(f, x):
    return f(x)


@app.defjvp
def _app(f, primals, tangents):
    return f(primals[0]), 2.0 * tangents[0]


@jax.custom_vjp
def clip_gradient(lo, hi, x):
    return x


clip_gradient.defvjp(
    lambda lo, hi, x: (x, (lo, hi)),
    lambda kept, g: (None, None, jnp.clip(g, *kept)),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fixed_point(f, a, x_guess):
    def is_going_on(carry):
        before, x = carry
        return jnp.max(jnp.abs(before - x)) > 1e-6

    def body(carry):
        _, x = carry
        return x, f(a, x)

    return lax.while_loop(is_going_on, body, (x_guess, f(a, x_guess)))[1]


def _fixed_point_fwd(f, a, x_init):
    x = fixed_point(f, a, x_init)
    return x, (a, x)


def _fixed_point_rev(f, kept, g):
    a, x = kept
    _, vjp_a = jax.vjp(lambda a: f(a, x), a)
    (bar,) = vjp_a(
        fixed_point(
            lambda packed, u: packed[1] + jax.vjp(lambda x: f(a, x), x)[1](u)[0],
            (a, g),
            g,
        )
    )
    return bar, jnp.zeros_like(x)


fixed_point.defvjp(_fixed_point_fwd, _fixed_point_rev)


def predict(x):
    """The network of the guide to checkpointing."""
    for scale in (1.0, 0.5):
        x = jnp.sin(jnp.dot(x, scale * A))
    return x


def while_loop_by_hand(x):
    """`fori_loop` as its docstring defines it."""

    def body(carry):
        i, x = carry
        return i + 1, x @ A / 2 + i

    return lax.while_loop(lambda carry: carry[0] < 3, body, (0, x))


def newton_root(x):
    """The square root, as in the docstring of `custom_root`."""

    def solve(f, guess):
        return lax.fori_loop(0, 8, lambda _, y: y - f(y) / (2 * y), guess)

    return lax.custom_root(
        lambda y: y * y - jnp.sum(x * x), 1.0, solve, lambda g, y: y / g(1.0)
    )


def linear_solve(x):
    """Of a symmetric matrix, with a solver that the gradient uses, too."""
    symmetric = A @ A.T + jnp.sum(x * x) * jnp.eye(3)
    solve = lambda matvec, b: jax.scipy.sparse.linalg.cg(matvec, b, maxiter=3)[0]  # noqa: E731
    return lax.custom_linear_solve(
        lambda v: symmetric @ v, B + x[0], solve, symmetric=True
    )


def cumulative_sum(x):
    def step(carry, row):
        carry = carry + row
        return carry, carry

    return lax.scan(step, jnp.zeros(3), x)


def linear_recurrence(x):
    def combine(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    return lax.associative_scan(combine, (jnp.tanh(x), x))[1]


DIFFERENTIABLE = {
    "cond": lambda x: lax.cond(x[0, 0] > 0, lambda x: x + 1, lambda x: x @ A, x),
    "cond_of_operands": lambda x: lax.cond(True, jnp.add, jnp.subtract, x, B),
    "switch": lambda x: lax.switch(
        jnp.argmax(x[0]), [jnp.sin, lambda x: x @ A, lambda x: -x], x
    ),
    "select": lambda x: jnp.where(x > 0, jnp.log1p(jnp.abs(x)), 0.0),
    "piecewise": lambda x: jnp.piecewise(x, [x < -1, x > 1], [jnp.sin, jnp.cos, 0.5]),
    "fori_loop": lambda x: lax.fori_loop(0, 4, lambda i, x: x @ A / 2 + i, x),
    "scan": cumulative_sum,
    "scan_reversed": lambda x: lax.scan(
        lambda c, row: (c * row + 1, c), B, x, reverse=True, unroll=2
    ),
    "map": lambda x: lax.map(lambda row: jnp.dot(A, row), x),
    "map_of_batches": lambda x: lax.map(lambda row: A @ row, x, batch_size=3),
    "associative_scan": lambda x: lax.associative_scan(jnp.add, x),
    "associative_scan_of_pairs": linear_recurrence,
    "associative_scan_of_products": lambda x: lax.associative_scan(
        jnp.matmul, x[:, :, None] * x[:, None] + A, reverse=True
    ),
    "custom_jvp": lambda x: jax.vmap(jax.grad(log1pexp))(x.ravel()) + log1pexp(100.0),
    "custom_jvp_of_a_function": lambda x: app(lambda x: x @ A, x),
    "custom_vjp": lambda x: jnp.sin(clip_gradient(-0.75, 0.75, x * 10)),
    "checkpoint": lambda x: jax.checkpoint(predict)(x),
    "checkpoint_by_name": lambda x: jax.checkpoint(
        lambda x: predict(jax.ad_checkpoint.checkpoint_name(predict(x), "a")),
        policy=jax.checkpoint_policies.save_only_these_names("a"),
    )(x),
    "checkpoint_in_a_scan": lambda x: lax.scan(
        jax.checkpoint(lambda x, a: (jnp.sin(x @ a), None)), x, jnp.stack([A, A.T])
    )[0],
    "custom_root": newton_root,
    "custom_linear_solve": linear_solve,
    "grad_of_grad": lambda x: jax.hessian(lambda b: jnp.sum(jnp.tanh(A @ b)))(x[0]),
    "jvp": lambda x: jax.jvp(predict, (x,), (jnp.cos(x),)),
    "fixed_point": lambda x: fixed_point(
        lambda a, x: 0.5 * (x + a / x), jnp.sum(x * x), jnp.float32(3)
    ),
}

FORWARD = {
    "while_loop": while_loop_by_hand,
    "while_loop_of_arrays": lambda x: lax.while_loop(
        lambda c: jnp.sum(jnp.abs(c @ A)) < 1e3, lambda c: c @ A, x
    ),
    "fori_loop_of_any_length": lambda x: lax.fori_loop(
        0, jnp.argmax(x[0]) + 1, lambda i, x: x.at[i].add(1.0), x
    ),
    "reduce_window": lambda x: lax.reduce_window(
        x, -jnp.inf, lax.max, (2, 2), (1, 1), "VALID"
    ),
    "reduce": lambda x: lax.reduce(x, 1.0, lambda a, b: a * b, (1,)),
    "eager_print": lambda x: (jax.debug.print("{}", x.sum()), x @ A)[1],
    "pure_callback": lambda x: jax.pure_callback(
        lambda x: x + 1, jax.ShapeDtypeStruct(x.shape, x.dtype), x
    ),
}


def value_and_gradient(function):
    def evaluate(x):
        out, pull_back = jax.vjp(function, x)
        return out, pull_back(jax.tree.map(jnp.cos, out))

    return evaluate


@pytest.mark.parametrize("name", DIFFERENTIABLE | FORWARD)
def test_bits_stay(name):
    function = (DIFFERENTIABLE | FORWARD)[name]
    evaluated = value_and_gradient if name in DIFFERENTIABLE else lambda one: one
    by_rules = quantize_function(function, NOTHING)

    @jax.jit
    def together(x):
        return [evaluated(one)(x) for one in (function, by_rules, replaced(function))]

    wanted, *got = together(X)
    for one in got:
        assert_bits(one, wanted)
