"""Kernels, and other functions with a name, that rules quantize as what they compute.

The kernel is a mixture of experts as TPUs run it: a Pallas kernel inside of a function
with a derivative of its own.
"""

import functools
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas
from jax.extend.core import Primitive

import aqtlite
from aqtlite import Rule, config
from aqtlite.flax import convert, quantize_model
from tests.common import left_in_float, nearest, normal
from tests.flax.support import init
from tests.replacing import assert_bits

pytestmark = pytest.mark.code("quick")

INT8 = nearest()
ROWS, EXPERTS, K, N = 6, 3, 16, 8
SIZES = jnp.array([2, 0, 3])
X, W = normal((ROWS, K)), normal((EXPERTS, K, N), 1)
HEAD = normal((N, 4), 2)


def grouped_matmul_kernel(ends, lhs, rhs, out):
    group = pallas.program_id(0)
    row = lax.broadcasted_iota(jnp.int32, out.shape, 0)
    start = jnp.where(group == 0, 0, ends[jnp.maximum(group - 1, 0)])
    is_in_group = (start <= row) & (row < ends[group])

    @pallas.when(group == 0)
    def _():
        out[...] = jnp.zeros_like(out)

    product = jnp.dot(lhs[...], rhs[0], preferred_element_type=jnp.float32)
    out[...] += jnp.where(is_in_group, product, 0).astype(out.dtype)


def kernel(lhs, rhs, sizes, name=None):
    groups, k, n = rhs.shape
    rows = lhs.shape[0]
    return pallas.pallas_call(
        grouped_matmul_kernel,
        jax.ShapeDtypeStruct((rows, n), lhs.dtype),
        grid=(groups,),
        in_specs=[
            pallas.BlockSpec((groups,), lambda i: (0,)),
            pallas.BlockSpec((rows, k), lambda i: (0, 0)),
            pallas.BlockSpec((1, k, n), lambda i: (i, 0, 0)),
        ],
        out_specs=pallas.BlockSpec((rows, n), lambda i: (0, 0)),
        interpret=True,
        name=name,
    )(jnp.cumsum(sizes), lhs, rhs)


@jax.custom_vjp
def grouped_matmul(lhs, rhs, sizes):
    return kernel(lhs, rhs, sizes)


def _backward(residuals, g):
    lhs, rhs, sizes = residuals
    _, pull_back = jax.vjp(lambda x, w: lax.ragged_dot(x, w, sizes), lhs, rhs)
    return (*pull_back(g), None)


grouped_matmul.defvjp(lambda *args: (kernel(*args), args), _backward)


@functools.partial(jax.jit, static_argnames="transposed")
def jitted_gmm(lhs, rhs, sizes, transposed=False):
    return grouped_matmul(lhs, rhs.swapaxes(1, 2) if transposed else rhs, sizes)


def reference(lhs, rhs, sizes):
    return lax.ragged_dot(lhs, rhs, sizes)


def reference_of_ends(ends, lhs, rhs):
    return lax.ragged_dot(lhs, rhs, jnp.diff(ends, prepend=0))


def reference_in_any_layout(lhs, rhs, sizes):
    fits = rhs.shape[1] == lhs.shape[1]
    return lax.ragged_dot(lhs, rhs if fits else rhs.swapaxes(1, 2), sizes)


aqtlite.register_operation("grouped_matmul", reference)
aqtlite.register_operation("grouped_matmul_kernel", reference_of_ends)
aqtlite.register_operation("jitted_gmm", reference_in_any_layout)


def experts(call):
    """A layer of experts, and a dense one."""

    def model(params, x):
        with jax.named_scope("experts"):
            x = jnp.tanh(call(x, params["experts"], SIZES))
        with jax.named_scope("head"):
            return x @ params["head"]

    return model


PARAMS = {"experts": W, "head": HEAD}
CALLS = {
    "custom_vjp": grouped_matmul,
    "kernel": kernel,
    "jit": jitted_gmm,
    "jit_of_transposed": lambda x, w, sizes: jitted_gmm(
        x, w.swapaxes(1, 2), sizes, transposed=True
    ),
}


