"""Compares an accelerator with the CPU beside it, in one process.

``python -m tests.against_cpu`` quantizes arrays and contracts them, forward and
backward, by every preset, operation and dtype, on the first device and on the host.
Integers and scales are to be equal, results within what their sums may differ by.
``--part 0/8`` runs an eighth of it.
"""

import argparse
import collections
import dataclasses
import functools
import itertools
import random
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
from jax import lax

import aqtlite
from aqtlite import calibration, config, numerics
from tests.progress import shown

NAMES = ("out", "dlhs", "drhs")
_CLEAR_CACHES_EVERY = 50

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}
"""Norm of a difference over that of the result.

A scale that differs in its last bit moves a value over the edge between two integers,
and what follows it.
"""

PRESETS = {
    "int8": config.fully_quantized(),
    "int8 nearest": config.fully_quantized(use_stochastic_rounding=False),
    "int8 requantized": config.fully_quantized(use_fwd_quant=False),
    "int4": config.fully_quantized(fwd_bits=4, bwd_bits=8),
    "int16": config.fully_quantized(fwd_bits=12, bwd_bits=8),
    "qat": config.qat(8),
    "weight-only int8": config.weight_only(8),
    "weight-only int4": config.weight_only(4),
    "w4a8": config.w4a8(),
    "w4a8 in blocks": config.update(
        config.w4a8(), {"fwd.rhs.blocks": config.Blocks(size=32, fit=True)}
    ),
    "uint8": config.update(
        config.qat(8),
        {
            "fwd.*.numerics": numerics.IntAffine(bits=8),
            "fwd.*.calibration": calibration.MinMax(),
        },
    ),
    "no zero": config.update(
        config.qat(8),
        {"fwd.*.numerics": numerics.IntSymmetric(bits=8, preserve_zero=False)},
    ),
    "fp8": config.fp8(),
    "fp8 per tensor": config.fp8(per_tensor=True),
    "block fp8": config.block_fp8(size=32),
    "mxfp8": config.mxfp8(),
    "mxfp4": config.mxfp4(),
    "mxint8": config.mxint8(),
    "nvfp4": config.nvfp4(),
    "nf4": config.update(
        config.weight_only(4), {"fwd.rhs.numerics": numerics.NormalFloat()}
    ),
    "fake": config.update(config.fully_quantized(), {"fwd.*.use_fake_quant": True}),
}

Contract = Callable[[Any, jax.Array, jax.Array], jax.Array]


