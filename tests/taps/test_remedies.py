"""Remedies of `aqtlite.diagnose`, pasted: they run, and improve what they are for."""

import itertools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import Rule, calibration, config, numerics
from aqtlite.flax import calibrate_in_float, quantize_model
from tests.common import mostly_slow, normal

pytestmark = pytest.mark.code("quick")

NAMES = {
    "aqtlite": aqtlite,
    "calibration": calibration,
    "config": config,
    "numerics": numerics,
}
X = normal((32, 64))
LOUD_CHANNEL = jnp.ones(64).at[7].set(3000.0)
LOUD_ROW = jnp.ones((32, 1)).at[5].set(3000.0)
PRESETS = {
    "fully_quantized": config.fully_quantized(),
    "four_bits": config.fully_quantized(fwd_bits=4, bwd_bits=4),
    "two_bits": config.fully_quantized(fwd_bits=2, bwd_bits=2),
    "per_tensor": config.update(
        config.qat(8), {"fwd.*.calib_shared_axes": "per_tensor"}
    ),
    "local_aqt": config.update(
        config.fully_quantized(bwd_bits=4),
        {
            f"{one}.local_aqt": config.LocalAqt(contraction_axis_shard_count=2)
            for one in ("dlhs", "drhs")
        },
    ),
    "weight_only": config.weight_only(3),
    "gptq": config.gptq(2, 64),
    "w4a8": config.w4a8(),
    "static_int8": config.static_int8(),
    "percentile": config.static_int8(calibration.PercentileOverBatches(90.0)),
    "smoothquant": config.smoothquant(),
    "lsq8": config.lsq(8),
    "lsq2": config.lsq(2),
    "lsq_weight_only": config.lsq_weight_only(2),
    "fp8": config.fp8(),
    "fp8_per_tensor": config.fp8(per_tensor=True),
    "fp8_delayed": config.fp8(delayed=True),
    "block_fp8": config.block_fp8(size=64),
    "mxfp4": config.mxfp4(),
    "nvfp4": config.nvfp4(),
    "mxint8": config.mxint8(),
}


class Model(nn.Module):
    """A layer for each kind of trouble, beside each other."""

    @nn.compact
    def __call__(self, x):
        return [
            nn.Dense(64, name="plain")(x),
            nn.Dense(64, name="channel")(x * LOUD_CHANNEL),
            nn.Dense(64, name="row")(x * LOUD_ROW),
            nn.Dense(64, name="heavy")(x**11),
            nn.Dense(64, name="kernel")(x),
            nn.Dense(64, name="kernel_channel")(x),
            nn.Conv(16, (3,), name="conv")((x * LOUD_CHANNEL).reshape(4, 8, 64)),
            jnp.einsum("bk,ck->bc", x * LOUD_CHANNEL, jnp.roll(x, 3, 0)),
        ]


class Odd(nn.Module):
    """Contractions of a prime number of channels: no blocks, no Hadamard matrix."""

    @nn.compact
    def __call__(self, x):
        x = x[:, :37]
        return [
            nn.Dense(41, name="channel")(x * LOUD_CHANNEL[:37]),
            nn.Dense(41, name="row")(x * LOUD_ROW),
            nn.Dense(41, name="kernel")(x),
        ]


LOUD = {
    "kernel": lambda w: w.at[3].mul(3000.0),
    "kernel_channel": lambda w: w.at[:, 3].mul(3000.0),
}
"""Changes of kernels, by layer."""


def tapped(model, rules, batch):
    """Taps of a training step, after statistics of a batch."""
    quantized = quantize_model(model, rules)
    variables = quantized.init(jax.random.key(0), X)
    params = {
        layer: {
            name: LOUD.get(layer, lambda w: w)(x) if name == "kernel" else x
            for name, x in fields.items()
        }
        for layer, fields in variables["params"].items()
    }
    variables = {**variables, "params": params}
    if "aqt_stats" in variables:
        variables = calibrate_in_float(quantized, variables, [batch])
    fixed = {"aqt_stats": variables.pop("aqt_stats", {})}

    def loss(variables, fixed, x):
        out = quantized.apply({**variables, **fixed}, x)
        return sum(jnp.square(y - 1).mean() for y in out)

    return aqtlite.tap(jax.grad(loss))(variables, fixed, X)[1]


