"""What somebody might write into a file of his own: the examples of docs/own-code.md, so these are tested."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs/own-code.md"


def write_example(folder: Path) -> str:
    """Write the page's Python into FOLDER/mine.py; returns its path."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    (folder / "mine.py").write_text("import numpy\nimport torch\n\n" + "\n\n".join(blocks))
    return str(folder / "mine.py")
