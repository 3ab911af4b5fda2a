"""Private: sums of products, reductions and exact arithmetic in forms for XLA.

Nothing here knows of configs: stored values, axes and dtypes go in, sums of products
come out, the same in every form that a platform runs fast. A form is chosen for its
target when a program is lowered. Read `target` first, then `integer`.
"""

from aqtlite.lowering.float_convolution import (
    float_conv,
    integer_conv_in_float,
    mixed_conv,
    narrow_conv,
)
from aqtlite.lowering.floating import float_dot, integer_dot_in_float
from aqtlite.lowering.integer import integer_dot
from aqtlite.lowering.integer_convolution import integer_conv
from aqtlite.lowering.mixed import mixed_dot
from aqtlite.lowering.narrow import narrow_dot
from aqtlite.lowering.reduction import largest_magnitude
from aqtlite.lowering.target import Target, TargetDependent
from aqtlite.lowering.updates import update_slice

__all__ = [
    "Target",
    "TargetDependent",
    "float_conv",
    "float_dot",
    "integer_conv",
    "integer_conv_in_float",
    "integer_dot",
    "integer_dot_in_float",
    "largest_magnitude",
    "mixed_conv",
    "mixed_dot",
    "narrow_conv",
    "narrow_dot",
    "update_slice",
]