def operand_of(taps, finding):
    """The numbers of the operand that a finding names; None if it is in float."""
    place = finding.path, finding.operand
    found = [one for one in taps.operands if (one.path, one.operand) == place]
    return found[0] if found else None


def is_mended(finding, before, after):
    if after is None:  # In float.
        return True
    if "rounded to zero" in finding.what:
        return after.flushed < before.flushed
    return after.snr > np.nan_to_num(before.snr)  # NaN: nothing is left.


def pasted(finding, text, cfg):
    """The rule that a remedy of a finding makes."""
    made = eval(text, {**NAMES, "cfg": cfg})
    path = re.escape(finding.path)
    return made if isinstance(made, Rule) else Rule(path=path, cfg=made)


def check(model, cfg, batch=X):
    """Pastes all remedies, in rounds of one for each contraction."""
    others = Rule(cfg=cfg, is_required=False)
    before = tapped(model, [others], batch)
    remedies = {}
    for one in aqtlite.diagnose(before):
        for text in one.remedy.split(", or "):
            remedies.setdefault(one.path, []).append((one, text))
    for round_ in itertools.zip_longest(*remedies.values()):
        these = list(filter(None, round_))
        rules = [pasted(one, text, cfg) for one, text in these]
        after = tapped(model, [*rules, others], batch)
        for one, text in these:
            old, new = operand_of(before, one), operand_of(after, one)
            assert one.operand == "" or is_mended(one, old, new), (one, text)
    return [one for several in remedies.values() for one, _ in several]


@pytest.mark.parametrize("name", mostly_slow(PRESETS, "static_int8"))
def test_a_remedy_runs_and_mends(name):
    assert check(Model(), PRESETS[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("static_int8", 1 / 8),
        ("static_int8", 100.0),
        ("percentile", 100.0),
        ("fp8_delayed", 1 / 8),
    ],
)
def test_statistics_of_other_batches(name, factor):
    found = check(Model(), PRESETS[name], factor * X)
    what = "saturated" if factor < 1 else "most of the grid is not used"
    assert {one.path for one in found if what in one.what} >= {"Model/plain"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["fully_quantized", "four_bits", "static_int8", "weight_only", "lsq8"]
)
def test_a_prime_number_of_channels(name):
    assert check(Odd(), PRESETS[name])


@pytest.mark.parametrize(
    "name", mostly_slow(["fully_quantized", "w4a8", "mxfp4", "nvfp4"], "nvfp4")
)
def test_no_remedy_makes_the_result_worse(name):
    """In decibels of the result, though an outlier's neighbours lose less than before.

    A rotation spreads an outlier over channels whose weights have few bits.
    """
    x = X.at[:, 7].mul(300.0)

    def decibels(cfg):
        dense = quantize_model(nn.Dense(64, name="dense"), cfg)
        variables = dense.init(jax.random.key(0), x)
        if "aqt_stats" in variables:
            variables = calibrate_in_float(dense, variables, [x])
        return aqtlite.tap_against_float(dense.apply)(variables, x)[1]

    cfg = PRESETS[name]
    before = decibels(cfg)
    found = [one for one in aqtlite.diagnose(before) if one.operand == "fwd.lhs"]
    assert found
    for one in found:
        for text in one.remedy.split(", or "):
            made = eval(text, {**NAMES, "cfg": cfg})
            after = decibels(made.cfg if isinstance(made, Rule) else made)
            assert after.results[0].snr > before.results[0].snr - 0.5, text
