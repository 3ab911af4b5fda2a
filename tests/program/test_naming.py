"""Names of contractions after the parameters in them."""

import jax
import jax.numpy as jnp
import pytest

import aqtlite
from aqtlite import Rule, config
from aqtlite.program import plan
from aqtlite.program.naming import by_parameter, by_scope
from tests.common import left_in_float

pytestmark = pytest.mark.code("quick")

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


# --- Functions of pytrees ------------------------------------------------------------

X = jnp.ones((3, 4))
TREE = {
    "layers": [{"w": jnp.ones((4, 4)), "b": jnp.ones(4)} for _ in range(2)],
    "attention": {"q": jnp.ones((4, 4)), "kv": {"a": X.T, "b": X}},
}


def over_tree(params, x):
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    query = jnp.einsum("bd,dh->bh", x, params["attention"]["q"])
    scores = jnp.einsum("qd,kd->qk", query, query)
    kv = params["attention"]["kv"]
    with jax.named_scope("out"):
        return scores @ x @ (kv["a"] @ kv["b"])


def paths_of(function, *args, params=0, **kwargs):
    planned = aqtlite.plan(function, *args, rules=[], params=params, **kwargs)
    return [one.path for one in planned.contractions]


def test_without_scopes_paths_are_those_of_parameters():
    named = ["layers/0/w", "layers/1/w", "attention/q", "attention/qd,kd->qk"]
    assert paths_of(over_tree, TREE, X) == [*named, "out", "out#1", "out#2"]
    by_leaf = ["attention/out", "attention/kv", "attention/kv#1"]
    assert paths_of(over_tree, TREE, X, paths="parameters") == [*named, *by_leaf]


def test_rules_for_plain_dictionaries():
    rules = [Rule(path="layers/0/.*", cfg=config.fully_quantized())]
    quantized = aqtlite.quantize_function(over_tree, rules, params=0)
    assert [one.path for one in quantized.plan(TREE, X).quantized()] == ["layers/0/w"]
    _, serving = aqtlite.convert_function(quantized, TREE, X)
    assert serving["aqt"].keys() == {"layers/0/w"}
    assert serving["aqt"]["layers/0/w"].keys() == {"w"}
    assert not left_in_float(serving["params"]["layers"][0]["w"])


@pytest.mark.parametrize("paths", ["scopes", "parameters"])
def test_the_argument_is_named_where_there_are_several(paths):
    def function(w, tree, *, x):
        return x @ w @ tree["w"]

    w, tree = TREE["layers"][0]["w"], TREE["layers"][1]
    assert paths_of(function, w, tree, x=X, paths=paths) == ["", "#1"]
    named = paths_of(function, w, tree, x=X, params=(0, 1), paths=paths)
    assert named == ["0", "1/w"]
    by_keyword = paths_of(lambda x, kernel: x @ kernel, X, kernel=w, paths=paths)
    assert by_keyword == [""]
    is_kernel = "kernel".__eq__
    by_keyword = paths_of(
        lambda x, kernel: x @ kernel, X, kernel=w, params=is_kernel, paths=paths
    )
    assert by_keyword == ["kernel"]


def test_paths_are_one_of_two():
    with pytest.raises(ValueError, match="paths must be 'scopes' or 'parameters'"):
        paths_of(over_tree, TREE, X, paths="names")
