"""Random Linen models, data and configs: what is served has to be what is trained.

`sample` makes the model that belongs to a seed and a kind of config, always the same.
Models are small, since most of a comparison is compilation: one to three layers of
widths 4 to 256, in the arrangements that models are made of; those of the kind
"repeated" are by rules, and call a layer several times. Of the kinds "presets", "grids"
and "repeated" it draws a history as well: how the model is trained, where the serving
variables were stored, and whether they serve a batch of another size.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from aqtlite import Rule, config
from aqtlite.flax import AqtDotGeneral, AqtEinsum, quantize_model
from aqtlite.quantization.states.state_collections import (
    OF_GRADIENTS,
    STATISTICS,
    collections_of,
)
from tests.common import quick_jit
from tests.flax import random_configs, repeated_models
from tests.flax.random_parts import VOCABULARY, Model, OfTokens, Settings, activation

KINDS = tuple(random_configs.CONFIGS)
Storage = Literal["memory", "orbax", "converted orbax", "converted safetensors"]
STORAGE: dict[str, tuple[Storage, ...]] = {
    "presets": ("memory", "orbax", "converted orbax", "converted safetensors"),
    "grids": ("memory", "orbax", "converted orbax"),  # safetensors has no float8_e3m4.
    "repeated": ("memory", "orbax", "converted orbax", "converted safetensors"),
}
_WIDTHS = (4, 5, 8, 12, 16, 17, 24, 32, 48, 64, 96, 128, 200, 256)
_BATCHES = (1, 1, 2, 3, 4, 7, 8, 10, 16, 33, 64)
_LIFTED = {"params": 0, "aqt": 0, STATISTICS: 0, OF_GRADIENTS: 0}


@dataclasses.dataclass(frozen=True)
class Sample:
    """A model, and what it is called with."""

    kind: str
    seed: int
    model: Any
    """A Linen module, or a model by rules."""

    variables: dict[str, Any]
    args: tuple[jax.Array, ...]
    """The batch that the model is converted for."""

    history: "History"

    def __str__(self) -> str:
        settings, history = self.model.settings, self.history
        module = getattr(self.model, "model", self.model)
        shapes = ", ".join(f"{x.dtype}{x.shape}" for x in self.args)
        return (
            f"--kind {self.kind} --seed {self.seed}: {type(module).__name__} of "
            f"{shapes}, depth {settings.depth}, width {settings.width}, "
            f"{jnp.dtype(settings.dtype)}, bias {settings.use_bias}, "
            f"{settings.activation}, {settings.norm}; {history.steps} steps, "
            f"{history.storage}, serves {history.args[0].shape}"
        )


@dataclasses.dataclass(frozen=True)
class History:
    """What happens to a model between its initialization and its use."""

    steps: int
    """Training steps before the conversion."""

    storage: Storage
    """Where the serving variables come from: `convert`, `convert` and Orbax, or
    `convert_checkpoint` into a format."""

    args: tuple[jax.Array, ...]
    """The batch that is served."""


def sample(kind: str, seed: int) -> Sample:
    """The model that belongs to a kind of config (one of `KINDS`) and a seed."""
    rng = np.random.default_rng([KINDS.index(kind), seed])

    def one_of(values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    settings = Settings(
        cfg=random_configs.CONFIGS[kind](one_of),
        width=one_of(_WIDTHS),
        depth=one_of((1, 1, 2, 2, 3)),
        dtype=one_of((jnp.float32,) * 3 + (jnp.bfloat16, jnp.float16)),
        use_bias=one_of((True, True, False)),
        activation=one_of(("relu", "gelu", "silu", "none")),
        norm=one_of(("layer", "rms", "sum", "none")),
    )
    model = _model(kind, settings, one_of)
    batch, length = one_of(_BATCHES), one_of((None, None, 3, 8))
    args = model.sample_args(rng, batch, length)
    history, values = History(0, "memory", args), _parameter
    variables = jax.eval_shape(model.init, jax.random.key(0), *args)
    if kind in STORAGE:
        others = model.sample_args(rng, one_of(_BATCHES), length)
        history = History(
            steps=max(one_of((0, 1, 2, 4)), _gathers_statistics(settings.cfg)),
            storage=one_of(STORAGE[kind]),
            args=one_of((args, others)),
        )
        values = _perturbed
        variables = quick_jit(model.init)(jax.random.key(seed), *args)
    variables = {
        **variables,
        "params": jax.tree_util.tree_map_with_path(
            functools.partial(values, rng), variables["params"]
        ),
    }
    return Sample(kind, seed, model, variables, args, history)


def _model(kind: str, settings: Settings, one_of: Any) -> Any:
    of_gradients = OF_GRADIENTS in collections_of(settings.cfg)
    if kind == "repeated":
        architecture = one_of(repeated_models.MODELS)
        if architecture in repeated_models.SCANNED and of_gradients:
            architecture = repeated_models.Repeated
        rules = [Rule(operands="weight", cfg=settings.cfg)]
        return quantize_model(architecture(settings), rules)
    architecture = one_of(_MODELS)
    if architecture is Shared and of_gradients:
        architecture = Chain  # Calls of one layer have no statistics of gradients.
    return architecture(settings)


def _gathers_statistics(cfg: config.DotGeneral) -> bool:
    return bool(collections_of(cfg).keys() & {STATISTICS, OF_GRADIENTS})


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


def _perturbed(rng: np.random.Generator, path: Any, leaf: jax.Array) -> jax.Array:
    """Initial values, but no bias is zero and no norm's scale one."""
    if path[-1].key not in ("bias", "scale"):
        return leaf
    return leaf + jnp.asarray(0.2 * rng.standard_normal(leaf.shape), leaf.dtype)


