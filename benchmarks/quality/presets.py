"""The presets to train, one line each, and the peers' int8."""

import dataclasses
import functools
import importlib.metadata
import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax

from aqtlite import calibration, config, numerics
from aqtlite.flax import AqtDotGeneral
from benchmarks.harness import contestants
from benchmarks.harness.peers import aqt_flax
from benchmarks.harness.peers import dot_general_qt as qwix_qt
from benchmarks.harness.peers import stochastic_rounding as qwix_noise

FLOAT32 = "float32"

CONFIGS: dict[str, Callable[[], config.DotGeneral]] = {
    FLOAT32: config.unquantized,
    "int8": config.fully_quantized,
    "int8_nearest": lambda: config.fully_quantized(use_stochastic_rounding=False),
    "static_int8": config.static_int8,
    "weight_only_8": lambda: config.weight_only(8),
    "weight_only_4": lambda: config.weight_only(4),
    "qat_8": lambda: config.qat(8),
    "qat_4": lambda: config.qat(4),
    "w4a8": config.w4a8,
    "w4a8_blocks": lambda: config.update(config.w4a8(), {"fwd.rhs.blocks": _BLOCKS}),
    "int4": lambda: config.fully_quantized(fwd_bits=4),
    "int4_blocks": lambda: _int4({"fwd.*.blocks": _BLOCKS}),
    "int4_affine_blocks": lambda: _int4(
        {"fwd.*.blocks": _BLOCKS, **_AFFINE_ACTIVATIONS}
    ),
    "int4_per_tensor": lambda: _int4({"fwd.lhs.calib_shared_axes": "per_tensor"}),
    "lsq_weight_only_4": lambda: config.lsq_weight_only(4),
    "lsq_8": lambda: config.lsq(8),
    "lsq_4": lambda: config.lsq(4),
    "lsq_2": lambda: config.lsq(2),
    "lsq_4_clipping": lambda: config.update(config.lsq(4), _LEARNED_CLIPPING),
    "lsq_2_clipping": lambda: config.update(config.lsq(2), _LEARNED_CLIPPING),
    "int2": lambda: config.fully_quantized(fwd_bits=2),
    "fp8": config.fp8,
    "fp8_e3m4": lambda: config.fp8(forward="float8_e3m4", use_stochastic_rounding=True),
    "fp8_per_tensor": lambda: config.fp8(per_tensor=True),
    "fp8_per_tensor_stochastic": lambda: config.fp8(
        per_tensor=True, use_stochastic_rounding=True
    ),
    "fp8_per_tensor_e3m4": lambda: config.fp8(
        per_tensor=True, forward="float8_e3m4", use_stochastic_rounding=True
    ),
    "fp8_delayed": lambda: config.fp8(delayed=True, per_tensor=True),
    "block_fp8": config.block_fp8,
    "mxfp8": config.mxfp8,
    "mxfp8_may_clip": lambda: config.mxfp8(may_clip=True),
    "mxfp6": config.mxfp6,
    "mxfp4": config.mxfp4,
    "mxint8": config.mxint8,
    "nvfp4": config.nvfp4,
    "nvfp4_per_tensor": lambda: config.nvfp4(per_tensor=True),
    "nvfp4_per_tensor_hadamard": lambda: config.nvfp4(per_tensor=True, hadamard=True),
}
"""Presets of aqtlite by name, as functions without arguments that make the config."""


@dataclasses.dataclass(frozen=True)
class Preset:
    """The contraction to train a model with."""

    name: str
    identity: str
    """Text that changes if earlier runs are no longer valid."""
    settings: Mapping[str, Any]
    """Settings for readers of the records, as plain data."""
    dot_general: Callable[[jax.Array], Any]
    """Function from the PRNG key of a step's noise to the argument of Flax layers."""


_BLOCKS = config.Blocks(size=8)
_LEARNED_CLIPPING = {"fwd.rhs.calibration": calibration.LearnedClipping()}
_AFFINE_ACTIVATIONS = {
    "fwd.lhs.numerics": numerics.IntAffine(bits=4),
    "fwd.lhs.calibration": calibration.MinMax(),
}


def select(name: str) -> Preset:
    """The preset or peer with this name."""
    return _PEERS[name]() if name in _PEERS else _preset(name)


def _preset(name: str) -> Preset:
    cfg = CONFIGS[name]()
    return Preset(
        name,
        # The repr omits defaults: a field added in a later version changes nothing.
        identity=repr(cfg),
        settings=json.loads(config.to_json(cfg)),
        dot_general=lambda key: AqtDotGeneral(cfg),
    )


def _int4(changes: Mapping[str, Any]) -> config.DotGeneral:
    """4 bits forward, 8 bits backward, with further changes."""
    return config.update(config.fully_quantized(fwd_bits=4), changes)


def _peer(
    package: str, what: str, dot_general: Callable[[jax.Array], Any]
) -> Callable[[], Preset]:
    def make() -> Preset:
        version = importlib.metadata.version(package)
        return Preset(
            f"{package}_{what}",
            identity=f"{package} {version} {what}",
            settings={"package": package, "version": version, "what": what},
            dot_general=dot_general,
        )

    return make


def _aqtp(key: jax.Array, *, stochastic: bool) -> Any:
    # A Flax module, which draws noise from the RNG stream of the model.
    return aqt_flax.AqtDotGeneral(contestants.aqtp_config(stochastic=stochastic))


def _qwix(key: jax.Array, *, stochastic: bool) -> Callable[..., jax.Array]:
    calls = itertools.count()

    def dot_general(lhs: Any, rhs: Any, dims: Any, *_: Any, **__: Any) -> jax.Array:
        noise = None
        if stochastic:  # Independent noise for each contraction of each step.
            drawn = jax.random.fold_in(key, next(calls))
            noise = qwix_noise.get_noise_fn("uniform", drawn)
        cfg = qwix_qt.DotGeneralQtConfig(
            lhs_qtype="int8",
            rhs_qtype="int8",
            dlhs_grad_qtype="int8",
            drhs_grad_qtype="int8",
            dlhs_stochastic_rounding_noise_fn=noise,
            drhs_stochastic_rounding_noise_fn=noise,
        )
        return qwix_qt.dot_general_qt(lhs, rhs, dims, cfg)

    return dot_general


_PEERS: dict[str, Callable[[], Preset]] = {
    f"{package}_{what}": _peer(
        package, what, functools.partial(dot, stochastic=what == "int8")
    )
    for package, dot in (("aqtp", _aqtp), ("qwix", _qwix))
    for what in ("int8", "int8_nearest")
}

NAMES = (*CONFIGS, *_PEERS)
"""All names, in the order of tables."""
