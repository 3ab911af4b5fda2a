"""What `calibrate` takes for batches: in Linen, in NNX and for the edge."""

import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import aqtlite.flax.nnx
from aqtlite import config, edge
from aqtlite.flax import AqtDotGeneral, calibrate, quantize_model
from tests.common import normal
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

X, STATIC = normal((3, 8)), config.static_int8()


def linen(batches):
    model = nn.Dense(4, dot_general=AqtDotGeneral(STATIC))
    return calibrate(model, init(model, X), batches)


def of_nnx(batches):
    layer = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    model = aqtlite.flax.nnx.quantize_model(layer, STATIC)
    aqtlite.flax.nnx.calibrate(model, batches)


def of_edge(batches):
    return edge.calibrate(lambda w, x: x @ w, jnp.ones((8, 4)), batches)


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        (X, r"got the array float32\[3, 8\], whose rows .* Write \[x\] for a single"),
        ({"x": X}, r"got a dict of x. Write \[x\] for a single batch"),
        (None, "got None"),
        (3, "got 3"),
    ],
    ids=["array", "mapping", "none", "number"],
)
@pytest.mark.parametrize("run", [linen, of_nnx, of_edge])
def test_what_is_no_batches(run, batches, words):
    with pytest.raises(TypeError, match=f"^batches must be an iterable .*{words}"):
        run(batches)


@pytest.mark.parametrize("run", [linen, of_nnx, of_edge])
def test_a_list_is_no_batch(run):
    """As data loaders collate batches; a tuple has positional arguments."""
    with pytest.raises(TypeError, match=r"^a batch is a list of 2 .* tuple\(batch\)"):
        run([[X, X]])
    run([(X,)])


@pytest.mark.parametrize("run", [linen, of_nnx, of_edge])
def test_a_mapping_is_one_argument(run):
    message = r"^a batch is an array or a tuple .* a dict of x as .*\(batch\['x'\], \)"
    with pytest.raises(TypeError, match=message):
        run([{"x": X}])


def test_a_model_of_a_mapping():
    class OfFeatures(nn.Module):
        @nn.compact
        def __call__(self, features):
            return nn.Dense(4, dot_general=AqtDotGeneral(STATIC))(features["x"])

    model, batch = OfFeatures(), {"x": X}
    variables = init(model, batch)
    assert "aqt_stats" in calibrate(model, variables, [batch])
    with pytest.raises(TypeError, match=r"a dict of y as one .* raised KeyError: 'x'"):
        calibrate(model, variables, [{"y": X}])


@pytest.mark.parametrize("run", [linen, of_nnx, of_edge])
def test_an_iterator_and_a_sequence(run):
    class Sequence:
        def __getitem__(self, index):
            return [X, 2 * X][index]

    run(iter([X]))
    run(Sequence())


def linen_by_rules(batches):
    model = nn.Dense(4)
    calibrate(quantize_model(model, STATIC), init(model, X), batches)


@pytest.mark.parametrize("run", [linen_by_rules, of_nnx])
def test_a_batch_without_rows(run):
    with pytest.raises(
        ValueError, match=r"float32\[0,8\], which has an axis of size 0"
    ):
        run([X[:0]])


class Branching(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        dot_general = AqtDotGeneral(STATIC)
        return nn.Dense(4, dot_general=dot_general)(2 * x if train else x)


def test_a_value_to_branch_on_is_a_keyword_argument():
    model = Branching()
    variables = init(model, X)
    with pytest.raises(TypeError, match="^a batch holds True, .* as a keyword arg"):
        calibrate(model, variables, [(X, True)])
    assert calibrate(model, variables, [X], train=True)
