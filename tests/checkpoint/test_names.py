"""Names of arrays: whatever they are, nothing is lost and nothing is mixed up."""

import jax
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import serialization, traverse_util
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from safetensors import numpy as safetensors_numpy

from aqtlite import checkpoint
from aqtlite.checkpoint import names
from aqtlite.checkpoint.formats import orbax as orbax_format
from aqtlite.flax import convert
from tests.checkpoint.support import assert_same, copy, save
from tests.flax.support import DG, X, init

pytestmark = pytest.mark.code("quick")

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
    report = copy(source, tmp_path / target)
    assert_same(checkpoint.load_serving(tmp_path / target), variables)
    assert report.kept == len(jax.tree.leaves(variables))


def outcome(source, target):
    """Converts and loads; None if that is refused."""
    try:
        copy(source, target)
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
        assert_same(loaded, variables)


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
        found = [float(x.ravel()[0]) for x in jax.tree.leaves(loaded)]
        assert sorted(found) == list(range(len(flat)))


@given(st.lists(st.text(), min_size=1))
def test_a_name_is_one_path(steps):
    assert names.steps_of(names.name_of(steps)) == tuple(steps)


BAD_FLAT = {
    "a level and an array": (["a", "a.kernel"], "'a' and 'a/kernel'"),
    "the same, deeper": (["a.b.c.kernel", "a.b"], "'a/b' and 'a/b/c/kernel'"),
    "a dot for a slash": (["a.kernel", "a/kernel"], "a.kernel is in"),
    "an empty first step": ([".kernel", "b"], "'/kernel'"),
    "an empty last step": (["a.kernel.", "b"], "'a/kernel/'"),
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
        copy(tmp_path / "s.safetensors", tmp_path / target)
    assert [path.name for path in tmp_path.iterdir()] == ["s.safetensors"]


@pytest.mark.parametrize(
    "paths, target, match",
    [
        ([("a", "b"), ("a.b",)], "out", "'a.b' and 'a/b' to one place"),
        ([("a.b", "c"), ("a", "b.c")], "out", "to one place"),
        ([("a",), ("a/b",)], "out", "to one place"),
        ([("a\\b",)], "out", "hold a backslash"),
        ([("a",)], "o\\ut", "takes a backslash for a separator of folders"),
        ([("a", "__lock")], "out", "end in '.__lock'"),
        ([("_METADATA",)], "out", "its own metadata in _METADATA"),
        ([("aqtlite", "json")], "out", "its own metadata in aqtlite.json"),
        ([("ü" * 120,)], "out", "too long"),
        ([("a" * 150, "b" * 150)], "out", "too long"),
        ([("__metadata__",)], "out.safetensors", "under the name __metadata__"),
    ],
)
def test_what_a_target_cannot_tell_apart(paths, target, match, tmp_path):
    source = write(tmp_path / "float", tree(*paths, ("w", "kernel")), "msgpack")
    with pytest.raises(checkpoint.CheckpointError, match=match):
        copy(source, tmp_path / target)
    assert [path.name for path in tmp_path.iterdir()] == ["float.msgpack"]


@pytest.mark.parametrize("how", ["orbax", "msgpack"])
def test_slashes_stay_in_their_step(how, tmp_path):
    """As in Haiku's names of modules."""
    variables = tree(("mlp/~/linear", "kernel"), ("mlp", "linear"))
    source = write(tmp_path / "float", variables, how)
    copy(source, tmp_path / "out")
    assert_same(checkpoint.load_serving(tmp_path / "out"), variables)


def test_a_folder_that_looks_like_a_file(tmp_path):
    variables = tree(("w", "kernel"), ("b", "safetensors"))
    source = write(tmp_path / "float", variables, "orbax")
    copy(source, tmp_path / "out")
    assert_same(checkpoint.load_serving(tmp_path / "out"), variables)


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
    write_all = orbax_format.ocp.Checkpointer.save

    def save_all_but_one(self, directory, *args, **kwargs):
        write_all(self, directory, *args, **kwargs)
        (directory / "A" / ".zarray").unlink()

    monkeypatch.setattr(orbax_format.ocp.Checkpointer, "save", save_all_but_one)
    with pytest.raises(checkpoint.CheckpointError, match="A was not written"):
        copy(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


LEAVES = {
    "step is the int 1234": {"step": 1234},
    "rate is the float 0.1": {"rate": 0.1},
    "name is the str 'x'": {"name": "x"},
    "a/b is the bytes b'x'": {"a": {"b": b"x"}},
    "a/b is the list": {"a": {"b": [1, 2]}},
    "a/b is the ExtType": {"a": {"b": 1j}},
}


@pytest.mark.parametrize("match", LEAVES)
def test_leaves_that_are_no_arrays(match, tmp_path):
    """None says as much as an absent leaf; the others are named."""
    model = nn.Dense(8, dot_general=DG)
    variables = {**init(model, X), "nothing": None}
    source = write(tmp_path / "float", {**variables, **LEAVES[match]}, "msgpack")
    with pytest.raises(checkpoint.CheckpointError, match=f"{match}.*not in the model"):
        checkpoint.convert_checkpoint(source, tmp_path / "out", model, X)
    assert [path.name for path in tmp_path.iterdir()] == ["float.msgpack"]
    source = write(tmp_path / "float", variables, "msgpack")
    checkpoint.convert_checkpoint(source, tmp_path / "out", model, X)


def test_strings_and_lists_of_orbax(tmp_path):
    model = nn.Dense(8, dot_general=DG)
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = {**init(model, X), "l": [np.ones(3)], "name": "x", "nothing": None}
        checkpointer.save(tmp_path / "float", tree)
    with pytest.raises(checkpoint.CheckpointError) as info:
        checkpoint.convert_checkpoint(tmp_path / "float", tmp_path / "out", model, X)
    assert "l/0 is float64[3] in a list or a tuple" in str(info.value)
    assert "name is a string" in str(info.value)
    assert "nothing" not in str(info.value)


def test_a_parameter_that_is_no_array(tmp_path):
    model = nn.Dense(8, dot_general=DG)
    variables = {"params": {**init(model, X)["params"], "bias": 3}}
    source = write(tmp_path / "float", variables, "msgpack")
    with pytest.raises(checkpoint.CheckpointError, match="params/bias is the int 3"):
        checkpoint.convert_checkpoint(source, tmp_path / "out", model, X)


def test_a_name_twice(tmp_path):
    array = msgpack.packb(np.zeros(2).tolist())
    source = tmp_path / "float.msgpack"
    source.write_bytes(b"\x82\xa1a" + array + b"\xa1a" + array)
    with pytest.raises(checkpoint.CheckpointError, match="holds a twice"):
        copy(source, tmp_path / "out")
