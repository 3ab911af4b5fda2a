"""Assertions for tests of quantized models and kernels.

`assert_served_equals_trained` compares a model with its conversion, and
`assert_kernel_equals_reference` a kernel with its reference. Read `served` first.
"""

from aqtlite.testing.kernels import assert_kernel_equals_reference
from aqtlite.testing.served import assert_served_equals_trained

__all__ = ["assert_kernel_equals_reference", "assert_served_equals_trained"]
