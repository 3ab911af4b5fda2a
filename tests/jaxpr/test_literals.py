"""Numbers of Python and NumPy that a program gives to functions inside of it."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax

import aqtlite
from tests.common import nearest, normal
from tests.replacing import assert_bits, replaced

pytestmark = pytest.mark.code("quick")

X, W = normal((3, 4)), normal((4, 4), 1)


def scaled(x, by):
    """A contraction, multiplied by a number, or given to the function of a name."""
    x = jnp.tanh(x @ W)
    if by is None:
        return x
    return getattr(jnp, by)(x) if isinstance(by, str) else x * as_float(by)


def as_float(number):
    return jnp.real(number).astype(jnp.float32)


def with_jvp(function):
    called = jax.custom_jvp(lambda x, by: function(x, by))
    called.defjvps(lambda tangent, out, x, by: tangent * 3 + jnp.cos(x), None)
    return called


def with_vjp(function):
    called = jax.custom_vjp(lambda x, by: function(x, by))
    called.defvjp(
        lambda x, by: (called(x, by), x), lambda x, g: (g * 3 + jnp.cos(x), None)
    )
    return called


def with_static_jvp(function):
    called = jax.custom_jvp(lambda x, by: function(x, by), nondiff_argnums=(1,))
    called.defjvp(lambda by, x, tangents: (called(*x, by), tangents[0] * 3))
    return called


def with_static_vjp(function):
    called = jax.custom_vjp(lambda x, by: function(x, by), nondiff_argnums=(1,))
    called.defvjp(
        lambda x, by: (called(x, by), x), lambda by, x, g: (g * 3 + jnp.cos(x),)
    )
    return called


def times(count, function):
    """A function that is called again and again: the number is carried along."""
    return lambda x, by: lax.fori_loop(
        0, count(x), lambda _, carry: (function(*carry), carry[1]), (x, by)
    )[0]


# Each makes a function of an array and a number of one.
CALLS = {
    "jit": jax.jit,
    "jit_by_name": lambda f: lambda x, by: jax.jit(lambda x, *, by: f(x, by))(x, by=by),
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: times(lambda x: 2, f),
    "scan_of_a_constant": lambda f: (
        lambda x, by: lax.scan(
            lambda carry, s: (f(carry, by) * s, None), x, jnp.ones(2)
        )[0]
    ),
    "while": lambda f: times(lambda x: jnp.argmax(x[0]) + 1, f),
    "cond": lambda f: lambda x, by: lax.cond(x[0, 0] < 9, f, lambda x, _: x, x, by),
    "switch": lambda f: (
        lambda x, by: lax.switch(
            jnp.argmax(x[0]) % 2, [f, lambda x, by: f(f(x, by), by)], x, by
        )
    ),
    "vmap": lambda f: jax.vmap(lambda row, by: f(row[None], by)[0], (0, None)),
}
STATIC_CALLS = {
    "jit": lambda f: jax.jit(f, static_argnums=1),
    "jit_by_name": lambda f: (
        lambda x, by: jax.jit(lambda x, *, by: f(x, by), static_argnames="by")(x, by=by)
    ),
    "custom_jvp": with_static_jvp,
    "custom_vjp": with_static_vjp,
    "checkpoint": lambda f: jax.checkpoint(f, static_argnums=1),
}

DTYPES = [
    np.dtype(one)
    for one in (
        *("bool", "int8", "int16", "int32", "int64"),
        *("uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
        *(ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.bfloat16),
        *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
    )
]
of_numpy = st.builds(
    lambda dtype, value: dtype.type(value), st.sampled_from(DTYPES), st.integers(0, 3)
)
numbers = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.floats(width=32),
    st.complex_numbers(max_magnitude=3),
    of_numpy,
    st.builds(np.asarray, of_numpy),
    st.sampled_from([jnp.float32(2), jnp.asarray(2), jnp.int8(2)]),
)


def nested(calls, names):
    return functools.reduce(lambda function, name: calls[name](function), names, scaled)


def assert_same(function, *, differentiable=True):
    """Compares a program with itself, evaluated with contractions replaced."""

    def results(one):
        out = one(X)
        if not differentiable:
            return out
        return out, jax.grad(lambda x: jnp.sum(jnp.sin(one(x)[0])))(X)

    wanted, got = jax.jit(lambda: (results(function), results(replaced(function))))()
    assert_bits(got, wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.weak_type == b.weak_type


@pytest.mark.slow
@hypothesis.given(
    st.lists(st.sampled_from(sorted(CALLS)), min_size=1, max_size=2), numbers
)
@hypothesis.settings(max_examples=25, deadline=None)
def test_numbers_given_to_functions(names, number):
    def function(x):
        of_jit = jax.jit(lambda x, by: (x @ W, by))(x, number)
        return nested(CALLS, names)(x, number), of_jit, number

    assert_same(function, differentiable="while" not in names)


@hypothesis.given(
    st.lists(st.sampled_from(sorted(STATIC_CALLS)), min_size=1, max_size=2),
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 3),
        st.floats(-3, 3),
        st.sampled_from(["sin", "cos"]),
    ),
)
@hypothesis.settings(max_examples=10, deadline=None)
def test_static_arguments_of_functions(names, value):
    assert_same(lambda x: (nested(STATIC_CALLS, names)(x, value),))


@pytest.mark.parametrize("call", [jax.jit, with_jvp, with_vjp])
@pytest.mark.parametrize("number", [True, 2, 0.5, None, np.int8(3)], ids=repr)
def test_quantized_and_served(call, number):
    """Both the weight and the result are made by functions that are given one."""

    def model(params, x):
        weight = call(lambda w, by: w if by is None else w * as_float(by))
        return call(lambda x, by: jnp.sin(x) if by else x)(
            x @ weight(params, number), None
        )

    quantized = aqtlite.quantize_function(model, nearest(), params=0)
    (one,) = quantized.plan(W, X).quantized()
    assert one.rhs.kind == "weight"
    serve, serving = aqtlite.convert_function(quantized, W, X)
    assert_bits(jax.jit(serve)(serving, X), jax.jit(quantized)(W, X))
    with_array = aqtlite.quantize_function(
        lambda w, x: x @ (w if number is None else w * jnp.float32(number)),
        nearest(),
        params=0,
    )
    assert_bits(jax.jit(quantized)(W, X), jax.jit(with_array)(W, X))
