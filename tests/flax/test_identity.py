"""A frozen weight is found by what it is: never another one, whatever is called."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from aqtlite import config
from aqtlite.flax import AqtDotGeneral, AqtEinsum, Call, FrozenKernel, convert
from aqtlite.flax.linen.bare import lookup
from tests.common import quick_jit
from tests.flax import models
from tests.flax.support import (
    DG,
    INT8,
    LAST_BY_FIRST,
    NORMAL,
    X,
    assert_equal,
    check_served,
    float_shapes,
    init,
    placeholders,
)
from tests.flax.support import quick_apply as apply

pytestmark = pytest.mark.code("quick")

EINSUM = AqtEinsum(INT8)


class CrossAttention(nn.Module):
    """Projects the encoder's output in prefill only, and keeps it in a cache."""

    @nn.compact
    def __call__(self, x, memory=None):
        w = {name: self.param(name, NORMAL, (8, 8)) for name in ("q", "k", "o")}
        query = EINSUM("bd,dn->bn", x, w["q"])
        key = self.variable("cache", "k", jnp.zeros, (4, 8))
        if memory is not None:
            key.value = EINSUM("bd,dn->bn", memory, w["k"])
        return EINSUM("bd,dn->bn", query * key.value, w["o"])


PREFILL = Call(X, X[::-1], mutable=["cache"])
DECODE = Call(X)


def apply_eagerly(model, *args, **kwargs):
    return model.apply(*args, **kwargs)


@pytest.mark.parametrize(
    ("calls", "frozen", "how"),
    [
        ([PREFILL], 3, apply),
        ([DECODE], 2, apply),
        ([DECODE], 2, apply_eagerly),
        pytest.param([PREFILL, DECODE], 3, apply, marks=pytest.mark.slow),
        pytest.param([DECODE, PREFILL], 3, apply, marks=pytest.mark.slow),
        ([DECODE, PREFILL], 3, apply_eagerly),
    ],
)
def test_a_branch_that_contracts_other_weights(calls, frozen, how):
    model = CrossAttention()
    variables = init(model, X, X[::-1])
    serving = convert(model, variables, calls=calls)
    assert len(placeholders(serving["params"])) == frozen
    assert set(serving["aqt"]) == ({"q", "k", "o"} if frozen == 3 else {"q", "o"})
    wanted = how(model, variables, *PREFILL.args, **PREFILL.kwargs)
    served = how(model, serving, *PREFILL.args, **PREFILL.kwargs)
    assert_equal(wanted, served)
    cache = wanted[1]
    assert_equal(
        how(model, {**variables, **cache}, X), how(model, {**serving, **cache}, X)
    )


class Branch(nn.Module):
    """A flag decides which weight it contracts."""

    how: str

    @nn.compact
    def __call__(self, x, flag: Any = False):
        a, b = (self.param(name, NORMAL, (8, 8)) for name in "ab")
        match self.how:
            case "skip":
                x = x if flag else EINSUM("bk,kn->bn", x, a)
                return EINSUM("bk,kn->bn", x, b)
            case "swap":
                a = b if flag else a
            case "transpose":
                a = a.T if flag else a
            case "scale":
                a = a * (3.0 if flag else 1.0)
            case "reverse":
                a = a[::-1] if flag else a
            case "mirror":
                a = a[:, ::-1] if flag else a
            case "drop":
                a = nn.Dropout(0.5, deterministic=not flag)(a, rng=jax.random.key(3))
            case "half":
                a = a[:4] if flag else a[4:]
                x = x[:, :4]
        return EINSUM("bk,kn->bn", x, a)


HOWS = ("skip", "swap", "transpose", "scale", "reverse", "mirror", "drop", "half")


