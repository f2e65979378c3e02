"""docs/api.md is the public API: its examples run, and it has every public name with all its parameters."""

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import shardvit
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
SIGNATURES = {text.partition("(")[0]: text for text in re.findall(r"^```text\n(.*?)^```", PAGE, re.M | re.S)}
TYPED = {"OwnModel", "UserError", "Stopped", "RunFailed", "LoadedRun", "LoadedModel", "OpenedShards", "ShardLoader"}


def test_each_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preloaded_environment: Mapping[str, str]):
    for name, value in preloaded_environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    assert len(EXAMPLES) > 12
    scope: dict[str, object] = {}
    for number, example in enumerate(EXAMPLES):
        exec(compile(example, f"docs/api.md, example {number}", "exec"), scope)


def test_the_page_has_the_public_names_and_no_other():
    headings = re.findall(r"^### (\w+)$", PAGE, re.M)
    assert sorted(headings) == sorted(shardvit.__all__)
    assert sorted(shardvit._PLACES) == shardvit.__all__


def without_annotations(function: Callable[..., object]) -> str:
    signature = inspect.signature(function)
    bare = [each.replace(annotation=each.empty) for each in signature.parameters.values() if each.name != "self"]
    return function.__name__ + str(signature.replace(parameters=bare, return_annotation=signature.empty))


@pytest.mark.parametrize("name", sorted({*shardvit.__all__} - TYPED | {"loader"}))
def test_the_page_has_the_signature(name: str):
    function = shardvit.OpenedShards.loader if name == "loader" else getattr(shardvit, name)
    assert re.sub(r"\s+", " ", SIGNATURES[name]).strip() == without_annotations(function).replace("'", '"').replace(
        "<built-in function print>", "print"
    )


@pytest.mark.parametrize("name", ["LoadedRun", "LoadedModel"])
def test_the_page_has_every_member(name: str):
    section = PAGE.partition(f"### {name}\n")[2].partition("\n### ")[0]
    members = {each for each in vars(getattr(shardvit, name)) if not each.startswith("_")}
    assert [each for each in members - {"forward", "as_predictor"} if f"`{each}" not in section] == []


@pytest.mark.parametrize("name", sorted({*shardvit.__all__} - {"as_webdataset"}))
def test_docstrings_say_what_is_taken_and_returned(name: str):
    what = shardvit.OpenedShards.loader if name == "OpenedShards" else getattr(shardvit, name)
    text = inspect.getdoc(what) or ""
    assert text
    if inspect.isfunction(what):
        for part in ("Args:", "Returns:", "Raises:", "Example:"):
            assert part in text
        parameters = [each for each in inspect.signature(what).parameters if each != "self"]
        assert [each for each in parameters if not re.search(rf"^    {each}: ", text, re.M)] == []


def test_type_checkers_see_the_same_places():
    tree = ast.parse((ROOT / "shardvit" / "__init__.py").read_text(encoding="utf-8"))
    imported = {
        alias.name: str(node.module).removeprefix("shardvit.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module != "typing"
        for alias in node.names
        if alias.name == alias.asname
    }
    assert imported == shardvit._PLACES
    assert (ROOT / "shardvit" / "py.typed").is_file()
    assert {*shardvit.__all__} <= {*dir(shardvit)}
    with pytest.raises(AttributeError, match="no attribute 'runn'"):
        _ = shardvit.runn  # pyright: ignore[reportAttributeAccessIssue]
