"""A quantized `lax.dot_general`.

Before: `config/dot_general.py`, the config of a contraction.
Next: `operations/base.py`, the operation that it makes of its arguments.
"""

from collections.abc import Callable
from typing import Any

import jax

from aqtlite import config, operations
from aqtlite.contraction.contract import Options, as_operands, contract, with_config
from aqtlite.contraction.given_arguments import checks_arguments
from aqtlite.qtensor.qtensor import QTensor

DotGeneral = Callable[..., Any]


def make_dot_general(cfg: config.DotGeneral | None) -> DotGeneral:
    """Compiles a config into a function with the signature of `lax.dot_general`.

    The function is hashable, and the same object for equal configs, so that it can be a
    static argument (``jnp.einsum(..., _dot_general=...)``).

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
        - `precision`: precision of the contractions that the config leaves in floats:
          a gradient, or a float operand with an integer one. If it leaves none, only
          None and DEFAULT are allowed, others raise: sums of integers are exact.
        - `preferred_element_type`: the dtype of the output; by default, as in
          `lax.dot_general`, the promoted dtype of the operands.
        - `out_sharding`: as in `lax.dot_general`.
        - `key`: seeds the noise of stochastic rounding, which differs between operands.
          Without a key, the seeds come from what calibration found in the operands.
        - `states`: `aqtlite.statistics.States`, for calibrations that gather statistics
          or are learned. The gradient with respect to learned parameters is the
          gradient of the loss; with respect to statistics of the output gradient, it
          is their value after this batch. With ``fwd.smoothing``, a `QTensor` must have
          been smoothed already (`quantization.preparation.smoothing.smooth`). With
          ``fwd.rotation``, only frozen weights may be `QTensor`s.

        It returns an array, or a `QTensor` where ``cfg.out`` quantizes the result.

        Gradients pass the rounding unchanged (straight-through estimator, Bengio et
        al. 2013, arXiv:1308.3432). Where ``use_fwd_quant`` is set, the backward
        contraction reuses the integers of the forward pass, and only they are saved.
        A *second* differentiation sees these integers as constants: second derivatives
        with respect to one operand exist; mixed ones raise, and need
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
    return with_config(_dot_general, cfg)


@checks_arguments
def _dot_general(
    cfg: config.DotGeneral | None,
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
    lhs, rhs = as_operands(lhs, rhs)
    operation = operations.DotGeneral.of(dimension_numbers, lhs.shape, rhs.shape)
    options = Options(precision, preferred_element_type, out_sharding, key, states)
    return contract(cfg, operation, lhs, rhs, options)
