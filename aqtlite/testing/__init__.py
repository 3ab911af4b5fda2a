"""Assertions for tests of quantized models and kernels.

`assert_served_equals_trained` compares a model with its conversion, and
`assert_kernel_equals_reference` a kernel with its reference. `assert_causal` and
`assert_independent` show that positions, or examples, do not see those that they should
not. Read `dependence` first.
"""

from aqtlite.testing.dependence import assert_causal, assert_independent
from aqtlite.testing.kernels import assert_kernel_equals_reference
from aqtlite.testing.served import assert_served_equals_trained

__all__ = [
    "assert_causal",
    "assert_independent",
    "assert_kernel_equals_reference",
    "assert_served_equals_trained",
]
