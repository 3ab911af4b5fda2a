"""The modes of a contraction in a Flax module: training or serving."""

import enum


class QuantMode(enum.Enum):
    """A mode to enforce; without one, the variables decide."""

    TRAIN = "train"
    """Quantize both operands at every call, and refuse frozen kernels."""

    SERVE = "serve"
    """Use frozen weights, and raise if there are none.

    `init` still returns float variables, for `convert`. The shapes of the serving
    variables are ``jax.eval_shape(lambda v: convert(model, v, *args), variables)``.
    """
