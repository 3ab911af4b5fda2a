import jax
import jax.numpy as jnp
import pytest
from jax import lax

from aqtlite.jaxpr import equation_digests

pytestmark = pytest.mark.code("quick")

W = jnp.ones((2, 3, 4))

LISTED = {
    "cast": (lambda w: w.astype(jnp.bfloat16), lambda w: w.astype(jnp.float16)),
    "transposition": (lambda w: w.transpose(2, 0, 1), lambda w: w.transpose(1, 0, 2)),
    "reshape": (lambda w: w.reshape(6, 4), lambda w: w.reshape(3, 8)),
    "slice": (lambda w: w[:1], lambda w: w[1:]),
    "repetition": (
        lambda w: lax.broadcast_in_dim(w, (2, 3, 4, 4), (0, 1, 2)),
        lambda w: lax.broadcast_in_dim(w, (2, 3, 4, 4), (0, 1, 3)),
    ),
    "joined": (
        lambda w: lax.concatenate([w, w], 0),
        lambda w: lax.concatenate([w, w], 1),
    ),
    "reversed": (lambda w: lax.rev(w, (0,)), lambda w: lax.rev(w, (1,))),
    "padded": (
        lambda w: lax.pad(w, 0.0, [(1, 0, 0)] * 3),
        lambda w: lax.pad(w, 0.0, [(0, 1, 0)] * 3),
    ),
    "sum": (
        lambda w: lax.reduce_sum_p.bind(w, axes=(0,), out_sharding=None),
        lambda w: lax.reduce_sum_p.bind(w, axes=(1,), out_sharding=None),
    ),
    "power": (lambda w: w**3, lambda w: w**5),
}


def equation(function):
    (eqn,) = [one for one in jax.make_jaxpr(function)(W).eqns if one.outvars]
    return eqn


def digest(eqn):
    return equation_digests.of_equation(eqn, ["x"] * len(eqn.invars))


@pytest.mark.parametrize("name", LISTED)
def test_says_what_is_computed_whatever_else_jax_adds(name):
    one, other = map(equation, LISTED[name])
    assert digest(one) != digest(other)
    with_more = one.replace(params={**one.params, "of_another_jax": True})
    assert digest(with_more) == digest(one)
    former = [equation_digests.former(eqn, ["x"]) for eqn in (one, with_more)]
    assert former[0] != former[1]


def test_other_primitives_count_with_all_parameters():
    one, other = (equation(lambda w, axis=axis: lax.cumsum(w, axis)) for axis in (0, 1))
    assert digest(one) != digest(other)
    assert digest(one.replace(params={**one.params, "more": 1})) != digest(one)


def test_lists_are_tuples():
    eqn = equation(lambda w: w.transpose(2, 0, 1))
    listed = eqn.replace(params={"permutation": list(eqn.params["permutation"])})
    assert digest(listed) == digest(eqn)