def value_and_gradients(model):
    return lambda params, x: jax.value_and_grad(
        lambda params, x: jnp.sum(jnp.sin(model(params, x))), (0, 1)
    )(params, x)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_quantized_as_the_reference(call):
    """Results, gradients and what is served are those of the reference, bit for bit."""
    quantized = aqtlite.quantize_function(experts(call), INT8, params=0)
    as_reference = aqtlite.quantize_function(experts(reference), INT8, params=0)
    got = jax.jit(value_and_gradients(quantized))(PARAMS, X)
    assert_bits(got, jax.jit(value_and_gradients(as_reference))(PARAMS, X))

    serve, serving = aqtlite.convert_function(quantized, PARAMS, X)
    assert not left_in_float(serving["params"])
    served = jax.jit(serve)(serving, X)
    assert_bits(served, jax.jit(quantized)(PARAMS, X))
    floats = jax.jit(experts(reference))(PARAMS, X)
    np.testing.assert_allclose(served, floats, atol=0.05 * np.abs(floats).max())


def test_what_stays_in_float_stays_the_kernel():
    rules = [Rule(path="head", cfg=INT8), Rule(op="grouped_matmul", cfg=None)]
    quantized = aqtlite.quantize_function(
        experts(grouped_matmul), rules, params=0, strict=True
    )
    text = str(jax.make_jaxpr(quantized)(PARAMS, X))
    assert "pallas_call" in text
    assert "ragged_dot" not in text
    dense = aqtlite.make_dot_general(INT8)

    def by_hand(params, x):
        x = jnp.tanh(grouped_matmul(x, params["experts"], SIZES))
        return dense(x, params["head"], (((1,), (0,)), ((), ())))

    assert_bits(
        jax.jit(value_and_gradients(quantized))(PARAMS, X),
        jax.jit(value_and_gradients(by_hand))(PARAMS, X),
    )


def test_rules_and_plans():
    model = experts(grouped_matmul)
    rules = [Rule(op=("conv_general_dilated", "grouped_matmul"), cfg=INT8)]
    plan = aqtlite.plan(model, PARAMS, X, rules=rules, params=0)
    (one,) = plan.quantized()
    assert (one.path, one.op, one.registered) == (
        "experts",
        "ragged_dot",
        "grouped_matmul",
    )
    assert (one.lhs.kind, one.rhs.kind) == ("activation", "weight")
    assert "grouped_matmul: ragged_dot" in str(plan)
    assert [row["registered"] for row in json.loads(plan.to_json())] == [
        "grouped_matmul",
        None,
    ]
    text = aqtlite.rules.to_json(rules)
    assert aqtlite.rules.from_json(text) == tuple(rules)

    by_function = [Rule(op="ragged_dot", cfg=INT8)]
    plan = aqtlite.plan(model, PARAMS, X, rules=by_function, params=0)
    assert [one.path for one in plan.quantized()] == ["experts"]


def test_layers_in_a_scan():
    """Each step has its weights, frozen in one array; some are made of parameters."""

    def model(params, x):
        def layer(x, w):
            return jnp.tanh(jax.checkpoint(grouped_matmul)(x, w * 2, SIZES)), None

        return lax.scan(layer, x, params)[0]

    params, x = normal((2, EXPERTS, N, N), 3), normal((ROWS, N), 4)
    quantized = aqtlite.quantize_function(model, INT8, params=0)
    serve, serving = aqtlite.convert_function(quantized, params, x)
    assert not left_in_float(serving["params"])
    assert_bits(jax.jit(serve)(serving, x), jax.jit(quantized)(params, x))


class Experts(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), W.shape)
        return nn.Dense(4)(nn.relu(grouped_matmul(x, kernel, SIZES)))


def test_a_linen_model():
    model = quantize_model(Experts(), [Rule(operands="weight", cfg=INT8)])
    variables = init(model, X)
    serving = convert(model, variables, X)
    (left,) = left_in_float(serving["params"])
    assert left.shape == (4,)  # The bias.
    wanted = jax.jit(model.apply)(variables, X)
    assert_bits(jax.jit(model.apply)(serving, X), wanted)


