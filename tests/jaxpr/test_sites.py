import jax
import jax.custom_batching
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas
from jax.extend.core import primitives as jax_primitives
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from aqtlite.jaxpr import higher_order, rewriting, sites
from aqtlite.jaxpr.origins import Loop

pytestmark = pytest.mark.code("quick")

X, W = jnp.ones((3, 4)), jnp.ones((4, 4))
WS = jnp.ones((2, 4, 4))
MESH = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))


def found(function, w=W, x=X):
    """The contractions of a function whose first argument is its parameters."""
    closed = jax.make_jaxpr(function)(w, x)
    count = len(jax.tree.leaves(w))
    return sites.find(closed, {i: str(i) for i in range(count)}).contractions


def inputs(origin):
    return {one for one in origin.needed if not isinstance(one, Loop)}


def only(function, w=W, x=X):
    (site,) = found(function, w, x)
    return site


# --- Where they are ------------------------------------------------------------------


def test_in_the_order_of_equations():
    def function(w, x):
        with jax.named_scope("a"):
            x = jax.jit(lambda x: x @ w)(x)
        with jax.named_scope("b"):

            def step(x, w):
                with jax.named_scope("c"):
                    return x @ w, None

            x, _ = lax.scan(step, x, w[None])
        return lax.cond(x[0, 0] > 0, lambda x: x, lambda x: x @ w @ w, x)

    there = found(function)
    assert [one.scope.path for one in there] == ["a", "b/c", "", ""]
    assert [one.around for one in there] == [("jit",), ("scan",), ("cond",), ("cond",)]
    assert [len(one.location) for one in there] == [2] * 4
    assert len({one.location for one in there}) == 4


def test_of_every_operation():
    def function(w, x):
        image = x[None, :, :, None]
        image = lax.conv_general_dilated(
            image, w[:1, :1, None, None], (1, 1), "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip
        return image, lax.ragged_dot(x, w[None], jnp.array([3])), x @ w

    assert [one.operation for one in found(function)] == [
        "conv_general_dilated",
        "ragged_dot",
        "dot_general",
    ]


@jax.custom_batching.custom_vmap
def mapped_by_itself(w, x):
    return x @ w


@mapped_by_itself.def_vmap
def _mapped(size, is_batched, w, x):
    raise NotImplementedError


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            lambda w, x: lax.while_loop(
                lambda x: jnp.sum(x @ w) < 9, lambda x: x + 1, x
            ),
            "condition of a while loop",
        ),
        (
            lambda w, x: lax.custom_linear_solve(
                lambda v: v @ w, x[0], lambda matvec, b: b
            ),
            "inside of custom_linear_solve",
        ),
        (lambda w, x: mapped_by_itself(w, x), "inside of custom_vmap_call"),
    ],
    ids=["while", "linear_solve", "custom_vmap"],
)
def test_out_of_reach(function, words):
    there = found(function)
    assert there
    assert all(words in one.obstacle for one in there)


def test_within_reach():
    def function(w, x):
        x = lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: x @ w, x)
        return jax.checkpoint(jax.jit(lambda x: x @ w))(x)

    assert [one.obstacle for one in found(function)] == [None, None]


# --- What operands come from ---------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda w: w,
        lambda w: w.T,
        lambda w: w.astype(jnp.bfloat16).astype(jnp.float32),
        lambda w: jax.jit(lambda w: w * 2)(w) + 1,
        lambda w: jax.checkpoint(jnp.sin)(w),
        lambda w: jnp.where(jnp.arange(4) > 1, w, 0),
        lambda w: w * jax.random.normal(jax.random.key(0), (4, 4)),
        lambda w: jax.nn.relu(w),
        lambda w: lax.scan(lambda c, w: (c + w, None), w[0], w)[0] + w,
    ],
)
def test_a_weight_is_made_of_parameters(make):
    lhs, rhs = only(lambda w, x: x @ make(w)).operands
    assert inputs(rhs) == {0}
    assert rhs.identity is not None
    assert inputs(lhs) == {1}
    assert lhs.identity is None


def test_no_weight_depends_on_the_input():
    for make in (
        lambda w, x: w * x[0],
        lambda w, x: lax.cond(x[0, 0] > 0, lambda w: w, lambda w: w * 2, w),
        lambda w, x: lax.fori_loop(0, x[0, 0].astype(int), lambda i, w: w * 2, w),
    ):
        _, rhs = only(lambda w, x, make=make: x @ make(w, x)).operands
        assert inputs(rhs) == {0, 1}
        assert rhs.identity is None


def test_constants_need_nothing():
    _, rhs = only(lambda w, x: x @ np.ones((4, 4), np.float32)).operands
    assert rhs.needed == frozenset()
    assert rhs.identity is not None


