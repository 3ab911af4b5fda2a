"""Lower bound on the time of a quantized contraction.

The bare integer contractions in their fastest form, plus the unavoidable memory traffic
of quantization at the bandwidth of an in-place pass: each operand is read once as
float32 and written once as int8, and each result is read once as int32 and written once
as float32.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite import lowering
from benchmarks.harness import figures, phases, timing

PASSED_BYTES = 512 << 20
"""Size of the array for measuring bandwidth, larger than the caches."""


@dataclasses.dataclass(frozen=True)
class Contraction:
    """Shapes and dimension numbers of one contraction."""

    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    dims: Any
    frozen: bool = False
    """True if rhs is stored as int8, so that quantization moves no bytes of rhs."""

    @property
    def out(self) -> tuple[int, ...]:
        """Shape of the result."""
        operands = (jax.ShapeDtypeStruct(x, jnp.int8) for x in (self.lhs, self.rhs))
        dot = functools.partial(lax.dot_general, dimension_numbers=self.dims)
        return jax.eval_shape(dot, *operands).shape

    @property
    def traffic(self) -> int:
        """Bytes read and written to quantize the operands and scale the result."""
        quantized = math.prod(self.lhs)
        if not self.frozen:
            quantized += math.prod(self.rhs)
        return (4 + 1) * quantized + (4 + 4) * math.prod(self.out)


def matmul(lead: tuple[int, ...], k: int, n: int, phase: str) -> list[Contraction]:
    """The contractions of ``(*lead, k) @ (k, n)``: one, or three with both gradients.

    Args:
        lead: leading axes of lhs.
        k: size of the forward contracting axis.
        n: columns of rhs.
        phase: one of `phases.PHASES`.
    """
    last, leading = len(lead), tuple(range(len(lead)))
    none: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    forward = Contraction((*lead, k), (k, n), (((last,), (0,)), none))
    if phase == phases.FORWARD:
        return [forward]
    dlhs = Contraction((*lead, n), (k, n), (((last,), (1,)), none))
    drhs = Contraction((*lead, k), (*lead, n), ((leading, leading), none))
    return [forward, dlhs, drhs]


def program(contractions: Sequence[Contraction]) -> Callable[[], Any]:
    """One program of the bare integer contractions, on random operands."""
    rng = np.random.default_rng(0)
    operands = [
        [jnp.asarray(rng.integers(-127, 128, x, np.int8)) for x in (c.lhs, c.rhs)]
        for c in contractions
    ]

    @jax.jit
    def dots(operands: Any) -> list[jax.Array]:
        return [
            lowering.Integers()(
                lowering.Dot(c.dims, lhs.ndim, rhs.ndim),
                lowering.DotInput(lhs),
                lowering.DotInput(rhs),
            )
            for c, (lhs, rhs) in zip(contractions, operands, strict=True)
        ]

    return lambda: dots(operands)


@functools.cache
def bandwidth() -> float:
    """Bytes read and written per second, by a compiled pass over a large array.

    The pass is in place: writing to a new array would measure page faults.
    """
    x = jnp.zeros(PASSED_BYTES // 4, jnp.float32)
    increment = jax.jit(lambda x: x + 1, donate_argnums=0)

    def pass_over() -> jax.Array:
        nonlocal x
        x = increment(x)
        return x

    taken = timing.alternate({"pass": pass_over}, repeats=15)["pass"]
    return 2 * PASSED_BYTES / taken.median


def add(spreads: dict[str, timing.Spread], contractions: Sequence[Contraction]) -> None:
    """Add the floor to spreads in which `figures.BARE` was measured on `program`."""
    traffic = sum(c.traffic for c in contractions) / bandwidth()
    dots = spreads[figures.BARE]
    spreads[figures.FLOOR] = dataclasses.replace(
        dots,
        median=dots.median + traffic,
        lower_quartile=dots.lower_quartile + traffic,
        upper_quartile=dots.upper_quartile + traffic,
    )
