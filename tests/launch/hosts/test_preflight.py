"""Verdicts on hosts, from facts alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardvit.launch.hosts import host_facts as probe
from shardvit.launch.hosts.hostfile import Host
from shardvit.launch.hosts.preflight import PACKAGES, Facts, clock_offset, find_problems, hosts_table

HERE = Facts(
    machine="boot here",
    python="3.12.1",
    packages={"shardvit": "0.1", "torch": "2.15.0", "deepspeed": "0.19.8"},
    code="abc",
    revision="r1",
    sees_marker=True,
    can_write=True,
    files={"/shards/manifest.json": "d1", "/absent.yaml": "! No such file"},
    gpus=8,
    free_bytes=1 << 40,
    addresses={"10.0.0.1": "ib0"},
    port=0,
)
HOSTS = (Host("a", tuple(range(8))), Host("b", tuple(range(8))))
FOLDER = Path("runs")


def problems(**changes: Any) -> list[str]:
    """Of host b, which differs from the others in this."""
    facts = {"a": replace(HERE, machine="boot a"), "b": replace(HERE, **{"machine": "boot b", **changes})}
    found = find_problems(HOSTS, facts, here=HERE, folder=FOLDER)
    assert found["a"] == []
    return found["b"]


def test_alike_is_ready():
    assert problems() == []
    assert problems(clock_offset_seconds=3.0, addresses={}, revision="r2") == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"python": "3.11.9"}, "b has Python 3.11.9, this host 3.12.1: install the same environment on both"),
        ({"packages": {**HERE.packages, "torch": "2.14.0"}}, "b has torch 2.14.0, this host 2.15.0"),
        ({"packages": {**HERE.packages, "deepspeed": "not installed"}}, "b has deepspeed not installed, this host"),
        ({"packages": {**HERE.packages, "shardvit": "0.2"}}, "b has shardvit 0.2, this host 0.1"),
        ({"code": "xyz", "revision": "r2"}, "b has other code of shardvit than this host (revision r2, this host r1)"),
        ({"code": "xyz"}, "(the same revision, with other changes): bring both to one revision"),
        ({"code": ""}, "b has no shardvit that its Python finds"),
        ({"clock_offset_seconds": 61.0}, "b's clock is 61 seconds ahead of this host's: set both by NTP"),
        ({"clock_offset_seconds": -61.0}, "b's clock is 61 seconds behind this host's"),
        ({"sees_marker": False, "files": {}}, "b does not see what this host writes to runs: let --runs name"),
        ({"can_write": False}, "b may not write to runs"),
        ({"files": {"/shards/manifest.json": "! No such file"}}, "b cannot read /shards/manifest.json (No such file)"),
        ({"files": {"/shards/manifest.json": "d2"}}, "/shards/manifest.json on b is not the one on this host"),
        ({"gpus": 4}, "b has 4 GPUs, and slot 7 (counted from 0) is asked for"),
        ({"free_bytes": 1 << 20}, "b has 1.05 MB free in runs, less than 1.07 GB: make room"),
        ({"machine": "boot a"}, "b and a are one machine"),
    ],
)
def test_each_difference_has_its_sentence(changes: dict[str, Any], sentence: str):
    found = problems(**changes)
    assert len(found) == 1 and sentence in found[0], found


@pytest.mark.parametrize(
    ("clock", "offset"),
    [(100.0, 0.0), (105.0, 0.0), (110.0, 0.0), (99.0, -1.0), (112.0, 2.0), (210.0, 100.0)],
)
def test_an_answer_that_takes_its_time_is_no_clock_that_goes_wrong(clock: float, offset: float):
    assert clock_offset(clock, asked=100.0, replied=110.0) == offset


def test_where_nobody_has_a_gpu_slots_are_processes():
    facts = {name: replace(HERE, machine=name, gpus=0) for name in ("a", "b")}
    assert find_problems(HOSTS, facts, here=HERE, folder=FOLDER) == {"a": [], "b": []}


def test_the_table_has_a_line_a_host():
    facts: dict[str, Facts | str] = {"a": replace(HERE, machine="a", clock_offset_seconds=-0.04), "b": "b is away"}
    found = find_problems(HOSTS, facts, here=HERE, folder=FOLDER)
    head, _, first, second = hosts_table(HOSTS, facts, found).splitlines()
    for word in ("host", "slots", "GPUs", "Python", *PACKAGES, "code", "clock", "free", "verdict"):
        assert word in head
    assert first.split()[:3] == ["a", "8", "8"] and first.endswith("ready") and "-0.0 s" in first
    assert second.split() == ["b", "8", *["-"] * 8, "1", "problem"]


def test_a_host_says_the_truth_of_itself(tmp_path: Path):
    (tmp_path / "marker").write_text("text")
    (tmp_path / "file").write_text("content")
    question: dict[str, Any] = {
        "folder": str(tmp_path),
        "marker": ["marker", "text"],
        "files": [str(tmp_path / "file"), str(tmp_path / "absent")],
        "packages": ["torch", "no-such-package"],
        "modules": ["launch", "pipeline"],
        "listen": True,
        "port": 0,
    }
    told = probe.answer(question)
    assert told["sees_marker"] and told["can_write"] and told["free_bytes"] > 0 and len(told["code"]) == 12
    assert told["packages"]["no-such-package"] == "not installed" and told["packages"]["torch"][0].isdigit()
    assert told["files"][str(tmp_path / "absent")].startswith("! No such file")
    reached = probe.connect(["127.0.0.1"], port=told["port"], text="text")
    assert reached == {"127.0.0.1": ["127.0.0.1", "lo"]}
    assert probe.connect(["127.0.0.1"], port=told["port"], text="somebody else") == {}


def test_any_change_of_the_code_changes_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "some_package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "inner" / "a.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    digest = probe._code_digest(["some_package"])
    assert digest == probe._code_digest(["some_package"]) != ""
    (package / "inner" / "a.py").write_text("x = 2\n")
    changed = probe._code_digest(["some_package"])
    (package / "inner" / "a.py").rename(package / "inner" / "b.py")
    assert len({digest, changed, probe._code_digest(["some_package"])}) == 3
    assert probe._code_digest(["no_such_package"]) == ""