def test_identity_is_that_of_the_computation():
    def function(w, x):
        a, b = w["a"], w["b"]
        scale = np.arange(4, dtype=np.float32)
        with jax.named_scope("elsewhere"):
            again = jax.jit(lambda w: w * scale)(a)
        return [
            x @ one
            for one in (
                a * scale, again, a * (scale + 1), b * scale, a.T * scale,
                a * jax.random.normal(jax.random.key(0), (4, 4)),
                a * jax.random.normal(jax.random.key(1), (4, 4)),
            )
        ]  # fmt: skip

    there = [one.operands[1].identity for one in found(function, {"a": W, "b": W})]
    assert there[0] == there[1]
    assert len(set(there)) == 6
    assert there == [
        one.operands[1].identity for one in found(function, {"a": W, "b": W})
    ]


@pytest.mark.parametrize("kind", ["key", "raw"])
def test_constant_keys(kind):
    """Keys that a function closes over are no NumPy arrays."""
    make = {"key": jax.random.key, "raw": jax.random.PRNGKey}[kind]
    first, second = make(0), make(1)

    def function(w, x):
        return [x @ (w * jax.random.normal(key, w.shape)) for key in (first, second)]

    one, other = [site.operands[1].identity for site in found(function)]
    assert None not in (one, other)
    assert one != other


def test_a_constant_of_another_trace_has_no_identity():
    @jax.jit
    def function(constant):
        site = only(lambda w, x: x @ (w * constant))
        assert inputs(site.operands[1]) == {0}
        assert site.operands[1].identity is None
        return constant

    function(W)


# --- Loops ---------------------------------------------------------------------------


def test_slices_of_parameters_are_weights():
    site = only(lambda w, x: lax.scan(lambda x, w: (x @ w.T, None), x, w)[0], WS)
    lhs, rhs = site.operands
    assert rhs.needed == {0, Loop(0, False)}
    assert rhs.identity is not None
    assert lhs.needed == {0, 1, Loop(0, True), Loop(0, False)}
    assert site.per_step == (True,)


def test_shared_parameters():
    site = only(lambda w, x: lax.scan(lambda x, _: (x @ w, None), x, None, length=2)[0])
    assert site.operands[1].needed == {0}
    assert site.per_step == (False,)


def test_slices_of_inputs_are_not_parameters():
    site = only(lambda w, x: lax.scan(lambda c, x: (c, x @ w), 0, x)[1])
    assert site.operands[0].needed == {1, Loop(0, False)}
    assert site.per_step == (False,)


def test_scans_in_scans():
    def function(w, x):
        def outer(x, w):
            return lax.scan(lambda x, w: (x @ w, None), x, w)[0], None

        def shared(x, _):
            return lax.scan(lambda x, w: (x @ w, None), x, w[0])[0], None

        x, _ = lax.scan(outer, x, w)
        return lax.scan(shared, x, None, length=2)[0]

    both, inner = found(function, WS[None])
    assert both.per_step == (True, True)
    assert inner.per_step == (False, True)
    assert both.operands[1].needed == {0, Loop(0, False), Loop(1, False)}
    assert inner.operands[1].needed == {0, Loop(1, False)}


@pytest.mark.parametrize("length", [2, None])
def test_a_carried_value_that_changes_is_no_weight(length):
    """It has no identity, and says that it is carried: in scans and while loops."""

    def step(carry):
        w, fixed, x = carry
        return w * 2, fixed, x @ w + x @ fixed

    def function(w, x):
        if length is None:
            return lax.while_loop(lambda c: c[2][0, 0] < 9, step, (w, w, x))
        return lax.scan(lambda c, _: (step(c), None), (w, w, x), None, length=2)[0]

    changing, fixed = (one.operands[1] for one in found(function))
    assert changing.needed == {0, Loop(0, True)}
    assert changing.identity is None
    assert fixed.needed == {0}
    assert fixed.identity is not None


def test_a_carry_takes_on_what_another_one_has():
    """Through several steps: c of b, b of a, a of the input."""

    def function(w, x):
        def step(carry, x):
            a, b, c = carry
            return (x, a, b), c @ w

        first = jnp.zeros(4)
        return lax.scan(step, (first, first, first), x)

    (site,) = found(function)
    assert inputs(site.operands[0]) == {1}


def test_inputs_of_a_shard_map():
    specs = dict(mesh=MESH, in_specs=(P(), P("d")), out_specs=P("d"))
    site = only(jax.shard_map(lambda w, x: x @ w, **specs))
    assert [inputs(one) for one in site.operands] == [{1}, {0}]
    assert site.around == ("shard_map",)
    assert site.obstacle is None


# --- Coverage of the JAX in use ------------------------------------------------------

# Primitives that call functions and are not entered, and why.
LEFT_ALONE = {
    "custom_lin": "an intermediate of differentiation, which no traced program has",
    "custom_linear_solve": "its solver and its matvec have to stay consistent",
    "composite": "a backend may know its name, and takes all of it",
    "custom_vmap_call": "its rule for vmap stands for what is inside",
    "pallas_call": "a kernel",
    "reduce": "computations on scalars",
    "reduce_window": "computations on scalars",
    "scatter": "its update is a computation on scalars",
    "scatter-add": "its update is a computation on scalars",
    "scatter-mul": "its update is a computation on scalars",
    "scatter-min": "its update is a computation on scalars",
    "scatter-max": "its update is a computation on scalars",
    "select_and_scatter": "computations on scalars",
}

