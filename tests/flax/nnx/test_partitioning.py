"""Sharding metadata of frozen weights, and what NNX makes of it."""

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import aqtlite
from aqtlite import QTensor, config
from aqtlite.flax.nnx import convert, quantize_model
from tests.flax.nnx.models import CFG, X, call

pytestmark = pytest.mark.code("quick")

NORMAL = nnx.initializers.normal()
MESH = jax.make_mesh(
    (1, 1), ("in", "out"), axis_types=(jax.sharding.AxisType.Auto,) * 2
)
LAYERS = {nnx.PARTITION_NAME: "layers"}


def partitioned(names=("in", "out"), features=4, **kwargs):
    init = nnx.with_partitioning(NORMAL, names)
    return nnx.Linear(8, features, kernel_init=init, rngs=nnx.Rngs(0), **kwargs)


class Scanned(nnx.Module):
    def __init__(self):
        @nnx.split_rngs(splits=2)
        @nnx.vmap(transform_metadata=LAYERS)
        def layers(rngs):
            init = nnx.with_partitioning(NORMAL, ("in", "out"))
            return nnx.Linear(8, 8, kernel_init=init, rngs=rngs)

        self.layers = layers(nnx.Rngs(0))

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, transform_metadata=LAYERS)
        def run(x, layer):
            return layer(x)

        return run(x, self.layers)


class Transposed(nnx.Module):
    def __init__(self):
        kernel = NORMAL(jax.random.key(0), (4, 8))
        self.kernel = nnx.Param(kernel, out_sharding=P("out", "in"))

    def __call__(self, x):
        return x @ (2 * self.kernel[...].T)


@pytest.fixture(autouse=True)
def no_mesh_is_needed():
    with nnx.use_eager_sharding(False):
        yield


def specs(model, module=""):
    """Those of integers and of scales, as they are stored: the output first."""
    found = nnx.get_partition_spec(nnx.state(model))["aqt"]["frozen"][module]["kernel"]
    return found.get_value().qvalue, found.get_value().scale


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (partitioned, (P("out", "in"), P("out", None))),
        (lambda: partitioned((None, "out")), (P("out", None), P("out", None))),
        (lambda: partitioned(("in",)), (P(None, "in"), P(None, None))),
        (Transposed, (P("out", "in"), P("out", None))),
        (lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0)), (P(None, None), P(None, None))),
    ],
    ids=["linear", "out alone", "in alone", "transposed", "without names"],
)
def test_names_carry_over(make, expected):
    assert specs(convert(quantize_model(make(), CFG), X)) == expected


def test_scanned_layers_keep_the_name_of_the_stack():
    with jax.set_mesh(MESH):
        model = quantize_model(Scanned(), CFG)
        serving = convert(model, X)
        expected = P("layers", "out", "in"), P("layers", "out", None)
        assert specs(serving, "layers") == expected
        np.testing.assert_array_equal(call(serving, X), call(model, X))


def test_blocks():
    cfg = config.update(CFG, {"fwd.*.blocks": config.Blocks(size=4)})
    model = quantize_model(partitioned(), cfg)
    serving = convert(model, X)
    assert serving.aqt.frozen[""]["kernel"].scale.shape == (4, 2)
    assert specs(serving) == (P("out", "in"), P("out", None))


def test_logical_names():
    model = quantize_model(partitioned(("embed", "mlp")), CFG)
    serving = convert(model, X)
    with nnx.logical_axis_rules((("embed", None), ("mlp", "out"))):
        assert specs(serving) == (P("out", None), P("out", None))


def test_rules_of_the_variable_come_along():
    init = nnx.with_partitioning(
        NORMAL, ("embed", "mlp"), sharding_rules=(("embed", None), ("mlp", "out"))
    )
    layer = nnx.Linear(8, 4, kernel_init=init, rngs=nnx.Rngs(0))
    serving = convert(quantize_model(layer, CFG), X)
    assert specs(serving) == (P("out", None), P("out", None))


def test_arrays_are_put_onto_a_mesh():
    model = quantize_model(partitioned(), CFG)
    serving = convert(model, X)
    state = nnx.state(serving)
    nnx.update(serving, jax.device_put(state, nnx.get_named_sharding(state, MESH)))
    frozen = serving.aqt.frozen[""]["kernel"]
    assert frozen.qvalue.sharding == jax.NamedSharding(MESH, P("out", "in"))
    assert frozen.scale.sharding == jax.NamedSharding(MESH, P("out", None))
    np.testing.assert_array_equal(call(serving, X), call(model, X))


@pytest.mark.parametrize("how", [lambda model: model, nnx.as_abstract])
def test_shapes_on_a_mesh(how):
    """`nnx.eval_shape` and `nnx.as_abstract` give shapes that are sharded."""
    with jax.set_mesh(MESH):
        make = lambda: convert(quantize_model(partitioned(), CFG), X)  # noqa: E731
        abstract = how(nnx.eval_shape(make))
    frozen = abstract.aqt.frozen[""]["kernel"].get_value()
    assert isinstance(frozen, QTensor)
    assert frozen.qvalue.sharding.spec == P("out", "in")
    assert frozen.scale.sharding.spec == P("out", None)
    assert aqtlite.is_frozen(abstract.kernel)


def test_a_frozen_parameter_has_no_axes_to_name():
    layer = partitioned()
    serving = convert(quantize_model(layer, CFG), X)
    assert "out_sharding" not in serving.kernel.get_metadata()
    assert layer.kernel.get_metadata("out_sharding") == ("in", "out")
