"""Every grid of the package: JSON, the table of a config, training and serving."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from aqtlite import checkpoint, config, numerics
from aqtlite.calibration import MinMax
from aqtlite.flax import convert
from aqtlite.testing import assert_served_equals_trained
from tests.common import normal
from tests.extensions import models

GRIDS = {
    "uint8": numerics.IntAffine(bits=8),
    "int8": numerics.IntAffine(bits=8, signed=True, narrow_range=True),
    "uint4": numerics.IntAffine(bits=4),
    "int3": numerics.IntAffine(bits=3, signed=True),
    "fp8_e4m3": numerics.Float(exponent_bits=4, mantissa_bits=3),
    "fp6_e3m2": numerics.Float.from_dtype("float6_e3m2fn", clip_gradient=True),
    "fp4_e2m1": numerics.Float(exponent_bits=2, mantissa_bits=1),
    "fp8_e4m3b11_fnuz": numerics.Float.from_dtype("float8_e4m3b11fnuz"),
    "fp13_e5m7": numerics.Float(exponent_bits=5, mantissa_bits=7),
    "nf4": numerics.NormalFloat(),
    "int12": numerics.IntSymmetric(bits=12),
    "int16": numerics.IntSymmetric(bits=16, preserve_max_val=True),
}
CELLS = {
    "uint8": "uint8 0..255",
    "int8": "int8 -127..127",
    "uint4": "uint4 0..15",
    "int3": "int3 -4..3",
    "fp8_e4m3": "fp8_e4m3 ±448",
    "fp6_e3m2": "fp6_e3m2 ±28",
    "fp4_e2m1": "fp4_e2m1 ±6",
    "fp8_e4m3b11_fnuz": "fp8_e4m3b11_fnuz ±30",
    "fp13_e5m7": "fp13_e5m7 ±65280",
    "nf4": "nf4 ±1",
    "int12": "int12 ±2047.5",
    "int16": "int16 ±32767",
}
X = jax.nn.relu(normal((8, 12)))
Y = jnp.tanh(X @ normal((12, 3), 1))
each = pytest.mark.parametrize("name", GRIDS)


def make_config(name):
    """The grid for both operands of the forward contraction, int8 gradients."""
    grid = GRIDS[name]
    has_zero_point = grid.zero_point_range is not None
    how = config.Tensor(numerics=grid)
    if has_zero_point:
        how = dataclasses.replace(how, calibration=MinMax())
    return models.config_of(how, how)


def train(name, steps=40):
    """Returns the model, its variables, and its losses."""
    model = models.Mlp(make_config(name), width=16)
    variables = model.init(jax.random.key(0), X)
    optimizer = optax.adam(2e-2)

    def step(carry, _):
        variables, state = carry
        loss, grads = jax.value_and_grad(
            lambda variables: ((model.apply(variables, X) - Y) ** 2).mean()
        )(variables)
        updates, state = optimizer.update(grads, state)
        return (optax.apply_updates(variables, updates), state), loss

    start = variables, optimizer.init(variables)
    (variables, _), losses = jax.jit(lambda c: jax.lax.scan(step, c, length=steps))(
        start
    )
    return model, variables, losses


# One grid of each kind and storage dtype.
@pytest.fixture(scope="module", params=sorted({*GRIDS} - {"fp6_e3m2", "int12"}))
def trained(request):
    return request.param, *train(request.param)


def test_trains(trained):
    _, _, _, losses = trained
    assert losses[-1] < 0.5 * losses[0]


def test_is_served_bit_for_bit_and_from_disk(trained, tmp_path):
    name, model, variables, _ = trained
    serving = convert(model, variables, X)
    q = serving["aqt"]["Dense_0"]["kernel"]["rhs"]
    assert q.numerics == GRIDS[name]
    assert q.qvalue.dtype == GRIDS[name].storage_dtype
    for x in (X, X[:1]):
        assert_served_equals_trained(model, variables, x, serving=serving)
    source, target = tmp_path / "source", tmp_path / "target"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(source, variables)
    checkpoint.convert_checkpoint(
        source, target, model, jax.ShapeDtypeStruct(X.shape, X.dtype)
    )
    loaded = checkpoint.load_serving(target, model=model)
    np.testing.assert_array_equal(
        jax.jit(model.apply)(loaded, X), jax.jit(model.apply)(variables, X)
    )


@each
def test_json(name):
    cfg = make_config(name)
    assert config.from_json(config.to_json(cfg)) == cfg


@each
def test_describe(name):
    lines = config.describe(make_config(name)).splitlines()
    assert any(line.startswith("fwd.rhs") and CELLS[name] in line for line in lines)
    assert any(line.startswith("dlhs.rhs") and "fwd's" in line for line in lines)
