"""Reports of weights that cannot be frozen and are quantized at every call."""

import functools

import jax
import jax.numpy as jnp
import pytest
from absl import logging
from flax import linen as nn
from flax import nnx

from aqtlite import config, numerics
from aqtlite.flax import AqtDotGeneral, AqtEinsum, QuantMode, convert
from aqtlite.lowering.forms import panel_products, processor
from aqtlite.program.serving.placeholder import without_markers
from tests.flax import models
from tests.flax.support import (
    DG,
    INT8,
    LAST_BY_FIRST,
    NORMAL,
    XX,
    X,
    apply,
    assert_equal,
    init,
    placeholders,
)

pytestmark = pytest.mark.code("quick")

EINSUM = AqtEinsum(INT8)


class NestedApply(nn.Module):
    """A tied head, as in many public models."""

    def setup(self):
        self.embed = nn.Embed(16, 8)
        self.dense = nn.Dense(8, dot_general=DG)
        self.head = nn.Dense(16, use_bias=False, dot_general=DG)

    def __call__(self, x):
        tokens = jnp.arange(4)
        x = self.dense(self.embed(tokens) + x)
        kernel = self.embed.embedding.T
        return self.head.apply({"params": {"kernel": kernel}}, x)


class Spectral(nn.Module):
    @nn.compact
    def __call__(self, x):
        dense = nn.Dense(8, dot_general=DG)
        return nn.SpectralNorm(dense)(x, update_stats=False)


class Raw(nn.Module):
    """A transformation of JAX's own inside a module."""

    how: str

    @nn.compact
    def __call__(self, x):
        w = self.param("kernel", NORMAL, (8, 8))
        if self.how == "scan":
            step = lambda c, _: (EINSUM("bk,kn->bn", c, w), None)  # noqa: E731
            return jax.lax.scan(step, x, None, length=2)[0]
        how = {"jit": jax.jit, "vmap": jax.vmap, "remat": jax.checkpoint}[self.how]
        return how(lambda row: EINSUM("...k,kn->...n", row, w))(x)


@pytest.mark.parametrize("grid", [None, numerics.NormalFloat()])
def test_values_of_4_bits_take_half_a_byte(grid):
    cfg = config.weight_only(4)
    if grid is not None:
        cfg = config.update(cfg, {"fwd.rhs.numerics": grid})
    model, reports = nn.Dense(6, dot_general=AqtDotGeneral(cfg), use_bias=False), []
    convert(model, init(model, X), X, report=reports.append)
    assert reports[0].bytes_after == 8 * 6 // 2 + 6 * 4


class Branches(nn.Module):
    """Layers in the branches of a lifted conditional, in structures of their own."""

    how: str

    @nn.compact
    def __call__(self, x):
        def one(module, x):
            return nn.Dense(8, dot_general=DG, name="one")(x)

        def two(module, x):
            x = nn.Dense(8, dot_general=DG, name="two")(x)
            return nn.Dense(8, dot_general=DG, name="three")(x)

        if self.is_initializing():
            return one(self, x) + two(self, x)
        if self.how == "cond":
            return nn.cond(x.sum() > 0, one, two, self, x)
        return nn.switch((x.sum() > 0).astype(jnp.int32), [one, two], self, x)


class Buffered(nn.Module):
    @nn.compact
    def __call__(self, x):
        w = self.variable("constants", "w", lambda: jnp.eye(8) * 3)
        self.param("bias", nn.initializers.zeros, (8,))
        return DG(x, w.value, LAST_BY_FIRST)


def _broadcast_scan(lifted):
    def step(module, carry, x):
        return carry, module(x)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            scan = nn.scan(
                step, variable_broadcast=lifted, split_rngs={"params": False}
            )
            return scan(nn.Dense(8, dot_general=DG), None, x)[1]

    return Model()


def _shared_vmap(axis):
    return nn.vmap(
        nn.Dense,
        variable_axes={"params": None, "aqt": axis},
        split_rngs={"params": False},
    )(16, dot_general=DG)


class Queries(nn.Module):
    """Learned queries, broadcast to the batch."""

    side: str

    @nn.compact
    def __call__(self, x):
        queries = self.param("kernel", NORMAL, (3, 8))
        queries = jnp.broadcast_to(queries, (len(x), 3, 8))
        if self.side == "lhs":
            return EINSUM("bqd,bkd->bqk", queries, x)
        return EINSUM("bkd,bqd->bkq", x, queries)


def _converted(model, x, **kwargs):
    """Converted and served like the trained model; gives the report."""
    variables = init(model, x)
    reports = []
    serving = convert(model, variables, x, report=reports.append, **kwargs)
    assert_equal(apply(model, variables, x), apply(model, serving, x))
    (report,) = reports
    for name, tree in (("before", variables["params"]), ("after", serving)):
        if name == "after":
            tree = {k: tree[k] for k in ("params", "aqt") if k in tree}
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(without_markers(tree)))
        assert size == getattr(report, f"bytes_{name}")
    return variables, serving, report


