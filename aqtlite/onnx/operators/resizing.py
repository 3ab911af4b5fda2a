"""Interpolation of images and volumes."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from aqtlite.onnx.evaluation import Call, Value
from aqtlite.onnx.registry import operator


@operator("Resize", "Upsample", static=(1, 2, 3))
def _resize(
    call: Call,
    x: Value,
    roi: Value = None,
    scales: Value = None,
    sizes: Value = None,
) -> Value:
    if call.opset < 11:  # Without a region; Upsample was an operator until 9.
        roi, scales = None, roi
    if scales is None and sizes is None:
        scales = np.asarray(call.attribute("scales"), np.float32)
    axes = call.attribute("axes")
    axes = tuple(range(x.ndim)) if axes is None else tuple(a % x.ndim for a in axes)
    factors, lengths = _scales(call, x, axes, scales, sizes)
    region = None
    if call.attribute("coordinate_transformation_mode") == "tf_crop_and_resize":
        region = call.static(roi, "region").reshape(2, -1)
    x = jnp.asarray(x)
    for i, axis in enumerate(axes):
        ends = (0.0, 1.0) if region is None else (region[0, i], region[1, i])
        if lengths[i] != x.shape[axis] or factors[i] != 1 or region is not None:
            x = _along(call, x, axis, lengths[i], factors[i], ends)
    return x


def _scales(
    call: Call, x: Value, axes: tuple[int, ...], scales: Value, sizes: Value
) -> tuple[list[float], list[int]]:
    """Scale and new size of each axis."""
    old = [x.shape[axis] for axis in axes]
    if scales is not None and scales.size:
        factors = [float(s) for s in call.static(scales, "scales")]
        lengths = [math.floor(n * s) for n, s in zip(old, factors, strict=True)]
        return factors, lengths
    lengths = list(call.integers(sizes, "sizes"))
    factors = [new / size for new, size in zip(lengths, old, strict=True)]
    policy = call.attribute("keep_aspect_ratio_policy", "stretch")
    if policy != "stretch":
        factor = min(factors) if policy == "not_larger" else max(factors)
        factors = [factor] * len(old)
        lengths = [math.floor(factor * n + 0.5) for n in old]
    return factors, lengths


def _along(
    call: Call,
    x: Value,
    axis: int,
    length: int,
    factor: float,
    ends: tuple[float, float],
) -> Value:
    """Interpolates along one axis: known elements, times known weights."""
    size = x.shape[axis]
    mode = call.attribute("mode", "nearest")
    repeats = length // size
    places = _places(call, size, length, factor, ends)
    if mode == "nearest":
        taken = np.clip(_nearest(call, places), 0, size - 1).astype(np.int32)
        if (
            length == size * repeats
            and (taken == np.repeat(np.arange(size), repeats)).all()
        ):
            return _repeated(x, axis, repeats)
        y = jnp.take(x, taken, axis=axis)
    else:
        y = _interpolated(call, x, axis, places, min(factor, 1.0))
    if call.attribute("coordinate_transformation_mode") != "tf_crop_and_resize":
        return y
    outside = (places < 0) | (places > size - 1)
    shape = [1] * x.ndim
    shape[axis] = -1
    value = call.attribute("extrapolation_value", 0.0)
    return jnp.where(outside.reshape(shape), jnp.asarray(value, y.dtype), y)


def _repeated(x: Value, axis: int, repeats: int) -> Value:
    shape = (*x.shape[: axis + 1], repeats, *x.shape[axis + 1 :])
    y = jnp.broadcast_to(jnp.expand_dims(x, axis + 1), shape)
    return y.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])


def _places(
    call: Call, size: int, length: int, factor: Any, ends: tuple[float, float]
) -> np.ndarray:
    """Coordinates in the input of the elements of the result.

    In float32, as onnxruntime computes them: the nearest element depends on the last
    bit where a coordinate is in the middle.
    """
    default = "half_pixel" if call.opset >= 11 else "asymmetric"
    mode = call.attribute("coordinate_transformation_mode", default)
    out = np.arange(length, dtype=np.float32)
    factor = np.float32(factor)
    if mode == "asymmetric":
        return out / factor
    if mode == "half_pixel" or (mode == "pytorch_half_pixel" and length > 1):
        return (out + 0.5) / factor - 0.5
    if mode == "pytorch_half_pixel":
        return np.zeros(length, np.float32)
    if mode == "half_pixel_symmetric":
        adjustment = length / (factor * size)
        offset = size / 2 * (1 - adjustment)
        return offset + (out + 0.5) / factor - 0.5
    if mode == "align_corners":
        return out * (size - 1) / (length - 1) if length > 1 else 0 * out
    if mode == "tf_half_pixel_for_nn":
        return (out + 0.5) / factor
    if mode == "tf_crop_and_resize":
        start, stop = ends
        if length == 1:
            return np.full(1, 0.5 * (start + stop) * (size - 1), np.float32)
        return start * (size - 1) + out * (stop - start) * (size - 1) / (length - 1)
    raise call.unsupported(f"coordinate_transformation_mode={mode!r}")


def _nearest(call: Call, places: np.ndarray) -> np.ndarray:
    default = "round_prefer_floor" if call.opset >= 11 else "floor"
    mode = call.attribute("nearest_mode", default)
    if mode == "round_prefer_floor":
        return np.ceil(places - 0.5)
    if mode == "round_prefer_ceil":
        return np.floor(places + 0.5)
    return np.floor(places) if mode == "floor" else np.ceil(places)


def _interpolated(
    call: Call, x: Value, axis: int, places: np.ndarray, factor: float
) -> Value:
    """Sums of neighbors with the weights of a linear or cubic kernel."""
    mode, size = call.attribute("mode"), x.shape[axis]
    radius = {"linear": 1, "cubic": 2}[mode]
    shrink = factor if call.attribute("antialias", 0) else 1.0
    reach = math.ceil(radius / shrink)
    first = np.floor(places).astype(np.int64) - reach + 1
    shape = [1] * x.ndim
    shape[axis] = -1
    taps = [first + offset for offset in range(2 * reach)]
    distances = [(tap - places) * shrink for tap in taps]
    a = call.attribute("cubic_coeff_a", -0.75)
    weights = [_linear(d) if mode == "linear" else _cubic(d, a) for d in distances]
    excludes = call.attribute("exclude_outside", 0)
    if excludes:
        pairs = zip(weights, taps, strict=True)
        weights = [np.where((t >= 0) & (t < size), w, 0) for w, t in pairs]
    if excludes or shrink != 1:
        total = sum(weights)
        weights = [weight / total for weight in weights]
    terms = [
        jnp.take(x, np.clip(tap, 0, size - 1).astype(np.int32), axis=axis)
        * weight.astype(x.dtype).reshape(shape)
        for tap, weight in zip(taps, weights, strict=True)
        if weight.any()
    ]
    return sum(terms[1:], terms[0])


def _linear(distance: np.ndarray) -> np.ndarray:
    return np.maximum(1 - abs(distance), 0)


def _cubic(distance: np.ndarray, a: float) -> np.ndarray:
    d = abs(distance)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0))
