"""Check the installed packages against pyproject.toml. Reads only metadata, in milliseconds."""

import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from shardvit.launch.doctor.findings import Check, judge

_SHOWN = ("torch", "torchvision", "deepspeed", "accelerate", "timm", "mlflow", "webdataset")
_PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def read_requirements(pyproject: Path = _PYPROJECT) -> tuple[str, list[Requirement]]:
    """The Python range and this platform's packages, from pyproject.toml or shardvit's own metadata."""
    if pyproject.exists():
        project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
        pythons, texts = project["requires-python"], project["dependencies"]
    else:
        pythons, texts = metadata.metadata("shardvit")["Requires-Python"], metadata.requires("shardvit") or []
    requirements = [Requirement(text) for text in texts]
    return pythons, [each for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]


def installed_version(name: str) -> str | None:
    """None if not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def library_checks(requirements: list[Requirement]) -> list[Check]:
    """One check for all packages, then one for each that does not fit."""
    wrong = [check for each in requirements if (check := check_requirement(each, version=installed_version(each.name)))]
    shown = ", ".join(f"{name} {version}" for name in _SHOWN if (version := installed_version(name)))
    missed, count = sum(check.verdict == "problem" for check in wrong), len(requirements)
    advice = "install them as below, or set up a fresh environment with `make test` in the repository"
    many = f"{missed} of {count} are missing or too old; there are {shown or 'none of the main ones'}"
    found = many if missed else f"{shown}; all {count} that pyproject.toml asks for"
    return [judge("packages", found, (missed > 0, "problem", advice)), *wrong]


def check_requirement(needed: Requirement, *, version: str | None) -> Check | None:
    """Check one package; None: it fits."""
    text = f"{needed.name}{needed.specifier}"
    if version is None:
        if not needed.name.startswith("nvidia-nvimgcodec"):
            return Check(needed.name, "problem", "not installed", f"pip install '{text}'")
        if installed_version("nvidia-nvimgcodec-cu12"):  # either one will do
            return None
        return Check(needed.name, "note", "not installed", f"it decodes only the crop, faster: pip install '{text}'")
    if needed.specifier.contains(version, prereleases=True):
        return None
    lowest = [Version(each.version) for each in needed.specifier if each.operator in (">=", "==", "~=", ">")]
    if lowest and Version(version) < max(lowest):
        return Check(needed.name, "problem", f"{version}, but {text} is needed", f"pip install '{text}'")
    remedy = f"untested; if something fails: pip install '{text}'"
    return Check(needed.name, "note", f"{version}, which is newer than {text}", remedy)
