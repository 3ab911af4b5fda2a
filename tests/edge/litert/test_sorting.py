import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from aqtlite import edge
from tests.edge import models

pytestmark = pytest.mark.code("quick")

FUNCTIONS = {
    "sort": lambda x: jnp.sort(x, 0),
    "argsort": lambda x: jnp.argsort(x, -1),
    "of several": lambda x: lax.sort((x, jnp.sin(x)), dimension=1, num_keys=1)[1],
    "largest": lambda x: lax.top_k(x, 3)[0],
    "largest integers": lambda x: lax.top_k((8 * x).astype(int), 3)[0],
    "places of the largest": lambda x: lax.top_k(x, 3)[1],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_sorts_as_jax_does(name, tmp_path):
    def function(w, x):
        return FUNCTIONS[name](x @ w)

    w, x = models.normal((4, 8)), models.normal((5, 4), 1)
    path = tmp_path / "sorted.tflite"
    report = edge.export(function, w, None, x, path)
    assert report.counts()["TOPK_V2"] == 1
    (found,) = models.run(path, x)
    np.testing.assert_allclose(found, jax.jit(function)(w, x), atol=1e-5)


def test_a_rule_leaves_it_in_float(tmp_path):
    def function(w, x):
        return jnp.sort(x @ w, -1) @ w.T

    w, x = models.normal((4, 8)), models.normal((5, 4), 1)
    path, rules = tmp_path / "sorted.tflite", [edge.Rule(op="sort", is_float=True)]
    report, _ = models.assert_simulated(path, function, w, x, rules)
    assert report.counts()["FULLY_CONNECTED"] == 2


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda w, x: lax.sort((x, x * w), num_keys=2), "by several keys"),
        (lambda w, x: jnp.sort((x * w).astype(int)), "it sorts int32"),
    ],
)
def test_other_sorts_are_refused(function, reason, tmp_path):
    w, x = models.normal((4,)), models.normal((5, 4), 1)
    with pytest.raises(ValueError, match=f"in float or not.*\n.*sort: .*{reason}"):
        edge.export(function, w, None, x, tmp_path / "sorted.tflite")
