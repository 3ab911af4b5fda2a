"""A small CNN learns handwritten digits in 8 bits (see `benchmarks.digits`)."""

import functools

import pytest

from aqtlite import config
from aqtlite.flax import convert, fold_batch_norm
from benchmarks import digits

pytestmark = [pytest.mark.slow, pytest.mark.code("quick")]


def test_a_cnn_learns_and_serves_in_8_bits():
    training, (images, labels) = digits.load()
    model = digits.Cnn(config.fully_quantized(fwd_bits=8, bwd_bits=8))
    variables = digits.train(model, *training, epochs=4, seed=0)
    learned = digits.accuracy(model, variables, images, labels)
    assert learned > 0.9
    folded = fold_batch_norm(variables, digits.LAYERS)
    serving = functools.partial(convert, model, train=False)(folded, images[:1])
    served = digits.accuracy(model, serving, images, labels)
    assert abs(served - learned) < 0.005  # two of 450 images
