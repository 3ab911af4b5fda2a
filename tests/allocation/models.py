"""Small models and batches that the tests of this folder share."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from aqtlite import config
from aqtlite.flax import AqtDotGeneral
from tests.common import normal

INT4, INT8 = config.weight_only(bits=4), config.fully_quantized()
CANDIDATES = {"w4": INT4, "w8a8": INT8}
X, LABELS = normal((16, 8)), jnp.arange(16) % 4
BATCHES = [(X, LABELS), (2 * X, LABELS)]


def loss(logits, x, labels):
    del x
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
    return -chosen.mean()


class Mlp(nn.Module):
    cfg: config.DotGeneral | None = None

    @nn.compact
    def __call__(self, x):
        dot_general = AqtDotGeneral(self.cfg)
        x = nn.relu(nn.Dense(16, dot_general=dot_general)(x))
        x = nn.relu(nn.Dense(12, dot_general=dot_general)(x))
        return nn.Dense(4, dot_general=dot_general)(x)
