"""Names of arrays: whatever they are, nothing is lost and nothing is mixed up."""

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import serialization, traverse_util
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from safetensors import numpy as safetensors_numpy

import aqtlite
from aqtlite import checkpoint, config
from aqtlite.checkpoint import names
from aqtlite.checkpoint.targets import orbax as orbax_target
from aqtlite.flax import convert
from aqtlite.qtensor import QTensor
from tests.checkpoint.support import assert_same, save
from tests.flax.support import DG, X, init

INT8 = config.weight_only(bits=8).fwd.rhs
RULE = checkpoint.Rule("*kernel", (0,))
TARGETS = ("out", "out.safetensors")


def tree(*paths):
    """Different arrays at these paths; those that end in "kernel" are matrices."""
    flat = {
        path: np.arange(i, i + (12 if path[-1].endswith("kernel") else 4), dtype="f4")
        for i, path in enumerate(paths)
    }
    return traverse_util.unflatten_dict(
        {p: x.reshape(4, 3) if x.size == 12 else x for p, x in flat.items()}
    )


def write(path, variables, how):
    """Writes variables, with names of levels that no other library would join."""
    if how == "msgpack":
        path = path.with_suffix(".msgpack")
        path.write_bytes(serialization.msgpack_serialize(variables))
        return path
    return save(path, variables, how)


def expected(variables):
    """What freezing by `RULE` makes of them."""
    flat = traverse_util.flatten_dict(variables)
    return traverse_util.unflatten_dict(
        {
            path: aqtlite.quantize(jnp.asarray(x), INT8, 0).stored_in((1, 0))
            if "/".join(path).endswith("kernel") and x.ndim == 2
            else x
            for path, x in flat.items()
        }
    )


