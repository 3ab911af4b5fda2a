"""N:M sparsity of the weights of Flax models."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import aqtlite
from aqtlite import checkpoint, config
from aqtlite.flax import (
    AqtDotGeneral,
    AqtTake,
    QuantizedCache,
    convert,
    quantize_model,
)
from aqtlite.flax import nnx as aqtlite_nnx
from tests.checkpoint.support import assert_same, save
from tests.common import normal
from tests.flax.models import Mlp
from tests.flax.support import apply, init

pytestmark = pytest.mark.code("quick")

CFG = config.update(config.fully_quantized(), {"fwd.rhs.sparsity": config.NofM(2, 4)})
X = normal((8, 16))


VARIABLES = init(Mlp(None), X)


def is_qtensor(x):
    return isinstance(x, aqtlite.QTensor)


def integers(tree):
    """The integers of frozen kernels."""
    leaves = jax.tree.leaves(tree, is_leaf=is_qtensor)
    return [q.in_own_order().qvalue for q in filter(is_qtensor, leaves)]


def is_sparse(x):
    groups = np.asarray(x).reshape(-1, 4, x.shape[-1])
    return ((groups != 0).sum(1) <= 2).all()


def test_serves_as_trained_with_zeros_among_the_integers(tmp_path):
    model, reports = Mlp(CFG), []
    serving = convert(model, VARIABLES, X, report=reports.append)
    assert (apply(model, serving, X) == apply(model, VARIABLES, X)).all()
    assert [is_sparse(x) for x in integers(serving["aqt"])] == [True, True]
    assert str(reports[0]).count("frozen, 2:4 sparse") == 2
    ruled = quantize_model(Mlp(None), CFG)
    assert (
        apply(ruled, convert(ruled, VARIABLES, X), X) == apply(model, serving, X)
    ).all()
    source = save(tmp_path / "float", VARIABLES, "msgpack")
    checkpoint.convert_checkpoint(source, tmp_path / "out", model, X)
    assert_same(checkpoint.load_serving(tmp_path / "out", model), serving)


def test_pruned_weights_return_in_training():
    """Those of a sparse regression are found, whichever were the largest first."""
    model = nn.Dense(3, use_bias=False, dot_general=AqtDotGeneral(CFG))
    wanted = jnp.zeros((16, 3)).at[jnp.array([1, 2, 6, 11, 12])].set(2.0)
    x = normal((256, 16), 3)
    variables = init(model, x)
    first = np.asarray(variables["params"]["kernel"]) != 0
    optimizer = optax.adam(0.05)

    def loss(params):
        return jnp.mean((model.apply({"params": params}, x) - x @ wanted) ** 2)

    def step(state, _):
        params, opt_state = state
        value, gradients = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(gradients, opt_state)
        return (optax.apply_updates(params, updates), opt_state), value

    state = variables["params"], optimizer.init(variables["params"])
    _, losses = jax.jit(lambda state: jax.lax.scan(step, state, length=150))(state)
    assert first.all() and losses[-1] < 0.01 * losses[0]


def test_nnx_models():
    plain = nnx.Sequential(nnx.Linear(16, 12, rngs=nnx.Rngs(0)), nnx.relu)
    model = aqtlite_nnx.quantize_model(plain, CFG)
    served = aqtlite_nnx.convert(model, X)
    call = nnx.jit(lambda m, x: m(x))
    assert (call(served, X) == call(model, X)).all()
    assert [is_sparse(x) for x in integers(nnx.to_pure_dict(nnx.state(served)))] == [
        True
    ]


def test_tables_and_caches_are_refused():
    class Table(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            table = self.param("table", nn.initializers.normal(), (16, 8))
            return AqtTake(CFG)(table, tokens)

    with pytest.raises(ValueError, match=r"fwd\.rhs\.sparsity=.* a lookup reads rows"):
        init(Table(), jnp.arange(4))
    with pytest.raises(ValueError, match="sparsity=.* is of weights"):
        QuantizedCache(CFG)
