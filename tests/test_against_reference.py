"""Random contractions keep the bounds of the NumPy reference.

``python -m tests.against_reference`` runs as many of them as are wanted.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import against_reference, generators, reference

pytestmark = pytest.mark.code("quick")

# Some that once failed: gradients summed in bfloat16 and float16, a contraction of
# bfloat16 that XLA:CPU lacks, long sums of 16-bit integers.
SEEDS = (*range(25), 1017, 1072, 1134, 1097, 3765)
DRAWS = 5


@pytest.fixture(scope="module", autouse=True)
def memory():
    """Gives back the compiled programs, of which no other test has use."""
    yield
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_random_contractions(seed):
    found = against_reference.failures_of(seed, DRAWS)
    assert not found, "\n\n".join(str(failure) for failure in found[:2])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_result_outside_its_interval_is_found(dtype):
    dtype = jnp.dtype(dtype)
    center = np.linspace(-3, 3, 6).astype(dtype).astype(np.float64)
    interval = reference.Interval(center, np.abs(center) * reference.UNIT)
    got = center.astype(dtype)
    assert against_reference.difference(got, interval, dtype) is None
    neighbour = np.nextafter(got, dtype.type(np.inf))
    after_it = np.nextafter(neighbour, dtype.type(np.inf))
    found = against_reference.difference(after_it, interval, dtype)
    assert found is not None
    assert found.startswith("6 of 6 elements")


def test_dtype_shape_and_nan_are_compared():
    interval = reference.Interval(np.array([1.0, np.nan]), np.zeros(2))
    right = np.array([1, np.nan], np.float32)
    for got, is_right in (
        (right, True),
        (right.astype(np.float16), False),
        (right[:1], False),
        (np.ones(2, np.float32), False),
        (np.full(2, np.nan, np.float32), False),
    ):
        found = against_reference.difference(got, interval, np.dtype("float32"))
        assert (found is None) is is_right


def test_cases_are_repeatable_and_their_draws_differ():
    first, again, other = (generators.case(1, draw) for draw in (0, 0, 1))
    np.testing.assert_array_equal(first.lhs, again.lhs)
    assert first.cfg == again.cfg == other.cfg
    assert (first.lhs != other.lhs).any()
