"""Private: sums of products, reductions and exact arithmetic in forms for XLA.

Nothing here depends on configs: stored values, axes and dtypes go in, and sums of
products come out, equal in the form of every platform. `kinds` defines the kinds of
dots, `dot` how each platform sums the products of one, and `forms` holds the forms.
Read `kinds` first, then `dot`.
"""

from aqtlite.lowering.contraction import Contraction, DotInput
from aqtlite.lowering.dot import Dot
from aqtlite.lowering.forms.conv import Conv
from aqtlite.lowering.forms.gpu import transposed
from aqtlite.lowering.forms.packed_dot import packing_of
from aqtlite.lowering.forms.ragged import Ragged
from aqtlite.lowering.kinds import (
    Floats,
    Integers,
    IntegersInFloat,
    Kind,
    Mixed,
    Narrow,
)
from aqtlite.lowering.reduction import largest_magnitude
from aqtlite.lowering.target import OnCpu, Target, TargetDependent
from aqtlite.lowering.updates import update_slice

__all__ = [
    "Contraction",
    "Conv",
    "Dot",
    "DotInput",
    "Floats",
    "Integers",
    "IntegersInFloat",
    "Kind",
    "Mixed",
    "Narrow",
    "OnCpu",
    "Ragged",
    "Target",
    "TargetDependent",
    "largest_magnitude",
    "packing_of",
    "transposed",
    "update_slice",
]
