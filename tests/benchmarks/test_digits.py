"""A small CNN learns handwritten digits in 8 bits as it does in float32."""

import functools

import numpy as np

from aqtlite import config
from aqtlite.flax import convert, fold_batch_norm
from benchmarks import digits


def test_accuracy_is_that_of_float32():
    training, test = digits.load()
    found = []
    for cfg in (None, config.fully_quantized(fwd_bits=8, bwd_bits=8)):
        model = digits.Cnn(cfg, features=16)
        variables = digits.train(model, *training, epochs=6, seed=0)
        found.append(digits.accuracy(model, variables, *test))
    assert found[0] > 0.95
    assert found[1] > found[0] - 0.01  # of 450 images, four
    serve = functools.partial(convert, model, train=False)
    folded = serve(fold_batch_norm(variables, digits.LAYERS), test[0][:1])
    np.testing.assert_allclose(
        digits.accuracy(model, folded, *test), found[1], atol=0.0045
    )
