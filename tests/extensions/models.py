"""Models that use the extensions, as a user's module that registers them."""

import flax.linen as nn
import jax

from aqtlite import config
from aqtlite.flax import AqtDotGeneral
from tests.common import tensor
from tests.extensions import affine, running, ternary

INT8 = tensor(8)


def config_of(lhs, rhs):
    """A forward contraction of these operands, with int8 gradients that reuse them."""
    backward = config.DotGeneralRaw(lhs=INT8, rhs=config.Tensor(use_fwd_quant=True))
    return config.DotGeneral(
        fwd=config.DotGeneralRaw(lhs=lhs, rhs=rhs), dlhs=backward, drhs=backward
    )


CONFIGS = {
    name: config_of(lhs, rhs)
    for name, lhs, rhs in (
        ("ternary", INT8, ternary.TENSOR),
        ("affine", affine.TENSOR, affine.TENSOR),
        ("running", running.TENSOR, INT8),
    )
}


class Mlp(nn.Module):
    cfg: config.DotGeneral
    width: int = 24

    @nn.compact
    def __call__(self, x):
        dot_general = AqtDotGeneral(self.cfg)
        x = nn.relu(nn.Dense(self.width, dot_general=dot_general)(x))
        return nn.Dense(3, dot_general=dot_general)(x)


class Head(nn.Module):
    """A layer below which a parameter is trained, by the gradient of its input."""

    cfg: config.DotGeneral

    @nn.compact
    def __call__(self, x):
        gain = self.param("gain", nn.initializers.ones, (x.shape[-1],))
        return nn.Dense(3, dot_general=AqtDotGeneral(self.cfg))(gain * x)


class Heads(nn.Module):
    """Models of several configs side by side, trained and served in one program."""

    cfgs: tuple[tuple[str, config.DotGeneral], ...]

    @nn.compact
    def __call__(self, x):
        return {name: Head(cfg, name=name)(x) for name, cfg in self.cfgs}


SAMPLE = (jax.ShapeDtypeStruct((4, 12), "float32"),)


def make_ternary():
    return Mlp(CONFIGS["ternary"]), SAMPLE


def make_affine():
    return Mlp(CONFIGS["affine"]), SAMPLE


def make_running():
    return Mlp(CONFIGS["running"]), SAMPLE
