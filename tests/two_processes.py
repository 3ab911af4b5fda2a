"""What the two processes of tests/test_two_processes.py have in common."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from aqtlite import config
from aqtlite.flax import AqtDotGeneral
from aqtlite.qtensor.qtensor import QTensor

X = np.random.default_rng(0).standard_normal((8, 16)).astype("float32")


class Mlp(nn.Module):
    """Two layers, the hidden axis of which is sharded."""

    cfg: config.DotGeneral | None = config.fully_quantized()

    @nn.compact
    def __call__(self, x):
        dot_general = AqtDotGeneral(self.cfg)
        for features, names in ((32, (None, "model")), (16, ("model", None))):
            kernel_init = nn.with_partitioning(nn.initializers.lecun_normal(), names)
            x = nn.Dense(
                features,
                use_bias=False,  # whose gradient is a float sum, in an order of its own
                dot_general=dot_general,
                kernel_init=kernel_init,
            )(x)
            x = nn.relu(x)
        return x


class Stack(nn.Module):
    """Two layers of one parameter, the first of which a rule names."""

    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        weights = self.param("weights", init, (2, 16, 16))
        with jax.named_scope("first"):
            x = jnp.tanh(x @ weights[0])
        return x @ weights[1]


def start(port: str, rank: str) -> jax.sharding.Mesh:
    """Joins the other process; returns a mesh whose two axes both span them.

    Each process has two devices: a row of the mesh holds one of each, and so does a
    column.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"localhost:{port}",
        num_processes=2,
        process_id=int(rank),
        initialization_timeout=60,
    )
    (a, b), (c, d) = (jax.devices()[:2], jax.devices()[2:])
    return jax.sharding.Mesh(np.array([[a, c], [d, b]]), ("data", "model"))


def variables(model=None):
    """The same in both processes, on a device of each."""
    model = Mlp() if model is None else model
    return jax.tree.map(np.asarray, jax.jit(model.init)(jax.random.key(0), X))


def put(mesh, x, *spec):
    """An array of both processes."""
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def sharded(mesh, tree):
    """Variables of both processes, as their partitioning says."""
    return jax.tree.map(
        lambda box: box.replace_boxed(put(mesh, box.value, *box.names)),
        tree,
        is_leaf=nn.meta.is_axis_metadata,
    )


def assert_alike(text):
    """Text that both processes have."""
    own = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    first, second = multihost_utils.process_allgather(own)
    np.testing.assert_array_equal(first, second)


def assert_equal(got, wanted):
    """Arrays of both processes against those of one, bit for bit."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        whole = multihost_utils.process_allgather(a, tiled=True)
        assert whole.dtype == b.dtype
        np.testing.assert_array_equal(whole, b)


def assert_sharded(serving):
    """The integers of every weight lie in halves, of which a process has both."""
    nodes = jax.tree.leaves(serving, is_leaf=lambda x: isinstance(x, QTensor))
    weights = [nn.meta.unbox(x) for x in nodes if isinstance(x, QTensor)]
    assert len(weights) == 2
    for weight in weights:
        assert not weight.qvalue.is_fully_addressable
        shards = weight.qvalue.addressable_shards
        assert [s.data.size for s in shards] == [weight.qvalue.size // 2] * 2
