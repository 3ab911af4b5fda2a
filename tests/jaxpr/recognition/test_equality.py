import jax
import jax.numpy as jnp
import pytest
from jax import lax

from aqtlite.jaxpr.recognition import equality

pytestmark = pytest.mark.code("quick")

X = jnp.ones((3, 4))


def _classes(function, *args):
    """For each output, the first output that is known to be equal."""
    numbers = equality.numbers_of_outputs(jax.make_jaxpr(function)(*args))
    return [numbers.index(number) for number in numbers]


def _scan(x, y):
    """Two slices that are equal, one that is not, and carries with other starts."""

    def step(carry, one):
        first, second = carry
        stacked = one + first, one + first, one + second
        return (first * 2, second * 2), stacked

    carry, stacked = lax.scan(step, (jnp.float32(1), jnp.float32(2)), x)
    del y
    return *stacked, *carry


def _late(x, y):
    """Carries that are equal until the third step."""
    del y

    def step(carry, _):
        a, b, c, d = carry
        return (a, c, d, d), (a, b)

    zero, one = jnp.float32(0), jnp.float32(1)
    stacked = lax.scan(step, (zero, zero, zero, one), None, length=5)[1]
    return stacked, x


def _random(x, y):
    del y
    key = jax.random.key(0)
    return (x, *(jax.random.normal(k, (2,)) for k in (key, key, jax.random.key(1))))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, y: (x, y, x), [0, 1, 0]),
        (lambda x, y: (x + y, x + y, y + x, x - y), [0, 0, 2, 3]),
        (lambda x, y: (x + 1, x + 1, x + 2), [0, 0, 2]),
        (lambda x, y: (x.sum(0), x.sum(0), x.sum(1)), [0, 0, 2]),
        (lambda x, y: (jax.jit(jnp.sin)(x), jnp.sin(x), jnp.sin(y)), [0, 0, 2]),
        (lambda x, y: (jnp.zeros(3), jnp.zeros(3), jnp.zeros(4)), [0, 0, 2]),
        (lambda x, y: (jnp.zeros(3), jnp.zeros(3, "int32")), [0, 1]),
        (lambda x, y: lax.cond(x[0, 0] > 0, lambda: (x, x), lambda: (x, y)), [0, 1]),
        (_scan, [0, 0, 2, 3, 4]),
        (_late, [0, 1, 2]),
        (_random, [0, 1, 1, 3]),
    ],
)
def test_equal_outputs(function, expected):
    assert _classes(function, X, 2 * X) == expected


def test_slices_of_one_array_are_equal():
    def step(carry, slices):
        first, second, other = slices
        return carry, (first @ first.T, second @ second.T, other @ other.T)

    def stacked(x, y):
        return lax.scan(step, 0.0, (x, x, y))[1]

    x = jnp.ones((2, 3, 4))
    assert _classes(stacked, x, x + 1) == [0, 0, 2]


def test_effects_count_each_time():
    def function(x):
        def one():
            return jax.pure_callback(lambda a: a, x, x)

        def other():
            shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
            return jax.experimental.io_callback(lambda a: a, shape, x)

        return one(), other(), other()

    assert len(set(_classes(function, X))) == 3