@pytest.mark.parametrize(
    ("model", "x", "stayed", "why"),
    [
        (NestedApply(), X, ["embed/embedding"], "nested Module.apply"),
        (Spectral(), X, ["Dense_0/kernel"], "collection other than 'params'"),
        *[
            (Raw(how), X, ["kernel"], "jax.jit, jax.vmap or another transformation")
            for how in ("scan", "jit", "vmap", "remat")
        ],
        *[
            (
                Branches(how),
                X,
                ["one/kernel", "three/kernel", "two/kernel"],
                "nn.cond, nn.switch",
            )
            for how in ("cond", "switch")
        ],
        (_broadcast_scan("params"), XX, ["Dense_0/kernel"], "variable_broadcast="),
        (_broadcast_scan(["params", "aqt"]), XX, [], ""),
        (_shared_vmap(0), XX, ["kernel"], "larger than the parameters"),
        (_shared_vmap(None), XX, [], ""),
        (models.Transformed(INT8, "standardise"), X, ["w"], "mixes elements"),
        (models.Tied(INT8), jnp.arange(6), [], ""),
        *[
            (Queries(side), x, ["kernel"], why)
            for side in ("lhs", "rhs")
            for x, why in (
                (XX, "larger than the parameters"),
                (XX[:1], "may be a batch"),
            )
        ],
    ],
)
def test_what_stays_in_float(model, x, stayed, why):
    variables, serving, report = _converted(model, x)
    assert sorted(one.path for one in report.stayed_float) == stayed
    assert all(why in one.why for one in report.stayed_float)
    frozen = [one for one in report.parameters if one.is_frozen]
    assert len(frozen) == len(placeholders(serving))
    assert all(one.path in str(report) for one in (*frozen, *report.stayed_float))
    if stayed:
        with pytest.raises(ValueError, match=rf"(?s)strict.*{stayed[0]}: .*{why}"):
            convert(model, variables, x, strict=True)
    else:
        convert(model, variables, x, strict=True)


@pytest.mark.parametrize("axis", [0, None])
def test_a_shared_layer_under_vmap_serves_other_batches(axis):
    model = _shared_vmap(axis)
    variables = init(model, XX)
    serving = convert(model, variables, XX)
    for x in (XX[:1], jnp.concatenate([XX, XX])):
        assert_equal(apply(model, variables, x), apply(model, serving, x))


@pytest.mark.parametrize("side", ["lhs", "rhs"])
@pytest.mark.parametrize("batch", [1, 2])
def test_learned_queries_serve_other_batches(side, batch):
    model = Queries(side)
    variables = init(model, XX)
    serving = convert(model, variables, XX[:batch])
    assert_equal(apply(model, variables, XX), apply(model, serving, XX))


def test_a_parameter_that_no_call_reads_is_said_to_be_unread():
    class Model(nn.Module):
        def setup(self):
            self.used = nn.Dense(8, dot_general=DG)
            self.other = nn.Dense(8, dot_general=DG)

        def __call__(self, x):
            return self.used(x)

        def both(self, x):
            return self.used(self.other(x))

    model = Model()
    variables = init(model, X, method="both")
    reports = []
    convert(model, variables, X, report=reports.append)
    text = str(reports[0])
    assert "unread (2)" in text and "not read by the calls that were given" in text
    assert "others (1)" in text and "in float, not quantized" in text
    why = {one.path: one.why for one in reports[0].parameters}
    assert "calls=" in why["other/kernel"] and why["used/bias"] == "not quantized"


@pytest.mark.parametrize("report", [True, "print"])
def test_a_report_that_is_no_function(report):
    model = nn.Dense(24, dot_general=DG)
    with pytest.raises(TypeError, match="report must be a function.*report=print"):
        convert(model, init(model, X), X, report=report)


def test_a_weight_of_another_collection():
    variables, serving, report = _converted(Buffered(), X)
    assert not report.stayed_float and "aqt" not in serving
    (text,) = report.other_operands
    assert "float32[8,8]" in text and text in str(report)
    with pytest.raises(ValueError, match="strict"):
        convert(Buffered(), variables, X, strict=True)


@pytest.mark.parametrize(
    ("model", "warns"), [(nn.Dense(24, dot_general=DG), False), (Spectral(), True)]
)
def test_what_stays_is_logged_once(model, warns, monkeypatch):
    said = {"info": [], "warning": []}
    for level, lines in said.items():
        say = functools.partial(
            lambda lines, text, *args: lines.append(text % args), lines
        )
        monkeypatch.setattr(logging, level, say)
    convert(model, init(model, X), X)
    assert (len(said["info"]), len(said["warning"])) == ((0, 1) if warns else (1, 0))
    assert not warns or "Dense_0/kernel" in said["warning"][0]


