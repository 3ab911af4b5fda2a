"""Forms by target: which is compiled, and what transformations see."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from aqtlite import lowering

X = jnp.array([1.0, -2.0, 3.0])


@dataclasses.dataclass(frozen=True)
class Times(lowering.TargetDependent):
    """A product; its form for CPUs adds a constant, so that it shows."""

    factor: float

    def reference(self, x):
        return x * self.factor

    def lowered(self, target, x):
        return x * self.factor + (100.0 if target.platform == "cpu" else 0.0)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_the_form_of_the_platform_runs(jit):
    assert jit(Times(2.0))(X).tolist() == [102.0, 96.0, 106.0]


def test_without_jit():
    with jax.disable_jit():
        assert Times(2.0)(X).tolist() == [102.0, 96.0, 106.0]


def test_derivative_is_that_of_the_reference():
    assert jax.grad(lambda x: Times(2.0)(x).sum())(X).tolist() == [2.0, 2.0, 2.0]
    out, tangent = jax.jvp(Times(3.0), (X,), (jnp.ones(3),))
    assert out.tolist() == [103.0, 94.0, 109.0] and tangent.tolist() == [3.0] * 3


@pytest.mark.parametrize("axis", [0, 1])
def test_vmap(axis):
    rows = jnp.stack([X, 2 * X], axis)
    assert jax.vmap(Times(2.0), axis)(rows)[1].tolist() == [104.0, 92.0, 112.0]
    twice = jax.vmap(jax.vmap(Times(2.0)))(rows[None])
    assert twice.shape == (1, *rows.shape)


def test_another_platform_gets_its_own_form():
    text = jax.export.export(jax.jit(Times(2.0)), platforms=["tpu"])(X).mlir_module()
    assert "2.0" in text and "1.000000e+02" not in text
    both = jax.export.export(jax.jit(Times(2.0)), platforms=["cpu", "tpu"])(X)
    assert "1.000000e+02" in both.mlir_module()


def test_only_the_form_for_the_target_is_traced():
    traced = []

    @dataclasses.dataclass(frozen=True)
    class Recorded(lowering.TargetDependent):
        def reference(self, x):
            traced.append("reference")
            return x

        def lowered(self, target, x):
            traced.append(target.platform)
            return x

    jitted = jax.jit(lambda x: Recorded()(x) + Recorded()(x))
    traced_call = jitted.trace(X)
    assert traced == ["reference"]
    traced_call.lower()
    assert traced == ["reference", "cpu"]


@pytest.mark.parametrize(
    ("policy", "is_saved"),
    [
        (lambda primitive, *_, **__: primitive.name == "mul", True),
        (jax.checkpoint_policies.nothing_saveable, False),
        (jax.checkpoint_policies.dots_saveable, False),
    ],
)
def test_checkpoint_policies_see_the_reference(policy, is_saved):
    def f(x):
        return jnp.sin(Times(2.0)(jnp.cos(x)))

    _, vjp = jax.vjp(jax.checkpoint(f, policy=policy), X)
    saved = jax.tree.leaves(vjp)
    assert any((x == Times(2.0)(jnp.cos(X))).all() for x in saved) == is_saved
    assert jnp.allclose(vjp(jnp.ones(3))[0], jax.vjp(f, X)[1](jnp.ones(3))[0])
