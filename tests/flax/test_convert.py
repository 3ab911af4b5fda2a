"""Arguments, results and errors of `convert`."""

import itertools
import pathlib

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from flax import core as flax_core
from flax import linen as nn

import aqtlite
from aqtlite import calibration, config
from aqtlite.flax import AqtDotGeneral, AqtEinsum, FrozenKernel, calibrate, convert
from tests.common import mostly_slow, shapes_of
from tests.flax import models
from tests.flax.support import (
    DG,
    INT8,
    LAST_BY_FIRST,
    NORMAL,
    X,
    apply,
    assert_equal,
    check_served,
    float_shapes,
    init,
)

pytestmark = pytest.mark.code("quick")

MODEL = models.MlpBlock(INT8)


@pytest.mark.parametrize(
    "model", [nn.Dense(24, dot_general=DG), MODEL, models.Trained(INT8)]
)
def test_what_stays_and_what_goes(model):
    variables = init(model, X)
    before = jax.tree.map(lambda leaf: leaf, variables)
    serving = convert(model, variables, X)
    assert_equal(variables, before)  # The argument is left alone.
    assert set(serving) == {*variables, "aqt"}
    assert all(len(shape) < 2 for shape in float_shapes(serving["params"]))
    flat = dict(jax.tree.leaves_with_path(variables["params"]))
    left = jax.tree.leaves_with_path(serving["params"], is_leaf=aqtlite.is_frozen)
    for path, leaf in left:
        assert aqtlite.is_frozen(leaf) or leaf is flat[path]


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential([nn.Dense(24, dot_general=DG), nn.Dense(8, dot_general=DG)]),
        models.Transformed(INT8, "mask"),
        models.Attention(INT8, "einsum"),
    ],
)
def test_the_compiled_program_has_no_float_kernel(model):
    x = X[None] if isinstance(model, models.Attention) else X
    variables = init(model, x)
    serving = convert(model, variables, x)
    compiled = jax.jit(model.apply).lower(serving, x).compile().as_text()
    layout = compiled.partition("entry_computation_layout=")[2].partition("\n")[0]
    leaves = jax.tree_util.tree_leaves_with_path(variables)
    kernels = [leaf for path, leaf in leaves if path[-1].key in ("kernel", "w")]
    assert kernels
    for kernel in kernels:
        assert all(f"f32[{sizes}]" not in layout for sizes in _permuted(kernel.shape))
        assert any(f"s8[{sizes}]" in layout for sizes in _permuted(kernel.shape))


def _permuted(shape):
    return [",".join(map(str, order)) for order in itertools.permutations(shape)]


@pytest.mark.parametrize(
    "model",
    [
        nn.Dense(24, dot_general=DG),
        nn.remat(models.MlpBlock)(INT8),
        nn.jit(models.MlpBlock)(INT8),
        nn.Sequential([nn.remat(nn.Dense)(24, dot_general=DG)]),
    ],
)
def test_inputs_as_shapes(model):
    variables = init(model, X)
    assert_equal(convert(model, variables, shapes_of(X)), convert(model, variables, X))


def test_inputs_as_shapes_under_scan():
    model = models.scanned(models.Layer)(INT8)
    variables = init(model, X, None)
    serving = convert(model, variables, shapes_of(X), None)
    assert_equal(serving, convert(model, variables, X, None))


def test_abstract_and_jitted_conversions_agree():
    variables = init(MODEL, X)
    serving = convert(MODEL, variables, X)
    assert_equal(jax.jit(lambda v: convert(MODEL, v, X))(variables), serving)
    for abstract in (
        jax.eval_shape(lambda v: convert(MODEL, v, X), shapes_of(variables)),
        jax.eval_shape(lambda v, x: convert(MODEL, v, x), variables, X),
        convert(MODEL, shapes_of(variables), shapes_of(X)),
    ):
        assert jax.tree.structure(abstract) == jax.tree.structure(serving)
        assert jax.tree.leaves(shapes_of(abstract)) == (
            jax.tree.leaves(shapes_of(serving))
        )


def test_frozen_dicts():
    variables = flax_core.freeze(init(MODEL, X))
    serving = convert(MODEL, variables, X)
    served = apply(MODEL, flax_core.freeze(serving), X)
    assert_equal(apply(MODEL, variables, X), served)


