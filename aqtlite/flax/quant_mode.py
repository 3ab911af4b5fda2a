"""The modes in which a contraction inside a Flax module treats frozen weights."""

import enum


class QuantMode(enum.Enum):
    """A mode to impose; normally the variables decide, and no mode is needed."""

    TRAIN = "train"
    """Quantize both operands at every call; frozen kernels are refused."""

    SERVE = "serve"
    """Take frozen weights, and raise if there are none.

    `init` makes the float variables that `convert` takes. The shapes of the serving
    variables are ``jax.eval_shape(lambda v: convert(model, v, *args), variables)``.
    """
