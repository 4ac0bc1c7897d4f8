"""Every notebook in notebooks/ runs from its first cell to its last."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Jupyter's own packages warn about each other
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path):
    nbformat = pytest.importorskip("nbformat", reason="notebooks need the extra 'notebooks'")
    nbclient = pytest.importorskip("nbclient", reason="notebooks need the extra 'notebooks'")
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