@pytest.mark.parametrize("value", [0.5, 3])
def test_a_python_number_is_an_input(value):
    """It may be another one in serving."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, t):
            t = nn.Dense(16, dot_general=DG)(jnp.full((1, 4), t, jnp.float32))
            return x + nn.Dense(8, dot_general=DG)(nn.relu(t))

    model = Model()
    variables = init(model, X, value)
    serving = convert(model, variables, X, value)
    assert_equal(
        apply(model, variables, X, value + 1), apply(model, serving, X, value + 1)
    )


def test_a_kernel_that_is_read_elsewhere_is_kept():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", NORMAL, (8, 24))
            return DG(x, w, LAST_BY_FIRST) + w.sum()

    serving = convert(Model(), init(Model(), X), X)
    assert (8, 24) in float_shapes(serving["params"])
    assert_equal(apply(Model(), init(Model(), X), X), apply(Model(), serving, X))


def test_an_embedding_is_kept():
    model, tokens = models.Tied(INT8), jnp.arange(6)
    serving = convert(model, init(model, tokens), tokens)
    assert serving["params"]["Embed_0"]["embedding"].shape == (32, 8)
    assert isinstance(serving["params"]["Dense_0"]["kernel"], FrozenKernel)


class ScaledByBuffer(nn.Module):
    dot_general: AqtDotGeneral = DG

    @nn.compact
    def __call__(self, x):
        w = self.param("w", NORMAL, (8, 24))
        scale = self.variable("buffers", "scale", jnp.ones, (24,))
        return self.dot_general(x, w * scale.value, LAST_BY_FIRST)


def test_what_depends_on_another_collection_is_no_weight():
    serving = check_served(ScaledByBuffer(), X, frozen=0)
    assert serving["params"]["w"].shape == (8, 24)


@pytest.mark.parametrize("side", ["rhs", "both"])
def test_freezing_what_depends_on_inputs_raises(side):
    model = ScaledByBuffer(AqtDotGeneral(INT8, frozen_operands=side))
    with pytest.raises(ValueError, match="frozen_operands.*rhs.*'auto'|lhs.*'auto'"):
        convert(model, init(model, X), X)


def test_freezing_the_activation_raises():
    model = nn.Dense(24, dot_general=AqtDotGeneral(INT8, frozen_operands="lhs"))
    with pytest.raises(ValueError, match="lhs float32.*depends on the model's inputs"):
        convert(model, init(model, X), X)


def test_freezing_nothing():
    model = nn.Sequential(
        [
            nn.Dense(24, dot_general=AqtDotGeneral(INT8, frozen_operands="none")),
            nn.Dense(8, dot_general=DG),
        ]
    )
    check_served(model, X, frozen=1)


class Step(nn.Module):
    dot_general: AqtDotGeneral

    @nn.compact
    def __call__(self, carry, x):
        carry = nn.relu(nn.Dense(8, dot_general=self.dot_general)(carry + x))
        return carry, carry


def _shared_over_steps(broadcast, **fields):
    return nn.scan(Step, variable_broadcast=broadcast, split_rngs={"params": False})(
        AqtDotGeneral(INT8, **fields)
    )


def test_weights_shared_over_the_steps_of_a_scan():
    for operands in ("auto", "rhs"):
        model = _shared_over_steps(["params", "aqt"], frozen_operands=operands)
        check_served(model, X[:1], X[:, None], frozen=1)


@pytest.mark.parametrize("operands", ["auto", "rhs", "none"])
def test_weights_of_a_scan_that_does_not_lift_the_collection(operands):
    model = _shared_over_steps("params", frozen_operands=operands)
    check_served(model, X[:1], X[:, None], frozen=0)


def test_weights_of_steps_with_states_of_their_own():
    cfg = config.update(
        INT8,
        {
            "fwd.rhs.calibration": calibration.MaxOverBatches(),
            "fwd.rhs.calib_shared_axes": "per_tensor",
        },
    )
    scan = nn.scan(
        Step,
        variable_axes={"aqt_stats": 0},
        variable_broadcast=["params", "aqt"],
        split_rngs={"params": False},
    )
    model = scan(AqtDotGeneral(cfg))
    inputs = X[:1], X[:, None]
    variables = calibrate(model, init(model, *inputs), [inputs])
    with pytest.raises(ValueError, match="the steps of an nn.scan share a weight"):
        convert(model, variables, *inputs)


def test_wrong_variables():
    variables = init(MODEL, X)
    with pytest.raises(ValueError, match="collection 'params'"):
        convert(MODEL, variables["params"], X)
    with pytest.raises(ValueError, match="collection 'params'"):
        convert(MODEL, None, X)
    with pytest.raises(ValueError, match="frozen weights already"):
        convert(MODEL, convert(MODEL, variables, X), X)
    with pytest.raises(ValueError, match="mutable"):
        convert(MODEL, variables, X, mutable=True)


@pytest.mark.parametrize("cfg", [None, config.unquantized()])
def test_nothing_to_freeze(cfg):
    model = models.MlpBlock(cfg)
    with pytest.raises(ValueError, match="nothing to freeze: the configs of all 3"):
        convert(model, init(model, X), X)
    plain = nn.Dense(8)
    with pytest.raises(ValueError, match="no AqtDotGeneral .*quantize_model"):
        convert(plain, init(plain, X), X)


@pytest.mark.parametrize("how", [jax.vmap, jax.checkpoint, jax.jit])
def test_raw_transformations_inside_a_module(how):
    """They cannot be frozen, but they work; `jnp.einsum` is one of them."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", NORMAL, (24, 8))
            x = nn.Dense(24, dot_general=DG)(x)
            return how(lambda row: AqtEinsum(INT8)("...k,kn->...n", row, w))(x)

    check_served(Model(), X, frozen=1)


@pytest.mark.parametrize("name", mostly_slow(["convert", "serve", "rng"], "convert"))
def test_jnp_einsum_with_nothing_in_its_cache(name):
    """`jnp.einsum` is jitted: what it traced once it does not trace again."""
    model, x = models.Attention(INT8, "einsum_dot_general"), X[None]
    variables = init(model, x)
    if name == "rng":
        jax.clear_caches()
        for seed in range(2):
            rngs = {"aqt": jax.random.key(seed)}
            jax.jit(jax.grad(lambda v, r: model.apply(v, x, rngs=r).sum()))(
                variables, rngs
            )
        return
    expected = apply(model, variables, x)
    if name == "convert":
        jax.clear_caches()
    serving = convert(model, variables, x)
    jax.clear_caches()
    assert_equal(apply(model, serving, x), expected)


def test_orbax(tmp_path: pathlib.Path):
    variables = init(MODEL, X)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "serving", convert(MODEL, variables, X))
        checkpointer.wait_until_finished()
        target = jax.eval_shape(lambda v: convert(MODEL, v, X), shapes_of(variables))
        restored = checkpointer.restore(tmp_path / "serving", target)
    assert_equal(apply(MODEL, variables, X), apply(MODEL, restored, X))