@pytest.mark.parametrize("how", HOWS)
def test_a_call_that_was_not_converted(how):
    """It is right, where the weight is frozen or a float, or it is refused."""
    model = Branch(how)
    variables = init(model, X)
    serving = convert(model, variables, X)
    assert_equal(apply(model, variables, X), apply(model, serving, X))
    expected = model.apply(variables, X, True)
    if how in ("skip", "swap"):
        assert_equal(expected, model.apply(serving, X, True))
        served = quick_jit(lambda v: model.apply(v, X, True))(serving)
        np.testing.assert_allclose(expected, served, rtol=1e-6)
        return
    with pytest.raises(ValueError, match=r"another way.*calls=\[Call"):
        model.apply(serving, X, True)
    assert jnp.isnan(quick_jit(lambda v: model.apply(v, X, True))(serving)).all()


@pytest.mark.parametrize("how", [how for how in HOWS if how != "drop"])
def test_both_calls_converted(how):
    model = Branch(how)
    variables = init(model, X)
    calls = [Call(X, flag) for flag in (np.bool_(False).item(), True)]
    serving = convert(model, variables, calls=calls)
    for flag in (False, True):
        run = quick_jit(lambda v, flag=flag: model.apply(v, X, flag))
        assert_equal(run(variables), run(serving))
        assert_equal(model.apply(variables, X, flag), model.apply(serving, X, flag))
    assert len(serving["aqt"]) == 2
    gone = {"a", "b"} if how in ("skip", "swap") else {"a"}
    assert {
        name for name in "ab" if isinstance(serving["params"][name], FrozenKernel)
    } == gone


def test_two_methods_that_share_a_function():
    class Model(nn.Module):
        def setup(self):
            self.a = self.param("a", NORMAL, (8, 8))
            self.b = self.param("b", NORMAL, (8, 8))

        def __call__(self, x):
            return DG(x, self.a, LAST_BY_FIRST)

        def other(self, x):
            return DG(x, self.b, LAST_BY_FIRST)

    model = Model()
    variables = init(model, X)
    calls = [Call(X), Call(X, method="other")]
    for serving, frozen in (
        (convert(model, variables, X), 1),
        (convert(model, variables, calls=calls), 2),
    ):
        assert len(placeholders(serving)) == frozen
        for method in ("__call__", "other"):
            assert_equal(
                apply(model, variables, X, method=method),
                apply(model, serving, X, method=method),
            )


def test_one_weight_in_two_calls_is_one_weight():
    model = models.MlpBlock(INT8)
    variables = init(model, X)
    once = convert(model, variables, X)
    twice = convert(model, variables, calls=[Call(X), Call(X[None])])
    assert jax.tree.structure(once) == jax.tree.structure(twice)


