"""docs/notebook.ipynb runs from top to bottom in a folder that holds the user's own model.py, launch.py, pipeline/ and
data_shards/, and imports none of them."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tests.conftest import ROOT
from tests.traps import ROOMS, lay_traps

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def outputs(notebook: nbformat.NotebookNode) -> str:
    return "\n".join(
        output.get("text") or output.get("data", {}).get("text/plain", "")
        for cell in notebook.cells
        for output in cell.get("outputs", ())
    )


def test_the_notebook_is_kept_with_the_outputs_of_one_run_from_top_to_bottom() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert NOTEBOOK.stat().st_size < 400_000


@pytest.mark.skipif(importlib.util.find_spec("nbclient") is None, reason="the extra test is not installed")
def test_the_notebook_runs_among_files_of_our_names(tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    # Python's and torch's names are left out: Jupyter itself puts the notebook's folder first, as its users expect.
    sprung = lay_traps(folder, names=ROOMS)
    done = subprocess.run(
        [sys.executable, ROOT / ".ci" / "site" / "run_notebook.py", folder, tmp_path / "done.ipynb"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sprung() == []
    notebook = nbformat.read(tmp_path / "done.ipynb", as_version=4)
    pictures = [
        each for cell in notebook.cells for each in cell.get("outputs", ()) if "image/png" in each.get("data", {})
    ]
    assert len(pictures) == 3  # curves, attention of blocks and heads, attention rolled out
    assert "val/top1" in outputs(notebook) and "'images': 359.0" in outputs(notebook)