# Programs with each primitive that has a body, so that a new one is noticed.
PROGRAMS = {
    "jit": lambda x: jax.jit(jnp.sin)(x),
    "scan": lambda x: lax.scan(lambda c, _: (c, None), x, None, length=2),
    "while": lambda x: lax.while_loop(lambda x: x[0, 0] < 0, lambda x: x, x),
    "cond": lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
    "remat2": lambda x: jax.checkpoint(jnp.sin)(x),
    "custom_jvp_call": lambda x: jax.nn.relu(x),
    "custom_vjp_call": lambda x: jax.custom_gradient(lambda x: (x * 2, lambda g: g))(x),
    "custom_linear_solve": lambda x: lax.custom_linear_solve(
        lambda v: v * 2, x, lambda _, b: b
    ),
    "shard_map": lambda x: jax.shard_map(
        jnp.sin, mesh=MESH, in_specs=P("d"), out_specs=P("d")
    )(x),
    "composite": lambda x: lax.composite(jnp.sin, "aqtlite.test")(x),
    "custom_vmap_call": lambda x: mapped_by_itself(W, x),
    "pallas_call": lambda x: pallas.pallas_call(
        lambda x, out: None, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype)
    )(x),
    "reduce": lambda x: lax.reduce(x, 1.0, lambda a, b: a * b + a, (0,)),
    "reduce_window": lambda x: lax.reduce_window(
        x, 1.0, lambda a, b: a * b + a, (1, 1), (1, 1), "SAME"
    ),
    "scatter": lambda x: x.at[0].set(1),
    "scatter-add": lambda x: x.at[0].add(1),
    "scatter-mul": lambda x: x.at[0].mul(2),
    "scatter-min": lambda x: x.at[0].min(2),
    "scatter-max": lambda x: x.at[0].max(2),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_bodies_are_entered_or_left_alone_for_a_reason(name):
    eqns = jax.make_jaxpr(PROGRAMS[name])(X).eqns
    (eqn,) = [one for one in eqns if one.primitive.name == name]
    assert rewriting.enters(eqn) != (name in LEFT_ALONE)


def test_primitives_that_call_functions_are_known():
    """All that JAX publishes: a new one has to be entered, or listed above."""
    published = {
        value.name
        for name, value in vars(jax_primitives).items()
        if name.endswith("_p")
    }
    words = ("call", "jit", "scan", "while", "cond", "remat", "checkpoint", "custom")
    calling = {one for one in published if any(word in one for word in words)}
    entered = set(higher_order.BUILDERS)
    assert calling <= entered | set(LEFT_ALONE)
    assert set(PROGRAMS) <= entered | set(LEFT_ALONE)


# --- Values with names ---------------------------------------------------------------


def named(function, *args):
    """The values with names of a function whose second argument is its parameter."""
    return sites.find(jax.make_jaxpr(function)(*args), {1: "w"}).named


def test_named_values():
    def function(x, w):
        y = sites.with_name(x * 2, "outside")
        y = jax.jit(lambda y, w: y + checkpoint_name(w, "called"))(y, w)
        y, _ = lax.scan(
            lambda c, _: (sites.with_name(c, "carried") + w, None), y, None, length=2
        )
        y = (
            lax.cond(
                x.sum() > 0, lambda w: sites.with_name(w, "branch"), lambda w: w, w
            )
            + y
        )
        return lax.while_loop(
            lambda c: c.sum() < 9, lambda c: c + sites.with_name(w, "loop"), y
        )

    found = {one.name: one for one in named(function, jnp.ones(3), jnp.ones(3))}
    assert {name: set(one.origin.inputs) for name, one in found.items()} == {
        "outside": {0},
        "called": {1},
        "carried": {0, 1},
        "branch": {1},
        "loop": {1},
    }
    assert {name for name, one in found.items() if one.is_in_branch} == {
        "branch",
        "loop",
    }


def test_values_of_one_name_are_told_apart():
    def function(x, w):
        def step(carry, _):
            return checkpoint_name(carry + x, "here"), checkpoint_name(2 * w, "here")

        return jax.jit(lambda w: checkpoint_name(w, "here"))(w), lax.scan(
            step, jnp.zeros(3), None, length=2
        )

    found = named(function, jnp.ones(3), jnp.ones(3))
    assert [one.name for one in found] == ["here"] * 3
    assert sorted(sorted(one.origin.inputs) for one in found) == [[0], [1], [1]]


def test_marks_are_no_part_of_how_a_value_is_made():
    def function(x, w):
        return x @ jnp.sin(sites.with_name(w, "a")) + x @ jnp.sin(w)

    found = sites.find(jax.make_jaxpr(function)(X, W), {1: "w"}).contractions
    first, second = (one.operands[1].identity for one in found)
    assert first == second is not None
