import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from aqtlite import config
from aqtlite.flax import AqtDotGeneral, AqtEinsum, convert
from tests.flax import models
from tests.flax.support import DG, INT8, LAST_BY_FIRST, NORMAL, X, check_served, init

pytestmark = pytest.mark.code("quick")

WRAPPERS = {
    "partitioning": nn.with_partitioning,
    "logical": nn.with_logical_partitioning,
}


def _rhs_spec(serving, *path):
    """The specs of integers and scale, in the order of the kernel's own axes."""
    node = nn.get_partition_spec(serving)["aqt"]
    for step in path:
        node = node[step]
    return tuple(_own_order(spec, node["rhs"].order) for spec in _specs(node["rhs"]))


def _specs(qtensor):
    return qtensor.qvalue, qtensor.scale


def _own_order(spec, order):
    if order is None or not spec:
        return spec
    stacked = len(spec) - len(order)
    return P(*spec[:stacked], *(spec[stacked + order.index(a)] for a in sorted(order)))


@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
def test_names_carry_over(wrapper):
    kernel_init = wrapper(NORMAL, ("embed", "mlp"))
    model = nn.Dense(24, dot_general=DG, kernel_init=kernel_init)
    serving = check_served(model, X, frozen=1)
    assert _rhs_spec(serving, "kernel") == (P("embed", "mlp"), P(None, "mlp"))
    box = init(model, X)["params"]["kernel"]
    frozen = serving["aqt"]["kernel"]["rhs"]
    assert type(frozen.qvalue) is type(frozen.scale) is type(box)


def test_logical_names_become_mesh_names():
    kernel_init = nn.with_logical_partitioning(NORMAL, ("embed", "mlp"))
    model = nn.Dense(24, dot_general=DG, kernel_init=kernel_init)
    specs = nn.get_partition_spec(convert(model, init(model, X), X))
    rules = (("embed", "data"), ("mlp", "model"))
    rhs = nn.logical_to_mesh(specs, rules)["aqt"]["kernel"]["rhs"]
    assert _specs(rhs) == (P("model", "data"), P("model", None))  # as stored


def test_an_axis_of_one():
    kernel_init = nn.with_partitioning(NORMAL, ("in", "out"))
    model = nn.Dense(1, dot_general=DG, kernel_init=kernel_init)
    serving = check_served(model, X, frozen=1)
    assert _rhs_spec(serving, "kernel")[0] == P("in", "out")


def _boxed(names, shape, how):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.with_partitioning(NORMAL, names), shape)
            return AqtEinsum(INT8)("bk,kn->bn", x, how(w))

    return Model()


@pytest.mark.parametrize(
    ("names", "shape", "how", "expected"),
    [
        (("o", "i"), (24, 8), lambda w: w.T, P("i", "o")),
        (("i", "o"), (8, 24), lambda w: w * jnp.arange(24), P("i", "o")),
        (("i", "o"), (8, 24), lambda w: w.astype(jnp.bfloat16), P("i", "o")),
        (("i", "o"), (8, 24), lambda w: w - 1, P("i", "o")),
        (("i", None), (8, 24), lambda w: w, P("i", None)),
        (("s", "i", "o"), (2, 8, 24), lambda w: w[1], P("i", "o")),
        (("i", "o"), (8, 24), lambda w: jnp.maximum(w, 0), P("i", "o")),
        (("i", "o"), (8, 24), jax.jit(lambda w: 2 * w), P("i", "o")),
    ],
    ids=lambda value: str(value) if isinstance(value, P) else "",
)
def test_names_follow_the_axes(names, shape, how, expected):
    serving = check_served(_boxed(names, shape, how), X, frozen=1)
    assert _rhs_spec(serving, "w")[0] == expected


def test_blocks_keep_their_names():
    dot_general = AqtDotGeneral(config.mxint8())
    kernel_init = nn.with_partitioning(NORMAL, ("in", "out"))
    model = nn.Dense(24, dot_general=dot_general, kernel_init=kernel_init)
    x = jnp.ones((2, 64))
    serving = convert(model, init(model, x), x)
    assert serving["aqt"]["kernel"]["rhs"].scale.value.shape == (24, 2)
    assert _rhs_spec(serving, "kernel") == (P("in", "out"), P(None, "out"))


