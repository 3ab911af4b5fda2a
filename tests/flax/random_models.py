"""Random Linen models, data and configs: what is served has to be what is trained.

`sample` makes the model that belongs to a seed and a kind of config, always the same.
Models are small, since most of a comparison is compilation: one to three layers of
widths 4 to 256, in the arrangements that models are made of.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from aqtlite import config
from aqtlite.flax import AqtDotGeneral, AqtEinsum

KINDS = ("integers", "weight_only", "fake_quant", "dg_in_dtype")
_WIDTHS = (4, 5, 8, 12, 16, 17, 24, 32, 48, 64, 96, 128, 200, 256)
_BATCHES = (1, 1, 2, 3, 4, 7, 8, 10, 16, 33, 64)
_VOCABULARY = 24


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options that the parts of a model share."""

    cfg: config.DotGeneral
    width: int
    depth: int
    dtype: Any
    use_bias: bool
    activation: str
    norm: str


@dataclasses.dataclass(frozen=True)
class Sample:
    """A model, and what it is called with."""

    kind: str
    seed: int
    model: nn.Module
    variables: dict[str, Any]
    args: tuple[jax.Array, ...]

    def __str__(self) -> str:
        settings = self.model.settings
        shapes = ", ".join(f"{x.dtype}{x.shape}" for x in self.args)
        return (
            f"--kind {self.kind} --seed {self.seed}: {type(self.model).__name__} of "
            f"{shapes}, depth {settings.depth}, width {settings.width}, "
            f"{jnp.dtype(settings.dtype)}, bias {settings.use_bias}, "
            f"{settings.activation}, {settings.norm}"
        )


