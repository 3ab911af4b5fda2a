"""Execute the notebooks and store their outputs: ``python -m tests.execute_notebooks``.

Run it where a notebook or what it prints has changed; the tests execute the notebooks
too, but keep nothing.
"""

import pathlib

import nbclient
import nbformat

NOTEBOOKS = sorted((pathlib.Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def execute(path: pathlib.Path) -> nbformat.NotebookNode:
    """Execute a notebook in its folder.

    Raises:
        nbclient.exceptions.CellExecutionError: if a cell raises.
    """
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    client = nbclient.NotebookClient(
        notebook, timeout=300, record_timing=False, resources=resources
    )
    client.execute()
    # The version of Python and the like would change with whoever runs this.
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def is_log(output: nbformat.NotebookNode) -> bool:
    """Whether an output of a cell was written to standard error."""
    return output.output_type == "stream" and output.name == "stderr"


if __name__ == "__main__":
    for path in NOTEBOOKS:
        print(path.name, flush=True)
        notebook = execute(path)
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)
            # Log lines of other libraries, which differ with their versions.
            if cell.cell_type == "code":
                cell.outputs = [one for one in cell.outputs if not is_log(one)]
        nbformat.write(notebook, path)
