"""Every notebook runs from top to bottom, and is stored with its outputs."""

import nbformat
import pytest

from tests.execute_notebooks import NOTEBOOKS, execute

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.slow
@pytest.mark.code("quick")
@each_notebook
def test_notebook_runs(path):
    for cell in code_cells(execute(path)):
        assert cell.execution_count


@each_notebook
def test_notebook_is_stored_as_executed_from_top_to_bottom(path):
    cells = code_cells(nbformat.read(path, as_version=4))
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    printed = {cell.id for cell in cells if "print(" in cell.source}
    assert printed <= {cell.id for cell in cells if cell.outputs}
    shown = [
        data for cell in cells for out in cell.outputs for data in out.get("data", ())
    ]
    assert "image/png" in shown
    streams = {out.get("name") for cell in cells for out in cell.outputs}
    assert "stderr" not in streams  # log lines of other libraries