def sample(kind: str, seed: int) -> Sample:
    """The model that belongs to a kind of config (one of `KINDS`) and a seed."""
    rng = np.random.default_rng([KINDS.index(kind), seed])

    def one_of(values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    settings = Settings(
        cfg=_CONFIGS[kind](one_of),
        width=one_of(_WIDTHS),
        depth=one_of((1, 1, 2, 2, 3)),
        dtype=one_of((jnp.float32,) * 3 + (jnp.bfloat16, jnp.float16)),
        use_bias=one_of((True, True, False)),
        activation=one_of(("relu", "gelu", "silu", "none")),
        norm=one_of(("layer", "rms", "sum", "none")),
    )
    model = one_of(_MODELS)(settings)
    args = model.sample_args(rng, one_of(_BATCHES), one_of((None, None, 3, 8)))
    shapes = jax.eval_shape(model.init, jax.random.key(0), *args)
    variables = jax.tree_util.tree_map_with_path(
        functools.partial(_parameter, rng), shapes
    )
    return Sample(kind, seed, model, variables, args)


def _parameter(rng: np.random.Generator, path: Any, leaf: Any) -> jax.Array:
    """Values as after some training: no bias is zero, no norm's scale one."""
    x = rng.standard_normal(leaf.shape)
    name = jax.tree_util.keystr(path)
    if "scale" in name:
        x = 1 + 0.1 * x
    elif leaf.ndim >= 2 and "bias" not in name:
        x = x / np.sqrt(leaf.shape[-2])
    else:
        x = 0.2 * x
    return jnp.asarray(x, leaf.dtype)


# Configs.


def _integers(one_of: Callable[[Any], Any]) -> config.DotGeneral:
    cfg = config.fully_quantized(
        fwd_bits=one_of((8, 8, 8, 4, 2)),
        bwd_bits=one_of((8, 4, None)),
        use_stochastic_rounding=one_of((True, False)),
    )
    if one_of((True, False, False)):
        cfg = config.update(cfg, {"fwd.*.po2_scale": True})
    if one_of((True, False, False)):
        axes = one_of(({"fwd.*": "per_tensor"}, {"fwd.rhs": "per_tensor"}))
        changes = {f"{path}.calib_shared_axes": value for path, value in axes.items()}
        cfg = config.update(cfg, changes)
    return cfg


def _weight_only(one_of: Callable[[Any], Any]) -> config.DotGeneral:
    return config.weight_only(bits=one_of((8, 4)))


def _fake_quant(one_of: Callable[[Any], Any]) -> config.DotGeneral:
    return config.update(_integers(one_of), {"fwd.*.use_fake_quant": True})


def _dg_in_dtype(one_of: Callable[[Any], Any]) -> config.DotGeneral:
    dtype = one_of(("bfloat16", "float32"))
    return config.update(_integers(one_of), {"fwd.dg_in_dtype": dtype})


_CONFIGS = {
    "integers": _integers,
    "weight_only": _weight_only,
    "fake_quant": _fake_quant,
    "dg_in_dtype": _dg_in_dtype,
}


# Parts of models.


def _activation(settings: Settings, x: jax.Array) -> jax.Array:
    functions = {"relu": nn.relu, "gelu": nn.gelu, "silu": nn.silu}
    return functions.get(settings.activation, lambda x: x)(x)


def _norm(settings: Settings, x: jax.Array) -> jax.Array:
    if settings.norm == "layer":
        return nn.LayerNorm(dtype=settings.dtype)(x)
    if settings.norm == "rms":
        return nn.RMSNorm(dtype=settings.dtype)(x)
    return x.sum(-1) if settings.norm == "sum" else x


def _dense(settings: Settings, features: int | None = None, **options: Any) -> nn.Dense:
    return nn.Dense(
        features or settings.width,
        use_bias=settings.use_bias,
        dtype=settings.dtype,
        dot_general=AqtDotGeneral(settings.cfg),
        **options,
    )


class _Model(nn.Module):
    """A model of one floating input."""

    settings: Settings

    def sample_args(
        self, rng: np.random.Generator, batch: int, length: int | None
    ) -> tuple[jax.Array, ...]:
        """Random inputs, of rank 2 unless a length is given."""
        shape = (
            (batch, self.features())
            if length is None
            else (
                batch,
                length,
                self.features(),
            )
        )
        return (jnp.asarray(rng.standard_normal(shape), self.settings.dtype),)

    def features(self) -> int:
        """The width of the input."""
        return self.settings.width


class _Block(_Model):
    """Dense, activation, Dense, skip connection, norm."""

    @nn.compact
    def __call__(self, x):
        y = _activation(self.settings, _dense(self.settings, 2 * x.shape[-1])(x))
        return _norm(self.settings, x + _dense(self.settings, x.shape[-1])(y))


class _Step(nn.Module):
    """A layer to scan over, or to map over."""

    settings: Settings

    @nn.compact
    def __call__(self, x, _=None):
        y = _activation(self.settings, _dense(self.settings)(x))
        return x + y, None


# Models.


class Chain(_Model):
    """Dense layers of changing widths."""

    def features(self):
        return self.settings.width + 3

    @nn.compact
    def __call__(self, x):
        for i in range(self.settings.depth):
            x = _dense(self.settings, self.settings.width + i % 2)(x)
            x = _activation(self.settings, x)
        return _norm(self.settings, x)


class Residual(_Model):
    """Dense, activation, skip connection, norm; as many as are wanted."""

    @nn.compact
    def __call__(self, x):
        x = _dense(self.settings)(x)
        for i in range(self.settings.depth):
            y = _activation(self.settings, _dense(self.settings)(x)) + x
            is_last = i == self.settings.depth - 1
            x = (
                y
                if self.settings.norm == "sum" and not is_last
                else _norm(self.settings, y)
            )
        return x


class Attention(_Model):
    """Multi-head self-attention with a residual connection."""

    def features(self):
        return 4 * max(1, self.settings.width // 8)

    @nn.compact
    def __call__(self, x):
        x = x if x.ndim == 3 else x[None]
        y = nn.MultiHeadDotProductAttention(
            num_heads=2,
            qkv_features=self.features(),
            use_bias=self.settings.use_bias,
            dtype=self.settings.dtype,
            qkv_dot_general=AqtDotGeneral(self.settings.cfg),
            out_dot_general=AqtDotGeneral(self.settings.cfg),
        )(x)
        return _norm(self.settings, x + y)


class Einsum(_Model):
    """Weights in equations, in either order of their axes."""

    @nn.compact
    def __call__(self, x):
        width, cfg = self.settings.width, self.settings.cfg
        init = nn.initializers.normal()
        for i, equation in enumerate(("...k,kn->...n", "...k,nk->...n")):
            w = self.param(f"w{i}", init, (width, width)).astype(self.settings.dtype)
            x = _activation(self.settings, AqtEinsum(cfg)(equation, x, w))
        heads = self.param("heads", init, (2, width, 4)).astype(self.settings.dtype)
        x = AqtEinsum(cfg)("...k,hkd->...hd", x, heads)
        return _norm(self.settings, x)


class Scanned(_Model):
    """Layers under `nn.scan`."""

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            _Step,
            variable_axes={"params": 0, "aqt": 0},
            split_rngs={"params": True},
            length=1 + self.settings.depth,
        )
        x, _ = layers(self.settings)(x, None)
        return _norm(self.settings, x)


class Rematerialized(_Model):
    """A block under `nn.remat`."""

    @nn.compact
    def __call__(self, x):
        return nn.remat(_Block)(self.settings)(x)


class Mapped(_Model):
    """Experts under `nn.vmap`, averaged."""

    @nn.compact
    def __call__(self, x):
        experts = nn.vmap(
            _Step,
            in_axes=None,
            axis_size=3,
            variable_axes={"params": 0, "aqt": 0},
            split_rngs={"params": True},
        )
        y, _ = experts(self.settings)(x)
        return _norm(self.settings, y.mean(0))


class Shared(_Model):
    """One layer that is called several times."""

    @nn.compact
    def __call__(self, x):
        layer = _dense(self.settings)
        for _ in range(1 + self.settings.depth):
            x = _activation(self.settings, layer(x))
        return _norm(self.settings, x)


class Tied(_Model):
    """An embedding that is looked up, and contracted as the head."""

    def sample_args(self, rng, batch, length):
        shape = (batch,) if length is None else (batch, length)
        return (jnp.asarray(rng.integers(_VOCABULARY, size=shape), jnp.int32),)

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(_VOCABULARY, self.settings.width, dtype=self.settings.dtype)
        x = embed(tokens)
        x = x + _activation(self.settings, _dense(self.settings)(x))
        if self.settings.norm != "sum":
            x = _norm(self.settings, x)
        x, table = nn.dtypes.promote_dtype(
            x, embed.embedding, dtype=self.settings.dtype
        )
        return AqtEinsum(self.settings.cfg)("...d,vd->...v", x, table)


class Graph(_Model):
    """Messages along edges, summed in each node."""

    @nn.compact
    def __call__(self, x):
        nodes = x.reshape(-1, x.shape[-1])
        count = nodes.shape[0]
        senders, receivers = jnp.arange(2 * count) % count, jnp.arange(2 * count) // 2
        for _ in range(self.settings.depth):
            messages = _activation(self.settings, _dense(self.settings)(nodes)[senders])
            nodes = nodes + jax.ops.segment_sum(messages, receivers, count)
        return _norm(self.settings, _dense(self.settings)(nodes))


class Blocks(_Model):
    """Dense, activation, Dense, skip connection, norm."""

    @nn.compact
    def __call__(self, x):
        return _Block(self.settings)(x)


_MODELS = (
    Chain,
    Chain,
    Residual,
    Residual,
    Residual,
    Blocks,
    Attention,
    Einsum,
    Scanned,
    Rematerialized,
    Mapped,
    Shared,
    Tied,
    Graph,
)
