"""The packages, against the versions that pyproject.toml asks for.

Reads metadata only, in milliseconds. Ranges are those of the pyproject.toml beside the code or, if installed without
it, of shardvit's own metadata.
"""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from launch.doctor.findings import Check, judge

_SHOWN = ("torch", "torchvision", "deepspeed", "accelerate", "timm", "mlflow", "webdataset")
_REGION_DECODERS = ("nvidia-nvimgcodec-cu13", "nvidia-nvimgcodec-cu12")  # either will do
_PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def read_requirements(pyproject: Path = _PYPROJECT) -> tuple[str, list[Requirement]]:
    """The range of Python, and the packages that are needed on this platform."""
    if pyproject.exists():
        project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
        pythons, texts = project["requires-python"], project["dependencies"]
    else:
        pythons, texts = metadata.metadata("shardvit")["Requires-Python"], metadata.requires("shardvit") or []
    requirements = [Requirement(text) for text in texts]
    return pythons, [each for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]


def installed_version(name: str) -> str | None:
    """None: not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def library_checks(requirements: list[Requirement]) -> list[Check]:
    """One check if all packages fit, else one for each that does not."""
    wrong = [check for each in requirements if (check := check_requirement(each, version=installed_version(each.name)))]
    shown = ", ".join(f"{name} {version}" for name in _SHOWN if (version := installed_version(name)))
    missed, count = sum(check.verdict == "problem" for check in wrong), len(requirements)
    summary = judge(
        "packages",
        f"{missed} of {count} are missing or too old; there are {shown or 'none of the main ones'}"
        if missed
        else f"{shown}; all {count} that pyproject.toml asks for",
        (
            missed > 0,
            "problem",
            "install them as below, or set up a fresh environment with `make test` in the repository",
        ),
    )
    torch, torchvision = installed_version("torch"), installed_version("torchvision")
    if torch is None or torchvision is None:
        return [summary, *wrong]
    needs = [Requirement(text) for text in metadata.requires("torchvision") or ()]
    return [summary, *wrong, check_pair(torch, torchvision, needs=[each for each in needs if each.name == "torch"])]


def check_requirement(needed: Requirement, *, version: str | None) -> Check | None:
    """What is wrong with one package; None: nothing."""
    text = f"{needed.name}{needed.specifier}"
    if version is None:
        if canonicalize_name(needed.name) not in _REGION_DECODERS:
            return Check(needed.name, "problem", "not installed", f"pip install '{text}'")
        if any(map(installed_version, _REGION_DECODERS)):
            return None
        return Check(
            needed.name,
            "note",
            "not installed",
            f"reading is slower without it (it decodes only the crop): pip install '{text}'",
        )
    if needed.specifier.contains(version, prereleases=True):
        return None
    lowest = [Version(each.version) for each in needed.specifier if each.operator in (">=", "==", "~=", ">")]
    is_old = bool(lowest) and Version(version) < max(lowest)
    return judge(
        needed.name,
        f"{version}, but {text} is needed" if is_old else f"{version}, which is newer than {text}",
        (is_old, "problem", f"pip install '{text}'"),
        (True, "note", f"untested; if something fails: pip install '{text}'"),
    )


def check_pair(torch: str, torchvision: str, *, needs: list[Requirement]) -> Check:
    """Whether torchvision was built for this torch: its compiled operators load with no other."""
    refused = [str(each.specifier) for each in needs if not each.specifier.contains(torch, prereleases=True)]
    builds = [Version(version).local for version in (torch, torchvision)]
    asks = f", which asks for torch{refused[0]}" if refused else ""
    return judge(
        "torch and torchvision",
        f"torch {torch} and torchvision {torchvision}{asks}",
        (bool(refused), "problem", "install both in one command: pip install torch torchvision -c constraints.txt"),
        (
            all(builds) and builds[0] != builds[1],
            "problem",
            "they are builds for different devices: install both from the same index, in one command",
        ),
    )