def _dot(dims: Any, cfg: Any, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return aqtlite.make_dot_general(cfg)(lhs, rhs, dims)


def _einsum(equation: str, cfg: Any, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return aqtlite.einsum(equation, lhs, rhs, cfg=cfg)


def _conv(cfg: Any, lhs: jax.Array, rhs: jax.Array, **how: Any) -> jax.Array:
    conv = aqtlite.make_conv_general_dilated(cfg)
    numbers = ("NHWC", "HWIO", "NHWC")
    return conv(lhs, rhs, (2, 1), "SAME", dimension_numbers=numbers, **how)


def _ragged(cfg: Any, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    sizes = jnp.array([20, 0, 40, 36], jnp.int32)
    return aqtlite.make_ragged_dot(cfg)(lhs, rhs, sizes)


_MATMUL = (((1,), (0,)), ((), ()))
OPERATIONS: dict[str, tuple[Contract, tuple[int, ...], tuple[int, ...]]] = {
    "matmul": (functools.partial(_dot, _MATMUL), (64, 128), (128, 96)),
    "odd sizes": (functools.partial(_dot, _MATMUL), (33, 101), (101, 59)),
    "one row": (functools.partial(_dot, _MATMUL), (1, 128), (128, 64)),
    "3-D": (
        functools.partial(_dot, (((2,), (1,)), ((), ()))),
        (4, 24, 64),
        (96, 64),
    ),
    "batched": (
        functools.partial(_dot, (((2,), (1,)), ((0,), (0,)))),
        (3, 40, 64),
        (3, 64, 32),
    ),
    "scores": (
        functools.partial(_einsum, "bqhd,bkhd->bhqk"),
        (2, 24, 4, 32),
        (2, 32, 4, 32),
    ),
    "values": (
        functools.partial(_einsum, "bhqk,bkhd->bqhd"),
        (2, 4, 24, 32),
        (2, 32, 4, 32),
    ),
    "conv": (_conv, (2, 9, 10, 32), (3, 3, 32, 48)),
    "grouped conv": (
        functools.partial(_conv, feature_group_count=2),
        (2, 8, 8, 64),
        (3, 3, 32, 64),
    ),
    "depthwise conv": (
        functools.partial(_conv, feature_group_count=32),
        (2, 8, 8, 32),
        (3, 3, 1, 32),
    ),
    "ragged_dot": (_ragged, (96, 64), (4, 64, 32)),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A preset, an operation and a dtype."""

    preset: str
    operation: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.preset}, {self.operation}, {self.dtype}"


def cases() -> list[Case]:
    """All of them, in an order that begins with something of everything."""
    found = [Case(*one) for one in itertools.product(PRESETS, OPERATIONS, TOLERANCE)]
    random.Random(0).shuffle(found)
    return found


def differences(case: Case, devices: tuple[jax.Device, jax.Device]) -> list[str]:
    """How two devices differ in a case.

    Raises:
        ValueError: if the operation refuses the config.
    """
    cfg = PRESETS[case.preset]
    contract, lhs_shape, rhs_shape = OPERATIONS[case.operation]
    rng = np.random.default_rng(0)
    dtype = jnp.dtype(case.dtype)
    lhs, rhs = (
        rng.standard_normal(shape, np.float32).astype(dtype)
        for shape in (lhs_shape, rhs_shape)
    )
    out = jax.eval_shape(functools.partial(contract, cfg), lhs, rhs)
    g = rng.standard_normal(out.shape, np.float32).astype(out.dtype)

    def run(lhs, rhs, g):
        out, vjp = jax.vjp(functools.partial(contract, cfg), lhs, rhs)
        quantized = [
            aqtlite.quantize(x, tensor, x.ndim - 1)
            for x, tensor in ((lhs, cfg.fwd.lhs), (rhs, cfg.fwd.rhs), (g, cfg.dlhs.lhs))
            if tensor.is_quantized and not tensor.blocks
        ]
        return (out, *vjp(g)), quantized

    got, wanted = (
        jax.tree.map(np.asarray, jax.jit(run)(*jax.device_put((lhs, rhs, g), device)))
        for device in devices
    )
    found = []
    for one, other in zip(*map(jax.tree.leaves, (got[1], wanted[1])), strict=True):
        count = np.sum(one.astype(np.float32) != other.astype(np.float32))
        if count:
            found.append(f"{count} of {one.size} {one.dtype} of a QTensor")
    for name, one, other in zip(NAMES, got[0], wanted[0], strict=True):
        error = distance(one, other)
        if not error <= TOLERANCE[case.dtype]:  # NaN is none.
            found.append(f"{name} by {error:.2g}")
    return found


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Norm of the difference, over that of the second."""
    one, other = (x.astype(np.float64) for x in (one, other))
    return float(np.linalg.norm(one - other) / max(np.linalg.norm(other), 1e-30))


def unbiased(device: jax.Device, keys: int = 4000) -> float:
    """The root mean square of z-scores of stochastic rounding; some 1 if unbiased."""
    noisy = config.Tensor(
        numerics=numerics.IntSymmetric(
            bits=4, preserve_max_val=True, stochastic_rounding=True
        )
    )
    x = jax.random.normal(jax.random.key(0), (8, 64))
    x, seeds = jax.device_put((x, jax.random.split(jax.random.key(1), keys)), device)

    @jax.jit
    def z_scores(x, seeds):
        drawn = lax.map(lambda key: aqtlite.quantize(x, noisy, 1, key).dequant(), seeds)
        spread = jnp.std(drawn, axis=0, ddof=1) / keys**0.5
        return jnp.where(spread > 1e-6, (drawn.mean(0) - x) / spread, 0.0)

    return float(jnp.sqrt(jnp.mean(z_scores(x, seeds) ** 2)))


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.against_cpu",
        description="Compares an accelerator with the CPU beside it.",
    )
    parser.add_argument("--part", default="0/1", help="which of how many parts")
    parser.add_argument("--only", nargs="+", choices=PRESETS, default=list(PRESETS))
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    # By default GPUs and TPUs round operands of float32 contractions to fewer bits.
    jax.config.update("jax_default_matmul_precision", "highest")
    devices = jax.devices()[0], jax.devices("cpu")[0]
    console = rich.console.Console()
    chosen = [case for case in cases() if case.preset in options.only][part::parts]
    console.print(f"{devices[0].device_kind} beside {devices[1].device_kind}")
    z = unbiased(devices[0])
    console.print(f"stochastic rounding: z-scores {z:.2f}")
    failed, refused = 0, collections.Counter[str]()
    with shown(console, len(chosen)) as on_done:
        for done, case in enumerate(chosen):
            if done % _CLEAR_CACHES_EVERY == _CLEAR_CACHES_EVERY - 1:
                jax.clear_caches()
            try:
                found = differences(case, devices)
            except ValueError as error:
                refused[case.preset] += 1
                console.print(f"{case} refused: {str(error)[:150]}", soft_wrap=True)
                found = []
            except RuntimeError as error:
                found = [f"{type(error).__name__}: {str(error)[:600]}"]
            if found:
                failed += 1
                console.print(
                    f"FAILED {case}: {', '.join(found)}",
                    soft_wrap=True,
                    highlight=False,
                )
            on_done(f"{failed} fail")
    console.print(
        f"{failed} of {len(chosen)} fail, {refused.total()} are refused "
        f"({dict(refused)})"
    )
    return 1 if failed or not z < 1.5 else 0


if __name__ == "__main__":
    sys.exit(main())