def test_statistics():
    """The derivative of its own is the kernel's, and no obstacle to statistics."""
    cfg = config.fp8(delayed=True)
    quantized = aqtlite.quantize_function(experts(grouped_matmul), cfg, params=0)
    state = quantized.init_state(PARAMS, X)
    assert set(state["aqt_stats"]) == {"experts", "head"}
    as_reference = aqtlite.quantize_function(experts(reference), cfg, params=0)
    got = jax.jit(quantized)(state, PARAMS, X)
    assert_bits(got, jax.jit(as_reference)(state, PARAMS, X))


def test_inside_a_shard_map():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    P = jax.sharding.PartitionSpec
    over_mesh = jax.shard_map(
        grouped_matmul, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"),
        check_vma=False,
    )  # fmt: skip
    quantized = aqtlite.quantize_function(over_mesh, INT8, params=1)
    as_reference = aqtlite.quantize_function(reference, INT8, params=1)
    got = jax.jit(quantized)(X, W, SIZES)
    assert_bits(got, jax.jit(as_reference)(X, W, SIZES))


def test_a_primitive_and_several_contractions():
    """Attention as one primitive: each of its contractions is one of the plan."""
    attention = Primitive("test_attention")
    attention.def_abstract_eval(lambda q, k, v: q)

    def reference_of_attention(q, k, v):
        weights = jax.nn.softmax(jnp.einsum("qd,kd->qk", q, k))
        return jnp.einsum("qk,kd->qd", weights, v)

    aqtlite.register_operation("test_attention", reference_of_attention)
    quantized = aqtlite.quantize_function(
        lambda x: attention.bind(x, x, x), [Rule(op="test_attention", cfg=INT8)]
    )
    found = quantized.plan(X).quantized()
    assert [one.equation for one in found] == ["ab,cb->ac", "ab,bc->ac"]
    as_reference = aqtlite.quantize_function(reference_of_attention, INT8)
    assert_bits(jax.jit(quantized)(X), jax.jit(as_reference)(X, X, X))


def test_a_gradient_that_the_function_takes():
    """It has calls of the name with other inputs, and stays as it is."""

    def model(params, x):
        gradient = jax.grad(lambda x: jnp.sum(jitted_gmm(x, params["experts"], SIZES)))
        return experts(jitted_gmm)(params, x + gradient(x))

    quantized = aqtlite.quantize_function(model, INT8, params=0)
    found = quantized.plan(PARAMS, X).quantized()
    assert [one.registered for one in found] == ["jitted_gmm", None]


# --- Mistakes ------------------------------------------------------------------------


def test_an_operation_that_the_program_does_not_call():
    aqtlite.register_operation("grouped_mm", reference)
    with pytest.raises(ValueError) as caught:
        aqtlite.plan(
            experts(kernel), PARAMS, X, rules=Rule(op="grouped_mm", cfg=INT8), params=0
        )
    text = str(caught.value)
    assert "rule 0 (op='grouped_mm') matches nothing" in text
    assert "experts: op='grouped_matmul_kernel'" in text
    assert "does not call grouped_mm. What it calls by a name:" in text
    assert "grouped_matmul_kernel" in text.splitlines()[-1]


def test_serving_what_is_not_registered():
    """A kernel that is not known to contract the frozen weight reads its float."""
    called = [kernel]
    quantized = aqtlite.quantize_function(
        experts(lambda *args: called[0](*args)), INT8, params=0
    )
    serve, serving = aqtlite.convert_function(quantized, PARAMS, X)
    serve(serving, X)
    called[0] = functools.partial(kernel, name="another_kernel")
    with pytest.raises(ValueError, match="'experts' is frozen, but .* in float"):
        serve(serving, X)


@jax.jit
def mapped_product(x, w):
    return x @ w


def product_kernel(x, w):
    def mapped_product_kernel(x, w, out):
        out[...] = x[...] @ w[...]

    shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    return pallas.pallas_call(mapped_product_kernel, shape, interpret=True)(x, w)


def product(x, w):
    return jnp.einsum("nk,km->nm", x, w)


aqtlite.register_operation("mapped_product", jnp.matmul)
aqtlite.register_operation("mapped_product_kernel", product)
PRODUCTS = pytest.mark.parametrize("call", [mapped_product, product_kernel])


