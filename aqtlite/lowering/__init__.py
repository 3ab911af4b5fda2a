"""Private: sums of products, reductions and exact arithmetic in forms for XLA.

Nothing here knows of configs: stored values, axes and dtypes go in, sums of products
come out, the same in every form that a platform runs fast. What a kind of dot does is
in `kinds`, and how a platform sums the products of a contraction in `dot`, `conv` or
`ragged`. Read `kinds` first, then `dot`.
"""

from aqtlite.lowering.contraction import Contraction, DotInput
from aqtlite.lowering.conv import Conv
from aqtlite.lowering.dot import Dot
from aqtlite.lowering.kinds import (
    Floats,
    Integers,
    IntegersInFloat,
    Kind,
    Mixed,
    Narrow,
)
from aqtlite.lowering.ragged import Ragged
from aqtlite.lowering.reduction import largest_magnitude
from aqtlite.lowering.target import OnCpu, Target, TargetDependent
from aqtlite.lowering.transposition import transposed
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
    "transposed",
    "update_slice",
]
