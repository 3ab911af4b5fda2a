"""The ways of serving, with one face: two layers, and a tied embedding."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

import aqtlite
from aqtlite import Rule, config
from aqtlite.flax import AqtDotGeneral, AqtEinsum, convert, quantize_model
from aqtlite.flax import nnx as aqtlite_nnx
from tests.common import normal
from tests.flax.support import init

CFG = config.fully_quantized(use_stochastic_rounding=False)
X = normal((4, 8))
TOKENS = jnp.array([3, 1, 2])
SUM = "...k,nk->...n"


class Mlp(nn.Module):
    dot_general: object = None
    names: tuple[str, str] = ("up", "down")
    width: int = 16

    @nn.compact
    def __call__(self, x):
        up, down = self.names
        x = nn.Dense(self.width, dot_general=self.dot_general, name=up)(x)
        return nn.Dense(4, dot_general=self.dot_general, name=down)(nn.relu(x))


class Tied(nn.Module):
    """An embedding that is looked up in float, and contracted."""

    einsum: object = jnp.einsum

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(8, 4, name="embed")
        bias = self.param("bias", nn.initializers.zeros, (8,))
        return self.einsum(SUM, embed(tokens), embed.embedding) + bias


class Linen:
    """A Linen model with injected functions."""

    def __init__(self, cfg=CFG, names=("up", "down"), width=16):
        self.model = Mlp(AqtDotGeneral(cfg), names, width)
        self.tied = Tied(AqtEinsum(cfg))

    def floats(self, seed=0):
        return _of_seed(init(self.model, X), seed)

    def convert(self, floats):
        return convert(self.model, floats, X)

    def run(self, variables, x):
        return self.model.apply(variables, x)

    jit = staticmethod(jax.jit)

    def mixed(self, serving, floats):
        return {**serving, "params": floats["params"]}

    def frozen(self, serving):
        return serving["aqt"]

    def with_frozen(self, serving, frozen):
        return {**serving, "aqt": frozen}

    def cast(self, serving):
        return jax.tree.map(_half, serving)

    def converted_tied(self):
        return convert(self.tied, init(self.tied, TOKENS), TOKENS)

    def run_tied(self, serving):
        return self.tied.apply(serving, TOKENS)

    def with_embedding(self, serving, change):
        embed = {"embedding": change(serving["params"]["embed"]["embedding"])}
        return {**serving, "params": {**serving["params"], "embed": embed}}

    def without_sample(self, serving):
        """The fingerprint alone."""
        entry = serving["aqt"]["embed.embedding"]
        entry["identity"] = entry["identity"][:3]
        return serving

    def loss_of(self, serving, select):
        """A loss of some of the parameters that are left, and these parameters."""

        def loss(chosen):
            params = {**serving["params"], **chosen}
            return (self.tied.apply({**serving, "params": params}, TOKENS) ** 2).sum()

        return jax.grad(loss), {select: serving["params"][select]}


class Rules(Linen):
    """A Linen model by rules."""

    def __init__(self, cfg=CFG, names=("up", "down"), width=16):
        self.model = quantize_model(Mlp(None, names, width), cfg)
        self.tied = quantize_model(Tied(), [Rule(operands="weight", cfg=cfg)])

    def without_sample(self, serving):
        for entries in serving["aqt"].values():
            for entry in (entries, *entries.values()):
                if isinstance(entry, dict):
                    entry.pop("identity", None)
        return serving


class Function(Rules):
    """A function by rules."""

    def __init__(self, cfg=CFG, names=("up", "down"), width=16):
        self.names, self.width = names, width
        self.function = aqtlite.quantize_function(self._mlp, cfg, params=0)
        rules = [Rule(operands="weight", cfg=cfg)]
        self.tied = aqtlite.quantize_function(self._tied, rules, params=0)

    def _mlp(self, params, x):
        up, down = (params[name] for name in self.names)
        with jax.named_scope(self.names[0]):
            x = jax.nn.relu(x @ up["kernel"] + up["bias"])
        with jax.named_scope(self.names[1]):
            return x @ down["kernel"] + down["bias"]

    @staticmethod
    def _tied(params, tokens):
        table = params["embed"]["embedding"]
        return jnp.einsum(SUM, table[tokens], table) + params["bias"]

    def floats(self, seed=0):
        return _of_seed(init(Mlp(None, self.names, self.width), X)["params"], seed)

    def convert(self, floats):
        return aqtlite.convert_function(self.function, floats, X)[1]

    def run(self, variables, x):
        if "aqt" not in variables:
            return self.function(variables, x)
        serve, _ = aqtlite.convert_function(self.function, self.floats(), X)
        return serve(variables, x)

    def mixed(self, serving, floats):
        return {**serving, "params": floats}

    def converted_tied(self):
        params = init(Tied(), TOKENS)["params"]
        self.serve_tied, serving = aqtlite.convert_function(self.tied, params, TOKENS)
        return serving

    def run_tied(self, serving):
        return self.serve_tied(serving, TOKENS)

    def loss_of(self, serving, select):
        def loss(chosen):
            params = {**serving["params"], **chosen}
            return (self.serve_tied({**serving, "params": params}, TOKENS) ** 2).sum()

        return jax.grad(loss), {select: serving["params"][select]}


class NnxMlp(nnx.Module):
    def __init__(self, names, width, rngs, **kwargs):
        self.names = names
        setattr(self, names[0], nnx.Linear(8, width, rngs=rngs, **kwargs))
        setattr(self, names[1], nnx.Linear(width, 4, rngs=rngs, **kwargs))

    def __call__(self, x):
        up, down = (getattr(self, name) for name in self.names)
        return down(nnx.relu(up(x)))


class NnxTied(nnx.Module):
    def __init__(self, rngs, dot_general=jax.lax.dot_general):
        self.embed = aqtlite_nnx.AqtEmbed(8, 4, dot_general=dot_general, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros(8))

    def __call__(self, tokens):
        return self.embed.attend(self.embed(tokens)) + self.bias[...]


class NnxInjected:
    """An NNX model with injected functions."""

    def __init__(self, cfg=CFG, names=("up", "down"), width=16):
        self.cfg, self.names, self.width = cfg, names, width

    def floats(self, seed=0):
        dot_general = aqtlite_nnx.AqtDotGeneral(self.cfg)
        rngs = nnx.Rngs(seed)
        return NnxMlp(self.names, self.width, rngs, dot_general=dot_general)

    def convert(self, floats):
        return aqtlite_nnx.convert(floats, X)

    def run(self, model, x):
        return model(x)

    jit = staticmethod(nnx.jit)

    def mixed(self, serving, floats):
        nnx.update(serving, nnx.state(floats, nnx.Param))
        return serving

    def frozen(self, serving):
        return serving.aqt.frozen

    def with_frozen(self, serving, frozen):
        serving.aqt.frozen = nnx.data(frozen)
        return serving

    def cast(self, serving):
        nnx.update(serving, jax.tree.map(_half, nnx.state(serving)))
        return serving

    def converted_tied(self):
        dot_general = aqtlite_nnx.AqtDotGeneral(self.cfg)
        return aqtlite_nnx.convert(NnxTied(nnx.Rngs(0), dot_general), TOKENS)

    def run_tied(self, model):
        return model(TOKENS)

    def with_embedding(self, serving, change):
        embedding = serving.embed.embedding
        embedding.set_value(change(embedding.get_value()))
        return serving

    def without_sample(self, serving):
        serving.aqt.samples = nnx.data({})
        return serving

    def loss_of(self, serving, select):
        def is_selected(path, x):
            return isinstance(x, nnx.Param) and select in path

        wrt = nnx.DiffState(0, is_selected)
        return nnx.grad(lambda m: (m(TOKENS) ** 2).sum(), argnums=wrt), serving


class NnxRules(NnxInjected):
    """An NNX model by rules."""

    def floats(self, seed=0):
        model = NnxMlp(self.names, self.width, nnx.Rngs(seed))
        return aqtlite_nnx.quantize_model(model, self.cfg)

    def converted_tied(self):
        rules = [Rule(operands="weight", cfg=self.cfg)]
        model = aqtlite_nnx.quantize_model(NnxTied(nnx.Rngs(0)), rules)
        return aqtlite_nnx.convert(model, TOKENS)


class NnxInPlace(NnxRules):
    """An NNX model by rules, frozen without a copy."""

    def convert(self, floats):
        return aqtlite_nnx.convert_in_place(floats, X)

    def converted_tied(self):
        rules = [Rule(operands="weight", cfg=self.cfg)]
        model = aqtlite_nnx.quantize_model(NnxTied(nnx.Rngs(0)), rules)
        return aqtlite_nnx.convert_in_place(model, TOKENS)


def _half(x):
    return x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x


def _of_seed(variables, seed):
    """Others for every seed."""
    return jax.tree.map(lambda leaf: leaf * 2**seed, variables) if seed else variables
