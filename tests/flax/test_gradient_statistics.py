"""Statistics of output gradients, which take the place of their own gradient."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

from aqtlite import calibration, checkpoint, config
from aqtlite.flax import AqtDotGeneral, convert
from aqtlite.testing import assert_served_equals_trained
from tests.checkpoint.support import assert_same, save
from tests.common import normal, quick_jit
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

X, Y = normal((4, 8)), normal((4, 8), 1)
OWG = "_overwrite_with_gradient"
NAME = "dot_general_ab_bc"


def delayed(how):
    changes = {}
    for path in ("dlhs.lhs", "drhs.lhs"):
        changes[f"{path}.calibration"] = how
        changes[f"{path}.calib_shared_axes"] = "per_tensor"
    return config.update(config.fully_quantized(), changes)


DELAYED = delayed(calibration.DelayedScaling(length=2))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(8, dot_general=AqtDotGeneral(DELAYED))(x), None


class Model(nn.Module):
    """A layer, and two of a scan."""

    lifted: str = "variable_axes"

    @nn.compact
    def __call__(self, x):
        x, _ = Layer(name="first")(x, None)
        axes = {"params": 0, "aqt": 0}
        kwargs = {}
        if self.lifted == "variable_axes":
            axes[OWG] = 0
        elif self.lifted == "variable_broadcast":
            kwargs = {"variable_broadcast": OWG}
        body = nn.scan(
            nn.remat(Layer),
            variable_axes=axes,
            split_rngs={"params": True},
            length=2,
            **kwargs,
        )
        return body(name="scan")(x, None)[0]


def train_state(model, learning_rate=0.03):
    variables = quick_jit(model.init)(jax.random.key(0), X)
    return TrainState.create(
        apply_fn=model.apply, params=variables, tx=optax.sgd(learning_rate)
    )


@jax.jit
def train_step(state, scale):
    def loss(variables):
        return scale * jnp.mean((state.apply_fn(variables, X) - Y) ** 2)

    value, gradients = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=gradients), value


def test_train_state_overwrites_them():
    """Under jit, grad, scan and remat; the range is that of the batches before."""
    model = Model()
    state = train_state(model)
    start = state.params[OWG]
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(start))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(start))
    highs, amax, losses = [], [], []
    for scale in (1.0, 8.0, 1.0, 1.0):
        state, value = train_step(state, scale)
        layer = state.params[OWG]["scan"]["Dense_0"][NAME]["drhs"].state
        highs.append(layer["high"].ravel())
        amax.append(layer["history"][:, 0].ravel())
        losses.append(value / scale)
    assert losses[-1] < 0.9 * losses[0]
    # Two layers, each with its own.
    np.testing.assert_array_equal(highs[0], amax[0])
    np.testing.assert_array_equal(highs[1], amax[0])
    np.testing.assert_array_equal(highs[2], np.maximum(amax[0], amax[1]))
    np.testing.assert_array_equal(highs[3], np.maximum(amax[1], amax[2]))
    assert (amax[1] > 2 * amax[0]).all() and amax[0][0] != amax[0][1]
    first = state.params[OWG]["first"]["Dense_0"][NAME]
    assert first["drhs"].batches == 4
    # The model's input has no gradient.
    assert first["dlhs"].batches == 0
    assert_served_equals_trained(model, state.params, X)
    np.testing.assert_array_equal(  # Not needed to evaluate.
        model.apply({"params": state.params["params"]}, X),
        model.apply(state.params, X),
    )


def test_converts_on_disk(tmp_path):
    model = nn.Dense(8, dot_general=AqtDotGeneral(DELAYED))
    variables = init(model, X)
    source = save(tmp_path / "float", variables, "msgpack")
    checkpoint.convert_checkpoint(source, tmp_path / "out", model, X)
    loaded = checkpoint.load_serving(tmp_path / "out", model)
    assert_same(loaded, convert(model, variables, X))


@pytest.mark.parametrize(
    "how",
    [
        calibration.MaxOverBatches(),
        calibration.MeanOverBatches(),
        calibration.MovingAverage(decay=0.5),
    ],
    ids=lambda how: type(how).__name__,
)
def test_statistics_over_batches(how):
    cfg = delayed(how)
    model = nn.Dense(8, dot_general=AqtDotGeneral(cfg))
    variables = init(model, X)

    @jax.jit
    def gradient(variables, g):
        return jax.vjp(lambda v: model.apply(v, X), variables)[1](g)[0]

    gs = [Y, 3 * Y, 2 * Y]
    for g in gs:
        found = gradient(variables, g)
        variables = {**variables, OWG: found[OWG]}
    x_scale = np.abs(X).max(1, keepdims=True) / 127.5  # It moves onto the gradient.
    largest = [np.abs(g * x_scale).max() for g in gs]
    wanted = {
        calibration.MaxOverBatches: np.max(largest),
        calibration.MeanOverBatches: np.mean(largest),
        calibration.MovingAverage: np.dot(largest, [0.125, 0.25, 0.5]) / 0.875,
    }[type(how)]
    state = variables[OWG][NAME]["drhs"]
    assert state.batches == 3
    found = how.range(None, (0, 1), cfg.drhs.lhs.grid, state)
    np.testing.assert_allclose(found.high, [[wanted]], rtol=1e-5)


def test_the_gradient_is_quantized_by_them():
    """A range that is too narrow clips: the gradient of a larger batch is too small."""
    cfg = config.update(
        delayed(calibration.DelayedScaling(length=2)),
        {
            "drhs.rhs": config.Tensor(),
            "fwd": config.DotGeneralRaw(),
            "dlhs": config.DotGeneralRaw(),
        },
    )
    model = nn.Dense(8, use_bias=False, dot_general=AqtDotGeneral(cfg))
    variables = init(model, X)

    @quick_jit
    def gradient(variables, g):
        return jax.vjp(lambda v: model.apply(v, X), variables)[1](g)[0]

    first = gradient(variables, Y)
    np.testing.assert_allclose(first["params"]["kernel"], X.T @ Y, atol=0.2)
    variables = {**variables, OWG: first[OWG]}
    second = gradient(variables, 4 * Y)
    bound = np.abs(Y).max()
    np.testing.assert_allclose(
        second["params"]["kernel"], X.T @ np.clip(4 * Y, -bound, bound), atol=0.2
    )


def test_a_sum_of_two_is_refused():
    """The steps of a scan that share statistics, and a layer that is called twice."""
    model = Model(lifted="variable_broadcast")
    state = train_state(model)
    state, _ = train_step(state, 1.0)
    summed = state.params[OWG]["scan"]["Dense_0"][NAME]["drhs"].uses
    assert summed == 2
    state, _ = train_step(state, 1.0)
    kernel = state.params["params"]["scan"]["Dense_0"]["kernel"]
    assert np.isnan(kernel).all()

    class Twice(nn.Module):
        name_of_calls: str | None = None

        @nn.compact
        def __call__(self, x):
            layer = nn.Dense(
                8, dot_general=AqtDotGeneral(DELAYED, name=self.name_of_calls)
            )
            return layer(layer(x))

    for name, match in ((None, "same axes"), ("both", "'both' twice, which would be")):
        with pytest.raises(ValueError, match=match):
            Twice(name).init(jax.random.key(0), X)


def test_a_sum_of_two_raises_outside_of_jit():
    model = nn.Dense(8, dot_general=AqtDotGeneral(DELAYED))
    variables = init(model, X)

    def loss(variables):
        return model.apply(variables, X).sum()

    summed = jax.tree.map(lambda leaf: 2 * leaf, jax.grad(loss)(variables)[OWG])
    with pytest.raises(ValueError, match=r"statistics of drhs.lhs are a sum or a"):
        jax.grad(loss)({**variables, OWG: summed})


def test_errors():
    with pytest.raises(ValueError, match="has no statistics .* '_overwrite_with_grad"):
        Model(lifted="").init(jax.random.key(0), X)
    model = nn.Dense(8, dot_general=AqtDotGeneral(DELAYED))
    variables = init(model, X)
    with pytest.raises(
        ValueError, match=r"drhs.lhs.calibration=Delayed.* was given no"
    ):
        jax.grad(lambda params: model.apply({"params": params}, X).sum())(
            variables["params"]
        )
    how = calibration.DelayedScaling()
    with pytest.raises(ValueError, match=r"dlhs.lhs.calib_shared_axes is None"):
        config.update(config.fully_quantized(), {"dlhs.lhs.calibration": how})


def dense_gradients(variables):
    model = nn.Dense(8, dot_general=AqtDotGeneral(DELAYED))
    return jax.grad(lambda v: (model.apply(v, X) ** 2).sum())(variables)


def dense_variables():
    model = nn.Dense(8, dot_general=AqtDotGeneral(DELAYED))
    return init(model, X)


@pytest.mark.parametrize("factor", [0.125, 3.0])
def test_a_multiple_of_them_is_refused(factor):
    """As loss scaling and averaging make one."""
    variables = dense_variables()
    statistics = dense_gradients(variables)[OWG]
    scaled = jax.tree.map(lambda leaf: factor * leaf, statistics)
    with pytest.raises(
        ValueError, match="of those of several contractions, devices or batches, or"
    ):
        dense_gradients({**variables, OWG: scaled})
    gradients = jax.jit(dense_gradients)({**variables, OWG: scaled})
    assert np.isnan(gradients["params"]["kernel"]).all()


def loss_of_rows(variables, x, y):
    model = nn.Dense(8, dot_general=AqtDotGeneral(DELAYED))
    return ((model.apply(variables, x) - y) ** 2).sum()


@jax.jit
def gradients_of_parts(variables, factors):
    """Of two halves of a batch, whose output gradients have these factors."""
    x, y = X.reshape(2, 2, 8), Y.reshape(2, 2, 8)

    def of_part(x, y, factor):
        return jax.grad(lambda v: factor * loss_of_rows(v, x, y))(variables)

    parts = jax.vmap(of_part, axis_name="device")(x, y, factors)
    return parts, {
        "mean": jax.vmap(lambda t: jax.lax.pmean(t, "d"), axis_name="d")(parts),
        "sum": jax.vmap(lambda t: jax.lax.psum(t, "d"), axis_name="d")(parts),
        "max": jax.vmap(lambda t: jax.lax.pmax(t, "d"), axis_name="d")(parts),
    }


def first_of(tree):
    return jax.tree.map(lambda leaf: leaf[0], tree)


def mean_of_two(parts):
    return jax.tree.map(lambda leaf: (leaf[0] + leaf[1]) / 2, parts)


def by_multi_steps(parts):
    steps = optax.MultiSteps(optax.identity(), every_k_schedule=2)
    state = steps.init(first_of(parts))
    for i in range(2):
        part = jax.tree.map(lambda leaf, i=i: leaf[i], parts)
        updates, state = steps.update(part, state)
    return updates


def moved_average(parts):
    return jax.tree.map(lambda leaf: 0.9 * leaf[0] + 0.1 * leaf[1], parts)


MERGED = {
    "pmean": lambda _, reduced: first_of(reduced["mean"]),
    "psum": lambda _, reduced: first_of(reduced["sum"]),
    "mean of microbatches": lambda parts, _: mean_of_two(parts),
    "MultiSteps": lambda parts, _: by_multi_steps(parts),
    "moving average": lambda parts, _: moved_average(parts),
}


@pytest.mark.parametrize("how", MERGED)
@pytest.mark.parametrize("factors", [(1000.0, 1.0), (1.0, 1.1), (0.0, 1.0)])
def test_what_is_averaged_or_summed_is_refused(how, factors):
    """Over devices, and over accumulated batches: their amax would be too small."""
    variables = dense_variables()
    parts, reduced = gradients_of_parts(variables, jnp.array(factors))
    merged = {**variables, OWG: MERGED[how](parts, reduced)[OWG]}
    with pytest.raises(ValueError, match="a sum or a mean of those of several"):
        dense_gradients(merged)
    gradients = jax.jit(dense_gradients)(merged)
    assert np.isnan(gradients["params"]["kernel"]).all()


def test_the_largest_values_are_those_of_the_whole_batch():
    """Of devices by `jax.lax.pmax`, of microbatches by a maximum."""
    variables = dense_variables()
    for factors in ((1.0, 1.0), (1.0, 8.0), (0.25, 0.5)):
        factors = jnp.array(factors)
        rows = jnp.repeat(factors, 2)[:, None]

        def whole(variables, rows=rows):
            model = nn.Dense(8, dot_general=AqtDotGeneral(DELAYED))
            return (rows * (model.apply(variables, X) - Y) ** 2).sum()

        wanted = jax.jit(jax.grad(whole))(variables)[OWG]
        parts, reduced = gradients_of_parts(variables, factors)
        largest = first_of(reduced["max"])[OWG]
        jax.tree.map(np.testing.assert_array_equal, largest, wanted)
        accumulated = jax.tree.map(lambda leaf: leaf.max(0), parts[OWG])
        jax.tree.map(np.testing.assert_array_equal, accumulated, wanted)
        variables = {**variables, OWG: largest}
    assert np.isfinite(dense_gradients(variables)["params"]["kernel"]).all()


def test_the_mean_of_equal_statistics_is_theirs():
    variables = dense_variables()
    found = dense_gradients(variables)[OWG]

    def mean(leaf):
        return jax.vmap(lambda x: jax.lax.pmean(x, "d"), axis_name="d")(
            jnp.broadcast_to(leaf, (7, *leaf.shape))
        )[0]

    averaged = dense_gradients({**variables, OWG: jax.tree.map(mean, found)})
    wanted = dense_gradients({**variables, OWG: found})
    for one, other in zip(
        *map(jax.tree.leaves, (averaged[OWG], wanted[OWG])), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_accumulated_gradients_of_a_train_state():
    """Each microbatch overwrites them: `optax.MultiSteps` sees the parameters alone."""
    model = nn.Dense(8, dot_general=AqtDotGeneral(DELAYED))
    state = TrainState.create(
        apply_fn=model.apply,
        params=dense_variables(),
        tx=optax.MultiSteps(optax.sgd(0.01), every_k_schedule=2),
    )
    kernels, amax = [state.params["params"]["kernel"]], []
    for scale in (1.0, 8.0, 1.0, 1.0):
        state, _ = train_step(state, scale)
        kernels.append(state.params["params"]["kernel"])
        amax.append(state.params[OWG][NAME]["drhs"].state["history"][0].item())
    assert (kernels[1] == kernels[0]).all() and (kernels[3] == kernels[2]).all()
    assert (kernels[2] != kernels[1]).any() and np.isfinite(kernels[4]).all()
    assert amax[1] == 8 * amax[0]
    assert state.params[OWG][NAME]["drhs"].batches == 4


def test_statistics_without_all_entries_are_refused():
    """As those of checkpoints that were written before there were roots."""
    variables = dense_variables()
    for entry in variables[OWG].values():
        entries = vars(entry["drhs"])
        entry["drhs"] = {k: v for k, v in entries.items() if k != "roots"}
    with pytest.raises(TypeError, match="drhs.lhs must be GradientStatistics, got dic"):
        dense_gradients(variables)


def test_statistics_that_were_cast_are_refused():
    cast = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), dense_variables())
    with pytest.raises(TypeError, match="are bfloat16, but have to be float32"):
        dense_gradients(cast)


@pytest.mark.parametrize(
    "how", [calibration.DelayedScaling(), calibration.MaxOverBatches()]
)
def test_statistics_of_another_calibration_are_refused(how):
    """A history of two batches, where the config has one of 16, or ranges."""
    model = nn.Dense(8, dot_general=AqtDotGeneral(delayed(how)))
    gradients = jax.grad(lambda v: model.apply(v, X).sum())
    with pytest.raises(ValueError, match=r"d.hs\.lhs\..* of another calibration"):
        jax.jit(gradients)(dense_variables())
