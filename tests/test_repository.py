"""Laws of the repository itself: pins, sizes, what may not be named in it."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAX_PYTHON_LINES = 400


def repository_files() -> list[Path]:
    """Every file that is tracked, or would be with `git add .`; of an unpacked archive, all but caches and results."""
    git = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if (ROOT / ".git").exists():
        names = subprocess.run(git, capture_output=True, text=True, check=True).stdout.split("\0")
        files = [ROOT / name for name in names if name]
    else:
        tops = ["*", ".ci/*", *(f"{folder}/**/*" for folder in ("data_shards", "launch", "model", "pipeline", "tests"))]
        files = [path for top in tops for path in ROOT.glob(top) if "__pycache__" not in path.parts]
    return [path for path in files if path.is_file()]


FILES = repository_files()


def pins() -> dict[str, list[tuple[str, str]]]:
    """Package -> (version, marker) of each line of constraints.txt that is no comment; fails on any other line."""
    found: dict[str, list[tuple[str, str]]] = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9][0-9A-Za-z.]*)(?: ; (.+))?", line)
        assert match, f"constraints.txt: {line!r} is not `name==version` or `name==version ; marker`"
        name, version, marker = match.groups()
        if marker:
            Marker(marker)
        found.setdefault(canonicalize_name(name), []).append((version, marker or ""))
    return found


def test_constraints_name_each_package_once_for_a_python() -> None:
    for name, versions in pins().items():
        markers = [marker for _, marker in versions]
        assert len(set(markers)) == len(markers), f"{name} is pinned twice"
        assert "" not in markers or len(markers) == 1, f"{name} is pinned with and without a marker"


ALL_REQUIREMENTS = [
    *PROJECT["dependencies"],
    *(text for extra in PROJECT["optional-dependencies"].values() for text in extra),
]


@pytest.mark.parametrize("text", ALL_REQUIREMENTS)
def test_every_requirement_is_pinned_within_its_range(text: str) -> None:
    requirement = Requirement(text)
    versions = pins().get(canonicalize_name(requirement.name))
    assert versions, f"constraints.txt does not pin {requirement.name}"
    for version, _ in versions:
        assert requirement.specifier.contains(Version(version)), f"{version} is outside of {text}"


def imported_packages(folders: list[str]) -> dict[str, str]:
    """Top-level package -> one file that imports it, for the absolute imports in these folders."""
    found: dict[str, str] = {}
    for path in FILES:
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in folders:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names: list[str] = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.level == 0:
                    names = [node.module or ""]
                for name in names:
                    found.setdefault(name.partition(".")[0], str(path.relative_to(ROOT)))
    return found


# Imported inside a function that says which extra to install where it is missing.
EXTRAS = {name: "onnx" for name in ("google", "onnx", "onnxruntime", "onnxscript")} | {
    name: name for name in ("ray", "tensorboard", "wandb")
}
BENCH_PEERS = (
    "launch/bench/acceptance_lines.py",  # a plugin of pytest's
    "launch/bench/data_peers.py",
    "launch/bench/gpu_contenders.py",
)


def test_every_import_of_the_four_packages_is_a_requirement() -> None:
    own = {"shardvit", "data_shards", "launch", "model", "pipeline"}
    distributions = {
        "PIL": "pillow",
        "yaml": "PyYAML",
        "sklearn": "scikit-learn",
        "nvidia": "nvidia-nvimgcodec-cu13",
        "google": "protobuf",
    }
    required = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}
    for name, file in imported_packages(sorted(own)).items():
        if file in BENCH_PEERS:  # what is measured beside ours is imported where somebody has installed it
            continue
        if name not in {"shardvit"} | set(sys.stdlib_module_names):
            distribution = canonicalize_name(distributions.get(name, name))
            texts = PROJECT["optional-dependencies"][EXTRAS[name]] if name in EXTRAS else ()
            extra = {canonicalize_name(Requirement(text).name) for text in texts}
            assert distribution in required | extra, f"{file} imports {name}, which pyproject.toml does not require"


def test_python_files_are_short() -> None:
    sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES if path.suffix == ".py"}
    assert len(sizes) > 10
    assert {str(path.relative_to(ROOT)): n for path, n in sizes.items() if n > MAX_PYTHON_LINES} == {}


# Put together here, so that this file does not name what it forbids.
FORBIDDEN = re.compile(
    "|".join(
        [
            r"(?<![\w./-])/(?:work|root|home/\w+|tmp/w)/",  # folders of one machine
            r"\.\./" + "shared",  # what lay beside somebody's clone
            r"py" + r"pi\.org",  # package registries: they differ between sites, and pip knows its own
            r"python" + r"hosted\.org",
            r"download\.pytorch" + r"\.org",
            r"registry\." + r"npmjs",
            r"(?:deb|security)\.debian" + r"\.org",
            r"anaconda" + r"\.org",
        ]
    )
)


def test_no_file_names_a_machine_or_a_registry() -> None:
    found = []
    for path in FILES:
        if path.suffix not in {".png", ".jpg", ".gz", ".npz", ".safetensors"}:
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                if match := FORBIDDEN.search(line):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {match.group()}")
    assert found == []


def test_readme_shows_the_two_commands_and_only_targets_that_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    shown = set(re.findall(r"(?:^|`|\$ )make ([a-z]+)", readme, re.M))
    assert {"demo", "test"} <= shown
    assert shown <= targets


PAGES = [path for path in FILES if path.suffix == ".md" and path.name != "CHANGELOG.md"]
_PATH = re.compile(r"(?<![\w/.])(?:(?:data_shards|launch|model|pipeline|tests)/[\w/]+\.\w+)(?![\w/])")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_no_file_that_is_not_there(page: Path) -> None:
    named = set(_PATH.findall(page.read_text(encoding="utf-8")))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_a_batch_passes_ten_files_and_comes_back_to_none() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    way = _PATH.findall(text.partition("## Follow one batch")[2].partition("##")[0])[1:]  # the first plans the order
    assert 8 <= len(way) <= 10
    assert len(set(way)) == len(way)


def test_no_class_name_has_two_meanings() -> None:
    found: dict[str, list[str]] = {}
    for path in FILES:
        name = str(path.relative_to(ROOT))
        if path.suffix == ".py" and name.startswith(("data_shards/", "launch/", "model/", "pipeline/")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found.setdefault(node.name, []).append(name)
    assert {name: files for name, files in found.items() if len(files) > 1} == {}
