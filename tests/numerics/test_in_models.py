"""Every grid of the package: JSON, the table of a config, training and serving."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest

from aqtlite import checkpoint, config, numerics
from aqtlite.calibration import MinMax
from aqtlite.flax import convert
from aqtlite.testing import assert_served_equals_trained
from tests.checkpoint.support import assert_same
from tests.common import normal, quick_jit
from tests.extensions import models

pytestmark = pytest.mark.code("quick")

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


# One grid of each kind and storage dtype.
NAMES = sorted({*GRIDS} - {"fp6_e3m2", "int12"})
MODEL = models.Heads(tuple((name, make_config(name)) for name in NAMES))


@pytest.fixture(scope="module")
def trained():
    """The variables, and the losses of each head, whose parameters are its own."""
    optimizer = optax.adam(2e-2)

    def losses_of(variables):
        outputs = MODEL.apply(variables, X)
        losses = {name: ((out - Y) ** 2).mean() for name, out in outputs.items()}
        return sum(losses.values()), losses

    def step(carry, _):
        variables, state = carry
        grads, losses = jax.grad(losses_of, has_aux=True)(variables)
        updates, state = optimizer.update(grads, state)
        return (optax.apply_updates(variables, updates), state), losses

    @quick_jit
    def train(variables):
        start = variables, optimizer.init(variables)
        return jax.lax.scan(step, start, length=40)

    (variables, _), losses = train(quick_jit(MODEL.init)(jax.random.key(0), X))
    return variables, losses


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_trains(trained, name):
    variables, losses = trained
    assert losses[name][-1] < 0.5 * losses[name][0]
    assert jnp.all(variables["params"][name]["gain"] != 1)


@pytest.mark.slow
def test_is_served_bit_for_bit_and_from_disk(trained, tmp_path):
    variables, _ = trained
    serving = convert(MODEL, variables, X)
    for name in NAMES:
        q = serving["aqt"][name]["Dense_0"]["kernel"]["rhs"]
        assert q.numerics == GRIDS[name]
        is_of_four_bits = name in ("uint4", "nf4", "fp4_e2m1")
        stored = "int4" if is_of_four_bits else GRIDS[name].storage_dtype
        assert q.qvalue.dtype == stored
    for x in (X, X[:1]):
        assert_served_equals_trained(MODEL, variables, x, serving=serving)
    source, target = tmp_path / "source", tmp_path / "target"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(source, variables)
    checkpoint.convert_checkpoint(
        source, target, MODEL, jax.ShapeDtypeStruct(X.shape, X.dtype)
    )
    assert_same(checkpoint.load_serving(target, model=MODEL), serving)


@each
def test_json(name):
    cfg = make_config(name)
    assert config.from_json(config.to_json(cfg)) == cfg


@each
def test_describe(name):
    lines = config.describe(make_config(name)).splitlines()
    assert any(line.startswith("fwd.rhs") and CELLS[name] in line for line in lines)
    assert any(line.startswith("dlhs.rhs") and "fwd's" in line for line in lines)
