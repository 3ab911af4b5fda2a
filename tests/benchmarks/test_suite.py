"""The benchmarks run and say what they document; what they measure is not tested."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks.gpu import __main__ as gpu
from benchmarks.harness import figures, floor, mlas, phases, suite, tables, timing
from benchmarks.harness.contestants import NAMES
from benchmarks.harness.figures import BARE, FLOOR
from benchmarks.harness.options import Options
from benchmarks.workloads import memory, small
from tests.common import QUICK_FLAGS

pytestmark = [pytest.mark.slow, pytest.mark.code("quick")]

FIGURE_KEYS = {
    "workload",
    "case",
    "contestant",
    "unit",
    "median",
    "lower_quartile",
    "upper_quartile",
    "repeats",
    "relative",
    "share_of_floor",
}


WITHOUT_PEERS = """
import importlib.metadata, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("aqt", "qwix"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def version(name, installed=importlib.metadata.version):
    if name in ("aqtp", "qwix"):
        raise importlib.metadata.PackageNotFoundError(name)
    return installed(name)

sys.meta_path.insert(0, Missing())
importlib.metadata.version = version
"""


@pytest.mark.parametrize(
    "command",
    [
        ["benchmarks", "--help"],
        ["benchmarks", "--quick", "--only", "small"],
        ["benchmarks.quality.rounding"],
        ["benchmarks.errors"],
    ],
)
def test_without_the_peers_a_command_says_what_to_install(tmp_path, command):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_PEERS)
    repository = str(pathlib.Path(__file__).parents[2])
    process = subprocess.run(
        [sys.executable, "-m", *command],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join([str(tmp_path), repository]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    if "--help" in command:
        assert process.returncode == 0 and "--only NAME" in process.stdout
    else:
        (message,) = process.stderr.splitlines()
        assert process.returncode == 1 and message.startswith("error: the benchmarks")
        assert "aqtp and qwix" in message and "pip install -e '.[test]'" in message


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Two workloads of the suite, as a user runs them: its output, JSON and picture."""
    folder = tmp_path_factory.mktemp("benchmarks")
    written, picture = folder / "figures.json", folder / "speedup.png"
    process = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks", "--quick", "--repeats", "1"),
            *("--only", "mlp", "serving"),
            *("--json", str(written), "--plot", str(picture)),
        ],
        cwd=pathlib.Path(__file__).parents[2],
        # Most of the time of a quick run is compilation.
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_FLAGS},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout, json.loads(written.read_text()), picture.read_bytes()


def test_json_has_the_documented_keys_and_positive_numbers(quick):
    _, document, _ = quick
    assert set(document) == {"machine", "options", "figures"}
    assert document["machine"]["bytes_per_second"] > 0
    assert document["machine"]["versions"]["jax"] == jax.__version__
    assert document["options"]["only"] == ["mlp", "serving"]
    assert document["options"]["quick"] is True
    for figure in document["figures"]:
        assert set(figure) == FIGURE_KEYS
        assert figure["unit"] == "s"
        assert figure["repeats"] >= 1
        lower, upper = figure["lower_quartile"], figure["upper_quartile"]
        assert 0 < lower <= figure["median"] <= upper
        assert figure["relative"] > 0


def test_layers_are_served_beside_onnxruntime(quick):
    _, document, _ = quick
    serving = [one for one in document["figures"] if one["workload"] == "serving"]
    found = {
        one["contestant"]
        for one in serving
        if one["case"] == {"program": "layer, 64 x 128, beside onnxruntime", "rows": 8}
    }
    theirs = {"onnxruntime, float32", "onnxruntime, int8"}
    ours = {"aqtlite", "aqtlite, packed", "aqtlite, compiled"}
    assert found == {"float32", *ours, *theirs}


def test_the_layers_of_onnxruntime_are_dense_layers():
    x, kernel = np.random.default_rng(0).normal(size=(2, 4, 4)).astype(np.float32)
    bias = np.arange(4, dtype=np.float32)
    for layer in mlas.served_layers(kernel, bias).values():
        np.testing.assert_allclose(layer(x)[0], x @ kernel + bias, atol=0.2)


def test_every_contestant_is_in_every_case(quick):
    _, document, _ = quick
    cases = {}
    for figure in document["figures"]:
        if figure["workload"] == "mlp":
            cases.setdefault(str(figure["case"]), []).append(figure)
    assert len(cases) == 4  # 2-D and 3-D, forward and forward + backward
    for case in cases.values():
        assert [figure["contestant"] for figure in case] == [*NAMES, BARE, FLOOR]
        assert case[0]["relative"] == 1.0
        assert case[-1]["share_of_floor"] == 1.0


def test_tables_and_picture(quick):
    output, _, picture = quick
    for name in NAMES:
        assert name in output
    assert "forward + backward, ms" in output
    assert "token" in output
    assert picture.startswith(b"\x89PNG")


def test_small_layers_are_trained_and_served():
    measured = small.run(Options(quick=True, repeats=1), lambda what: None)
    found = [(one.case["phase"], one.contestant) for one in measured]
    assert found == [
        *((small.TRAINING, name) for name in small.CONFIGS),
        *((small.UNDIVIDED, name) for name in small.CONFIGS),
        (small.SERVED, "float32"),
        (small.SERVED, "aqtlite"),
    ]


