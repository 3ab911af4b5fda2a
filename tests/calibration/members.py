"""Configs of each calibration by the values of an array, for tests of what all do."""

from aqtlite import calibration, config, numerics
from tests.extensions import affine


def _symmetric(member):
    grid = numerics.IntSymmetric(bits=8, preserve_max_val=True)
    return config.Tensor(numerics=grid, calibration=member)


def _affine(member):
    return config.Tensor(numerics=affine.AffineUint8(), calibration=member)


TENSORS = {
    "abs_max": _symmetric(calibration.AbsMax()),
    "clipped": _symmetric(calibration.AbsMax(clipping_scale=0.7)),
    "abs_mean": _symmetric(calibration.AbsMean(clipping_scale=3)),
    "abs_mean_p": _symmetric(calibration.AbsMean(p=2.5, clipping_scale=2)),
    "rms": _symmetric(calibration.RMS(3)),
    "percentile": _symmetric(calibration.Percentile(95)),
    "mse_search": _symmetric(calibration.MseSearch((1.0, 0.9, 0.7))),
    "snr_search": _symmetric(calibration.SnrSearch((1.0, 0.9, 0.7))),
    "affine_percentile": _affine(calibration.Percentile(95)),
    "affine_mse_search": _affine(calibration.MseSearch((1.0, 0.9, 0.7))),
    "min_max": _affine(calibration.MinMax()),
    "clipped_min_max": _affine(calibration.MinMax(clipping_scale=0.7)),
    "constant": _symmetric(calibration.Constant(1.3)),
    "constant_range": _affine(calibration.ConstantRange(min=-0.7, max=1.3)),
}
LOOKS_AT_NOTHING = {"constant", "constant_range"}
