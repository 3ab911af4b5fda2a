"""The table of dtypes by platform shows what the lowered programs contain."""

import pathlib

import pytest

from aqtlite.lowering.forms import processor
from benchmarks import native_dtypes
from benchmarks.harness import pages
from tests.common import mostly_slow

pytestmark = pytest.mark.code("quick")

PAGE = pathlib.Path(__file__).parent.parent.parent / "docs" / "numerics.md"


def table():
    """The rows of the page, by their first cell."""
    lines = pages.read(PAGE, native_dtypes.NAME).splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return {first: rest for first, *rest in cells}


ROWS = {
    f"`{name}`{f', {kind}' if kind else ''}": (kind, name)
    for kind, (_, presets) in native_dtypes.CONTRACTIONS.items()
    for name in presets
}


def test_the_page_has_all_rows():
    assert list(table()) == list(ROWS)


@pytest.mark.parametrize(
    "row",
    mostly_slow(
        ROWS,
        *("`fp8()`", "`block_fp8()`", "`mxfp8()`", "`nvfp4()`"),
        *("`fp8()`, ragged_dot", "`fp8()`, convolution"),
    ),
)
def test_the_page_says_what_is_lowered(row):
    """On accelerators: what CPUs contract depends on their processor."""
    kind, name = ROWS[row]
    make, presets = native_dtypes.CONTRACTIONS[kind]
    said = dict(zip(native_dtypes.PLATFORMS, table()[row], strict=True))
    for platform in ("cuda", "tpu"):
        found = native_dtypes.dtypes(*make(presets[name]), platform)
        assert said[platform] == native_dtypes.cell(*found)
        assert "float32" not in said[platform]


def test_the_command(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: True)
    page = tmp_path / "page.md"
    page.write_text("<!-- native dtypes: begin -->\n<!-- native dtypes: end -->\n")
    native_dtypes.main(["--presets", "block_fp8", "--write", str(page)])
    printed = capsys.readouterr().out.strip()
    assert pages.read(page, native_dtypes.NAME) == printed
    assert printed.splitlines()[2].startswith("| `block_fp8()` | float32 x float32 |")


def test_gpus_that_scale_no_blocks(monkeypatch):
    """On a host with a GPU before Blackwell, bfloat16 holds blocks of 32 and 16."""
    monkeypatch.setattr(processor, "gpu_scales_blocks", lambda: False)
    for name in ("mxfp8()", "nvfp4()"):
        function, operands = native_dtypes.matmul(native_dtypes.PRESETS[name])
        found = native_dtypes.dtypes(function, operands, "cuda")
        assert set(found) == {"bfloat16 x bfloat16"}
