"""Run docs/notebook.ipynb in an empty folder, and keep it with its outputs: `python .ci/site/run_notebook.py`.

With a FOLDER and an OUTPUT, run it in that folder and write it there instead, as the test does. It takes a minute on
one core. What is kept has no times of cells and no names of this machine's folders.
"""

import argparse
import os
import re
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parent.parent.parent / "docs" / "notebook.ipynb"


def run(folder: Path, output: Path) -> None:
    """Execute every cell, with `folder` as the working folder; CellExecutionError at the first that fails."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"  # tqdm's, which names a folder of this machine
    os.environ["SHARDVIT_PICTURES"] = "auto"
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute()
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    for cell in notebook.cells:
        for each in cell.get("outputs", ()):
            if "text" in each:
                each["text"] = _without_progress(each["text"]).replace(f"{folder}/", "")
    nbformat.write(notebook, output)


def _without_progress(text: str) -> str:
    """The lines as a terminal would show them in the end, without colours."""
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.replace("\r\n", "\n")).split("\n")
    return "\n".join(line.rpartition("\r")[2] for line in lines)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="the working folder; default: one that is removed")
    parser.add_argument("output", nargs="?", type=Path, default=NOTEBOOK, help="default: the notebook itself")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as empty:
        run(given.folder or Path(empty), given.output)


if __name__ == "__main__":
    main()
