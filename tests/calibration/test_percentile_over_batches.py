import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from aqtlite import config, numerics
from aqtlite.calibration import PercentileOverBatches, Statistics
from aqtlite.flax import AqtDotGeneral, calibrate
from tests.calibration.gathered import before_first, gathered
from tests.common import normal

pytestmark = pytest.mark.code("quick")

GRID = numerics.IntSymmetric(bits=8)


def run(how, batches, axes=(0, 1)):
    statistics, found = gathered(how, batches, axes, GRID)
    return statistics.state, np.asarray(found.high)


@pytest.mark.parametrize("percentage", [50, 99, 99.9, 100])
@pytest.mark.parametrize("axes", [(0, 1), (0,)])
def test_against_numpy(percentage, axes):
    batches = [normal((64, 5), seed) * 2.0**seed for seed in range(3)]
    _, found = run(PercentileOverBatches(percentage), batches, axes)
    wanted = np.percentile(
        np.abs(np.concatenate(batches)),
        percentage,
        axis=axes,
        keepdims=True,
        method="inverted_cdf",
    )
    assert (found >= wanted).all() and (found <= wanted * (1 + 2.0**-5)).all()


@pytest.mark.parametrize("percentage", [80, 99.9])
def test_each_end_of_a_grid_with_a_zero_point(percentage):
    batches = [normal((64, 5), seed) + seed for seed in range(3)]
    how, grid = PercentileOverBatches(percentage), numerics.IntAffine(bits=8)
    _, (high, low) = gathered(how, batches, (0, 1), grid)
    options = {"method": "inverted_cdf", "keepdims": True}
    for end, sign in ((high, 1), (-low, -1)):
        x = sign * np.concatenate(batches)
        wanted = np.maximum(np.percentile(x, percentage, **options), 0)
        assert (end >= wanted).all() and (end <= wanted * (1 + 2.0**-5)).all()


@pytest.mark.code("users")
def test_any_split_of_the_batches_gives_the_same():
    x = normal((12, 7))
    how = PercentileOverBatches(90.0, mantissa_bits=3)
    wanted, _ = run(how, [x])
    for cuts in ([4, 8], [1], [11, 11]):
        state, _ = run(how, np.split(np.asarray(x), cuts))
        np.testing.assert_array_equal(state["counts"], wanted["counts"])


def test_edges_and_values_that_are_none():
    how = PercentileOverBatches(100, mantissa_bits=2)
    for value in (0.0, 1.0, 1.25, -2.0, 2.0**-126):
        assert run(how, [jnp.full((2, 2), value)])[1] == abs(value)
    assert np.isnan(run(how, [jnp.array([[1.0, np.nan]])])[1])
    assert np.isnan(run(how, [jnp.array([[1.0, -np.inf]])])[1])
    assert run(how, [jnp.zeros((0, 3))])[1] == 0
    batch = jnp.array([[1.0, -np.inf]])
    _, (high, low) = gathered(how, [batch], (0, 1), numerics.IntAffine(bits=8))
    assert high == 1 and np.isnan(low)
    # The next edge is infinity.
    largest = jnp.finfo(jnp.float32).max
    assert run(how, [jnp.full((2, 2), 3.4e38)])[1] == largest


def test_counts_beyond_what_float32_adds_up():
    """Of 2^33 + 2 elements, all but the last 4 are ones and twos."""
    how = PercentileOverBatches(100, mantissa_bits=1)
    counts = np.zeros((512, 1), np.uint32)
    for value, count in ((1.0, 2**32 - 1), (2.0, 2**32 - 1), (1024.0, 4)):
        state, _ = run(how, [jnp.array([value])], (0,))
        counts += count * np.asarray(state["counts"])
    statistics = Statistics(jnp.ones(()), {"counts": jnp.asarray(counts)})

    def bounds():
        for percentage in (100, 99.99999997, 99.9999, 50, 49.9999999):
            how = PercentileOverBatches(percentage, mantissa_bits=1)
            yield how.range(None, (0,), GRID, statistics).high[0]

    found = jax.jit(lambda: list(bounds()))()
    assert found == [1024, 1024, 2, 2, 1] == list(bounds())


def test_counts_stay_at_the_largest():
    how = PercentileOverBatches(100, mantissa_bits=1)
    state = how.init_state((1,), GRID)
    full = {"counts": jnp.full_like(state["counts"], 2**32 - 2)}
    after = jax.jit(lambda full, x: how.update(full, x, (0,), GRID))(
        Statistics(jnp.ones(()), full), jnp.ones((5,))
    )
    assert int(after["counts"].max()) == 2**32 - 1


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"percentage": 0}, ValueError, "percentage must be positive"),
        ({"percentage": 0.999}, ValueError, "above 1, got 0.999: it is a percentage"),
        ({"percentage": 101}, ValueError, "at most 100, got 101"),
        ({"percentage": "all"}, TypeError, "must be a number"),
        ({"percentage": 9, "mantissa_bits": 0}, ValueError, "from 1 to 10, got 0"),
        ({"percentage": 9, "mantissa_bits": 2.0}, TypeError, "must be an int"),
    ],
)
def test_refuses(fields, error, match):
    with pytest.raises(error, match=match):
        PercentileOverBatches(**fields)


def test_json():
    cfg = config.static_int8(PercentileOverBatches(99.9))
    assert config.from_json(config.to_json(cfg)) == cfg


@pytest.mark.code("users")
@pytest.mark.parametrize("spec", [P("d", None), P(None, "d"), P("d", "m")])
def test_on_a_mesh_with_explicit_axes(spec):
    how, x = PercentileOverBatches(90), normal((8, 4))
    mesh = jax.make_mesh((1, 1), ("d", "m"), axis_types=(AxisType.Explicit,) * 2)
    before = before_first(how, (1, 4), GRID)
    wanted = how.update(before, x, (0,), GRID)["counts"]
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, spec))
        found = jax.jit(lambda x: how.update(before, x, (0,), GRID))(x)["counts"]
    np.testing.assert_array_equal(found, wanted)


def test_counts_have_no_gradient():
    x, cfg = normal((4, 16)), config.static_int8(PercentileOverBatches(99.0))
    model = nn.Dense(8, dot_general=AqtDotGeneral(cfg))
    variables = calibrate(model, model.init(jax.random.key(0), x), [x])

    def loss(variables):
        return jnp.square(model.apply(variables, x)).sum()

    def of_params(params):
        return loss({**variables, "params": params})

    wanted = jax.grad(of_params)(variables["params"])
    found = jax.grad(loss, allow_int=True)(variables)
    jax.tree.map(np.testing.assert_array_equal, found["params"], wanted)
    with pytest.raises(TypeError, match="uint32"):
        jax.grad(loss)(variables)
