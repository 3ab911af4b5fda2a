import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from aqtlite.jaxpr import scopes
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")


def paths(function, *args):
    """The scopes of the contractions of a function, which have no bodies around."""
    closed = jax.make_jaxpr(function)(*args)
    return [
        scopes.parse(scopes.text_of(eqn))
        for eqn in closed.eqns
        if eqn.primitive.name == "dot_general"
    ]


X = jnp.ones((4, 4))


def test_named_scopes_are_the_path():
    def function(x):
        with jax.named_scope("outer"):
            x = x @ x
            with jax.named_scope("inner"):
                return x @ x

    assert [one.path for one in paths(function, X)] == ["outer", "outer/inner"]


def test_flax_modules_are_the_path():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, name="mlp")(nn.Dense(4)(x))

    model = Block()
    variables = init(model, X)
    found = [one.path for one in paths(model.apply, variables, X)]
    assert found == ["Block/Dense_0", "Block/mlp"]


def test_transformations_are_no_part_of_the_path():
    def function(x):
        with jax.named_scope("layer"):
            return jnp.sum(x @ x)

    (forward, *backward) = paths(jax.grad(function), X)
    assert forward == scopes.Scope("layer", ("jvp",))
    assert backward
    assert {one.path for one in backward} == {"layer"}
    assert all("transpose" in one.transformations for one in backward)
    (mapped,) = paths(jax.vmap(function), X[None])
    assert mapped == scopes.Scope("layer", ("vmap",))


def test_nothing_is_around():
    assert paths(lambda x: x @ x, X) == [scopes.Scope("", ())]


@pytest.mark.parametrize(
    ("text", "scope"),
    [
        ("", ("", ())),
        ("a/b", ("a/b", ())),
        ("a//b/", ("a/b", ())),
        ("jvp()/a", ("a", ("jvp",))),
        ("vmap(jvp(a))/b/jvp(c)/d", ("a/b/c/d", ("vmap", "jvp", "jvp"))),
    ],
)
def test_parse(text, scope):
    assert scopes.parse(text) == scope


@pytest.mark.parametrize(
    ("outer", "inner", "joined"),
    [("a", "b", "a/b"), ("", "b", "b"), ("a", "", "a"), ("", "", "")],
)
def test_join(outer, inner, joined):
    assert scopes.join(outer, inner) == joined
