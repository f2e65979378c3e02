"""The packages' verdicts, from versions that the test makes up; and the project's own ranges."""

from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from shardvit.launch.doctor import libraries
from shardvit.launch.doctor.libraries import check_requirement, installed_version, library_checks, read_requirements

ROOT = Path(__file__).resolve().parents[3]
VERSIONS = {"torch": "2.15.0", "torchvision": "0.30.0", "simplejpeg": "1.9.0", "pillow": "13.0.0"}


def install(versions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "installed_version", versions.get)


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
    check = check_requirement(Requirement("torch>=2.11,<3"), version=version)
    assert (check.verdict if check else None) == verdict
    if check:
        assert "pip install 'torch<3,>=2.11'" in check.remedy


def test_names_are_compared_as_pip_does():
    assert installed_version("PyYAML") == installed_version("pyyaml") is not None


def test_a_missing_region_decoder_is_not_a_missing_package(monkeypatch: pytest.MonkeyPatch):
    needed = Requirement("nvidia-nvimgcodec-cu13>=0.9")
    install({}, monkeypatch)
    check = check_requirement(needed, version=None)
    assert check and check.verdict == "note" and "pip install" in check.remedy
    install({"nvidia-nvimgcodec-cu12": "0.9"}, monkeypatch)
    assert check_requirement(needed, version=None) is None


def test_one_line_when_all_is_well_and_one_for_each_that_is_not(monkeypatch: pytest.MonkeyPatch):
    needed = [Requirement("torch>=2.11,<3"), Requirement("timm>=1.0.31")]
    install(VERSIONS | {"timm": "1.0.31"}, monkeypatch)
    good = library_checks(needed)
    assert [(check.name, check.verdict) for check in good] == [("packages", "fine")]
    assert "torch 2.15.0" in good[0].found
    install(VERSIONS, monkeypatch)
    bad = library_checks(needed)
    assert [(check.name, check.verdict) for check in bad[:2]] == [("packages", "problem"), ("timm", "problem")]
    assert "1 of 2" in bad[0].found
    install(VERSIONS | {"timm": "1.0.31", "torch": "3.1"}, monkeypatch)
    newer = library_checks(needed)
    assert [check.verdict for check in newer] == ["fine", "note"]
    install({}, monkeypatch)
    assert "2 of 2" in library_checks(needed)[0].found


def test_the_ranges_are_pyprojects():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pythons, needed = read_requirements()
    assert SpecifierSet(pythons) == SpecifierSet(project["requires-python"])  # setuptools may reorder it
    assert {str(each) for each in needed} <= {str(Requirement(text)) for text in project["dependencies"]}
    assert {"torch", "deepspeed", "mlflow"} <= {each.name for each in needed}


def test_without_a_pyproject_the_ranges_are_the_installed_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    texts = ["torch>=2.11,<3", 'onnx>=1.21; extra == "onnx"', 'colorama; sys_platform == "nowhere"']
    monkeypatch.setattr("importlib.metadata.requires", lambda name: texts)
    monkeypatch.setattr("importlib.metadata.metadata", lambda name: {"Requires-Python": ">=3.11"})
    pythons, needed = read_requirements(tmp_path / "pyproject.toml")
    assert pythons == ">=3.11" and [each.name for each in needed] == ["torch"]


def test_what_is_not_installed_has_no_version():
    assert installed_version("no-such-package-anywhere") is None
