import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite.jaxpr import tracing

pytestmark = pytest.mark.code("quick")


def test_tables_of_inputs_and_outputs():
    def function(tree, number):
        return {"sum": tree["b"] + number, "same": (tree["a"],)}

    x = jax.ShapeDtypeStruct((3,), jnp.float32)
    traced = tracing.trace(function, ({"a": jnp.ones(2), "b": x, "c": "text"}, 2.0))
    assert traced.inputs == ({"a": 0, "b": 1, "c": None}, 2)
    assert traced.outputs == {"same": (0,), "sum": 1}
    run = jax.extend.core.jaxpr_as_fun(traced.jaxpr)
    same, total = run(np.zeros(2, np.float32), np.ones(3, np.float32), 5.0)
    assert not same.any() and (total == 6).all()


@pytest.mark.parametrize("size", [2, 3])
def test_a_number_that_the_function_needs_is_a_constant(size):
    traced = tracing.trace(
        lambda x, n: jnp.concatenate([x for _ in range(n)]), (jnp.ones(2), size)
    )
    assert traced.inputs == (0, None)
    (out,) = traced.jaxpr.out_avals
    assert out.shape == (2 * size,)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: x.reshape(n, -1),
        lambda x, n: x * np.sqrt(n),
        lambda x, n: [x, -x, x + 1][n],
        lambda x, n: {2: x}[n],
        lambda x, n: jnp.split(x, n)[0],
        lambda x, n: jnp.zeros(n),
        lambda x, n: x if n > 1 else -x,
        lambda x, n: np.ones(4)[: n + 1],
        jax.jit(lambda x, n: x * n, static_argnums=1),
    ],
)
def test_whatever_needs_a_number_gets_it(function):
    x = jnp.arange(4.0)
    traced = tracing.trace(function, (x, 2))
    assert traced.inputs == (0, None)
    (out,) = jax.extend.core.jaxpr_as_fun(traced.jaxpr)(x)
    np.testing.assert_array_equal(out, function(x, 2))


def test_a_number_too_large_for_an_array_is_a_constant():
    traced = tracing.trace(lambda x, n: x + (n >> 40), (jnp.ones(2), 2**41))
    (out,) = jax.extend.core.jaxpr_as_fun(traced.jaxpr)(jnp.ones(2))
    np.testing.assert_array_equal(out, [3, 3])


def test_errors_of_the_function_are_raised():
    def function(x, n):
        raise TypeError("its own")

    with pytest.raises(TypeError, match="its own"):
        tracing.trace(function, (jnp.ones(2), 2))


def test_close_over_constants():
    def function(x, flag, y):
        return x - y if flag else y

    flat, inputs = tracing.close_over_constants(
        function, (3.0, True, np.float32(1)), lambda leaf: isinstance(leaf, float)
    )
    assert inputs == [3.0]
    assert flat([5.0]) == 4.0