# Parts of models.


def _norm(settings: Settings, x: jax.Array) -> jax.Array:
    if settings.norm == "layer":
        return nn.LayerNorm(dtype=settings.dtype)(x)
    if settings.norm == "rms":
        return nn.RMSNorm(dtype=settings.dtype)(x)
    return x.sum(-1) if settings.norm == "sum" else x


def _dense(
    settings: Settings, features: int | None = None, states: str | None = None
) -> nn.Dense:
    """A layer; `states` names its statistics, where it is called several times."""
    return nn.Dense(
        features or settings.width,
        use_bias=settings.use_bias,
        dtype=settings.dtype,
        dot_general=AqtDotGeneral(settings.cfg, name=states),
    )


class _Block(Model):
    """Dense, activation, Dense, skip connection, norm."""

    @nn.compact
    def __call__(self, x):
        y = activation(self.settings, _dense(self.settings, 2 * x.shape[-1])(x))
        return _norm(self.settings, x + _dense(self.settings, x.shape[-1])(y))


class _Step(nn.Module):
    """A layer to scan over, or to map over."""

    settings: Settings

    @nn.compact
    def __call__(self, x, _=None):
        y = activation(self.settings, _dense(self.settings)(x))
        return x + y, None


# Models.


class Chain(Model):
    """Dense layers of changing widths."""

    def features(self):
        return self.settings.width + 3

    @nn.compact
    def __call__(self, x):
        for i in range(self.settings.depth):
            x = _dense(self.settings, self.settings.width + i % 2)(x)
            x = activation(self.settings, x)
        return _norm(self.settings, x)


class Residual(Model):
    """Dense, activation, skip connection, norm; as many as are wanted."""

    @nn.compact
    def __call__(self, x):
        x = _dense(self.settings)(x)
        for i in range(self.settings.depth):
            y = activation(self.settings, _dense(self.settings)(x)) + x
            is_last = i == self.settings.depth - 1
            x = (
                y
                if self.settings.norm == "sum" and not is_last
                else _norm(self.settings, y)
            )
        return x


class Attention(Model):
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


class Einsum(Model):
    """Weights in equations, in either order of their axes."""

    @nn.compact
    def __call__(self, x):
        width, cfg = self.settings.width, self.settings.cfg
        init = nn.initializers.normal()
        for i, equation in enumerate(("...k,kn->...n", "...k,nk->...n")):
            w = self.param(f"w{i}", init, (width, width)).astype(self.settings.dtype)
            x = activation(self.settings, AqtEinsum(cfg)(equation, x, w))
        heads = self.param("heads", init, (2, width, 4)).astype(self.settings.dtype)
        x = AqtEinsum(cfg)("...k,hkd->...hd", x, heads)
        return _norm(self.settings, x)


class Scanned(Model):
    """Layers under `nn.scan`."""

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            _Step,
            variable_axes=_LIFTED,
            split_rngs={"params": True},
            length=1 + self.settings.depth,
        )
        x, _ = layers(self.settings)(x, None)
        return _norm(self.settings, x)


class Rematerialized(Model):
    """A block under `nn.remat`."""

    @nn.compact
    def __call__(self, x):
        return nn.remat(_Block)(self.settings)(x)


class Mapped(Model):
    """Experts under `nn.vmap`, averaged."""

    @nn.compact
    def __call__(self, x):
        experts = nn.vmap(
            _Step,
            in_axes=None,
            axis_size=3,
            variable_axes=_LIFTED,
            split_rngs={"params": True},
        )
        y, _ = experts(self.settings)(x)
        return _norm(self.settings, y.mean(0))


class Shared(Model):
    """One layer that is called several times."""

    @nn.compact
    def __call__(self, x):
        layer = _dense(self.settings, states="shared")
        for _ in range(1 + self.settings.depth):
            x = activation(self.settings, layer(x))
        return _norm(self.settings, x)


class Tied(OfTokens):
    """An embedding that is looked up, and contracted as the head."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCABULARY, self.settings.width, dtype=self.settings.dtype)
        x = embed(tokens)
        x = x + activation(self.settings, _dense(self.settings)(x))
        if self.settings.norm != "sum":
            x = _norm(self.settings, x)
        x, table = nn.dtypes.promote_dtype(
            x, embed.embedding, dtype=self.settings.dtype
        )
        return AqtEinsum(self.settings.cfg)("...d,vd->...v", x, table)


class Graph(Model):
    """Messages along edges, summed in each node."""

    @nn.compact
    def __call__(self, x):
        nodes = x.reshape(-1, x.shape[-1])
        count = nodes.shape[0]
        senders, receivers = jnp.arange(2 * count) % count, jnp.arange(2 * count) // 2
        for _ in range(self.settings.depth):
            messages = activation(self.settings, _dense(self.settings)(nodes)[senders])
            nodes = nodes + jax.ops.segment_sum(messages, receivers, count)
        return _norm(self.settings, _dense(self.settings)(nodes))


class Blocks(Model):
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
