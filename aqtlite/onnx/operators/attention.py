"""Scaled dot-product attention."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.onnx.evaluation import Call, Value
from aqtlite.onnx.operators.elementwise import dtype_of
from aqtlite.onnx.operators.matrices import product
from aqtlite.onnx.registry import operator

_SCORES, _CAPPED, _BIASED = range(3)
"""What the fourth output contains; else weights."""


@operator("Attention")
def _attention(
    call: Call,
    q: Value,
    k: Value,
    v: Value,
    mask: Value = None,
    past_k: Value = None,
    past_v: Value = None,
    lengths: Value = None,
) -> Any:
    has_axis_of_heads = q.ndim == 4
    if not has_axis_of_heads:
        q = _apart(q, call.attribute("q_num_heads"))
        k = _apart(k, call.attribute("kv_num_heads"))
        v = _apart(v, call.attribute("kv_num_heads"))
    before: Value = 0  # Keys before the first query.
    if past_k is not None:
        before = past_k.shape[2]
        k = jnp.concatenate([past_k, k], axis=2)
        v = jnp.concatenate([past_v, v], axis=2)
    elif lengths is not None:
        before = (lengths - q.shape[2]).reshape(-1, 1, 1, 1)
    scale = call.attribute("scale") or 1 / math.sqrt(q.shape[-1])
    root = np.asarray(math.sqrt(scale), q.dtype)
    repeats = q.shape[1] // k.shape[1]  # Queries of several heads share keys.
    keys = jnp.repeat(k, repeats, axis=1) if repeats > 1 else k
    values = jnp.repeat(v, repeats, axis=1) if repeats > 1 else v
    stages = [product(q * root, (keys * root).swapaxes(2, 3))]
    cap = call.attribute("softcap", 0.0)
    stages.append(cap * jnp.tanh(stages[0] / cap) if cap else stages[0])
    allowed = _allowed(call, q.shape[2], k.shape[2], before, lengths)
    biased, allowed = _masked(stages[-1], allowed, mask)
    is_open = isinstance(allowed, np.ndarray) and allowed.all()
    stages.append(biased if is_open else jnp.where(allowed, biased, -jnp.inf))
    weights = _softmax(call, stages[_BIASED], allowed).astype(q.dtype)
    y = product(weights, values)
    if not has_axis_of_heads:
        y = y.swapaxes(1, 2).reshape(y.shape[0], y.shape[2], -1)
    mode = call.attribute("qk_matmul_output_mode", _SCORES)
    return y, k, v, stages[mode] if mode <= _BIASED else weights


def _apart(x: Value, heads: int) -> Value:
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def _allowed(
    call: Call, queries: int, keys: int, before: Value, lengths: Value
) -> Value:
    """Which keys each query may see, by their places: (batch or 1, 1, query, key)."""
    place = np.arange(keys, dtype=np.int32)
    own = before + np.arange(queries, dtype=np.int32)[:, None]
    left = call.attribute("left_window_size", -1)
    right = call.attribute("right_window_size", -1)
    allowed = np.ones((1, 1, queries, keys), bool)
    if call.attribute("is_causal", 0):
        allowed = allowed & (place <= own)
    if left >= 0:
        allowed = allowed & (place >= own - left)
    if right >= 0:
        allowed = allowed & (place <= own + right)
    if lengths is not None:
        allowed = allowed & (place < lengths.reshape(-1, 1, 1, 1))
    return allowed


def _masked(scores: Value, allowed: Value, mask: Value) -> tuple[Value, Value]:
    """Adds a mask of floats, or takes one of booleans; missing keys are not seen."""
    if mask is None:
        return scores, allowed
    missing = scores.shape[-1] - mask.shape[-1]
    widths = [(0, 0)] * (mask.ndim - 1) + [(0, missing)]
    if mask.dtype == bool:
        return scores, allowed & jnp.pad(mask, widths)
    mask = jnp.pad(mask, widths, constant_values=-jnp.inf)
    return scores + mask, allowed & (mask > -jnp.inf)


def _softmax(call: Call, scores: Value, allowed: Value) -> Value:
    """Weights of the keys; 0 for queries that see none."""
    number = call.attribute("softmax_precision")
    if number:
        scores = scores.astype(jax.dtypes.canonicalize_dtype(dtype_of(call, number)))
    if isinstance(allowed, np.ndarray) and allowed.all():
        return jax.nn.softmax(scores)
    sees_any = jnp.any(allowed, axis=-1, keepdims=True)
    weights = jax.nn.softmax(jnp.where(sees_any, scores, 0))
    return jnp.where(sees_any, weights, 0)
