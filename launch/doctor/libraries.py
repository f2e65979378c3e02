"""The packages: those that pyproject.toml asks for, in its ranges, and what decodes images.

Versions are read from the installed packages' metadata: nothing is imported, and it takes milliseconds. The ranges are
those of the pyproject.toml beside the code or, where shardvit is installed without it, of its own metadata. Whether the
libraries can be imported is `probe`'s to find out.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from launch.doctor.result import Check

SHOWN = ("torch", "torchvision", "deepspeed", "accelerate", "timm", "mlflow", "webdataset")
_DECODERS = ("nvidia-nvimgcodec-cu13", "nvidia-nvimgcodec-cu12")  # either will do, and neither is missed
_PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


@dataclass(frozen=True)
class Asked:
    """What the project asks for."""

    pythons: str
    requirements: tuple[Requirement, ...]


@dataclass(frozen=True)
class Installed:
    """What there is: versions by canonical name, and what torchvision itself asks of torch."""

    versions: Mapping[str, str]
    torchvision_asks: Requirement | None


def read_asked(pyproject: Path = _PYPROJECT) -> Asked:
    """The project's Python range and base requirements, of which a marker may exclude some here."""
    if pyproject.exists():
        project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
        pythons, texts = project["requires-python"], project["dependencies"]
    else:
        pythons = metadata.metadata("shardvit")["Requires-Python"]
        texts = metadata.requires("shardvit") or []
    requirements = [Requirement(text) for text in texts]
    here = [each for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]
    return Asked(pythons, tuple(here))


def read_installed(names: Iterable[str]) -> Installed:
    """The versions of these packages, as far as they are here."""
    versions: dict[str, str] = {}
    for name in (*names, *_DECODERS):
        try:
            versions[canonicalize_name(name)] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    asked: Requirement | None = None
    if "torchvision" in versions:
        for text in metadata.requires("torchvision") or ():
            try:
                requirement = Requirement(text)
            except InvalidRequirement:
                continue
            if requirement.name == "torch":
                asked = requirement
    return Installed(versions, asked)


def library_checks(asked: Asked, installed: Installed) -> list[Check]:
    """All verdicts."""
    shown = [f"{name} {version}" for name in SHOWN if (version := installed.versions.get(name))]
    wrong = [check for each in asked.requirements if (check := check_requirement(each, installed))]
    count = len(asked.requirements)
    missed = sum(check.verdict == "problem" for check in wrong)
    if missed:
        summary = Check(
            "packages",
            "problem",
            f"{missed} of {count} are missing or too old; there are {', '.join(shown) or 'none of the main ones'}",
            "install them as below, or set up a fresh environment with `make test` in the repository",
        )
    else:
        summary = Check("packages", "fine", f"{', '.join(shown)}; all {count} that pyproject.toml asks for")
    return [summary, *wrong, check_pair(installed), check_decoders(installed)]


def check_requirement(asked: Requirement, installed: Installed) -> Check | None:
    """What is wrong with one package; None: nothing is."""
    name = canonicalize_name(asked.name)
    text = f"{asked.name}{asked.specifier}"
    version = installed.versions.get(name)
    if version is None:
        if name in _DECODERS:
            return None
        return Check(asked.name, "problem", "not installed", f"pip install '{text}'")
    if asked.specifier.contains(version, prereleases=True):
        return None
    lowest = [Version(each.version) for each in asked.specifier if each.operator in (">=", "==", "~=", ">")]
    if lowest and Version(version) < max(lowest):
        return Check(asked.name, "problem", f"{version}, but {text} is needed", f"pip install '{text}'")
    return Check(
        asked.name,
        "note",
        f"{version}, which is newer than {text}",
        f"nobody has tried it; if something goes wrong: pip install '{text}'",
    )


def check_pair(installed: Installed) -> Check:
    """Whether torchvision was built for this torch: its compiled operators fail to load with another one."""
    name = "torch and torchvision"
    torch, torchvision = (installed.versions.get(package) for package in ("torch", "torchvision"))
    if torch is None or torchvision is None:
        return Check(name, "absent", "they are not both here")
    asks = installed.torchvision_asks
    if asks is not None and not asks.specifier.contains(torch, prereleases=True):
        return Check(
            name,
            "problem",
            f"torchvision {torchvision} asks for torch{asks.specifier}, and torch is {torch}",
            "install both in one command: pip install torch torchvision -c constraints.txt",
        )
    labels = [Version(version).local for version in (torch, torchvision)]
    if all(labels) and labels[0] != labels[1]:
        return Check(
            name,
            "problem",
            f"torch {torch} and torchvision {torchvision} are builds for different devices",
            "install both from the same index, in one command",
        )
    return Check(name, "fine", f"torchvision {torchvision} goes with torch {torch}")


def check_decoders(installed: Installed) -> Check:
    """Which JPEG decoders are installed; whether they work here is for `probe` to try."""
    region = [name for name in _DECODERS if name in installed.versions]
    whole = [name for name in ("simplejpeg", "pillow") if name in installed.versions]
    found = ", ".join(f"{name} {installed.versions[name]}" for name in (*region, *whole))
    if region and "simplejpeg" in whole:
        return Check("decoders", "fine", found)
    if not found:
        return Check("decoders", "problem", "none", "install shardvit's requirements: pip install -e .")
    missing = " and ".join(
        ["nvImageCodec, which decodes only the crop"] * (not region)
        + ["simplejpeg, the faster one for whole images"] * ("simplejpeg" not in whole)
    )
    return Check("decoders", "note", f"{found}; not {missing}", "reading is slower: pip install -e . adds them")
