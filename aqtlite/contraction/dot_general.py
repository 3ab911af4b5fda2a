"""A quantized `lax.dot_general`: the public function, and the checks of its call."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from aqtlite import config, noise, operations
from aqtlite.contraction import checks, differentiation, execution, requantization
from aqtlite.qtensor.qtensor import QTensor, axes_in_storage
from aqtlite.quantization import padding, smoothing
from aqtlite.shapes import dimension_numbers as dn

DotGeneral = Callable[..., Any]


def make_dot_general(cfg: config.DotGeneral | None) -> DotGeneral:
    """Compiles a config into a function with the signature of `lax.dot_general`.

    The function is hashable, and the same object for equal configs, so that it goes
    where a static argument is wanted (``jnp.einsum(..., _dot_general=...)``).

    Args:
        cfg: what to quantize, and how. None, or a config that quantizes nothing,
            gives a function that calls `lax.dot_general`.

    Returns:
        ``dot_general(lhs, rhs, dimension_numbers, precision=None,
        preferred_element_type=None, *, out_sharding=None, key=None,
        states=None)``.

        - `lhs`, `rhs`: float32, bfloat16, float16 or float64 arrays, of equal dtypes
          or not, or a `QTensor` that was quantized with this config: frozen weights,
          or the result of another contraction.
        - `precision`: of what the config leaves in floats: a gradient, or a float
          operand beside integers. Where it leaves nothing, None or DEFAULT: sums of
          integers are exact and have no other; ask for one and it raises.
        - `preferred_element_type`: the dtype of the output. By default that of
          `lax.dot_general`: the operands' dtypes, promoted.
        - `out_sharding`: as in `lax.dot_general`.
        - `key`: seeds the noise of stochastic rounding, for each operand otherwise.
          Without it the seeds are made of what calibration found in the operands.
        - `states`: `aqtlite.statistics.States`, for calibrations that gather statistics
          or are learned. The gradient with respect to learned parameters is that of
          the loss; with respect to statistics of the output gradient, it is what they
          become with this batch. With ``fwd.smoothing`` a `QTensor` is one of an
          operand that was smoothed before (`aqtlite.quantization.smoothing.smooth`).

        It returns an array, or, where ``cfg.out`` quantizes the result, a
        `QTensor`.

        Gradients pass the rounding unchanged (straight-through estimator, Bengio et
        al. 2013, arXiv:1308.3432). Where ``use_fwd_quant`` is set, the backward
        contraction takes the forward's integers as they are, and they alone are saved
        for it. Such integers are constants to a *second* differentiation: second
        derivatives with respect to one operand are there, mixed ones raise, and need
        ``use_fwd_quant=False``.

    Raises:
        TypeError: if `cfg` is not a `config.DotGeneral` or None.

    >>> import jax.numpy as jnp
    >>> from aqtlite import config
    >>> dot_general = make_dot_general(config.fully_quantized(fwd_bits=8, bwd_bits=8))
    >>> x = jnp.array([[1.0, 2.0], [3.0, -4.0]])
    >>> dot_general(x, x, (((1,), (0,)), ((), ()))).round().tolist()
    [[7.0, -6.0], [-9.0, 22.0]]
    """
    checks.check_config(cfg, "make_dot_general")
    return _make(cfg)


@functools.cache
def _make(cfg: config.DotGeneral | None) -> DotGeneral:
    if cfg is None or not cfg.is_quantized:
        return _unquantized
    return functools.partial(_dot_general, cfg)


def _unquantized(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
    key: jax.Array | None = None,
    states: tuple[Any, ...] | None = None,
) -> jax.Array:
    """Calls `lax.dot_general`, and ignores what only quantization needs."""
    del key, states
    checks.check_arrays(lhs, rhs)
    sharding = {} if out_sharding is None else {"out_sharding": out_sharding}
    return lax.dot_general(
        lhs, rhs, dimension_numbers, precision, preferred_element_type, **sharding
    )


def _dot_general(
    cfg: config.DotGeneral,
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
    key: jax.Array | None = None,
    states: tuple[Any, ...] | None = None,
) -> jax.Array | QTensor:
    precision = checks.precision_of_floats(cfg, precision)
    lhs = checks.check_operand(lhs, cfg.fwd.lhs, "fwd.lhs")
    rhs = checks.check_operand(rhs, cfg.fwd.rhs, "fwd.rhs")
    dims = dn.canonicalize(dimension_numbers, lhs.shape, rhs.shape)
    out_dtype = checks.check_out_dtype(preferred_element_type, lhs, rhs)
    given = checks.check_states(states)
    lhs, rhs = smoothing.smooth(cfg.fwd, lhs, rhs, dims, given.smoothing)
    inner = given._replace(smoothing=(), out=())
    lhs, rhs = (
        _in_own_order(x) if tensor.use_fake_quant else x
        for x, tensor in ((lhs, cfg.fwd.lhs), (rhs, cfg.fwd.rhs))
    )
    if isinstance(lhs, QTensor) or isinstance(rhs, QTensor):
        lhs, rhs, dims = _as_stored(lhs, rhs, dims)
    if isinstance(out_sharding, PartitionSpec):
        out_sharding = NamedSharding(jax.sharding.get_abstract_mesh(), out_sharding)
    operation = operations.DotGeneral(dims, lhs.ndim, rhs.ndim)
    shape = operation.output_shape(lhs.shape, rhs.shape)
    tensors = cfg.fwd.lhs, cfg.fwd.rhs
    lhs, rhs = padding.pad_operands(operation, lhs, rhs, tensors, "fwd")
    how = execution.resolve(
        cfg, operation, lhs, rhs, out_dtype, out_sharding, precision
    )
    seed = None if key is None else noise.seed_from_key(key)
    out = differentiation.quantize_and_contract(
        how, operation, lhs, rhs, seed, states=inner
    )
    out = padding.crop(out, shape)
    return requantization.quantize(out, cfg.out, given.out)


def _in_own_order(x):
    """A float contraction sums in an order that depends on where the axes lie."""
    return x.in_own_order() if isinstance(x, QTensor) else x


def _as_stored(lhs, rhs, dims):
    """Contracts the axes of a `QTensor` where they lie; nothing is transposed."""
    stored_dims = tuple(
        (axes_in_storage(lhs, lhs_axes), axes_in_storage(rhs, rhs_axes))
        for lhs_axes, rhs_axes in dims
    )
    lhs, rhs = (x.as_stored() if isinstance(x, QTensor) else x for x in (lhs, rhs))
    return lhs, rhs, stored_dims
