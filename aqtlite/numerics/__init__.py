"""Number grids: a bound, a storage dtype, and rounding onto the grid.

A grid is a frozen dataclass, one file each; custom grids derive from `Numerics`. Grids
have no scale: values are divided by the scale before rounding. Read `base` first.
"""

from aqtlite.numerics.base import NoNumerics, Numerics
from aqtlite.numerics.dynamic_tree import DynamicTree
from aqtlite.numerics.float import Float
from aqtlite.numerics.int_affine import IntAffine
from aqtlite.numerics.int_symmetric import IntSymmetric
from aqtlite.numerics.normal_float import NormalFloat

__all__ = [
    "DynamicTree",
    "Float",
    "IntAffine",
    "IntSymmetric",
    "NoNumerics",
    "NormalFloat",
    "Numerics",
]
