"""Checkpoints of earlier versions, and of another JAX.

Of statistics whose calibrations counted their batches themselves, and of weights known
by digests.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization, traverse_util

import aqtlite
from aqtlite import checkpoint, config
from aqtlite.flax import (
    absorb_smoothing,
    calibrate,
    convert,
    merge_statistics,
    quantize_model,
)
from aqtlite.flax import nnx as aqtlite_nnx
from tests.checkpoint.support import FORMATS, save
from tests.checkpoint.written_before.model import (
    CONFIGS,
    SERVED,
    Computed,
    Layers,
    Mlp,
    X,
)
from tests.common import mostly_slow, quick_jit

pytestmark = pytest.mark.code("quick")

FOLDER = pathlib.Path(__file__).parent / "written_before"
STORED = serialization.msgpack_restore((FOLDER / "linen.msgpack").read_bytes())
OLD = STORED["variables"]
MODEL, OWG = Layers(), "_overwrite_with_gradient"


def of_served(variables):
    return {
        name: {key: variables[name][key] for key in SERVED.configs}
        for name in ("params", "aqt_stats")
    }


def assert_close(found, wanted, rtol=1e-5):
    """The same leaves but for the counts of calibrations, up to the machine."""
    names = traverse_util.flatten_dict(serialization.to_state_dict(found), sep="/")
    others = traverse_util.flatten_dict(wanted, sep="/")
    more = {name.rpartition("/")[2] for name in others.keys() - names.keys()}
    assert more <= {"batches"} and names
    for name, leaf in names.items():
        np.testing.assert_allclose(leaf, others[name], rtol=rtol, err_msg=name)


@jax.jit
def step(variables):
    def loss(trained, statistics):
        given = {**trained, "aqt_stats": statistics}
        out, changed = MODEL.apply(given, X, mutable=["aqt_stats"])
        return (out**2).sum(), changed["aqt_stats"]

    trained = {name: variables[name] for name in ("params", OWG)}
    (value, statistics), gradient = jax.value_and_grad(loss, has_aux=True)(
        trained, variables["aqt_stats"]
    )
    return value, {**variables, "aqt_stats": statistics, OWG: gradient[OWG]}


@pytest.fixture(scope="module")
def records():
    target = jax.tree.map(jnp.zeros_like, quick_jit(MODEL.init)(jax.random.key(0), X))
    return serialization.from_bytes(target, serialization.to_bytes(OLD))


def test_dictionaries_train_on():
    value, after = step(OLD)
    np.testing.assert_allclose(value, STORED["loss"], rtol=1e-5)
    np.testing.assert_allclose(jax.jit(MODEL.apply)(OLD, X), STORED["out"], rtol=1e-5)
    after = aqtlite.restored_statistics(after)
    # Gradients pass through layers that were rounded with other noise then.
    assert_close(after[OWG], STORED["after"][OWG], rtol=0.1)
    others = after.keys() - {OWG}
    assert_close(
        *({name: of[name] for name in others} for of in (after, STORED["after"]))
    )
    assert_close(aqtlite.restored_statistics(step(after)[1])["params"], OLD["params"])


def test_records_are_what_init_makes(records):
    restored = aqtlite.restored_statistics(OLD)
    fresh = jax.eval_shape(MODEL.init, jax.random.key(0), X)
    for found in (records, restored):
        assert jax.tree.structure(found) == jax.tree.structure(fresh)
        assert_close(found, OLD)
    # As the carry of a loop, whose structure stays.
    _, values = jax.lax.scan(lambda v, _: step(v)[::-1], restored, length=2)
    np.testing.assert_allclose(values[1], STORED["loss"], rtol=1e-5)


def test_orbax(tmp_path, records):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "old", OLD)
        assert_close(checkpointer.restore(tmp_path / "old"), OLD)
        args = ocp.args.PyTreeRestore(item=records, partial_restore=True)
        found = checkpointer.restore(tmp_path / "old", args=args)
    assert jax.tree.structure(found) == jax.tree.structure(records)
    assert_close(found, OLD)


def test_dictionaries_are_converted_calibrated_and_merged():
    old = of_served(OLD)
    serving = convert(SERVED, old, X)
    assert isinstance(
        serving["aqt_stats"]["largest"]["dot_general_ab_bc"]["lhs"],
        aqtlite.fixed_scale.FixedScale,
    )
    np.testing.assert_allclose(SERVED.apply(serving, X), STORED["served"], rtol=1e-5)
    more = calibrate(SERVED, old, [X])["aqt_stats"]["largest"]["dot_general_ab_bc"]
    # Three batches of `calibrate`, and a training step.
    assert more["lhs"].batches == 4 + 1
    largest = type(MODEL)(("largest",))
    old = {name: {"largest": old[name]["largest"]} for name in old}
    merged = merge_statistics(largest, old, [old], X)["aqt_stats"]["largest"]
    assert merged["dot_general_ab_bc"]["lhs"].batches == 4 + 4


def test_smoothing_is_absorbed():
    model = Layers(("largest", "smooth"))
    old = of_served(OLD)
    absorbed = absorb_smoothing(old, ["smooth"], into="largest")
    wanted = jax.jit(model.apply)(old, X)
    np.testing.assert_allclose(jax.jit(model.apply)(absorbed, X), wanted, rtol=0.1)


@pytest.mark.parametrize("how", mostly_slow(FORMATS, "safetensors"))
def test_is_converted_on_disk(how, tmp_path):
    source = save(tmp_path / "float", of_served(OLD), how)
    checkpoint.convert_checkpoint(source, tmp_path / "out", SERVED, X)
    loaded = checkpoint.load_serving(tmp_path / "out", SERVED)
    wanted = convert(SERVED, of_served(OLD), X)
    jax.tree.map(np.testing.assert_array_equal, loaded, wanted)


@pytest.mark.parametrize("model", [SERVED, None], ids=["model", "no model"])
def test_a_converted_checkpoint_serves(model):
    serving = checkpoint.load_serving(FOLDER / "serving.safetensors", model)
    found = jax.jit(SERVED.apply)(serving, X)
    np.testing.assert_allclose(found, STORED["served"], rtol=1e-5)


def test_nnx(tmp_path):
    stored = serialization.msgpack_restore((FOLDER / "nnx.msgpack").read_bytes())
    model = aqtlite_nnx.quantize_model(Mlp(nnx.Rngs(0)), CONFIGS["delayed"])
    aqtlite_nnx.init_state(model, X)
    source = save(tmp_path / "float", stored["variables"], "msgpack")
    checkpoint.convert_checkpoint(source, tmp_path / "out", model, X)
    loaded = checkpoint.load_serving(tmp_path / "out", model)
    loaded.eval()
    np.testing.assert_allclose(loaded(X), stored["out"], rtol=1e-5)


@pytest.mark.parametrize("name", ["former_digests", "jax_0_12"])
def test_computed_weights_are_found(name):
    """By digests of all parameters of equations, and by those of another JAX."""
    x = jnp.linspace(-1.0, 2.0, 24).reshape(3, 8)
    model = quantize_model(Computed(), config.weight_only())
    variables = serialization.msgpack_restore(
        (FOLDER / "computed.msgpack").read_bytes()
    )
    serving = checkpoint.load_serving(FOLDER / f"computed_{name}.safetensors", None)
    found, wanted = (jax.jit(model.apply)(of, x) for of in (serving, variables))
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