def test_unknown_names_list_the_choices(capsys):
    with pytest.raises(SystemExit) as raised:
        command.main(["--only", "mlp", "mpl"])
    assert raised.value.code == 2
    message = capsys.readouterr().err
    assert "invalid choice: 'mpl'" in message
    for name in suite.WORKLOADS:
        assert name in message


@pytest.mark.parametrize("repeats", ["0", "-1", "many"])
def test_repeats_are_checked(repeats, capsys):
    with pytest.raises(SystemExit):
        command.main(["--repeats", repeats])
    assert "--repeats" in capsys.readouterr().err


class Clock:
    """Moves on only when a program that holds it runs."""

    def __init__(self):
        self.now = 0.0
        self.order = []

    def __call__(self):
        return self.now

    def program(self, name, *durations):
        remaining = iter(durations)

        def run():
            self.now += next(remaining)
            self.order.append(name)

        return run


def test_contestants_alternate_and_spread_is_that_of_measured_rounds():
    clock = Clock()
    programs = {
        "slow": clock.program("slow", 100.0, 1.0, 5.0, 2.0, 4.0, 3.0),
        "fast": clock.program("fast", 100.0, 0.5, 0.5, 0.5, 0.5, 0.5),
    }
    spreads = timing.alternate(programs, repeats=5, clock=clock)
    assert clock.order == ["slow", "fast"] * 6
    assert spreads == {
        "slow": timing.Spread(3.0, 2.0, 4.0, 5),
        "fast": timing.Spread(0.5, 0.5, 0.5, 5),
    }


@pytest.mark.parametrize("seconds, rounds", [(0.0, 3), (3.5, 4), (100.0, 9)])
def test_rounds_end_when_the_time_is_up(seconds, rounds):
    clock = Clock()
    programs = {"only": clock.program("only", *[1.0] * 10)}
    spreads = timing.alternate(programs, repeats=9, seconds=seconds, clock=clock)
    assert spreads["only"].repeats == rounds


def test_floor_has_all_contractions_and_their_traffic():
    forward = floor.matmul((4, 2), 3, 5, phases.FORWARD)
    assert [c.out for c in forward] == [(4, 2, 5)]
    assert forward[0].traffic == 5 * (24 + 15) + 8 * 40
    both = floor.matmul((4, 2), 3, 5, phases.BOTH)
    assert [c.out for c in both] == [(4, 2, 5), (4, 2, 3), (3, 5)]
    results = floor.program(both)()
    assert [x.shape for x in results] == [c.out for c in both]
    assert {x.dtype for x in results} == {jnp.dtype("int32")}


def test_saved_bytes_leave_out_arguments_and_count_arrays_once():
    x = jnp.ones((4, 4))
    assert memory.saved_bytes(lambda x, y: x @ y, x, x) == 0
    assert memory.saved_bytes(lambda x, y: jnp.exp(x) @ y, x, x) == 64


def test_phases_stand_side_by_side_in_markdown():
    measured = []
    for phase, seconds in (("forward", 0.0012), ("forward + backward", 0.25)):
        spread = timing.Spread(seconds, seconds / 2, seconds * 2, 3)
        case = {"width": 8, "phase": phase}
        spreads = {"float32": spread, FLOOR: spread}
        measured += figures.compare("mlp", case, spreads)
    console = tables.console()
    with console.capture() as captured:
        console.print(tables.table(measured, markdown=True))
    rows = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in captured.get().splitlines()
        if "|" in line
    ]
    assert rows[0] == [
        *("width", "", "forward, ms", "relative", "of floor"),
        *("forward + backward, ms", "relative", "of floor"),
    ]
    assert rows[2] == [
        *("8", "float32", "1.20 (0.60-2.40)", "1.00 x", "100%"),
        *("250 (125-500)", "1.00 x", "100%"),
    ]


def test_gpu_script_refuses_a_cpu_in_one_line():
    with pytest.raises(SystemExit) as raised:
        gpu.main([])
    message = str(raised.value.code)
    assert "needs a GPU" in message
    assert "\n" not in message


def test_gpu_script_runs_a_tiny_size_on_a_cpu(tmp_path, capsys):
    written = tmp_path / "gpu.json"
    programs = tmp_path / "programs"
    gpu.main(
        [
            *("--allow-cpu", "--repeats", "1", "--only", "products"),
            *("--json", str(written), "--programs", str(programs)),
        ]
    )
    assert "temporary, MB" in capsys.readouterr().out
    measured = json.loads(written.read_text())["figures"]
    assert {figure["contestant"] for figure in measured} >= {"bfloat16", "int8"}
    assert {figure["case"]["phase"] for figure in measured} == {"call", "temporary"}
    assert any("HloModule" in path.read_text() for path in programs.glob("*.hlo"))


def test_gpu_script_starts_nothing_when_the_time_is_up(capsys):
    gpu.main(["--allow-cpu", "--minutes", "0"])
    output = capsys.readouterr().out
    assert "training step: not run" in output
    assert "median" not in output