def test_nothing_to_freeze_is_said(caplog):
    dense, x = nn.Dense(1, dot_general=DG), jnp.ones((4, 1))
    with caplog.at_level("WARNING", logger="absl"):
        convert(dense, init(dense, x), x)
    assert "froze no parameters" in caplog.text
    assert "each sum has one element" in caplog.text


def test_a_parameter_that_is_read_elsewhere_is_said_to_stay():
    _, _, report = _converted(models.Tied(INT8), jnp.arange(6))
    (table,) = [p for p in report.parameters if p.path == "Embed_0/embedding"]
    assert not table.is_frozen and "something else reads it" in table.why
    assert table.bytes_after > table.bytes_before


@pytest.mark.parametrize("abstract", [False, True])
def test_serve_mode_initializes(abstract):
    """As float variables, which `convert` then takes."""
    model = nn.Dense(24, dot_general=AqtDotGeneral(INT8, QuantMode.SERVE))
    if abstract:
        made = jax.eval_shape(model.init, jax.random.key(0), X)
        assert made["params"]["kernel"].shape == (8, 24)
        return
    variables = init(model, X)
    serving = convert(model, variables, X)
    trained = nn.Dense(24, dot_general=DG)
    assert_equal(apply(trained, variables, X), apply(model, serving, X))


class NnxModel(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(8, 8, dot_general=DG, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


def test_an_nnx_module_behind_the_bridge_stays_in_float():
    model = nnx.bridge.to_linen(NnxModel)
    variables = init(model, X)
    reports = []
    serving = convert(model, variables, X, report=reports.append)
    assert_equal(model.apply(variables, X), model.apply(serving, X))
    assert "NNX" in str(reports[0])


def test_nnx_is_refused_clearly():
    with pytest.raises(TypeError, match=r"takes a flax\.linen\.Module, got NnxModel"):
        convert(NnxModel(rngs=nnx.Rngs(0)), {"params": {}}, X)
    wrapped = nnx.bridge.ToNNX(DG, rngs=nnx.Rngs(0))
    with pytest.raises(AttributeError, match=r"dot_general=AqtDotGeneral\(cfg\)"):
        wrapped(X, X, LAST_BY_FIRST)
    with pytest.raises(AttributeError, match="not a Flax module"):
        wrapped.lazy_init(X, X, LAST_BY_FIRST)
    dense = nn.Dense(24, dot_general=DG)
    serving = convert(dense, init(dense, X), X)
    with pytest.raises(TypeError, match="no counterpart in NNX"):
        nnx.bridge.variables.linen_vars_to_nnx_attrs(serving)


def test_weights_that_are_slow_to_serve_are_named(monkeypatch):
    whole = config.w4a8()
    blocks, large, of_int8 = (
        config.update(cfg, {"fwd.rhs.blocks": config.Blocks(size=size)})
        for cfg, size in ((whole, 8), (whole, 32), (config.qat(8), 32))
    )
    nf4 = config.update(
        config.weight_only(4), {"fwd.rhs.numerics": numerics.NormalFloat()}
    )
    nf4_blocks = config.update(nf4, {"fwd.rhs.blocks": config.Blocks(size=32)})
    decoded = "slow on CPUs under jax.jit: decoded at every call"
    decoded_without = decoded.replace("under jax.jit", "without the extra 'cpu'")
    without = "slow on CPUs without the extra 'cpu': int4 in blocks of 32"
    monkeypatch.setattr(processor, "has_slow_dots_of_bytes", lambda: True)
    for cfg, has_kernel, expected in (
        (nf4, True, ""),
        (nf4_blocks, False, decoded_without),
        (config.mxfp4(), True, ""),
        (config.mxfp4(), False, decoded_without),
        (config.nvfp4(), True, ""),
        (config.mxfp8(), True, decoded),
        (config.weight_only(4), True, ""),
        (
            config.weight_only(8),
            True,
            "slow here from 64 rows on: int8 by floats, without VNNI",
        ),
        (blocks, True, "slow on CPUs: int4 in blocks of 8"),
        (large, False, without),
        (large, True, ""),
        (whole, False, ""),
        (of_int8, False, without.replace("int4", "int8")),
    ):
        monkeypatch.setattr(panel_products, "runs_here", lambda has=has_kernel: has)
        dense = nn.Dense(16, use_bias=False, dot_general=AqtDotGeneral(cfg))
        reports = []
        x = jnp.ones((2, 64))
        convert(dense, init(dense, x), x, report=reports.append)
        assert reports[0].parameters[0].slow_on == expected
        assert expected in str(reports[0])
