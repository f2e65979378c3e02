"""docs/gpu.md names all wheels that a machine without a network may lack, and what a folder of wheels adds is said."""

import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
APART = {"deepspeed", "nvidia-nvimgcodec-cu13"}  # has no wheel; left out for its size


def closure(*roots: str) -> set[str]:
    """What these requirements bring, themselves included, on this Python."""
    todo, seen = [Requirement(root) for root in roots], set[tuple[str, str]]()
    while todo:
        requirement = todo.pop()
        name, extras = canonicalize_name(requirement.name), requirement.extras
        if (name, str(sorted(extras))) in seen:
            continue
        seen.add((name, str(sorted(extras))))
        needed = map(Requirement, metadata.distribution(name).requires or [])
        todo += [each for each in needed if any(_applies(each, extra) for extra in ("", *extras))]
    return {name for name, _ in seen}


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def listed() -> list[str]:
    text = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    return text.partition("<< END\n")[2].partition("\nEND\n")[0].split()


@pytest.mark.skipif(sys.platform != "linux", reason="the page is about Linux")
def test_all_that_is_needed_beside_torch_is_named():
    needed = [each for each in metadata.requires("shardvit") or [] if "extra ==" not in each]
    with_pytest = closure(*needed, "pytest", "pytest-timeout")
    assert with_pytest - closure("torch", "torchvision") - APART <= {*listed()}


def test_each_name_has_a_pin():
    pinned = {
        canonicalize_name(name) for name in re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.M)
    }
    assert {*listed()} <= pinned


def test_of_a_folder_of_wheels_those_are_told_that_are_missing_or_too_old(tmp_path: Path):
    for name in ("no_such_package-1.0", "numpy-9.9", "PyYAML-6.0"):
        (tmp_path / f"{name}-py3-none-any.whl").touch()
    command = [sys.executable, str(ROOT / ".ci" / "missing_packages.py"), "--wheels", str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert told == [str(tmp_path / "no_such_package-1.0-py3-none-any.whl")]


def test_what_is_missing_can_be_pasted_into_a_shell(tmp_path: Path):
    """In a Python that has nothing but a torch and a torchvision, by their metadata."""
    for name, version in (("torch", "2.11.0"), ("torchvision", "0.26.0")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    command = [sys.executable, "-S", str(ROOT / ".ci" / "missing_packages.py")]  # without the installed packages
    ended = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    words = shlex.split(ended.stderr.strip().splitlines()[-1])
    assert ended.returncode == 1 and words[1:4] == ["-m", "pip", "install"]
    assert [str(Requirement(word)) for word in words[4:]] and "torch==2.11.0" in words
