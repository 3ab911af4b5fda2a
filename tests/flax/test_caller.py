"""The module that makes a call, and the mode in which its calls are recorded."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

from aqtlite.flax import convert
from aqtlite.flax.linen import caller
from aqtlite.flax.linen.bare import recording
from tests.flax import models
from tests.flax.support import DG, INT8, LAST_BY_FIRST, X, init

pytestmark = pytest.mark.code("quick")


def test_no_caller_outside_a_module():
    assert caller.find_caller().module is None
    assert DG(X, X.T, LAST_BY_FIRST).shape == (4, 4)


@pytest.mark.parametrize("compact", [True, False])
def test_a_raw_transformation_shuts_the_caller_in(compact):
    found = []

    def look():
        found.append(caller.find_caller())
        return jnp.zeros(())

    class Compact(nn.Module):
        @nn.compact
        def __call__(self):
            look()
            return jax.jit(look)()

    class Plain(nn.Module):
        def __call__(self):
            look()
            return jax.jit(look)()

    (Compact if compact else Plain)().apply({})
    assert [one.is_inside for one in found] == [True, False]
    assert found[0].scope is found[1].scope


def test_recording_ends_with_its_block():
    def recorder(contraction, *_):
        return contraction

    assert not recording.is_recorded()
    with pytest.raises(KeyError), recording.recorded_by(recorder):
        assert recording.is_recorded()
        raise KeyError
    assert not recording.is_recorded()


def _reports(model, variables, x):
    reports = []
    convert(model, variables, x, report=reports.append)
    return [str(report) for report in reports]


class Attention(models.Attention):
    """Contracts a weight of its own through `jnp.einsum`, which is a `jax.jit`."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.ones, (8, 8))
        x = nn.Dense(8, dot_general=DG)(x)
        return jnp.einsum("...k,kn->...n", x, w, _dot_general=DG)


def test_a_conversion_sees_contractions_that_jit_has_traced_before():
    model = Attention(INT8, "")
    variables = init(model, X)
    model.apply(variables, X)
    first, second = (_reports(model, variables, X) for _ in range(2))
    assert first == second
    assert "w " in first[0] and "jnp.einsum is one" in first[0]


@pytest.mark.parametrize(
    ("wrap", "rows"), [(nn.jit, 5), (nn.remat, 6), (lambda module: module, 7)]
)
def test_a_conversion_leaves_nothing_in_what_is_traced_later(wrap, rows):
    model = wrap(Attention)(INT8, "")
    variables = init(model, X)
    x = jnp.ones((rows, 8))  # A shape that is in no cache.
    convert(model, variables, x)
    run = functools.partial(model.apply, mutable=["aqt"])
    assert "aqtlite operand" not in str(jax.make_jaxpr(run)(variables, x))
    _, changed = run(variables, x)
    assert not jax.tree.leaves(changed)
