"""Config of rotations: orthogonal matrices between the operands of a contraction."""

import dataclasses

from aqtlite.config import representation
from aqtlite.lowering import hadamard
from aqtlite.numerics import fields


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Hadamard(representation.CompactRepr):
    """Rotates both operands of a contraction before they are quantized.

    Along the contracting axes, lhs is multiplied with an orthogonal matrix R and rhs
    with its transpose, which leaves the products unchanged::

        x w = (x R) (R^T w),    R = D H / sqrt(n)

    with a Hadamard matrix H of entries 1 and -1 and a diagonal D of random signs
    (QuIP, Chee et al. 2023, arXiv:2307.13304; QuaRot, Ashkboos et al. 2024,
    arXiv:2404.00456). R spreads an outlier over n channels, so that activations of 4
    bits lose far less. It does nothing for weights alone, and can hurt where only the
    weights have few bits.

    The rotation is computed in float32 with ``n log n`` additions, at every call for
    activations and, for frozen weights, once by the conversion.

    >>> from aqtlite import config
    >>> cfg = config.update(config.qat(4), {"fwd.rotation": Hadamard()})
    >>> cfg.fwd.rotation
    Hadamard()
    >>> Hadamard(size=30)
    Traceback (most recent call last):
    ...
    ValueError: Hadamard.size=30 is the order of no Hadamard matrix known here; take \
28 or 32

    Raises:
        TypeError: if a field is of another type than declared.
        ValueError: if no Hadamard matrix of order `size` is known here, or if `seed` is
            not from 0 to 2^32 - 1.
    """

    size: int | None = None
    """Number of channels that are mixed: R is block-diagonal, with equal blocks of this
    size. Blocks that lie on one device, or in one block of scales, keep the rotation
    there. None: all channels; where no matrix of their number is known, the largest
    power of two that divides it. Known are the powers of two from 4 on and, times
    powers of two, the constructions of Paley up to 512: of most multiples of 4."""

    fit: bool = False
    """Where `size` does not divide the number of channels, mix all of them if they are
    fewer, of a known matrix; otherwise take the largest power of two below `size` that
    divides them. Without one (or with sums over rows of several experts, in the weight
    gradient of a `ragged_dot`) rotate nothing. False: all this is an error."""

    seed: int = 0
    """Seed of the signs. All blocks have the same ones."""

    def __post_init__(self) -> None:
        size = fields.or_none(fields.integer(1))
        fields.check(self, size=size, fit=fields.flag)
        fields.check(self, seed=fields.integer(0, 2**32 - 1))
        if self.size is not None:
            if not hadamard.has_order(self.size):
                raise ValueError(
                    f"Hadamard.size={self.size} is the order of no Hadamard matrix "
                    f"known here; take {_near(self.size)}"
                )
        elif self.fit:
            raise ValueError(
                "Hadamard.fit=True would have no effect, because size is None, which "
                "fits every number of channels; set size, or leave fit False"
            )


def _near(size: int) -> str:
    below = next((n for n in range(size, 3, -1) if hadamard.has_order(n)), None)
    above = next(n for n in range(max(size, 4), 2 * size + 5) if hadamard.has_order(n))
    return str(above) if below is None else f"{below} or {above}"