@PRODUCTS
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("shared", [False, True])
def test_calls_inside_of_a_map(call, axis, shared):
    """JAX leaves the mapped axis where it is, and the reference is mapped over it."""
    x, w = normal((2, 5, 6)), normal((2, 6, 7), 1)
    axes = (axis, None if shared else axis)
    args = jnp.moveaxis(x, 0, axis), w[0] if shared else jnp.moveaxis(w, 0, axis)

    def quantized(function):
        function = aqtlite.quantize_function(jax.vmap(function, axes, axis), INT8)
        return jax.jit(lambda *args: jax.vjp(function, *args)[1](function(*args)))

    assert_bits(quantized(call)(*args), quantized(product)(*args))


@PRODUCTS
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_axes_of_a_map_that_shapes_do_not_tell(call, axis):
    x, w = normal((4, 4, 4)), normal((4, 4, 4), 1)
    mapped = jax.vmap(call, axis, axis)
    with pytest.raises(ValueError, match=r"float32\[4,4,4\].*vmap.*register_operation"):
        aqtlite.plan(mapped, x, w, rules=INT8)

    @jax.jit
    def named_map(x, w):
        return mapped(x, w)

    aqtlite.register_operation("named_map", jax.vmap(product, axis, axis))
    plan = aqtlite.plan(named_map, x, w, rules=INT8)
    (one,) = plan.quantized()
    assert one.registered == "named_map"


def test_a_map_that_the_reference_does_not_take():
    """JAX maps no `ragged_dot` over the groups."""
    mapped = jax.vmap(lambda w: kernel(X, w, SIZES), 1)
    with pytest.raises(ValueError, match=r"float32\[3,2,16,8\].*inside of a jax.vmap"):
        aqtlite.plan(mapped, jnp.stack([W, W], 1), rules=INT8)


def test_an_operation_that_is_not_registered():
    with pytest.raises(
        ValueError, match=r"Rule.op.*grouped_matmul.*'tgmm'.*register_operation"
    ):
        Rule(op="tgmm", cfg=INT8)


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        (
            lambda lhs, rhs: lhs @ rhs[0],
            r"'wrong_\d' is called with float32\[6,16\], float32\[3,16,8\], "
            r"int32\[3\], and the function that is registered for it fails: .*argument",
        ),
        (
            lambda lhs, rhs, sizes: lax.ragged_dot(rhs[0], rhs, sizes),
            "fails: .*contracting",
        ),
        (lambda *args: {}["weights"], "is called with float32.*fails: KeyError: 'wei"),
        (
            lambda lhs, rhs, sizes: (lhs @ rhs[0])[1:],
            r"returns float32\[6,8\], but the function.*returns float32\[5,8\]",
        ),
        (
            lambda lhs, rhs, sizes: (lhs @ rhs[0]).astype(jnp.bfloat16),
            r"but the function.*returns bfloat16\[6,8\]",
        ),
        (lambda lhs, rhs, sizes: {}, "but the function.*returns nothing"),
        (lambda *args: jitted(3)(*args), "'wrong_3' calls 'wrong_3'"),
    ],
)
def test_references_that_do_not_fit(request, reference, words):
    number = 3 if "calls" in words else request.node.callspec.indices["reference"] + 4
    aqtlite.register_operation(f"wrong_{number}", reference)
    with pytest.raises(ValueError, match=words):
        aqtlite.plan(jitted(number), X, W, SIZES, rules=INT8)


def jitted(number):
    def function(lhs, rhs, sizes):
        return lhs @ rhs[0]

    function.__name__ = f"wrong_{number}"
    return jax.jit(function)


@pytest.mark.parametrize(
    ("name", "reference", "error", "words"),
    [
        (3, reference, TypeError, "name of a kernel or function.*got 3"),
        ("mine", None, TypeError, "a function of JAX that computes the same.*None"),
        ("", reference, ValueError, "'' cannot be registered"),
        ("ragged_dot", reference, ValueError, "rules know dot_general, .* already"),
        ("dot_general", reference, ValueError, "'dot_general' cannot be registered"),
        (
            "grouped_matmul",
            kernel,
            ValueError,
            "'grouped_matmul' is registered already.*reference.*kernel",
        ),
    ],
)
def test_names_and_functions_that_cannot_be_registered(name, reference, error, words):
    with pytest.raises(error, match=words):
        aqtlite.register_operation(name, reference)


def test_defined_again():
    aqtlite.register_operation("grouped_matmul", reference)
