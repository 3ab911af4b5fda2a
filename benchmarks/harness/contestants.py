"""Contestants: float, AQT (aqtp), Qwix and aqtlite."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import aqtlite
from aqtlite import config
from aqtlite.flax import AqtDotGeneral
from benchmarks.harness.peers import aqt_config, aqt_flax
from benchmarks.harness.peers import dot_general_qt as qwix_qt
from benchmarks.harness.peers import stochastic_rounding as qwix_noise

FLOAT32 = "float32"
BFLOAT16 = "bfloat16"
AQTP = "aqtp"
AQTP_NEAREST = "aqtp, nearest"
QWIX_STOCHASTIC = "qwix, stochastic"
QWIX_NEAREST = "qwix, nearest"
QWIX_FP8 = "qwix, fp8"
AQTLITE = "aqtlite"
AQTLITE_NEAREST = "aqtlite, nearest"

NAMES = (
    FLOAT32,
    BFLOAT16,
    AQTP,
    AQTP_NEAREST,
    QWIX_STOCHASTIC,
    QWIX_NEAREST,
    AQTLITE,
    AQTLITE_NEAREST,
)

RNG_STREAM = "params"
"""RNG stream for the noise of aqtp's Flax layers."""


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A library with one setting."""

    name: str
    dot_general: Callable[..., jax.Array]
    """Function with the signature ``dot_general(lhs, rhs, dimension_numbers)``."""
    dot_general_cls: Callable[[], Any] | None
    """Argument for Flax layers; None for Flax's default."""
    dtype: Any = jnp.float32
    """Dtype to which operands are cast."""


def select(names: Sequence[str] = NAMES) -> list[Contestant]:
    """The contestants with these names, in this order."""
    return [_MAKERS[name](name) for name in names]


def _float(name: str) -> Contestant:
    return Contestant(name, lax.dot_general, None, jnp.dtype(name))


def aqtp_config(*, stochastic: bool = True) -> Any:
    """aqtp's preset for int8 training."""
    return aqt_config.fully_quantized(use_stochastic_rounding=stochastic)


def _aqtp(name: str, *, stochastic: bool) -> Contestant:
    # aqtp's configs are callable and contain the PRNG key of the noise.
    keyed = aqt_config.set_context(
        aqtp_config(stochastic=stochastic), jax.random.key(0), train_step=None
    )
    cfg = aqtp_config(stochastic=stochastic)
    return Contestant(name, keyed, functools.partial(aqt_flax.AqtDotGeneral, cfg))


def _qwix(
    name: str, *, stochastic: bool, forward: str = "int8", backward: str = "int8"
) -> Contestant:
    # Qwix's default: noise varies along the first axis and is shared along the others.
    noise = (
        qwix_noise.get_noise_fn("uniform", jax.random.key(0)) if stochastic else None
    )
    cfg = qwix_qt.DotGeneralQtConfig(
        lhs_qtype=forward,
        rhs_qtype=forward,
        dlhs_grad_qtype=backward,
        drhs_grad_qtype=backward,
        dlhs_stochastic_rounding_noise_fn=noise,
        drhs_stochastic_rounding_noise_fn=noise,
    )

    def dot_general(lhs: Any, rhs: Any, dims: Any, **_: Any) -> jax.Array:
        return qwix_qt.dot_general_qt(lhs, rhs, dims, cfg)

    return Contestant(name, dot_general, lambda: dot_general)


def aqtlite_config(*, stochastic: bool = True) -> config.DotGeneral:
    """aqtlite's preset for int8 training."""
    return config.fully_quantized(use_stochastic_rounding=stochastic)


def _aqtlite(name: str, *, stochastic: bool) -> Contestant:
    cfg = aqtlite_config(stochastic=stochastic)
    return Contestant(
        name, aqtlite.make_dot_general(cfg), functools.partial(AqtDotGeneral, cfg)
    )


_MAKERS: dict[str, Callable[[str], Contestant]] = {
    FLOAT32: _float,
    BFLOAT16: _float,
    AQTP: functools.partial(_aqtp, stochastic=True),
    AQTP_NEAREST: functools.partial(_aqtp, stochastic=False),
    QWIX_STOCHASTIC: functools.partial(_qwix, stochastic=True),
    QWIX_NEAREST: functools.partial(_qwix, stochastic=False),
    QWIX_FP8: functools.partial(
        _qwix, stochastic=False, forward="float8_e4m3fn", backward="float8_e5m2"
    ),
    AQTLITE: functools.partial(_aqtlite, stochastic=True),
    AQTLITE_NEAREST: functools.partial(_aqtlite, stochastic=False),
}