def test_mixed_axes_lose_their_names():
    model = _boxed(("a", "b"), (8, 8), lambda w: w[:, ::-1])
    assert _rhs_spec(convert(model, init(model, X), X), "w")[0] == P()


def test_a_gate_keeps_the_names_of_the_base():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            def param(name, shape, names):
                return self.param(name, nn.with_partitioning(NORMAL, names), shape)

            w = param("w", (8, 24), ("i", "o"))
            w = w * param("gate", (8, 1), ("i", None))
            return AqtDotGeneral(INT8)(x, w, LAST_BY_FIRST)

    serving = check_served(Model(), X, frozen=2)
    assert _rhs_spec(serving, "gate+w") == (P("i", "o"), P(None, "o"))


@pytest.mark.parametrize(
    ("length", "remat", "wrapper"),
    [
        (1, False, "partitioning"),
        (1, True, "logical"),
        (3, False, "logical"),
        (3, True, "partitioning"),
    ],
)
def test_scan_over_boxed_layers(length, remat, wrapper):
    layer, wrapper = (
        nn.remat(models.Layer) if remat else models.Layer,
        WRAPPERS[wrapper],
    )
    model = models.scanned(
        layer, length=length, metadata_params={nn.PARTITION_NAME: "layers"}
    )(INT8, wrapper(nn.initializers.lecun_normal(), ("in", "out")))
    serving = check_served(model, X, None, frozen=2)
    integers, scale = _rhs_spec(serving, "Dense_0", "kernel")
    assert integers == P("layers", "in", "out")
    assert scale == P("layers", None, "out")


def test_scan_over_boxed_layers_along_another_axis():
    model = models.scanned(
        models.Layer, axis=1, metadata_params={nn.PARTITION_NAME: "layers"}
    )(INT8, nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out")))
    serving = check_served(model, X, None, frozen=2)
    specs = nn.get_partition_spec(serving)["aqt"]["Dense_0"]["kernel"]["rhs"]
    stored = P("out", "layers", "in"), P("out", "layers", None)
    assert _specs(specs) == stored


@pytest.mark.code("users")
def test_abstract_boxes():
    kernel_init = nn.with_partitioning(NORMAL, ("in", "out"))
    model = nn.Dense(24, dot_general=DG, kernel_init=kernel_init)
    abstract = jax.eval_shape(lambda: model.init(jax.random.key(0), X))
    serving = jax.eval_shape(lambda v: convert(model, v, X), abstract)
    concrete = convert(model, init(model, X), X)
    assert nn.get_partition_spec(serving) == nn.get_partition_spec(concrete)
    assert jax.tree.structure(serving) == jax.tree.structure(concrete)


SHARDED = """
    import jax, numpy as np
    from flax import linen as nn
    from aqtlite.flax import convert
    from tests.flax import models
    from tests.flax.support import INT8, X, init

    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=auto)
    model = models.scanned(
        models.Layer, length=2, metadata_params={nn.PARTITION_NAME: None}
    )(INT8, nn.with_partitioning(nn.initializers.lecun_normal(), ("data", "model")))
    variables = init(model, X, None)
    run = jax.jit(lambda v, x: model.apply(v, x, None)[0])
    expected = np.asarray(run(variables, X))
    serving = convert(model, variables, X, None)
    abstract = jax.eval_shape(lambda: serving)
    shardings = nn.get_sharding(abstract, mesh)
    served = jax.device_put(serving, shardings)
    integers = nn.unbox(served)["aqt"]["Dense_0"]["kernel"]["rhs"].qvalue
    assert len(integers.sharding.device_set) == 4, integers.sharding
    assert integers.addressable_shards[0].data.shape in ((2, 12, 4), (2, 4, 12))
    np.testing.assert_array_equal(np.asarray(run(served, X)), expected)

    specs = nn.get_sharding(jax.eval_shape(lambda: variables), mesh)
    sharded = jax.device_put(variables, specs)
    np.testing.assert_array_equal(np.asarray(run(sharded, X)), expected)
    jitted = jax.jit(lambda v: convert(model, v, X, None))
    for again in (convert(model, sharded, X, None), jitted(sharded)):
        for a, b in zip(jax.tree.leaves(serving), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    print("equal")
"""


@pytest.mark.slow
def test_sharded_serving():
    flags = "--xla_force_host_platform_device_count=4"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    environment["PYTHONPATH"] = root
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SHARDED)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout.strip().endswith("equal"), done.stderr[-3000:]
