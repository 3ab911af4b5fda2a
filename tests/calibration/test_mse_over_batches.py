import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite import numerics
from aqtlite.calibration import MseOverBatches
from tests.calibration.gathered import gathered
from tests.common import normal

pytestmark = pytest.mark.code("quick")

SYMMETRIC = numerics.IntSymmetric(bits=4, preserve_max_val=True)
AFFINE = numerics.IntAffine(bits=4)


def run(how, batches, grid, axes=(0, 1)):
    return gathered(how, batches, axes, grid)


def rounding_error(x, high, low, levels):
    step = (high - low) / levels
    rounded = np.clip(np.round(x / step), round(low / step), round(high / step)) * step
    return np.mean((rounded - x) ** 2)


@pytest.mark.parametrize("grid, levels", [(SYMMETRIC, 14), (AFFINE, 15)])
def test_the_error_is_close_to_the_least(grid, levels):
    batches = [normal((64, 32), seed) for seed in range(3)]
    batches = [batch * jnp.abs(batch) for batch in batches]  # Heavy tails.
    x = np.concatenate(batches)
    how = MseOverBatches()
    _, found = run(how, batches, grid)
    high = float(found.high.squeeze())
    low = -high if found.low is None else float(found.low.squeeze())
    widest = max(x.max(), -x.min()), -max(x.max(), -x.min())
    if grid is AFFINE:
        widest = x.max(), x.min()
    errors = [
        rounding_error(x, c * widest[0], c * widest[1], levels) for c in how.candidates
    ]
    assert rounding_error(x, high, low, levels) < 1.05 * min(errors)
    assert rounding_error(x, high, low, levels) < 0.7 * errors[0]


@pytest.mark.slow
@pytest.mark.code("users")
def test_any_split_of_the_batches_gives_the_same():
    x, how = normal((12, 7)), MseOverBatches()
    one, found = run(how, [x], AFFINE)
    several, other = run(how, np.split(np.asarray(x), [3, 8]), AFFINE)
    assert jax.tree.all(jax.tree.map(np.array_equal, one.state, several.state))
    np.testing.assert_array_equal(found.high, other.high)
    merged = how.merge(
        run(how, [x[:5]], AFFINE)[0], run(how, [x[5:]], AFFINE)[0], AFFINE
    )
    for part, whole in zip(*map(jax.tree.leaves, (merged, one.state)), strict=True):
        np.testing.assert_array_equal(part, whole)


def test_channels():
    x = normal((64, 3)) * jnp.array([1.0, 10.0, 0.0])
    _, found = run(MseOverBatches(), [x], SYMMETRIC, axes=(0,))
    assert found.high.shape == (1, 3)
    assert 0 < found.high[0, 0] < found.high[0, 1] and found.high[0, 2] == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("grid", [SYMMETRIC, AFFINE])
def test_what_is_no_number(bad, grid):
    _, found = run(MseOverBatches(), [jnp.array([[1.0, bad]])], grid)
    ends = [found.high] if found.low is None else [found.high, found.low]
    assert any(np.isnan(end).all() for end in ends)


def test_refused():
    grid = numerics.Float(exponent_bits=4, mantissa_bits=3)
    with pytest.raises(ValueError, match="equal steps"):
        MseOverBatches().init_state((1,), grid)
    with pytest.raises(ValueError, match="at most 1"):
        MseOverBatches((2.0,))
    with pytest.raises(ValueError, match="fractions"):
        MseOverBatches(())
    with pytest.raises(TypeError, match="tuple of numbers"):
        MseOverBatches(0.5)
