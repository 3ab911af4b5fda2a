"""Files that are written here: as the packages write them, and read again."""

import dataclasses
import errno
import functools
import json
import os
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from aqtlite import checkpoint, numerics
from aqtlite.checkpoint.quantized_formats import gguf
from aqtlite.qtensor.qtensor import QTensor
from tests.checkpoint.quantized_formats import written_here
from tests.checkpoint.support import refuses

pytestmark = pytest.mark.code("quick")

OTHERS = pathlib.Path(__file__).parent.parent / "formats_written_by_others"


def raw(path):
    """The header and the bytes of a safetensors file, fp8 included."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {
        name: (
            one["dtype"],
            one["shape"],
            data[start:][slice(*one["data_offsets"])],
        )
        for name, one in header.items()
    }


@pytest.mark.parametrize(
    ("case", "format_"),
    [
        *(
            (f"compressed_{case}", "compressed-tensors")
            for case in (
                *("w4", "w4_affine", "w3_affine", "w6_channel"),
                *("fp8_tensor", "fp8_channel", "fp8_block", "mxfp4"),
            )
        ),
        *((f"gptq_{case}", "gptq") for case in ("3", "4", "8", "2_affine")),
    ],
)
def test_the_bytes_of_the_package(case, format_, tmp_path):
    """What a package wrote is written again with the same tensors, byte for byte."""
    source = OTHERS / case
    path = tmp_path / "out"
    checkpoint.save_quantized(path, checkpoint.load_quantized(source), format=format_)
    got, wanted = (raw(folder / "model.safetensors") for folder in (path, source))
    if case == "gptq_3":
        # Symmetric weights are written in version 1.
        wanted.pop("model.layers.0.mlp.up_proj.qzeros")
        got.pop("model.layers.0.mlp.up_proj.qzeros")
    assert got == wanted


def test_the_bytes_of_gguf(tmp_path):
    source = OTHERS / "gguf" / "tiny.gguf"
    names = [f"{kind}.weight" for kind in ("Q4_0", "Q4_1", "Q8_0", "MXFP4", "BF16")]
    loaded = checkpoint.load_quantized(source)
    path = tmp_path / "out.gguf"
    weights = {name: loaded[name] for name in names}
    checkpoint.save_quantized(path, weights, format="gguf")
    for name in names:
        pair = []
        for file in (source, path):
            entry = gguf.open_file(file).entries[name]
            stop = entry.start + entry.nbytes
            pair.append((entry.kind.name, file.read_bytes()[entry.start : stop]))
        assert pair[0] == pair[1], name


@pytest.mark.parametrize("format_", list(written_here.WEIGHTS))
def test_read_again(format_, tmp_path):
    path = written_here.write(tmp_path, format_)
    loaded = checkpoint.load_quantized(path)
    assert loaded.method == format_
    wanted = written_here.weights(format_)
    assert set(loaded) == set(wanted)
    for name, one in wanted.items():
        if isinstance(one, QTensor):
            got = loaded[name].dequant()
            np.testing.assert_array_equal(got, one.dequant(), err_msg=name)
        else:
            assert loaded[name].dtype == one.dtype
            np.testing.assert_array_equal(loaded[name], one)
    if format_ == "gguf":
        for key, value in written_here.METADATA.items():
            got = loaded.metadata[key]
            got = got.tolist() if isinstance(got, np.ndarray) else got
            assert got == value, key
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_the_layout_of_scales_of_the_source_is_kept(tmp_path):
    """A weight that moves between formats keeps its integers."""
    q = checkpoint.load_quantized(OTHERS / "compressed_w4")
    (name,) = (name for name in q if "proj" in name)
    path = tmp_path / "out"
    weights = {name: q[name], "a.weight": q[name][:, :32]}
    checkpoint.save_quantized(path, weights, format="compressed-tensors")
    again = checkpoint.load_quantized(path)
    np.testing.assert_array_equal(again[name].qvalue, q[name].qvalue)
    np.testing.assert_array_equal(again["a.weight"].scale, q[name].scale[:, :1])


INT4 = written_here.INT4
INT8 = written_here.INT8


def with_scale(q, value):
    return dataclasses.replace(q, scale=np.full_like(q.scale, value))


@pytest.mark.parametrize(
    ("format_", "weights", "message"),
    [
        ("awq", {"a.weight": INT4}, "'awq' is not written; compressed-tensors, gptq"),
        ("gptq", {"a.weight": INT4, "b.weight": INT8}, "one width and group size"),
        ("gptq", {"a.weight": INT4[:3]}, "fill words of 32"),
        ("gptq", {"a.weight": INT4[0]}, "not a matrix's"),
        ("gptq", {"a": INT4}, "names such weights MODULE.weight"),
        ("gptq", {"a.weight": np.ones(3)}, "no weight is quantized"),
        (
            "gptq",
            {"a.weight": written_here.quantized(numerics.IntSymmetric(bits=4), 32)},
            "need more: quantize with scale_dtype='bfloat16'",
        ),
        *(
            (format_, {"a.weight": with_scale(INT4, value)}, "NaN or infinite")
            for format_ in ("compressed-tensors", "gptq", "gguf")
            for value in (np.nan, np.inf)
        ),
        ("gptq", {"a.weight": with_scale(INT4, -1)}, "a negative scale"),
        ("compressed-tensors", {"a.weight": with_scale(INT8, -1)}, "a negative scale"),
        ("gguf", {"a": INT4.T}, "blocks of 32 elements of the last axis"),
        (
            "gguf",
            {"a": written_here.quantized(numerics.NormalFloat(), 32)},
            "is not on a grid of integers",
        ),
        ("gptq", {"a.weight": INT4, "b/c": np.ones(3)}, "b/c: .* no '/' or '%'"),
        (
            "compressed-tensors",
            {"a.weight": INT4, "100%.b": np.ones(3)},
            "100%.b: .* no '/' or '%'",
        ),
        ("gguf", {"a": np.ones(3, np.uint16)}, "uint16, which GGUF has not"),
        ("gguf", {"a": np.ones((1,) * 5)}, "a has 5 axes, and GGUF has at most 4"),
        (
            "compressed-tensors",
            {"a.weight": written_here.quantized(written_here.E2M1, 32)},
            "with powers of two for 32 inputs, MXFP4",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_a_format_cannot_hold(format_, weights, message, tmp_path):
    """The message says why, and nothing is left behind."""
    path = tmp_path / "out"
    save = checkpoint.save_quantized
    refuses(message, save, path, weights, format=format_)
    assert not list(tmp_path.iterdir())


def test_paths_and_metadata(tmp_path):
    save = checkpoint.save_quantized
    refuses("exists; name a new one", save, tmp_path, {}, format="gguf")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nothing")
    refuses("exists; name a new one", save, link, {}, format="gguf")
    path = tmp_path / "no" / "out"
    refuses("there is no folder", save, path, {}, format="gguf")
    path = tmp_path / "out"
    for value in ({}, [[1], [1, 2]], 1j, object(), 1 << 70):
        refuses(
            "no value such as", save, path, {}, format="gguf", metadata={"a": value}
        )


@pytest.mark.parametrize(
    ("format_", "name", "message"),
    [
        (
            "gptq",
            "a.scales",
            "a.scales is an array, and gptq stores a part of a.weight",
        ),
        ("gptq", "a.qweight", "a.qweight, float32.2, 32., would be read as a part"),
        ("gptq", "a.g_idx", "a.g_idx, .* as a part of a quantized weight"),
        ("gptq", "b.qzeros", "b.qzeros, .* as a part of a quantized weight"),
        ("compressed-tensors", "a.weight_scale", "a.weight_scale, .* as a part"),
        ("compressed-tensors", "a.weight_packed", "a.weight_packed, .* as a part"),
        ("compressed-tensors", "b.weight_g_idx", "b.weight_g_idx, .* as a part"),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_names_that_are_taken(format_, name, message, is_first, tmp_path):
    """Files with two tensors of one name, or a part too many, could not be read."""
    pairs = [("a.weight", INT4), (name, np.ones((2, 32), np.float32))]
    weights = dict(pairs[::-1] if is_first else pairs)
    save = checkpoint.save_quantized
    refuses(message, save, tmp_path / "out", weights, format=format_)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [np.uint8, "float8_e4m3fn"])
def test_codes_that_have_no_scale(dtype, tmp_path):
    weights = {"a.weight": INT4, "b.experts": np.ones((2, 32), jnp.dtype(dtype))}
    message = "b.experts, .*, would be read as a part .* or make it float32"
    save = functools.partial(checkpoint.save_quantized, format="gptq")
    refuses(message, save, tmp_path / "out", weights)


@pytest.mark.parametrize("alignment", [8, np.uint32(16), np.int64(32), 4096])
def test_the_alignment_that_metadata_asks_for(alignment, tmp_path):
    """Tensors whose bytes fill no multiple of it."""
    arrays = {name: np.arange(n, dtype=np.float32) for n, name in ((3, "a"), (5, "b"))}
    weights = {"w": INT4, **arrays, "v": INT8}
    path = tmp_path / "a.gguf"
    key = "general.alignment"
    checkpoint.save_quantized(path, weights, format="gguf", metadata={key: alignment})
    loaded = checkpoint.load_quantized(path)
    assert loaded.metadata[key] == alignment
    for name, one in weights.items():
        got = loaded[name]
        pair = [x.dequant() if isinstance(x, QTensor) else x for x in (got, one)]
        np.testing.assert_array_equal(*pair)
    starts = [entry.start for entry in gguf.open_file(path).entries.values()]
    assert not any(start % alignment for start in starts)


@pytest.mark.parametrize("value", [0, 4, 24, -8, 1 << 17, True, 32.0, "32", [32]])
def test_alignments_that_are_none(value, tmp_path):
    refuses(
        "metadata: general.alignment has to be a power of two from 8 to 65536",
        functools.partial(checkpoint.save_quantized, format="gguf"),
        tmp_path / "a.gguf",
        {"w": INT4},
        metadata={"general.alignment": value},
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format_", ["gptq", "gguf"])
@pytest.mark.parametrize("name", [1, "a.\ud800.weight"])
def test_names_that_are_no_texts(format_, name, tmp_path):
    save = functools.partial(checkpoint.save_quantized, format=format_)
    refuses("names of weights are texts", save, tmp_path / "out", {name: INT4})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("pairs", [{1: 2}, {"\ud800": 1}, {"a": "\ud800"}])
def test_texts_that_gguf_has_not(pairs, tmp_path):
    save = functools.partial(checkpoint.save_quantized, format="gguf", metadata=pairs)
    refuses("GGUF has names and texts in UTF-8", save, tmp_path / "a", {"w": INT4})


@pytest.mark.parametrize(
    "value", [1e300, -1e300, 1e-60, 16777217.0, [0.5, 16777217], [1.5, 1e300]]
)
def test_numbers_that_float32_has_not(value, tmp_path):
    pairs = {"a.b": value}
    save = functools.partial(checkpoint.save_quantized, format="gguf", metadata=pairs)
    path = tmp_path / "a.gguf"
    refuses("metadata: a.b has .*, which is no float32", save, path, {"w": INT4})


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (1e-6, np.float32(1e-6)),
        (np.float64(1e300), np.float64(1e300)),
        ([2**63, 1], np.array([2**63, 1], np.uint64)),
        ([-(2**40), 1], np.array([-(2**40), 1])),
        ([0.5, 3], np.array([0.5, 3], np.float32)),
        (float("inf"), np.float32(np.inf)),
        (float("nan"), np.float32(np.nan)),
    ],
)
def test_numbers_are_kept(value, wanted, tmp_path):
    path = tmp_path / "a.gguf"
    pairs = {"a": value}
    checkpoint.save_quantized(path, {"w": INT4}, format="gguf", metadata=pairs)
    got = checkpoint.load_quantized(path).metadata["a"]
    np.testing.assert_array_equal(got, wanted)
    if isinstance(got, np.ndarray):
        assert got.dtype == wanted.dtype


@pytest.mark.parametrize("value", [np.float32(1), np.ones(2), {1, 2}, {(1, 2): 3}])
def test_metadata_that_is_no_json(value, tmp_path):
    pairs = {"a": value}
    save = functools.partial(checkpoint.save_quantized, format="gptq", metadata=pairs)
    refuses("metadata is what config.json", save, tmp_path / "a", {"w.weight": INT4})
    assert not list(tmp_path.iterdir())


class _Meanwhile(dict):
    """A weight that starts something else when it is read again, to be written."""

    def __init__(self, weights, start):
        super().__init__(weights)
        self.starts = [start, lambda: None]

    def __getitem__(self, name):
        if self.starts:
            self.starts.pop()()
        return super().__getitem__(name)


NEGATIVE = {"a.weight": dataclasses.replace(INT4, qvalue=-INT4.qvalue)}
BOTH = pytest.mark.parametrize("format_", ["compressed-tensors", "gguf"])


def assert_holds(folder, path, weights):
    """One whole checkpoint is in the folder."""
    (name,) = weights
    got = checkpoint.load_quantized(path)[name].dequant()
    np.testing.assert_array_equal(got, weights[name].dequant())
    assert list(folder.iterdir()) == [path]


@BOTH
def test_two_writers_to_one_path(format_, tmp_path):
    """The first that is done has it, and the other says so."""
    save = functools.partial(
        checkpoint.save_quantized, tmp_path / "out.gguf", format=format_
    )
    weights = _Meanwhile({"a.weight": INT4}, lambda: save(NEGATIVE))
    refuses("out.gguf exists; name a new one", save, weights)
    assert_holds(tmp_path, tmp_path / "out.gguf", NEGATIVE)


@BOTH
def test_a_writer_that_fails_leaves_the_work_of_others(format_, tmp_path):
    save = functools.partial(
        checkpoint.save_quantized, tmp_path / "out.gguf", format=format_
    )

    def fail():
        with pytest.raises(ZeroDivisionError):
            save(_Meanwhile({"a.weight": INT4}, lambda: 1 / 0))

    save(_Meanwhile(NEGATIVE, fail))
    assert_holds(tmp_path, tmp_path / "out.gguf", NEGATIVE)


def test_a_file_system_without_links(tmp_path, monkeypatch):
    def link(*args):
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "link", link)
    path = tmp_path / "out.gguf"
    save = functools.partial(checkpoint.save_quantized, path, format="gguf")
    weights = _Meanwhile({"a.weight": INT4}, lambda: save(NEGATIVE))
    refuses("out.gguf exists; name a new one", save, weights)
    assert_holds(tmp_path, path, NEGATIVE)


def test_a_failure_without_links_leaves_nothing(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError("no")

    monkeypatch.setattr(os, "link", fail)
    monkeypatch.setattr(pathlib.Path, "replace", fail)
    with pytest.raises(OSError, match="^no$"):
        checkpoint.save_quantized(tmp_path / "a.gguf", NEGATIVE, format="gguf")
    assert not list(tmp_path.iterdir())


def test_configs_that_servers_read(tmp_path):
    weights = {
        "a.q.weight": INT4,
        "a.bias": np.ones(3, np.float32),
        "lm_head.weight": np.ones((2, 3), jnp.bfloat16),
    }
    path = tmp_path / "one"
    save = checkpoint.save_quantized
    save(path, weights, format="compressed-tensors", metadata={"model_type": "llama"})
    config = json.loads((path / "config.json").read_text())
    assert config["model_type"] == "llama"
    quantization = config["quantization_config"]
    assert quantization["ignore"] == ["lm_head"]
    group = quantization["config_groups"]["group_0"]
    assert group["targets"] == ["Linear"] and group["weights"]["group_size"] == 32
    path = tmp_path / "two"
    save(path, weights, format="gptq")
    tensors = safetensors_numpy.load_file(path / "model.safetensors")
    assert (tensors["a.q.qzeros"] == 0x77777777).all()
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    assert config["sym"] and list(config["dynamic"]) == ["-:^lm_head$"]
