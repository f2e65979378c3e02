"""Laws of the layout: size of rooms, unique file names, and that CONTRIBUTING and README name only what exists."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("data_shards", "launch", "model", "pipeline")
FILES = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if "bench" not in path.parts]
ROOMS = sorted({path.parent for path in FILES})
MOST_FILES, MOST_FLAT_FILES, README_WORDS = 12, 10, 700


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(ROOT)))
def test_a_room_has_a_purpose_and_few_files(room: Path) -> None:
    most = MOST_FLAT_FILES if room.parent == ROOT else MOST_FILES
    assert len([path for path in room.glob("*.py") if path.name != "__init__.py"]) <= most
    assert ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8")))


@pytest.mark.parametrize("package", PACKAGES)
def test_no_file_name_occurs_twice_in_a_package(package: str) -> None:
    names = Counter(path.name for path in FILES if package in path.relative_to(ROOT).parts[:1])
    del names["__init__.py"]
    assert [name for name, times in names.items() if times > 1] == []


def defined_names() -> set[str]:
    """Every class, function, method, field, constant and parameter of the product, and its modules."""
    found = {path.stem for path in FILES}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return found


def test_contributing_names_only_what_is_defined() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = {
        name for code in re.findall(r"`([^`]+)`", page) for name in re.findall(r"^[A-Za-z_]+(?:\.[a-z_]+)?$", code)
    }
    names = {name.rpartition(".")[2] for name in named if not name.endswith((".py", ".md", ".yaml"))}
    assert len(names) > 20
    assert sorted(names - defined_names() - {"shardvit", "step"}) == []


def test_readme_is_short_and_shows_its_pictures() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(page.split()) <= README_WORDS
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page)
    assert pictures
    assert all((ROOT / picture).stat().st_size < 400_000 for picture in pictures)


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.M)
            assert anchor in {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}, target
