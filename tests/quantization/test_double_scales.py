"""Scales of frozen weights that are held in 8 bits."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from flax import nnx, serialization

import aqtlite
from aqtlite import config, numerics
from aqtlite.checkpoint import convert_checkpoint, load_serving
from aqtlite.checkpoint.load import summarize
from aqtlite.checkpoint.report import table
from aqtlite.flax import AqtDotGeneral, convert, quantize_model
from aqtlite.flax.nnx import convert as convert_nnx
from aqtlite.flax.nnx import quantize_model as quantize_nnx
from aqtlite.quantization import double_scales
from tests.common import normal, quick_jit, relative_error

pytestmark = pytest.mark.code("quick")

NF4 = config.Tensor(numerics=numerics.NormalFloat(), blocks=config.Blocks(size=64))
PLAIN = config.update(config.weight_only(4), {"fwd.rhs": NF4})
DOUBLE = config.update(PLAIN, {"fwd.rhs.double_scales": config.DoubleScales()})
W, X = normal((256, 512)), normal((3, 256))


def matmul(w, x):
    return x @ w


@functools.cache
def converted(cfg):
    reports = []
    fn_q = aqtlite.quantize_function(matmul, cfg, params=0)
    serve, serving = aqtlite.convert_function(fn_q, W, X, report=reports.append)
    return serve(serving, X), serving, reports[0]


def test_a_weight_takes_4_and_an_eighth_bits_and_little_more():
    out, serving, report = converted(DOUBLE)
    plain, of_plain, _ = converted(PLAIN)
    # Codes, their scales and a code for each block, the scales of those, and a mean.
    assert (
        report.bytes_after == W.size // 2 + W.size // 64 + 4 * W.size // 64 // 256 + 4
    )
    ((weight,),) = (one.values() for one in serving["aqt"].values())
    ((exact,),) = (one.values() for one in of_plain["aqt"].values())
    q, wanted = double_scales.decoded(weight["rhs"]), exact["rhs"]
    np.testing.assert_array_equal(q.qvalue, wanted.qvalue)
    errors = jnp.abs(q.scale - wanted.scale)
    rest = jnp.abs(wanted.scale - wanted.scale.mean()).max()
    assert 0 < errors.max() < 0.01 * rest
    assert 0 < relative_error(out, plain) < 0.01
    assert weight["rhs"].scale.qvalue.dtype == jnp.uint8


def test_a_mean_that_exceeds_a_scale_does_not_make_it_negative():
    q = aqtlite.quantize(jnp.ones((4, 64)) * jnp.array([[1e-9], [9], [9], [9]]), NF4, 1)
    scale = double_scales.decoded(double_scales.encoded(q, config.DoubleScales())).scale
    assert (scale > 0).all()
    nan = jnp.asarray(q.scale).at[0].set(jnp.nan)
    codes = double_scales.encoded(
        q.__class__(q.qvalue, nan, q.dtype, numerics=q.numerics),
        config.DoubleScales(size=1),
    )
    found = double_scales.decoded(codes).scale
    assert jnp.isnan(found).tolist() == [[True], [False], [False], [False]]


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = nn.scan(
            lambda module, x, _: (module(x), None),
            variable_axes={"params": 0, "aqt": 0},
            split_rngs={"params": True},
            length=2,
            metadata_params={nn.PARTITION_NAME: None},
        )
        kernel = nn.with_partitioning(nn.initializers.lecun_normal(), ("a", None))
        return layer(nn.Dense(256, kernel_init=kernel), x, None)[0]


def test_scanned_layers_with_partitioning():
    shapes = jax.eval_shape(Scanned().init, jax.random.key(0), X)
    variables = jax.tree.map(lambda x: normal(x.shape) / 16, shapes)
    model = quantize_model(Scanned(), DOUBLE)
    serving = convert(model, variables, X)
    served = quick_jit(model.apply)(serving, X)
    assert 0 < relative_error(served, Scanned().apply(variables, X)) < 0.3
    stored = nn.get_partition_spec(serving)["aqt"]
    (kernel,) = jax.tree.leaves(stored, is_leaf=lambda x: hasattr(x, "qvalue"))[:1]
    assert kernel.scale.qvalue == jax.sharding.PartitionSpec(None, None, None)


def test_every_way_serves_the_same():
    wanted, *_ = converted(DOUBLE)
    dense = nn.Dense(512, use_bias=False, dot_general=AqtDotGeneral(DOUBLE))
    serving = convert(dense, {"params": {"kernel": W}}, X)
    np.testing.assert_array_equal(dense.apply(serving, X), wanted)
    layer = nnx.Linear(256, 512, use_bias=False, rngs=nnx.Rngs(0))
    layer.kernel.set_value(W)
    model = convert_nnx(quantize_nnx(layer, DOUBLE), X)
    np.testing.assert_array_equal(model(X), wanted)


@pytest.mark.parametrize("target", ["orbax", "out.safetensors"])
def test_checkpoints_hold_what_a_conversion_in_memory_makes(target, tmp_path):
    source, out = tmp_path / "v.msgpack", tmp_path / target
    variables = {"params": {"kernel": W}}
    source.write_bytes(serialization.to_bytes(variables))
    dense = nn.Dense(512, use_bias=False, dot_general=AqtDotGeneral(DOUBLE))
    report = convert_checkpoint(source, out, dense, X)
    _, serving, _ = converted(DOUBLE)
    ((entry,),) = (one.values() for one in serving["aqt"].values())
    for model in (dense, None):
        loaded = load_serving(out, model)
        found = loaded["aqt"]["kernel"]["rhs"]
        assert jax.tree.structure(found) == jax.tree.structure(entry["rhs"])
        jax.tree.map(np.testing.assert_array_equal, found, entry["rhs"])
    shown = summarize(out)
    assert shown.weights == report.weights
    assert "2048 in 8 bits" in str(shown_as_text(shown))
    assert shown.bytes_after == W.size // 2 + 2048 + 4 * 8 + 4 + report.bytes_kept


def shown_as_text(report):
    console = rich.console.Console(width=200)
    with console.capture() as capture:
        console.print(table(report))
    return capture.get()


def test_integers_of_files_have_their_scales_in_8_bits():
    q = aqtlite.quantize(W, NF4, axes=0)
    fn_q = aqtlite.quantize_function(matmul, DOUBLE, params=0)
    reports = []
    _, serving = aqtlite.convert_function(fn_q, q, X, report=reports.append)
    assert "integers as given" in str(reports[0])
    _, wanted, _ = converted(DOUBLE)
    jax.tree.map(np.testing.assert_array_equal, serving, wanted)


def test_errors():
    with pytest.raises(ValueError, match=r"fwd\.lhs\.double_scales.* have no effect"):
        config.update(DOUBLE, {"fwd.lhs": DOUBLE.fwd.rhs})
    with pytest.raises(ValueError, match="double_scales=.* NoNumerics"):
        config.Tensor(double_scales=config.DoubleScales())
    with pytest.raises(ValueError, match="size"):
        config.DoubleScales(size=0)
    assert "in 8 bits when frozen" in config.describe(DOUBLE)
    assert config.from_json(config.to_json(DOUBLE)) == DOUBLE


def test_flax_restores_all_arrays_or_none():
    """The mean, too, whatever the target holds."""
    dense = nn.Dense(512, use_bias=False, dot_general=AqtDotGeneral(DOUBLE))
    serving = convert(dense, {"params": {"kernel": W}}, X)
    target = jax.tree.map(jnp.zeros_like, serving)
    found = serialization.from_bytes(target, serialization.to_bytes(serving))
    np.testing.assert_array_equal(dense.apply(found, X), dense.apply(serving, X))
    state = serialization.to_state_dict(serving)
    del state["aqt"]["kernel"]["rhs"]["scale"]["offset"]
    with pytest.raises(ValueError, match=r"rhs/scale: .* lacks \['offset'\]"):
        serialization.from_state_dict(target, state)
