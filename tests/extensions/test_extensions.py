"""Grids and calibrations of a user's own, from training to a served checkpoint."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import aqtlite
from aqtlite import checkpoint, cli, config
from aqtlite.flax import AqtDotGeneral, convert
from aqtlite.testing import assert_served_equals_trained
from tests.common import mostly_slow, normal, quick_jit
from tests.extensions import affine, models, running, ternary
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

X = jax.nn.relu(normal((16, 12)))
Y = jnp.tanh(X @ normal((12, 3), 1))
each = pytest.mark.parametrize("name", mostly_slow(models.CONFIGS, "running"))


@functools.cache
def train(name, steps=60):
    """Returns the model, its variables, and its first and last loss."""
    model = models.Mlp(models.CONFIGS[name])
    variables = init(model, X)
    optimizer = optax.adam(1e-2)
    state = quick_jit(optimizer.init)(variables["params"])

    @quick_jit
    def step(variables, state):
        def loss(params):
            out, changed = model.apply(
                {**variables, "params": params}, X, mutable=["aqt_stats"]
            )
            return ((out - Y) ** 2).mean(), changed

        (value, changed), grads = jax.value_and_grad(loss, has_aux=True)(
            variables["params"]
        )
        updates, state = optimizer.update(grads, state)
        params = optax.apply_updates(variables["params"], updates)
        return {**variables, **changed, "params": params}, state, value

    losses = []
    for _ in range(steps):
        variables, state, value = step(variables, state)
        losses.append(float(value))
    return model, variables, losses


@each
def test_trains(name):
    _, _, losses = train(name)
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.code("users")
@each
def test_is_served_bit_for_bit(name):
    model, variables, _ = train(name)
    serving = convert(model, variables, X)
    for x in (X, X[:1], 2 * X):
        assert_served_equals_trained(model, variables, x, serving=serving)
    q = serving["aqt"]["Dense_0"]["kernel"]["rhs"]
    assert q.numerics == models.CONFIGS[name].fwd.rhs.numerics
    assert (q.zero_point is not None) == (name == "affine")


@each
def test_json(name):
    cfg = models.CONFIGS[name]
    assert config.from_json(config.to_json(cfg)) == cfg


@pytest.mark.parametrize(
    ("name", "row", "words"),
    [
        ("ternary", "fwd.rhs", ["ternary", "±1", "AbsMax"]),
        ("affine", "fwd.lhs", ["uint8", "0..255", "OwnMinMax"]),
        ("running", "fwd.lhs", ["int8", "RunningAbsMax", "per-tensor"]),
    ],
)
def test_describe(name, row, words):
    table = config.describe(models.CONFIGS[name])
    line = next(line for line in table.splitlines() if line.startswith(row))
    assert all(word in line for word in words)


def test_statistics_are_of_all_batches():
    _, variables, _ = train("running")
    (entry,) = variables["aqt_stats"]["Dense_0"].values()
    assert int(entry["lhs"].batches) == 60
    np.testing.assert_array_equal(entry["lhs"].state["largest"], [[X.max()]])


def test_statistics_are_read_in_serving():
    """No reduction over the activations is left in the served program."""
    model, variables, _ = train("running")
    serving = convert(model, variables, X)
    apply = jax.jit(model.apply)
    one, both = apply(serving, X[:1]), apply(serving, jnp.stack([X[0], 9 * X[0]]))
    np.testing.assert_array_equal(one[0], both[0])


def test_before_statistics():
    model, _ = models.make_running()
    variables = init(model, X)
    with pytest.raises(ValueError, match="have seen no batch: gather some with"):
        convert(model, variables, X)
    with pytest.raises(ValueError, match="has no statistics yet"):
        model.apply(variables, X)
    with pytest.raises(ValueError, match="no statistics 'dot_general_ab_bc' in the"):
        model.apply({"params": variables["params"]}, X)


def test_ternary_weights_are_what_they_say():
    q = aqtlite.quantize(jnp.array([[4.0, -1.0, 0.5, -3.0]]), ternary.TENSOR, 1)
    assert q.qvalue.tolist() == [[2, 1, 1, 0]]
    assert q.dequant().tolist() == [[4.0, 0.0, 0.0, -4.0]]


def test_classes_are_registered_by_name():
    assert config.register(affine.OwnMinMax) is affine.OwnMinMax
    assert config.register(running.RunningAbsMax) is running.RunningAbsMax
    impostor = type("OwnMinMax", (affine.OwnMinMax,), {"__module__": "elsewhere"})
    with pytest.raises(
        ValueError, match="a class named 'OwnMinMax' is registered already"
    ):
        config.register(impostor)
    with pytest.raises(TypeError, match="subclass of numerics.Numerics, calibration"):
        config.register(int)


@each
def test_converts_on_disk_and_loads(name, tmp_path, capsys):
    model, variables, _ = train(name)
    source, target = tmp_path / "source", tmp_path / "target"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(source, variables)
    factory = f"tests.extensions.models:make_{name}"
    assert cli.main(["convert", str(source), str(target), "--model", factory]) == 0
    assert models.CONFIGS[name].fwd.rhs.numerics.name in capsys.readouterr().out
    loaded = checkpoint.load_serving(target, model=model)
    served = jax.jit(model.apply)(loaded, X)
    np.testing.assert_array_equal(served, jax.jit(model.apply)(variables, X))
    wanted = convert(model, variables, X)
    assert jax.tree.structure(loaded) == jax.tree.structure(wanted)


def test_statistics_of_no_batch_are_not_converted(tmp_path, capsys):
    model, _ = models.make_running()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "source", init(model, X))
    paths = [str(tmp_path / name) for name in ("source", "target")]
    factory = "tests.extensions.models:make_running"
    assert cli.main(["convert", *paths, "--model", factory]) == 2
    assert "the statistics of activations have seen no batch" in capsys.readouterr().err


def test_statistics_that_are_closed_over():
    model, variables, _ = train("running")
    out = jax.jit(model.apply)(variables, X)
    closed_over = jax.jit(lambda x: model.apply(variables, x))(X)
    np.testing.assert_allclose(closed_over, out, rtol=1e-5, atol=1e-6)
    shapes = jax.eval_shape(lambda v: convert(model, v, X), variables)
    assert jax.tree.structure(shapes) == jax.tree.structure(
        convert(model, variables, X)
    )


class Twice(nn.Module):
    name_of: str | None

    @nn.compact
    def __call__(self, x):
        dot_general = AqtDotGeneral(models.CONFIGS["running"], name=self.name_of)
        dense = nn.Dense(12, dot_general=dot_general)
        return dense(dense(x))


def test_a_shared_layer_needs_a_name():
    with pytest.raises(ValueError, match="name that of a layer that is called twice"):
        Twice(None).init(jax.random.key(0), X)
    variables = jax.eval_shape(Twice("shared").init, jax.random.key(0), X)
    assert set(variables["aqt_stats"]["Dense_0"]) == {"shared"}
