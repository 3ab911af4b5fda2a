"""Products that rules do not enter: in the plan, and an error under `strict`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import sparse
from jax.extend import core

from aqtlite import Rule, config, quantize_function
from tests.common import normal
from tests.replacing import assert_bits

pytestmark = pytest.mark.code("quick")

INT8 = config.fully_quantized()
X, W = normal((8, 32)), normal((32, 32))

kernel_p = core.Primitive("users_kernel")
kernel_p.def_abstract_eval(lambda x, w: jax.core.ShapedArray(x.shape, x.dtype))


def callback(x, w):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(lambda x, w: np.asarray(x) @ np.asarray(w), shape, x, w)


@jax.custom_vjp
def layer(x, w):
    return x @ w


layer.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda r, g: (callback(g, r[1].T), r[0].T @ g)
)

PRODUCTS = {
    "scaled_dot": lambda w, x: lax.scaled_dot(
        x, w, lhs_scale=jnp.ones((8, 1)), rhs_scale=jnp.ones((1, 32))
    ),
    "bcoo_dot_general": lambda w, x: sparse.BCOO.fromdense(x, nse=256) @ w,
    "pure_callback": lambda w, x: callback(x, w),
    "ffi_call": lambda w, x: jax.ffi.ffi_call(
        "users_product", jax.ShapeDtypeStruct(x.shape, x.dtype)
    )(x, w),
    "reduce_sum": lambda w, x: jnp.sum(2 * x[:, :, None] * w, 1),
    "users_kernel": lambda w, x: kernel_p.bind(x, w),
}
WHY = {"reduce_sum": "written as a multiplication and a sum"}


@pytest.mark.parametrize("name", PRODUCTS)
def test_strict_names_products_that_rules_do_not_enter(name):
    def function(w, x):
        with jax.named_scope("first"):
            x = PRODUCTS[name](w, x)
        with jax.named_scope("second"):
            return x @ w

    plan = quantize_function(function, INT8, params=0).plan(W, X)
    assert plan.summary() == "1 contractions: 1 quantized, 0 in float"
    assert [(one.path, one.op) for one in plan.unseen] == [("first", name)]
    for text in (repr(plan), plan._repr_html_()):
        assert (
            "Not entered" in text and "first: " in text and WHY.get(name, name) in text
        )

    strict = quantize_function(function, INT8, params=0, strict=True)
    wanted = f"(?s)strict=True, and 1 .* first: .*{WHY.get(name, name)}"
    with pytest.raises(ValueError, match=wanted):
        strict(W, X)
    rules = [Rule(path="first", cfg=None), Rule(cfg=INT8)]
    assert quantize_function(function, rules, params=0, strict=True).plan(W, X).unseen


def test_what_multiplies_no_floats_is_not_named():
    def function(w, x):
        jax.debug.callback(lambda x: None, x)
        order = jax.pure_callback(
            lambda x: np.argsort(x[:, 0]).astype(np.int32),
            jax.ShapeDtypeStruct((8,), jnp.int32),
            x,
        )
        x = x / jnp.sqrt(jnp.mean(x * x, 1, keepdims=True)) * w[0]
        weighted = jnp.sum(x * jax.nn.softmax(x, 0), 0)
        return jnp.linalg.inv(jnp.cumsum(weighted + x[order] @ w @ w.T)[:1, None])

    strict = quantize_function(function, INT8, params=0, strict=True)
    assert not strict.plan(W, X).unseen


def test_in_the_rule_of_a_gradient():
    def function(w, x):
        with jax.named_scope("layer"):
            return layer(x, w)

    strict = quantize_function(function, INT8, params=0, strict=True)
    with pytest.raises(ValueError, match="layer/gradient: rules cannot see"):
        strict(W, X)
    rules = [Rule(path=".*/gradient", cfg=None), Rule(cfg=INT8)]
    named = quantize_function(function, rules, params=0, strict=True)
    loose = quantize_function(function, INT8, params=0)
    assert_bits(named(W, X), loose(W, X))
