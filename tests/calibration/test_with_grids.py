"""Calibrations with grids: every pair that fits contracts, and differentiates."""

import dataclasses

import jax
import numpy as np
import pytest

import aqtlite
from aqtlite import calibration, config, numerics, statistics
from tests.common import MATMUL, normal, quick_jit

pytestmark = pytest.mark.code("quick")

SYMMETRIC = {
    "fp8": numerics.Float(exponent_bits=4, mantissa_bits=3),
    "nf4": numerics.NormalFloat(clip_gradient=True),
}
AFFINE = {
    "uint8": numerics.IntAffine(bits=8, clip_gradient=True),
    "int4": numerics.IntAffine(bits=4, signed=True, stochastic_rounding=True),
}
ANY = (
    calibration.Percentile(97),
    calibration.MseSearch((1.0, 0.8)),
    calibration.SnrSearch((1.0, 0.8)),
)
CALIBRATIONS = {
    "symmetric": (calibration.AbsMean(clipping_scale=4), calibration.RMS(3), *ANY),
    "affine": (calibration.MinMax(), *ANY),
}
PAIRS = [
    *((grid, how) for grid in SYMMETRIC.values() for how in CALIBRATIONS["symmetric"]),
    *((grid, how) for grid in AFFINE.values() for how in CALIBRATIONS["affine"]),
]
REUSED = config.DotGeneralRaw(rhs=config.Tensor(use_fwd_quant=True))
CONFIGS = [
    config.DotGeneral(fwd=config.DotGeneralRaw(lhs=one, rhs=one), dlhs=REUSED)
    for one in (config.Tensor(numerics=g, calibration=c) for g, c in PAIRS)
]
NAMES = [f"{grid.name}-{type(how).__name__}" for grid, how in PAIRS]
X, W, G = normal((6, 32)) + 0.1, normal((32, 5), 1), normal((6, 5), 2)


@quick_jit
def outputs(x, w, g):
    """Of all pairs, in one program."""

    def one(cfg):
        dot = aqtlite.make_dot_general(cfg)
        out, vjp = jax.vjp(lambda x, w: dot(x, w, MATMUL), x, w)
        return out, *vjp(g)

    return [one(cfg) for cfg in CONFIGS]


@pytest.fixture(scope="module")
def results():
    return dict(zip(NAMES, outputs(X, W, G), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_contracts_and_differentiates(results, name):
    for got, wanted in zip(results[name], (X @ W, G @ W.T, X.T @ G), strict=True):
        correlation = np.corrcoef(np.ravel(got), np.ravel(wanted))[0, 1]
        assert correlation > (0.9 if "4-" in name else 0.97)


@pytest.mark.parametrize(("cfg", "pair"), zip(CONFIGS, PAIRS, strict=True), ids=NAMES)
def test_json_and_describe(cfg, pair):
    assert config.from_json(config.to_json(cfg)) == cfg
    grid, how = pair
    table = config.describe(cfg)
    assert grid.name in table and type(how).__name__ in table


@pytest.mark.parametrize(
    ("grid", "how", "match"),
    [
        (AFFINE["uint8"], calibration.RMS(3), "has a zero point, but its calibration"),
        (AFFINE["uint8"], calibration.AbsMax(), "has a zero point, but its"),
        (SYMMETRIC["fp8"], calibration.MinMax(), "has no zero point, but its calib"),
        (SYMMETRIC["nf4"], calibration.MinMax(), "has no zero point, but its calib"),
    ],
)
def test_pairs_that_do_not_fit(grid, how, match):
    cfg = dataclasses.replace(config.Tensor(numerics=grid), calibration=how)
    with pytest.raises(ValueError, match=match):
        aqtlite.quantize(X, cfg, 1)


@pytest.mark.parametrize(
    "wrap",
    [calibration.MaxOverBatches, calibration.MovingAverage, calibration.Periodic],
)
@pytest.mark.parametrize(
    ("grid", "of", "match"),
    [
        (AFFINE["uint8"], calibration.AbsMax(), "of=AbsMax.* has a zero point, but"),
        (SYMMETRIC["fp8"], calibration.MinMax(), "of=MinMax.* has no zero point, but"),
    ],
)
def test_statistics_of_pairs_that_do_not_fit(wrap, grid, of, match):
    lhs = config.Tensor(
        numerics=grid, calibration=wrap(of=of), calib_shared_axes="per_tensor"
    )
    cfg = config.DotGeneral(fwd=config.DotGeneralRaw(lhs=lhs))
    states = statistics.init_states(cfg, X, W, MATMUL)
    states = statistics.update_states(cfg, states, X, W, MATMUL)
    with pytest.raises(ValueError, match=rf"^fwd.lhs.numerics and .*{match}"):
        aqtlite.make_dot_general(cfg)(X, W, MATMUL, states=states)