@pytest.mark.parametrize("as_activation", [False, True])
def test_an_operand_of_the_shape_of_a_frozen_weight(as_activation):
    """One that is not frozen is quantized as it is, wherever it comes from."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", NORMAL, (8, 8))
            other = x[:, None] * jnp.ones(8)
            if not as_activation:
                other = self.variable("buffers", "w", lambda: w * 2).value
            else:
                other = (x.T @ x) / 4
            return EINSUM("bk,kn->bn", EINSUM("bk,kn->bn", x, w), other)

    model = Model()
    variables = init(model, X)
    serving = convert(model, variables, X)
    assert len(placeholders(serving)) == 1
    assert_equal(model.apply(variables, X), model.apply(serving, X))
    assert_equal(apply(model, variables, X), apply(model, serving, X))
    gradient = quick_jit(jax.grad(lambda x, v: (model.apply(v, x) ** 2).sum()))
    assert_equal(gradient(X, variables), gradient(X, serving))


class TiedTwice(nn.Module):
    """A table that is looked up, and contracted where the flag says so."""

    @nn.compact
    def __call__(self, tokens, scale=1.0):
        table = self.param("table", NORMAL, (20, 8))
        x = table[tokens]
        return EINSUM("...k,nk->...n", x, table * scale)


def test_a_parameter_that_stays_is_known_by_its_values():
    model, tokens = TiedTwice(), jnp.arange(3)
    variables = init(model, tokens)
    serving = convert(model, variables, tokens)
    assert not placeholders(serving)
    assert (20, 8) in float_shapes(serving["params"])
    assert_equal(apply(model, variables, tokens), apply(model, serving, tokens))
    scaled = quick_jit(lambda v: model.apply(v, tokens, 3.0))
    assert jnp.isnan(scaled(serving)).all()
    with pytest.raises(ValueError, match="'table' .* is contracted in another way"):
        model.apply(serving, tokens, 3.0)
    other = jax.tree.map(lambda leaf: leaf + 1, variables["params"])
    assert jnp.isnan(apply(model, {**serving, "params": other}, tokens)).all()


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_a_parameter_that_stays_under_a_scan(axis):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            w = self.param("w", NORMAL, (8, 8))
            return x + EINSUM("bk,kn->bn", x, w) + w.sum(), None

    model = models.scanned(Layer, axis=axis)()
    variables = init(model, X, None)
    serving = convert(model, variables, X, None)
    assert_equal(apply(model, variables, X, None), apply(model, serving, X, None))
    wrong = jax.tree.map(lambda leaf: leaf.at[..., 0].add(1), variables["params"])
    assert jnp.isnan(apply(model, {**serving, "params": wrong}, X, None)[0]).any()


CLS = functools.partial(AqtDotGeneral, INT8)


@pytest.mark.code("users")
@pytest.mark.parametrize(
    ("model", "args"),
    [
        (nn.Dense(24, dot_general=DG), (X,)),
        pytest.param(
            nn.Dense(8, dot_general=DG, dtype=jnp.bfloat16),
            (X,),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            nn.MultiHeadDotProductAttention(
                2, qkv_dot_general_cls=CLS, out_dot_general=DG
            ),
            (X[None],),
            marks=pytest.mark.slow,
        ),
        (models.scanned(models.Layer)(INT8), (X, None)),
        (models.Loop(INT8), (X,)),
        (CrossAttention(), (X,)),
    ],
    ids=["Dense", "bfloat16", "attention", "scan", "loop", "one shape"],
)
def test_nothing_of_the_comparison_is_compiled(model, args, monkeypatch):
    serving = convert(model, init(model, *args), *args)

    def compiled():
        # A function of its own, which is in no cache.
        run = jax.jit(lambda variables, *args: model.apply(variables, *args))
        return run.lower(serving, *args).compile().as_text()

    text = compiled()
    assert "conditional" not in text

    def known(scope, candidates, operand, x):
        return candidates[0].values[operand.side]

    monkeypatch.setattr(lookup, "_traced", known)
    if not isinstance(model, models.Loop | CrossAttention):
        assert _num_instructions(text) == _num_instructions(compiled())


def _num_instructions(text):
    """Number of instructions but parameters, some of which are unread markers."""
    return text.count(" = ") - text.count(" parameter(")


def test_a_cast_changes_what_is_asked_for():
    """Other operand dtypes are other integers: such a call has to be converted, too."""
    model = nn.Dense(24, dot_general=DG, param_dtype=jnp.bfloat16)
    variables = init(model, X)
    serving = convert(model, variables, X)
    half = X.astype(jnp.bfloat16)
    with pytest.raises(ValueError, match=r"converted as rhs float32.*calls=\[Call"):
        model.apply(serving, half)
    both = convert(model, variables, calls=[Call(X), Call(half)])
    assert sorted(both["aqt"]) == ["kernel", "kernel_1"]
    for x in (X, half):
        assert_equal(apply(model, variables, x), apply(model, both, x))


def test_calls_or_arguments():
    model = nn.Dense(24, dot_general=DG)
    with pytest.raises(TypeError, match="not both"):
        convert(model, init(model, X), X, calls=[Call(X)])
    with pytest.raises(TypeError, match=r"calls=\[Call\(x\), \.\.\.\]"):
        convert(model, init(model, X), Call(X))


def test_downcast_scales_are_refused():
    model = nn.Dense(24, dot_general=DG)
    serving = convert(model, init(model, X), X)
    half = jax.tree.map(
        lambda a: a.astype(jnp.bfloat16) if a.dtype == jnp.float32 else a, serving
    )
    for run in (model.apply, functools.partial(apply, model)):
        with pytest.raises(
            ValueError, match="scale of the frozen weight 'kernel' is bfloat16"
        ):
            run(half, X)
    params = {**serving, "params": half["params"]}
    assert apply(model, params, X).dtype == jnp.float32


def test_two_configs_for_one_weight():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", NORMAL, (8, 8))
            coarse = AqtEinsum(config.fully_quantized(fwd_bits=4))
            return EINSUM("bk,kn->bn", x, w) + coarse("bk,kn->bn", x, w)

    model = Model()
    variables = init(model, X)
    serving = convert(model, variables, X)
    found = {q["rhs"].qvalue.dtype.name for q in serving["aqt"].values()}
    assert found == {"int8", "int4"}
    assert_equal(apply(model, variables, X), apply(model, serving, X))


def test_nn_jit_after_training_with_a_mutable_collection():
    """A conversion takes no trace from a cache, and leaves none to others."""
    model = nn.jit(models.MlpBlock)(INT8)
    variables = init(model, X)
    expected, _ = model.apply(variables, X, mutable=["aqt"])
    for _ in range(2):
        assert len(placeholders(convert(model, variables, X)["params"])) == 3
    again, changed = model.apply(variables, X, mutable=["aqt"])
    assert_equal(expected, again)
    assert not jax.tree.leaves(changed)


def test_a_lifted_module_that_is_called_for_other_weights():
    """Flax gives it a new scope at every call, in which it counts from the start."""

    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x, is_first):
            a, b = (self.param(name, NORMAL, (8, 8)) for name in "ab")
            return DG(x, a if is_first else b, LAST_BY_FIRST)

    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            inner = nn.remat(Inner, static_argnums=(2,))()
            return inner(nn.relu(inner(x, True)), False)

    check_served(Twice(), X, frozen=2)


def test_parts_of_one_kernel():
    class Fused(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", NORMAL, (8, 24))
            q, k, v = (DG(x, part, LAST_BY_FIRST) for part in jnp.split(w, 3, 1))
            return q + k * v

    check_served(Fused(), X, frozen=1)


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.at[:, -1].set(w[:, 1]),
        lambda w: w.at[-1].set(w[1]),
        lambda w: w[:8].repeat(2, 0),
        lambda w: jnp.tile(w[:8], (2, 1)),
        lambda w: jnp.concatenate([w[:1], w[:0:-1]]),
        lambda w: jnp.roll(w, 1, 1),
    ],
)
def test_changes_that_reach_a_corner(change):
    """In a call that was not converted: NaN in its output, or an error when eager."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, is_changed=False):
            w = self.param("w", NORMAL, (16, 16))
            return AqtEinsum(INT8)("bk,kn->bn", x, change(w) if is_changed else w)

    model, x = Model(), jnp.ones((2, 16))
    serving = convert(model, init(model, x), x)
    served = quick_jit(model.apply, static_argnums=2)(serving, x, True)
    assert jnp.isnan(served).all()
    with pytest.raises(ValueError, match="in another way"):
        model.apply(serving, x, True)


def test_a_float_layer_contracts_nothing_but_nan():
    model = nn.Dense(12, dot_general=DG)
    x = jnp.ones((3, 24))
    serving = convert(model, init(model, x), x)
    assert jnp.isnan(nn.Dense(12).apply(serving, x)).all()


@pytest.mark.parametrize("calls", [[], [X], Call(X)])
def test_what_is_not_a_list_of_calls(calls):
    model = nn.Dense(12, dot_general=DG)
    with pytest.raises(TypeError, match="calls must be a list of aqtlite.flax.Call"):
        convert(model, init(model, X), calls=calls)
