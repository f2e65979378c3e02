"""Say which of the project's requirements this Python lacks, with the pip command that adds them: exit 1 if any.

For `make ... PYTHON=...`, which uses an environment as it is. With `--wheels FOLDER` prints the wheels of a folder that
this Python lacks, or has in a version below the project's (docs/gpu.md). Runs on the standard library alone, in
milliseconds, and imports none of the packages. It compares plain lower bounds (">=1.2.3"); whatever else a requirement
says is pip's.
"""

from __future__ import annotations  # so that an older Python comes as far as the sentence that refuses it

import re
import sys
from importlib import metadata
from pathlib import Path

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: `2.11.0+cu130` -> (2, 11, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def installed_version(name: str) -> str:
    """The version that this Python has, or an empty string."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def requirements(pyproject: Path, extras: list[str]) -> list[tuple[str, tuple[int, ...], str]]:
    """(name, lower bound, text without markers) of the base dependencies and of the extras named."""
    import tomllib  # not at the top, for the same reason

    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    texts = list(project["dependencies"])
    for extra in extras:
        texts += project["optional-dependencies"][extra]
    found: list[tuple[str, tuple[int, ...], str]] = []
    for text in texts:
        name = re.split(r"[<>=!~;\[ ]", text, maxsplit=1)[0]
        bound = re.search(r">=\s*([\d.]+)", text)
        found.append((name, release(bound.group(1)) if bound else (), text.partition(";")[0]))
    return found


def missing_wheels(folder: Path) -> list[Path]:
    """List the wheels of a folder whose package is not installed, or older than the project allows."""
    lowest = {normalised(name): bound for name, bound, _ in requirements(PYPROJECT, [])}
    found: list[Path] = []
    for wheel in sorted(folder.glob("*.whl")):
        name = normalised(wheel.name.partition("-")[0])
        have = installed_version(name)
        if not have or release(have) < lowest.get(name, ()):
            found.append(wheel)
    return found


def normalised(name: str) -> str:
    """Spell a package's name as the index does."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main(extras: list[str]) -> int:
    """Print to stderr what is missing or too old; 0 when nothing is."""
    python = sys.executable
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        return refuse(f"{python} is Python {sys.version.split()[0]}; give PYTHON a 3.11, 3.12 or 3.13.")
    wanted: list[str] = []
    torch_pins: list[str] = []
    for name, lowest, text in requirements(PYPROJECT, extras):
        have = installed_version(name)
        enough = have != "" and release(have) >= lowest
        if enough and name in ("torch", "torchvision"):
            torch_pins.append(f"{name}=={have}")  # so that pip fails rather than replaces it
        elif not enough and name in ("torch", "torchvision"):
            has = f"has {name} {have}" if have else f"has no {name}"
            return refuse(
                f"{python} {has}, and {text} is needed: install the build that suits the machine, or leave PYTHON out."
            )
        elif not enough:
            wanted.append(text)
    if wanted:
        packages = " ".join(f"'{text}'" for text in torch_pins + wanted)
        return refuse(
            f"{python} lacks {len(wanted)} of the packages. This adds them and leaves torch as it is:\n"
            f"  {python} -m pip install {packages}"
        )
    return 0


def refuse(message: str) -> int:
    """Print the message to stderr; the exit status for it."""
    print(f"shardvit: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--wheels"]:
        print(*missing_wheels(Path(sys.argv[2])))
    else:
        sys.exit(main(sys.argv[1:]))
