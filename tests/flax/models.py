"""The models that the serving tests run."""

import functools
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from aqtlite.flax import AqtDotGeneral, AqtEinsum
from tests.flax.support import LAST_BY_FIRST, NORMAL


class Mlp(nn.Module):
    """Two layers with an activation between them."""

    cfg: Any = None

    @nn.compact
    def __call__(self, x):
        dot_general = AqtDotGeneral(self.cfg)
        x = nn.relu(nn.Dense(24, dot_general=dot_general)(x))
        return nn.Dense(8, dot_general=dot_general)(x)


class MlpBlock(nn.Module):
    """Layers of one shape and one instance."""

    cfg: Any
    use_bias: bool = True
    depth: int = 3

    @nn.compact
    def __call__(self, x):
        dot_general = AqtDotGeneral(self.cfg)
        for _ in range(self.depth):
            x = nn.Dense(8, self.use_bias, dot_general=dot_general)(nn.gelu(x))
        return x


class Setup(nn.Module):
    """Instances in `setup`: given to layers, a list of them, and called directly."""

    cfg: Any

    def setup(self):
        self.dot_general = AqtDotGeneral(self.cfg)
        self.other = AqtDotGeneral(self.cfg)
        self.layers = [nn.Dense(8, dot_general=self.dot_general) for _ in range(2)]
        self.w1 = self.param("w1", NORMAL, (8, 8))
        self.w2 = self.param("w2", NORMAL, (8, 8))

    def __call__(self, x):
        for layer in self.layers:
            x = nn.relu(layer(x))
        x = self.dot_general(x, self.w1, LAST_BY_FIRST)
        return self.other(x, self.w2, LAST_BY_FIRST)


class Loop(nn.Module):
    """One stacked parameter, contracted slice by slice."""

    cfg: Any

    @nn.compact
    def __call__(self, x):
        dot_general = AqtDotGeneral(self.cfg)
        weights = self.param("w", NORMAL, (3, 8, 8))
        for i in range(3):
            x = x + dot_general(x, weights[i], LAST_BY_FIRST)
        return x


class Transformed(nn.Module):
    """A weight made of parameters in more than a plain way."""

    cfg: Any
    how: str

    @nn.compact
    def __call__(self, x):
        w = self.param("w", NORMAL, (24, 8) if self.how == "transpose" else (8, 24))
        if self.how == "transpose":
            w = w.T
        elif self.how == "reshape":
            w = w.reshape(4, 2, 24).reshape(8, 24)
        elif self.how == "mask":
            w = w * (jnp.arange(8)[:, None] % 2 == 0)
        elif self.how == "standardise":
            w = (w - w.mean(0)) / jnp.sqrt(w.var(0) + 1e-5)
        elif self.how == "lora":
            a = self.param("a", NORMAL, (8, 2))
            w = w + a @ self.param("b", NORMAL, (2, 24))
        return AqtEinsum(self.cfg)("bk,kn->bn", x, w)


class Tied(nn.Module):
    """An embedding that is looked up and contracted."""

    cfg: Any

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(32, 8)
        x = nn.Dense(8, dot_general=AqtDotGeneral(self.cfg))(embed(tokens))
        x, table = nn.dtypes.promote_dtype(x, embed.embedding)
        return AqtEinsum(self.cfg)("...d,vd->...v", x, table)


class WeightFirst(nn.Module):
    """A weight as the first operand."""

    cfg: Any

    @nn.compact
    def __call__(self, x):
        w = self.param("w", NORMAL, (24, 8))
        return AqtEinsum(self.cfg)("nk,bk->nb", w, x)


class Attention(nn.Module):
    """Own attention by `nn.dot_product_attention`."""

    cfg: Any
    how: str

    @nn.compact
    def __call__(self, x):
        layer = functools.partial(nn.DenseGeneral, dot_general=AqtDotGeneral(self.cfg))
        q, k, v = (layer((2, 4), name=name)(x) for name in "qkv")
        if self.how == "einsum_dot_general":
            options = {"einsum_dot_general": AqtDotGeneral(self.cfg)}
        else:
            options = {
                "qk_attn_weights_einsum": AqtEinsum(self.cfg),
                "attn_weights_value_einsum": AqtEinsum(self.cfg),
            }
        return layer(8, (-2, -1), name="out")(
            nn.dot_product_attention(q, k, v, **options)
        )


class Trained(nn.Module):
    """BatchNorm, dropout, and a flag."""

    cfg: Any

    @nn.compact
    def __call__(self, x, *, train=False):
        dot_general = AqtDotGeneral(self.cfg)
        x = nn.Dense(8, dot_general=dot_general)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(8, dot_general=dot_general)(x)


class Layer(nn.Module):
    """A layer to scan over."""

    cfg: Any
    kernel_init: Any = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, x, _):
        dense = functools.partial(
            nn.Dense,
            dot_general=AqtDotGeneral(self.cfg),
            kernel_init=self.kernel_init,
        )
        return x + dense(8)(nn.relu(dense(24)(x))), None


def scanned(layer, length=3, axis=0, **options):
    """`nn.scan` over layers, with the collection "aqt" lifted."""
    return nn.scan(
        layer,
        variable_axes={"params": axis, "aqt": axis},
        split_rngs={"params": True},
        length=length,
        **options,
    )
