"""Networks of others: a tiny one is measured as those of the packages are."""

import doctest
import importlib.util
import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from benchmarks.pretrained import __main__ as command
from benchmarks.pretrained import contestants, edge_files, networks, peers, routes
from benchmarks.pretrained.tasks import detection, pitch, recognition, text
from benchmarks.pretrained.tasks.task import Task

CONTESTANTS = (
    contestants.FLOAT,
    contestants.CONTROL,
    "static int8, max",
    "weights of 8 bits",
    routes.GPTQ_OF_LARGE,
    "int8, the worst in float",
    "chosen bits, as many bytes as 4 bits in blocks of 32",
    peers.FLOAT,
    peers.DYNAMIC,
    "LiteRT file, dynamic int8",
    "ONNX file, static int8",
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the package of a network of two layers."""
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=shape) for shape in ((64, 64), (64, 4))]
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "first"], ["hidden"]),
            helper.make_node("Relu", ["hidden"], ["positive"]),
            helper.make_node("MatMul", ["positive", "second"], ["logits"]),
        ],
        "network",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [32, 64])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [32, 4])],
        [
            numpy_helper.from_array(value.astype(np.float32), name)
            for value, name in zip(weights, ("first", "second"), strict=True)
        ],
    )
    opset = helper.make_opsetid("", 21)
    package = tmp_path / "tiny-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny\n")
    onnx.save(
        helper.make_model(graph, opset_imports=[opset], ir_version=10),
        tmp_path / "tiny.onnx",
    )
    (tmp_path / "page.md").write_text(
        "# Page\n<!-- tiny: begin -->\n<!-- tiny: end -->"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def task(path, quick):
    """Labels that are the float network's for most inputs."""
    del path, quick
    rng = np.random.default_rng(1)
    batches = [(rng.normal(size=(32, 64)).astype(np.float32),) for _ in range(3)]
    labels = []

    def score(outputs):
        found = np.concatenate([one[0].argmax(-1) for one in outputs])
        labels.append(found)  # The first are those of the float network.
        return 100 * float((found == labels[0]).mean())

    return Task(batches[:1], batches[1:], batches[:1], score)


def run(folder, *arguments):
    tiny = networks.Network("tiny", "labels", "tiny", "tiny.onnx", task)
    chosen = "|".join(CONTESTANTS)
    command.main(
        [
            *("--out", str(folder / "records"), "--page", str(folder / "page.md")),
            *("--contestants", chosen, *arguments),
        ],
        [tiny],
    )


def test_a_network_is_measured_once(folder, capsys):
    run(folder)
    assert "float32 differs from onnxruntime by" in capsys.readouterr().out
    records = json.loads((folder / "records" / "tiny.json").read_text())
    figures = {one["contestant"]: one["figures"] for one in records["contestants"]}
    assert tuple(figures) == CONTESTANTS
    assert figures[contestants.FLOAT]["metric"] == 100
    assert figures[contestants.CONTROL]["decibels"] == pytest.approx(40, abs=1)
    assert figures[peers.FLOAT]["decibels"] is None
    for name in (
        *("static int8, max", "weights of 8 bits", peers.DYNAMIC),
        *("LiteRT file, dynamic int8", "ONNX file, static int8"),
    ):
        assert figures[name]["metric"] > 90
        assert figures[name]["decibels"] > 25
    # 4,352 int8 weights, and 68 scales of weights.
    assert figures["weights of 8 bits"]["nbytes"] == 4352 + 4 * 68
    assert figures["weights of 8 bits"]["in_float"] == (4352 + 4 * 68) / (4 * 4352)
    # The first layer in 4 bits, with two scales and zero points for each output.
    packed = 4096 // 2 + 2 * 64 * (4 + 4)
    assert figures[routes.GPTQ_OF_LARGE]["nbytes"] == packed + 256 + 4 * 4
    assert figures[routes.GPTQ_OF_LARGE]["decibels"] > 15

    page = (folder / "page.md").read_text()
    assert all(f"| {name} |" in page for name in CONTESTANTS)
    run(folder)  # Nothing is left to measure, and the page is the same.
    assert "onnxruntime by" not in capsys.readouterr().out
    assert (folder / "page.md").read_text() == page


def test_a_quantizer_that_is_missing_leaves_its_rows_out(folder, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: find(name, *rest) if name != "ai_edge_quantizer" else None,
    )
    tiny = networks.Network("tiny", "labels", "tiny", "tiny.onnx", task)
    arguments = ["--out", str(folder), "--contestants", "ai-edge.*dynamic int8"]
    command.main(arguments, [tiny])
    assert "pip install --no-deps ai-edge-quantizer" in capsys.readouterr().out
    assert not (folder / "tiny.json").exists()


def test_outputs_of_a_file_are_in_the_order_of_the_network(tmp_path):
    def network(parameters, x):
        return tuple(parameters * (i + 1) * x for i in range(11))

    x = np.ones((2, 3), np.float32)
    source = edge_files.Source(network, np.float32(2), [(x,)], ())
    path = edge_files.write("LiteRT file, float32", source, tmp_path)
    outputs = edge_files.loaded(path)(x)
    assert [float(one[0, 0]) for one in outputs] == [2 * (i + 1) for i in range(11)]


def test_a_package_that_is_missing(folder, capsys):
    (folder / "tiny-1.0.dist-info" / "METADATA").unlink()
    (folder / "tiny-1.0.dist-info").rmdir()
    with pytest.raises(SystemExit):
        run(folder)
    assert "tiny is not installed; pip install" in capsys.readouterr().err


@pytest.mark.parametrize("module", [recognition, detection, pitch])
def test_examples_of_metrics(module):
    results = doctest.testmod(module)
    assert results.attempted
    assert not results.failed


def test_boxes_of_a_page():
    """Boxes around regions of text are larger by what the network shrinks them."""
    probabilities = np.zeros((64, 64), np.float32)
    probabilities[10:20, 8:48] = 0.9
    probabilities[40:50, 8:48] = 0.35  # too uncertain
    (box,) = detection.boxes(probabilities)
    assert detection.overlap(box, (2, 3, 54, 27)) > 0.8


def test_notes_have_an_onset_and_last():
    onsets, sounding = np.zeros((2, 60, 88), np.float32)
    sounding[10:40, 30] = 0.8
    onsets[10, 30] = onsets[20, 50] = 0.9  # the second does not last
    ((found, at),) = pitch.notes(onsets, sounding)
    assert found == 30
    assert at == pytest.approx(10 * 256 / 22050)


def test_lines_of_text_are_made_anew_alike():
    strips = []
    for _ in range(2):
        rng = np.random.default_rng(0)
        image, _ = text.line(rng, text.phrase(rng, 12), 28)
        strips.append(text.strip(text.degraded(rng, image), 192))
    assert strips[0].shape == (3, text.HEIGHT, 192)
    assert (strips[0] == strips[1]).all()
    assert strips[0].std() > 0.1
