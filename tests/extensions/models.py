"""Models that use the extensions, as a user's module that registers them."""

import flax.linen as nn
import jax

from aqtlite import config
from aqtlite.flax import AqtDotGeneral
from tests.common import tensor
from tests.extensions import affine, running, ternary

INT8 = tensor(8)
_BACKWARD = config.DotGeneralRaw(lhs=INT8, rhs=config.Tensor(use_fwd_quant=True))
CONFIGS = {
    name: config.DotGeneral(
        fwd=config.DotGeneralRaw(lhs=lhs, rhs=rhs), dlhs=_BACKWARD, drhs=_BACKWARD
    )
    for name, lhs, rhs in (
        ("ternary", INT8, ternary.TENSOR),
        ("affine", affine.TENSOR, affine.TENSOR),
        ("running", running.TENSOR, INT8),
    )
}


class Mlp(nn.Module):
    cfg: config.DotGeneral

    @nn.compact
    def __call__(self, x):
        dot_general = AqtDotGeneral(self.cfg)
        x = nn.relu(nn.Dense(24, dot_general=dot_general)(x))
        return nn.Dense(3, dot_general=dot_general)(x)


SAMPLE = (jax.ShapeDtypeStruct((4, 12), "float32"),)


def make_ternary():
    return Mlp(CONFIGS["ternary"]), SAMPLE


def make_affine():
    return Mlp(CONFIGS["affine"]), SAMPLE


def make_running():
    return Mlp(CONFIGS["running"]), SAMPLE
