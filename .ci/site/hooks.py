"""What the site needs beyond mkdocs: pages and files from outside docs/, and the notebook as a page.

The pages are written for GitHub, where a link is a path in the repository. Links are followed here, in one place: to a
page of the site where there is one, otherwise to a page that shows the file itself, made for each file that some page
links to. So the site needs neither the repository's address nor a network. A link that leads nowhere is left as it is,
for mkdocs to refuse. The notebook is shown with the outputs that it was committed with; nothing is run.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent.parent
ASSETS = Path(__file__).resolve().parent / "assets"
NOTEBOOK = "docs/notebook.ipynb"
# Page of the site -> file of the repository; pages in docs/ have their own names.
ELSEWHERE = {
    "repository.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "changes.md": "CHANGELOG.md",
    "recipe-list.md": "pipeline/recipes/README.md",
    "notebook.md": NOTEBOOK,
}
_LINK = re.compile(r"\]\((?!\w+:|[#/])([^)\s#]+)(#[^)\s]*)?\)")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/, and one for each file of the repository that a page links to."""
    for name, source in ELSEWHERE.items():
        if (ROOT / source).is_file():
            text = "\n".join(notebook_parts(ROOT / source)) if source == NOTEBOOK else None
            files.append(_file(name, config, content=text, path=ROOT / source))
    for path in sorted(ASSETS.iterdir()):
        files.append(_file(f"assets/{path.name}", config, path=path))
    for file in list(files.documentation_pages()):
        for target in linked_files(file.content_string, _source(file.src_uri)):
            name = _page_of(target)
            if files.get_file_from_path(name) is None:
                files.append(_file(name, config, content=shown(target)))
    return files


def _file(name: str, config: MkDocsConfig, *, content: str | None = None, path: Path | None = None) -> File:
    if content is not None:
        return File.generated(config, name, content=content)
    return File.generated(config, name, abs_src_path=str(path))


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let each link lead to a page of the site."""
    here = page.file.src_uri
    if here.startswith("files/"):
        return markdown

    def followed(match: re.Match[str]) -> str:
        target = _target(match[1], _source(here))
        if target is None:
            return match[0]
        return f"]({os.path.relpath(_page_of(target), os.path.dirname(here) or '.')}{match[2] or ''})"

    return _LINK.sub(followed, markdown)


def _source(name: str) -> str:
    """The file of the repository that a page of the site is made of."""
    return ELSEWHERE.get(name, f"docs/{name}")


def _page_of(source: str) -> str:
    """The page (or picture) of the site that shows a file of the repository."""
    known = {file: name for name, file in ELSEWHERE.items()}
    if source in known:
        return known[source]
    return source.removeprefix("docs/") if source.startswith("docs/") else f"files/{source}.md"


def _target(link: str, source: str) -> str | None:
    """The file of the repository that a link in `source` names; None if there is none."""
    path = os.path.normpath(os.path.join(os.path.dirname(source), link))
    return path if not path.startswith("..") and (ROOT / path).is_file() else None


def linked_files(markdown: str, source: str) -> Iterator[str]:
    """The files outside docs/ to which a page links."""
    for match in _LINK.finditer(markdown):
        target = _target(match[1], source)
        if target is not None and _page_of(target).startswith("files/"):
            yield target


def shown(source: str) -> str:
    """A page that shows a file of the repository; a search leaves it out."""
    text = (ROOT / source).read_text(encoding="utf-8").rstrip()
    block = fenced(text, _LANGUAGES.get(Path(source).suffix, "text"))
    return f"---\nsearch: {{exclude: true}}\n---\n# {source}\n\n{block}\n"


def fenced(text: str, language: str) -> str:
    """A code block, whatever fences the text has."""
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 0)
    return f"{fence}{language}\n{text}\n{fence}"


def notebook_parts(path: Path) -> Iterator[str]:
    """A notebook's cells and their outputs (text and pictures) as Markdown."""
    cells: list[Any] = nbformat.read(path, as_version=4).cells
    for number, cell in enumerate(cells):
        if cell.cell_type == "markdown":
            yield f"{cell.source}\n"
        else:
            yield f"{fenced(cell.source, 'python')}\n"
            for output in cell.outputs:
                yield from _output(output)
        if number == 0:
            yield f'<a href="{path.name}" download>Download the notebook</a>\n'


def _output(output: Any) -> Iterator[str]:
    data = output.get("data", {})
    if "image/png" in data:
        yield f'<img alt="What the cell above draws" src="data:image/png;base64,{data["image/png"].strip()}">\n'
    elif text := (data.get("text/plain") or output.get("text", "")).rstrip():
        yield f"{fenced(text, 'text')}\n"