GOOD = {
    "plain": [("a", "kernel"), ("b",)],
    "names of fields": [("qvalue", "kernel"), ("scale",), ("a", "kernel", "qvalue")],
    "twins but for case": [("a", "Kernel"), ("A", "Kernel"), ("A", "kernel")],
    "spaces": [(" ", "kernel"), ("a b", " ")],
    "URLs": [("#", "kernel"), ("a#1", "?x=%20"), ("%2F",), ("%25",), ("%",)],
    "unicode": [("ü", "名", "kernel"), ("u\N{COMBINING DIAERESIS}", "名")],
    "wildcards": [("[a]", "kernel"), ("*",), ("?",)],
    "suffixes of files": [("a", "msgpack"), ("w", "kernel"), ("a", "json"), ("key",)],
    "numbers": [("0", "kernel"), ("1",), ("00",)],
    "quotes": [("'a'", '"', "kernel"), ("$HOME", "b"), ("!",), ("~",)],
    "prefixes that are not levels": [("a",), ("ab", "kernel"), ("a_kernel",)],
    "collections of ours": [("aqt", "w", "kernel"), ("params",), ("replaced",)],
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("how", ["orbax", "msgpack", "safetensors"])
@pytest.mark.parametrize("name", GOOD)
def test_every_array_arrives(name, how, target, tmp_path):
    variables = tree(*GOOD[name])
    source = write(tmp_path / "float", variables, how)
    report = checkpoint.convert_by_rules(source, tmp_path / target, [RULE])
    loaded = checkpoint.load_serving(tmp_path / target)
    assert_same(loaded, expected(variables))
    assert report.kept + len(report.weights) == len(jax.tree.leaves(variables))


def outcome(source, target):
    """What a conversion and a loading give, or None if they refuse."""
    try:
        checkpoint.convert_by_rules(source, target, [RULE])
    except checkpoint.CheckpointError as error:
        assert "\n" not in str(error)
        assert not target.exists()
        assert not target.with_name(f".{target.name}.converting").exists()
        return None
    return checkpoint.load_serving(target)


HOSTILE = ["a", "A", "b", "kernel", "qvalue", "scale", "a.b", "a/b", "a%2Fb", "", " "]
HOSTILE += [".", "..", "%", "é", "#", "0", "lock", "__lock", "\\", "\n", "\x1b[31m"]
HOSTILE += ["_METADATA", "__metadata__", "aqtlite.json", "b.safetensors"]
HOSTILE += ["x" * 150, "x" * 300, "ü" * 120]
STEPS = st.text(max_size=4) | st.sampled_from(HOSTILE)
PATHS = st.lists(
    st.lists(STEPS, min_size=1, max_size=3).map(tuple), min_size=1, max_size=4
)


@settings(max_examples=60, deadline=None, database=None)
@given(paths=PATHS, target=st.sampled_from(TARGETS))
def test_arrive_or_are_refused(paths, target, tmp_path_factory):
    paths = {("w", "kernel"), *paths}
    assume(not any(p != q == p[: len(q)] for p in paths for q in paths))
    variables = tree(*sorted(paths))
    folder = tmp_path_factory.mktemp("names")
    source = write(folder / "float", variables, "msgpack")
    loaded = outcome(source, folder / target)
    if loaded is not None:
        assert_same(loaded, expected(variables))


@settings(max_examples=60, deadline=None, database=None)
@example(keys=["kernel"], target="out")
@example(keys=["a", "a.kernel"], target="out")
@given(
    keys=st.lists(
        st.lists(STEPS, min_size=1, max_size=3).map(".".join), max_size=4, unique=True
    ),
    target=st.sampled_from(TARGETS),
)
def test_flat_names_arrive_or_are_refused(keys, target, tmp_path_factory):
    keys = [key for key in keys if key not in ("__metadata__", "w.kernel")]
    flat = {key: np.full(4, i, "f4") for i, key in enumerate(keys)}
    flat["w.kernel"] = np.full((4, 3), len(keys), "f4")
    folder = tmp_path_factory.mktemp("names")
    source = folder / "float.safetensors"
    safetensors_numpy.save_file(flat, source)
    loaded = outcome(source, folder / target)
    if loaded is not None:
        leaves = jax.tree.leaves(loaded, is_leaf=lambda x: isinstance(x, QTensor))
        arrays = [x.dequant() if isinstance(x, QTensor) else x for x in leaves]
        assert sorted(round(float(x.ravel()[0])) for x in arrays) == list(
            range(len(flat))
        )


@given(st.lists(st.text(), min_size=1))
def test_a_name_is_one_path(steps):
    assert names.steps_of(names.name_of(steps)) == tuple(steps)


BAD_FLAT = {
    "a level and an array": (["a", "a.kernel"], "'a' and 'a/kernel'"),
    "the same, deeper": (["a.b.c.kernel", "a.b"], "'a/b' and 'a/b/c/kernel'"),
    "a field of a weight": (["w.kernel", "w.kernel.qvalue"], "w/kernel/qvalue"),
    "the other field": (["w.kernel", "w.kernel.scale"], "w/kernel/scale"),
    "a dot for a slash": (["a.kernel", "a/kernel"], "a.kernel is in"),
    "an empty step": (["a..kernel", "b"], "'a//kernel'"),
    "a control character": (["a\nb.kernel"], r"'a\\nb/kernel'"),
    "an escape": (["\x1b[31m.kernel"], r"x1b"),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", BAD_FLAT)
def test_refused_by_name(name, target, tmp_path):
    keys, match = BAD_FLAT[name]
    flat = {key: np.ones((4, 3), "f4") for key in keys}
    safetensors_numpy.save_file(flat, tmp_path / "s.safetensors")
    with pytest.raises(checkpoint.CheckpointError, match=match):
        checkpoint.convert_by_rules(
            tmp_path / "s.safetensors", tmp_path / target, [RULE]
        )
    assert [path.name for path in tmp_path.iterdir()] == ["s.safetensors"]


@pytest.mark.parametrize(
    "paths, target, match",
    [
        ([("a", "b"), ("a.b",)], "out", "'a.b' and 'a/b' to one place"),
        ([("a.b", "c"), ("a", "b.c")], "out", "to one place"),
        ([("a",), ("a/b",)], "out", "to one place"),
        ([("a\\b",)], "out", "hold a backslash"),
        ([("a", "__lock")], "out", "end in '.__lock'"),
        ([("_METADATA",)], "out", "its own metadata in _METADATA"),
        ([("aqtlite", "json")], "out", "its own metadata in aqtlite.json"),
        ([("ü" * 120,)], "out", "too long"),
        ([("a" * 150, "b" * 150)], "out", "too long"),
        ([("__metadata__",)], "out.safetensors", "under the name __metadata__"),
        ([("a.b",)], "out.safetensors", "'a.b' has in a step"),
        ([("a/b",)], "out.safetensors", "'a/b' has in a step"),
    ],
)
def test_what_a_target_cannot_tell_apart(paths, target, match, tmp_path):
    source = write(tmp_path / "float", tree(*paths, ("w", "kernel")), "msgpack")
    with pytest.raises(checkpoint.CheckpointError, match=match):
        checkpoint.convert_by_rules(source, tmp_path / target, [RULE])
    assert [path.name for path in tmp_path.iterdir()] == ["float.msgpack"]


@pytest.mark.parametrize("how", ["orbax", "msgpack"])
def test_slashes_stay_in_their_step(how, tmp_path):
    """As in Haiku's names of modules; patterns are written with plain slashes."""
    variables = tree(("mlp/~/linear", "kernel"), ("mlp", "linear"))
    source = write(tmp_path / "float", variables, how)
    rule = checkpoint.Rule("mlp/~/*/kernel", (0,))
    checkpoint.convert_by_rules(source, tmp_path / "out", [rule])
    assert_same(checkpoint.load_serving(tmp_path / "out"), expected(variables))


def test_a_folder_that_looks_like_a_file(tmp_path):
    variables = tree(("w", "kernel"), ("b", "safetensors"))
    source = write(tmp_path / "float", variables, "orbax")
    checkpoint.convert_by_rules(source, tmp_path / "out", [RULE])
    assert_same(checkpoint.load_serving(tmp_path / "out"), expected(variables))


def test_modules_with_slashes(tmp_path):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(8, dot_general=DG, name="a/b")(x)
            return nn.Dense(8, dot_general=DG, name="100%")(x)

    model = Model()
    variables = init(model, X)
    source = save(tmp_path / "float", variables, "msgpack")
    checkpoint.convert_checkpoint(source, tmp_path / "out", model, X)
    wanted = convert(model, variables, X)
    for loaded in (
        checkpoint.load_serving(tmp_path / "out"),
        checkpoint.load_serving(tmp_path / "out", model),
    ):
        assert_same(loaded, wanted)


def test_a_file_system_that_takes_two_names_for_one(tmp_path, monkeypatch):
    """As one does that ignores case: the second array replaces the first."""
    source = write(tmp_path / "float", tree(("a",), ("A",), ("w", "kernel")), "msgpack")
    write_all = orbax_target.ocp.Checkpointer.save

    def save_all_but_one(self, directory, *args, **kwargs):
        write_all(self, directory, *args, **kwargs)
        (directory / "A" / ".zarray").unlink()

    monkeypatch.setattr(orbax_target.ocp.Checkpointer, "save", save_all_but_one)
    with pytest.raises(checkpoint.CheckpointError, match="A was not written"):
        checkpoint.convert_by_rules(source, tmp_path / "out", [RULE])
    assert not (tmp_path / "out").exists()


VALUES = {
    "step": 1234,
    "large": 2**40,
    "rate": 0.1,
    "name": 'x"\n',
    "flag": True,
    "nothing": None,
    "deep": {"er": -2.5},
}


@pytest.mark.parametrize("target", TARGETS)
def test_numbers_and_strings_arrive(target, tmp_path):
    variables = {**VALUES, **tree(("w", "kernel"))}
    source = write(tmp_path / "float", variables, "msgpack")
    checkpoint.convert_by_rules(source, tmp_path / target, [RULE])
    loaded = checkpoint.load_serving(tmp_path / target)
    assert_same(loaded.pop("w"), expected(tree(("w", "kernel")))["w"])
    assert loaded == VALUES
    assert {k: type(v) for k, v in loaded.items()} == {
        k: type(v) for k, v in VALUES.items()
    }


@pytest.mark.parametrize("target", TARGETS)
def test_numbers_and_strings_of_orbax(target, tmp_path):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "float", {**VALUES, **tree(("w", "kernel"))})
    checkpoint.convert_by_rules(tmp_path / "float", tmp_path / target, [RULE])
    loaded = checkpoint.load_serving(tmp_path / target)
    assert_same(loaded.pop("w"), expected(tree(("w", "kernel")))["w"])
    # Orbax itself has made arrays of the numbers. 64 bits stay 64 bits.
    assert loaded == VALUES
    assert loaded["large"].dtype == np.int64


UNSUPPORTED = {
    "bytes": b"x",
    "list": [1, 2],
    "complex": 1j,
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_leaves_that_cannot_be_copied(kind, tmp_path):
    variables = {"a": {"b": UNSUPPORTED[kind]}, **tree(("w", "kernel"))}
    source = write(tmp_path / "float", variables, "msgpack")
    match = "a/b is neither an array, a number, a string nor None"
    with pytest.raises(checkpoint.CheckpointError, match=match):
        checkpoint.convert_by_rules(source, tmp_path / "out", [RULE])
    assert [path.name for path in tmp_path.iterdir()] == ["float.msgpack"]


def test_lists_of_orbax(tmp_path):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "float", {"l": [np.ones(3)], "kernel": np.ones(2)})
    with pytest.raises(checkpoint.CheckpointError, match="l/0 .* lies in a list"):
        checkpoint.convert_by_rules(tmp_path / "float", tmp_path / "out", [RULE])


def test_a_name_twice(tmp_path):
    array = msgpack.packb(np.zeros(2).tolist())
    source = tmp_path / "float.msgpack"
    source.write_bytes(b"\x82\xa1a" + array + b"\xa1a" + array)
    with pytest.raises(checkpoint.CheckpointError, match="holds a twice"):
        checkpoint.convert_by_rules(source, tmp_path / "out", [RULE])


def test_a_rule_for_a_number(tmp_path):
    source = write(tmp_path / "float", {"kernel": 3, "w": np.ones(3)}, "msgpack")
    with pytest.raises(checkpoint.CheckpointError, match="no array: 3"):
        checkpoint.convert_by_rules(source, tmp_path / "out", [RULE])


def test_a_number_that_the_model_lacks(tmp_path):
    """With a model, what it does not know is refused, as arrays are."""
    model = nn.Dense(8, dot_general=DG)
    source = write(tmp_path / "float", {**init(model, X), "step": 3}, "msgpack")
    with pytest.raises(checkpoint.CheckpointError, match="step is not in the model"):
        checkpoint.convert_checkpoint(source, tmp_path / "out", model, X)
