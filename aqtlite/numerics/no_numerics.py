"""The absence of a grid: the operand stays in floating point."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoNumerics:
    """Leaves the operand unquantized.

    >>> from aqtlite import config, numerics
    >>> config.weight_only(bits=8).fwd.lhs.numerics == numerics.NoNumerics()
    True
    """
