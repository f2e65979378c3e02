"""The packages' verdicts, from versions that the test makes up; and the project's own ranges."""

import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from launch.doctor.libraries import (
    Asked,
    Installed,
    check_decoders,
    check_pair,
    check_requirement,
    library_checks,
    read_asked,
    read_installed,
)

ROOT = Path(__file__).resolve().parents[3]
VERSIONS = {"torch": "2.15.0", "torchvision": "0.30.0", "simplejpeg": "1.9.0", "pillow": "13.0.0"}


def installed(versions: dict[str, str], *, asks: str | None = None) -> Installed:
    return Installed(versions, Requirement(asks) if asks else None)


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        (None, "problem"),
        ("2.10.1", "problem"),
        ("2.11.0", None),
        ("2.15.0+cu130", None),
        ("2.16.0.dev20261101", None),
        ("3.0.0", "note"),
    ],
)
def test_a_package_against_its_range(version: str | None, verdict: str | None):
    check = check_requirement(Requirement("torch>=2.11,<3"), installed({"torch": version} if version else {}))
    assert (check.verdict if check else None) == verdict
    if check:
        assert "pip install 'torch<3,>=2.11'" in check.remedy


def test_names_are_compared_as_pip_does():
    assert check_requirement(Requirement("PyYAML>=6"), installed({"pyyaml": "6.0.3"})) is None


def test_a_missing_region_decoder_is_not_a_missing_package():
    assert check_requirement(Requirement("nvidia-nvimgcodec-cu13>=0.9"), installed({})) is None


def test_one_line_when_all_is_well_and_one_for_each_that_is_not():
    asked = Asked(">=3.11", (Requirement("torch>=2.11,<3"), Requirement("timm>=1.0.31")))
    good = library_checks(asked, installed(VERSIONS | {"timm": "1.0.31"}))
    assert [check.verdict for check in good[:1]] == ["fine"] and "torch 2.15.0" in good[0].found
    bad = library_checks(asked, installed(VERSIONS))
    assert [(check.name, check.verdict) for check in bad[:2]] == [("packages", "problem"), ("timm", "problem")]
    assert "1 of 2" in bad[0].found
    newer = library_checks(asked, installed(VERSIONS | {"timm": "1.0.31", "torch": "3.1"}))
    assert [(check.name, check.verdict) for check in newer[:2]] == [("packages", "fine"), ("torch", "note")]


@pytest.mark.parametrize(
    ("torch", "torchvision", "asks", "verdict"),
    [
        ("2.15.0", "0.30.0", "torch==2.15.0", "fine"),
        ("2.15.0+cu130", "0.30.0+cu130", "torch==2.15.0", "fine"),
        ("2.15.0+cu130", "0.30.0", None, "fine"),
        ("2.14.0", "0.30.0", "torch==2.15.0", "problem"),
        ("2.15.0+cpu", "0.30.0+cu130", "torch>=2.14", "problem"),
        (None, "0.30.0", "torch>=2.14", "absent"),
        ("2.15.0", None, None, "absent"),
    ],
)
def test_torch_and_torchvision_go_together(torch: str | None, torchvision: str | None, asks: str | None, verdict: str):
    versions = {name: version for name, version in (("torch", torch), ("torchvision", torchvision)) if version}
    assert check_pair(installed(versions, asks=asks)).verdict == verdict


@pytest.mark.parametrize(
    ("names", "verdict", "words"),
    [
        (["nvidia-nvimgcodec-cu13", "simplejpeg", "pillow"], "fine", "nvidia-nvimgcodec-cu13 1"),
        (["nvidia-nvimgcodec-cu12", "simplejpeg", "pillow"], "fine", "nvidia-nvimgcodec-cu12 1"),
        (["simplejpeg", "pillow"], "note", "not nvImageCodec"),
        (["pillow"], "note", "and simplejpeg"),
        ([], "problem", "none"),
    ],
)
def test_decoders(names: list[str], verdict: str, words: str):
    check = check_decoders(installed(dict.fromkeys(names, "1")))
    assert check.verdict == verdict and words in check.found


def test_the_ranges_are_pyprojects():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = read_asked()
    assert asked.pythons == project["requires-python"]
    assert {str(each) for each in asked.requirements} <= {str(Requirement(text)) for text in project["dependencies"]}
    assert {"torch", "deepspeed", "mlflow"} <= {each.name for each in asked.requirements}


def test_without_a_pyproject_the_ranges_are_the_installed_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    texts = ["torch>=2.11,<3", 'onnx>=1.21; extra == "onnx"', 'colorama; sys_platform == "nowhere"']
    monkeypatch.setattr("importlib.metadata.requires", lambda name: texts)
    monkeypatch.setattr("importlib.metadata.metadata", lambda name: {"Requires-Python": ">=3.11"})
    asked = read_asked(tmp_path / "pyproject.toml")
    assert asked.pythons == ">=3.11" and [each.name for each in asked.requirements] == ["torch"]


def test_versions_are_read_without_importing_anything_heavy():
    code = (
        "import sys; from launch.doctor.libraries import read_asked, read_installed\n"
        "found = read_installed([each.name for each in read_asked().requirements])\n"
        "assert found.versions['torch'] and found.versions['mlflow'] and found.torchvision_asks\n"
        "print({'torch', 'deepspeed', 'mlflow', 'timm', 'accelerate', 'torchvision'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_what_is_not_installed_has_no_version():
    assert "no-such-package-anywhere" not in read_installed(["no-such-package-anywhere", "pytest"]).versions
