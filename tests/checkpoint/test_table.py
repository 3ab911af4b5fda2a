"""Tables of converted checkpoints, for terminals of any width."""

import dataclasses
import io

import pytest
import rich.console

from aqtlite.checkpoint.report import (
    Report,
    Row,
    summary,
    table,
    without_constant_steps,
)

pytestmark = pytest.mark.code("quick")

LONG = "encoder/layers_{}/multi_head_dot_product_attention/query/kernel"
ROW = Row("", ("params/w",), (4096, 16, 256), "int8", 4096, 67108864, 16793600, 43.26)


def report(paths):
    rows = tuple(dataclasses.replace(ROW, path=path) for path in paths)
    return Report(
        rows,
        kept=12,
        bytes_kept=1000,
        bytes_before=400_000_000,
        bytes_after=50_000_000,
        bytes_on_disk=50_001_234,
        seconds=3.21,
    )


def shown(paths, width):
    console = rich.console.Console(file=io.StringIO(), width=width)
    console.print(table(report(paths)))
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 100, 160])
def test_it_fits(width):
    text = shown([f"aqt/{LONG.format(i)}/rhs" for i in range(3)], width)
    assert max(map(len, text.splitlines())) <= width
    rows = [line for line in text.splitlines() if "4096x16x256" in line]
    assert len(rows) == 3
    for line in rows:
        assert "layers_" in line
        assert (
            "67.1 MB" in line and "16.8 MB" in line and line.rstrip().endswith("43.3")
        )
    # A path that does not fit goes on in the next line, whole.
    folded = "".join(line.split()[0] for line in text.splitlines() if line.split())
    assert all(
        f"layers_{i}/multi_head_dot_product_attention" in folded for i in range(3)
    )


def test_paths_are_whole_where_there_is_room():
    text = shown([f"aqt/{LONG.format(i)}/rhs" for i in (2, 10)], 160)
    assert "layers_10/multi_head_dot_product_attention/query/kernel " in text
    assert "weight in encoder" in text and "rhs" not in text


@pytest.mark.parametrize(
    "paths, shared, rest",
    [
        ([], "", []),
        (["aqt/w/rhs"], "", ["w"]),
        (["aqt/a/b/w/rhs"], "", ["a/b/w"]),
        (["aqt/a/w/rhs", "aqt/a/v/rhs"], "a", ["w", "v"]),
        (["aqt/a/w/rhs", "aqt/a/b/v/rhs"], "a", ["w", "b/v"]),
        (["aqt/w/rhs", "aqt/w/lhs"], "w", ["rhs", "lhs"]),
        (["aqt/w/rhs", "aqt/w_1/rhs"], "", ["w", "w_1"]),
    ],
)
def test_constant_steps(paths, shared, rest):
    assert without_constant_steps(paths) == (shared, rest)


def test_the_summary():
    text = shown(["aqt/w/rhs"], 80)
    assert "1 frozen, 12 kept; SNR 43.3 dB worst, 43.3 dB mean; 3.2 s" in text
    assert "400.0 MB to 50.0 MB, 0.12 of the float size (50.0 MB of files)" in text


def test_nothing_frozen_and_nothing_run():
    plan = dataclasses.replace(report([]), seconds=None, bytes_on_disk=None)
    assert summary(plan) == (
        "0 frozen, 12 kept\n400.0 MB to 50.0 MB, 0.12 of the float size"
    )
