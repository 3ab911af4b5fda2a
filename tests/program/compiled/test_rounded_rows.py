"""Serving programs whose kernel rounds the rows: bits are those of the forms of XLA."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import calibration, config, numerics
from aqtlite.flax import AqtDotGeneral, calibrate, convert
from aqtlite.lowering.forms import integer_products, panel_products
from aqtlite.lowering.forms.integer_products import Instructions
from tests import common
from tests.flax.support import init

CFG, STATIC = config.fully_quantized(), config.static_int8()
OF_BYTES = [one for one in Instructions if not one.takes_int16]


def called(program):
    """The kernels that a program calls, and whether each rounds its rows."""
    text = program.compiled.as_text()
    lines = [one for one in text.splitlines() if " custom-call(" in one]
    return ["f32[" in one.split("operand_layout_constraints")[1] for one in lines]


def converted(model, x, cfg):
    """Serving variables of a model."""
    variables = init(model, x)
    if cfg == STATIC:
        variables = calibrate(model, variables, [x])
    return convert(model, variables, x)


def serving_program(model, x, cfg=CFG):
    """The program of a model that is converted, and what jax.jit gives."""
    serving = converted(model, x, cfg)
    program = aqtlite.compile_serving(model.apply, serving, x)
    return program, lambda x: jax.jit(model.apply)(serving, x)


def check(program, wanted, x, rounding):
    np.testing.assert_array_equal(program(x), wanted(x), strict=True)
    if panel_products.runs_here():
        assert called(program) == rounding


def check_function(function, params, x, rounding):
    """Checks the program of a function that is quantized and converted."""
    quantized = aqtlite.quantize_function(function, CFG, params=0)
    serve, serving = aqtlite.convert_function(quantized, params, x)
    program = aqtlite.compile_serving(serve, serving, x)
    check(program, lambda x: jax.jit(serve)(serving, x), x, rounding)


def mlp(cfg, width=64):
    dense = [nn.Dense(width, dot_general=AqtDotGeneral(cfg)) for _ in range(2)]
    return nn.Sequential([dense[0], nn.relu, dense[1]])


def take(instructions, monkeypatch):
    """Has kernels take instructions, if this processor has them."""
    widest = integer_products.of_processor()
    if widest is not None and instructions <= widest:
        monkeypatch.setattr(integer_products, "of_processor", lambda: instructions)


@pytest.fixture(params=OF_BYTES, ids=lambda one: one.name)
def instructions(request, monkeypatch):
    """Each set of instructions in turn."""
    take(request.param, monkeypatch)


PRESETS = {
    "int8": CFG,
    "int4": config.fully_quantized(fwd_bits=4, bwd_bits=None),
    "w4a8": config.w4a8(),
    "static": STATIC,
    "the largest value on the grid": config.update(
        CFG, {"fwd.lhs.numerics": numerics.IntSymmetric(bits=8, preserve_max_val=True)}
    ),
    "6 bits": config.update(CFG, {"fwd.lhs.numerics": numerics.IntSymmetric(bits=6)}),
}


@pytest.mark.parametrize("cfg", PRESETS.values(), ids=PRESETS)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 64), "float32"), ((3, 1, 96), "bfloat16"), ((70, 32), "float16")],
    ids=str,
)
def test_rows_of_any_grid_and_dtype(cfg, shape, dtype, monkeypatch):
    x, model = common.normal(shape).astype(dtype), mlp(cfg)
    serving = converted(model, x, cfg)
    wanted = jax.jit(model.apply)(serving, x)
    for instructions in OF_BYTES:
        with monkeypatch.context() as patch:
            take(instructions, patch)
            program = aqtlite.compile_serving(model.apply, serving, x)
        check(program, lambda x: wanted, x, [True, True])


@pytest.mark.parametrize("cfg", [CFG, STATIC], ids=["own", "given"])
def test_rows_of_extreme_values(cfg, instructions):
    x = np.array(common.normal((16, 64)), np.float32)
    x[0], x[1, 3], x[2, 0], x[3, 5], x[4, -1] = 0, np.nan, np.nan, np.inf, -np.inf
    x[5], x[6] = 1e-40, np.linspace(-3e-38, 3e-38, 64)
    x[7], x[8, 1:] = np.linspace(-3.4e38, 3.4e38, 64), 0
    x[9], x[10] = np.finfo(np.float32).tiny * 127, -np.finfo(np.float32).tiny
    model = mlp(cfg)
    program, wanted = serving_program(model, common.normal((16, 64)), cfg)
    check(program, wanted, jnp.asarray(x), [True, True])


class Heads(nn.Module):
    """Layers that read one array."""

    cfgs: tuple[config.DotGeneral, ...]

    @nn.compact
    def __call__(self, x):
        return [nn.Dense(64, dot_general=AqtDotGeneral(cfg))(x) for cfg in self.cfgs]


FINDING_NAN = config.update(STATIC, {"fwd.lhs.find_nan": True})


@pytest.mark.parametrize("is_converted", [True, False])
@pytest.mark.parametrize(
    "cfgs",
    [
        pytest.param((CFG,) * 3, id="own scales"),
        pytest.param((STATIC,) * 3, id="given scales"),
        pytest.param((STATIC, FINDING_NAN), id="the second reads all elements"),
        pytest.param((FINDING_NAN, STATIC), id="the first reads all elements"),
        pytest.param((CFG, STATIC), id="own and given"),
    ],
)
def test_products_of_one_array(cfgs, is_converted):
    model, x = Heads(cfgs), common.normal((4, 64)).at[1, 3].set(jnp.nan)
    x = x.at[2, -1].set(jnp.inf)
    ones = jnp.ones_like(x)
    variables = init(model, ones)
    if STATIC in cfgs:
        variables = calibrate(model, variables, [ones])
    if is_converted:
        variables = convert(model, variables, ones)
    program = aqtlite.compile_serving(model.apply, variables, x)
    wanted = jax.jit(model.apply)(variables, x)
    for one, other in zip(program(x), wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    if panel_products.runs_here():
        assert called(program) == [True] * len(cfgs)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_scales_whose_reciprocals_are_subnormal(bits):
    grids = {"lhs": bits, "rhs": 4}
    cfg = config.update(
        CFG,
        {
            f"fwd.{side}.numerics": numerics.IntSymmetric(bits=n)
            for side, n in grids.items()
        },
    )
    model, x = mlp(cfg), jnp.linspace(-3.3e38, 3.3e38, 64)[None]
    variables = jax.tree.map(lambda p: p * 1e-6, init(model, x))
    serving = convert(model, variables, x)
    program = aqtlite.compile_serving(model.apply, serving, x)
    wanted = jax.jit(model.apply)(serving, x)
    assert jnp.abs(wanted).max() > 0
    check(program, lambda x: wanted, x, [bits > 3] * 2)


@pytest.mark.parametrize("cfg", [CFG, STATIC], ids=["own", "given"])
def test_float64_is_left_to_xla(cfg):
    with jax.enable_x64(True):
        x = jnp.asarray(common.normal((4, 64)), "float64").at[0, 0].set(1e39)
        model = nn.Dense(32, dtype="float64", dot_general=AqtDotGeneral(cfg))
        ones = jnp.ones_like(x)
        variables = init(model, ones)
        if cfg == STATIC:
            variables = calibrate(model, variables, [ones])
        serving = convert(model, variables, ones)
        program = aqtlite.compile_serving(model.apply, serving, x)
        wanted = jax.jit(model.apply)(serving, x)
        check(program, lambda x: wanted, x, [False])


def test_statistics_that_are_not_fixed(instructions):
    """The range of the batches stands beside the scale."""
    x, model = common.normal((3, 64)), mlp(STATIC)
    variables = calibrate(model, init(model, x), [x])
    program = aqtlite.compile_serving(model.apply, variables, x)
    wanted = jax.jit(model.apply)(variables, x)
    np.testing.assert_array_equal(program(x), wanted)


def test_ties_are_rounded_to_even(instructions):
    """Of rows whose scale is a power of two, many elements lie between two integers."""
    x = np.random.default_rng(0).integers(-255, 256, (32, 64)) / 2
    x[:, 0] = 127.5
    program, wanted = serving_program(mlp(CFG), jnp.asarray(x, jnp.float32))
    check(program, wanted, jnp.asarray(x, jnp.float32), [True, True])


def test_heads_and_their_width_are_a_row():
    model = nn.DenseGeneral(32, axis=(-2, -1), dot_general=AqtDotGeneral(CFG))
    x = common.normal((2, 3, 4, 16))
    check(*serving_program(model, x), x, [True])


def test_weights_on_the_left_and_steps_of_a_scan():
    def function(w, x):
        def step(x, w):
            return jnp.tanh(w.T @ x), None

        return jax.lax.scan(step, x, w)[0]

    w, x = common.normal((3, 64, 64)), common.normal((64,))
    check_function(function, w, x, [True])


@pytest.mark.parametrize("steps", [1, 3, 4])
def test_one_weight_of_all_steps_beside_one_of_each(steps):
    def function(params, x):
        def step(x, w):
            return jnp.tanh(x @ w) + x @ params["all"], None

        return jax.lax.scan(step, x, params["each"])[0]

    params = {"all": common.normal((64, 64)), "each": common.normal((steps, 64, 64))}
    x = common.normal((2, 64))
    check_function(function, params, x, [True, True])


def test_a_function_that_is_called_twice():
    @jax.jit
    def layer(w, x):
        return jnp.tanh(x @ w)

    def function(params, x):
        return layer(params[1], layer(params[0], x))

    params, x = common.normal((2, 64, 64)), common.normal((2, 64))
    check_function(function, [*params], x, [True, True])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Even(numerics.IntSymmetric):
    """Even integers."""

    def round(self, scaled, noise):
        return super().round(scaled / 2, noise) * jnp.int8(2)


OTHERS = {
    "a power of two": {"fwd.lhs.po2_scale": True},
    "clipped": {"fwd.lhs.calibration": calibration.AbsMax(clipping_scale=0.9)},
    "of all rows": {"fwd.lhs.calib_shared_axes": (0, 1)},
    "halves": {"fwd.lhs.numerics": numerics.IntSymmetric(bits=4, preserve_zero=False)},
    "a grid of its own": {"fwd.lhs.numerics": Even(bits=6)},
}


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
def test_other_scales_and_grids_are_left_to_xla(changes):
    x = common.normal((2, 64))
    model = mlp(config.update(CFG, changes))
    check(*serving_program(model, x), x, [False, False])


def test_many_rows_are_left_to_xla():
    x = common.normal((600, 64))
    program, wanted = serving_program(mlp(CFG), x)
    np.testing.assert_array_equal(program(x), wanted(x))
    assert not any(called(program))
