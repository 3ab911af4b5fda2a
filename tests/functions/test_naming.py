"""Names of contractions after the parameters in them."""

import jax
import jax.numpy as jnp

from aqtlite.functions import plan
from aqtlite.functions.naming import by_parameter, by_scope

PARAMS = {
    "first": {"query": {"w": jnp.ones((4, 4))}, "key": {"w": jnp.ones((4, 4))}},
    "last": {"a": jnp.ones((4, 2)), "b": jnp.ones((2, 4))},
}
NAMES = ["0/first/key/w", "0/first/query/w", "0/last/a", "0/last/b"]


def paths(function, naming=by_parameter):
    closed = jax.make_jaxpr(function)(PARAMS, jnp.ones((3, 4)))
    planned = plan.make(closed, (), dict(enumerate(NAMES)), naming)
    return [one.path for one in planned.contractions]


def attend(params, x):
    query = x @ params["first"]["query"]["w"]
    key = x @ params["first"]["key"]["w"].T
    with jax.named_scope("scores"):
        weights = query @ key.T
    return (weights @ x) @ params["last"]["a"] @ params["last"]["b"]


def test_a_weight_is_of_the_module_that_holds_it_and_activations_of_that_around():
    assert paths(attend) == [
        "first/query",
        "first/key",
        "scores",  # Between modules that have nothing in common.
        "",
        "last",
        "last#1",
    ]


def test_activations_between_weights_of_one_module():
    def function(params, x):
        x = x @ params["first"]["query"]["w"]
        return (x @ x.T) @ (x @ params["first"]["key"]["w"])

    assert paths(function) == ["first/query", "first", "first/key", ""]


def test_a_weight_of_several_parameters():
    def function(params, x):
        first, last = params["first"], params["last"]
        merged = first["key"]["w"] + first["query"]["w"]
        return x @ merged @ (last["a"] @ last["b"])

    # The product of two parameters is made first, and contracts two weights.
    assert paths(function) == ["first", "last", "last#1"]


def test_inside_of_a_scan():
    def function(params, x):
        def step(x, a):
            return x + jnp.outer(x[:, 0], a) @ params["first"]["key"]["w"], None

        return jax.lax.scan(step, x, params["last"]["b"])[0]

    assert paths(function) == ["first/key"]


def test_by_scope_they_are_not_looked_at():
    assert paths(attend, by_scope)[:4] == ["", "#1", "scores", "#2"]
