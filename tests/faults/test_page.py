"""The page 'What happens when ...' says what the rows promise, in the same words."""

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "checkpoints-and-faults.md"


def promises() -> dict[str, str]:
    """What is handed to `row.is_about` as its promise: file and name of each constant, and its text."""
    found: dict[str, str] = {}
    for file in sorted(HERE.glob("test_*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        constants = {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "is_about":
                names = {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
                found |= {f"{file.name}: {name}": constants[name] for name in names & set(constants)}
    return found


@pytest.mark.fast
def test_every_promise_stands_on_the_page():
    page = PAGE.read_text(encoding="utf-8")
    told = promises()
    assert len(told) > 30
    assert [name for name, text in told.items() if text not in page] == []
