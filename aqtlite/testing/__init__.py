"""Assertions for tests of quantized models and kernels.

`assert_served_equals_trained` compares a model with its conversion, and
`assert_kernel_equals_reference` a kernel with its reference. `assert_causal` and
`assert_independent` show that positions, or examples, do not see those that they should
not. `assert_batch_invariant`, `assert_decoded_equals_trained` and `assert_reproducible`
compare bits between batches, between training and decoding, and with earlier runs.
`assert_quantized` and `assert_no_float_copy` read the compiled program, and
`assert_same_integers` compares what two programs contract.
Read `dependence` first.
"""

from aqtlite.testing.batches import assert_batch_invariant
from aqtlite.testing.compiled import assert_no_float_copy, assert_quantized
from aqtlite.testing.decoding import assert_decoded_equals_trained
from aqtlite.testing.dependence import assert_causal, assert_independent
from aqtlite.testing.integers import assert_same_integers
from aqtlite.testing.kernels import assert_kernel_equals_reference
from aqtlite.testing.reproducible import assert_reproducible, digest
from aqtlite.testing.served import assert_served_equals_trained

__all__ = [
    "assert_batch_invariant",
    "assert_causal",
    "assert_decoded_equals_trained",
    "assert_independent",
    "assert_kernel_equals_reference",
    "assert_no_float_copy",
    "assert_quantized",
    "assert_reproducible",
    "assert_same_integers",
    "assert_served_equals_trained",
    "digest",
]
