"""What a shard holds depends on the plan alone: threads, processes and tasks in any order write the same bytes."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardvit.data_shards.engines.engine import LocalEngine
from shardvit.data_shards.engines.threads import ThreadEngine
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing import shard_plan
from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.packing.plan_file import load_job
from shardvit.data_shards.packing.request import PackRequest
from shardvit.data_shards.packing.shard_plan import make_plan
from shardvit.data_shards.packing.shard_writer import make_shard
from shardvit.data_shards.packing.sources.base import Source, array_images
from shardvit.data_shards.packing.sources.label_list import LabelList
from tests.data_shards.packing.folders import quiet, tree, write_folder

ROOT = Path(__file__).resolve().parents[3]
OPTIONS: dict[str, Any] = {"name": "in", "samples_per_shard": 5, "holdout": 0.2, "unreadable": "skip"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """40 images, one of them twice and one broken: 8 shards."""
    root = tmp_path / "in"
    write_folder(root, {"cat": 20, "dog": 18})
    (root / "cat/broken.jpg").write_bytes(b"broken")
    shutil.copy(root / "cat/im. 0.png", root / "dog/same.png")
    return root


@pytest.fixture
def expected(source: Path) -> dict[str, str]:
    quiet(str(source), source.parent / "plain", engine=ThreadEngine(1), **OPTIONS)
    found = tree(source.parent / "plain")
    assert sum(name.endswith(".tar") for name in found) == 9 and "duplicates.jsonl" in found
    return found


@pytest.mark.parametrize("engine", [ThreadEngine(2), LocalEngine(2)], ids=["threads", "processes"])
@pytest.mark.parametrize("duplicates", ["keep", "drop"])
def test_any_engine_writes_the_same_bytes(source: Path, engine: Any, duplicates: str):
    options = {**OPTIONS, "duplicates": duplicates}
    quiet(str(source), source.parent / "plain", engine=ThreadEngine(1), **options)
    quiet(str(source), source.parent / "out", engine=engine, **options)
    assert tree(source.parent / "out") == tree(source.parent / "plain")


def test_arrays_in_memory_go_to_processes_too(tmp_path: Path):
    for out, engine in (("plain", ThreadEngine(1)), ("out", LocalEngine(2))):
        quiet("digits", tmp_path / out, samples_per_shard=900, engine=engine)
    assert tree(tmp_path / "out") == tree(tmp_path / "plain")


def steps(source: Path, out: Path, *steps: tuple[str, int, int]) -> None:
    for step, task, of in steps:
        quiet(str(source), out, step=step, task=task, of=of, **OPTIONS)


def test_tasks_in_any_order_and_again_write_the_same_bytes(source: Path, expected: dict[str, str]):
    out = source.parent / "out"
    steps(source, out, ("plan", 0, 1), ("shards", 2, 3), ("shards", 0, 3), ("shards", 2, 3), ("shards", 1, 3))
    assert not out.exists()
    steps(source, out, ("finish", 0, 1), ("finish", 0, 1))
    assert tree(out) == expected
    assert {path.name for path in source.parent.iterdir()} == {"in", "plain", "out"}


def test_a_step_without_the_one_before_is_refused(source: Path):
    out = source.parent / "out"
    with pytest.raises(UserError, match="not planned"):
        steps(source, out, ("shards", 0, 1))
    with pytest.raises(UserError, match="not planned"):
        steps(source, out, ("finish", 0, 1))
    assert [path.name for path in source.parent.iterdir()] == ["in"]
    steps(source, out, ("plan", 0, 1), ("shards", 0, 2))
    with pytest.raises(UserError, match=r"4 of 9 shards are not made yet .*000001\.tar"):
        steps(source, out, ("finish", 0, 1))
    with pytest.raises(UserError, match=r"another request .*seed"):
        quiet(str(source), out, step="shards", seed=7, **OPTIONS)
    with pytest.raises(UserError, match="task 2 of 2:"):
        steps(source, out, ("shards", 2, 2))
    report = quiet(str(source), out, **OPTIONS)  # the whole command goes on from there
    assert report.num_images == 39


KILLED = """
import os, sys
from shardvit.data_shards.packing import shard_writer
from shardvit.data_shards.packing.plan_file import load_job
from shardvit.data_shards.store.folders import LocalFolder
job, number, moment = load_job(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
put = LocalFolder.put
def dying(self, name, file):
    if name.endswith(moment):
        os.kill(os.getpid(), 9)
    put(self, name, file)
LocalFolder.put = dying
if moment == "record":
    LocalFolder.write = lambda *_: os.kill(os.getpid(), 9)
shard_writer.make_shard(job, number)
"""


@pytest.mark.parametrize("moment", [".idx", ".tar", "record"])
def test_a_worker_killed_in_the_middle_of_a_shard_leaves_no_half_of_it(
    source: Path, expected: dict[str, str], moment: str
):
    out = source.parent / "out"
    steps(source, out, ("plan", 0, 1), ("shards", 0, 2))
    killed = subprocess.run([sys.executable, "-c", KILLED, str(out), "3", moment], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    steps(source, out, ("shards", 1, 2), ("finish", 0, 1))
    assert tree(out) == expected


def test_a_finished_shard_is_not_made_again(source: Path, monkeypatch: pytest.MonkeyPatch):
    out = source.parent / "out"
    steps(source, out, ("plan", 0, 1))
    job = load_job(str(out))
    assert job is not None
    first = make_shard(job, 4)
    shutil.rmtree(source)
    assert make_shard(job, 4) == first
    refused = make_shard(job, 5)  # its images are gone: it has a record, but is tried again
    assert refused.num_images == job.plan.sizes[5]
    record = json.loads(job.work.read("records/in-train-000005.tar.json"))
    assert len(record["refused"]) == job.plan.sizes[5] and not any(entry[2] for entry in record["refused"])


def test_a_worker_that_dies_twice_is_one_sentence(source: Path):
    class Lost(ThreadEngine):
        def run(self, work: Any, request: Any, parts: Any, *, done: Callable[[Any], None]) -> Any:
            return super().run(work, request, [part for part in parts if part != 3], done=done)

    with pytest.raises(UserError, match=r"1 shard .*000003\.tar.*died twice"):
        quiet(str(source), source.parent / "out", engine=Lost(1), **OPTIONS)
    quiet(str(source), source.parent / "plain", **OPTIONS)
    quiet(str(source), source.parent / "out", **OPTIONS)
    assert tree(source.parent / "out") == tree(source.parent / "plain")


# ---- the order and the bytes are what they were before there was a plan on disk


def image(seed: int) -> bytes:
    return b"P6 4 4 255\n" + hashlib.sha256(b"%d" % seed).digest()[:24] * 2


@pytest.mark.parametrize(
    ("options", "sha256"),
    [
        ({"samples_per_shard": 7}, "450efd26f3d94a97b4076c3d86ca508592928d4e61c8f58112504468a3c5f48f"),
        (
            {"shard_size_bytes": 30_000, "duplicates": "drop", "seed": 3},
            "c044c2f91582457b6d90800e9e49b949a588347d1c3722072b0e6fa333eb34dc",
        ),
        (
            {"labels": "l.csv", "holdout": 0.3, "samples_per_shard": 7},
            "d7ceb11e7fddf9794afcd1d9805d454601e426ff3f3a9900d697dfc874855c5a",
        ),
    ],
    ids=["folders", "bytes", "multi-label"],
)
def test_shards_are_those_of_earlier_versions(tmp_path: Path, options: dict[str, Any], sha256: str):
    """Tars, indexes and lists, as made by the code before LocatedFiles."""
    root, lines = tmp_path / "in", ["path,label"]
    for i in range(60):
        name = f"{'train' if i % 5 else 'val'}/{'abc'[i % 3]}/im {i}.ppm"
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(image(i if i % 11 else 0))
        lines.append(f"{name},{'x|y' if i % 2 else 'z'}")
    (root / "l.csv").write_text("\n".join(lines) + "\n")
    if labels := options.get("labels"):
        options = {**options, "labels": LabelList(root / labels)}
    quiet(str(root), tmp_path / "out", **{**options, "name": "n"})
    digest = hashlib.sha256()
    for path in sorted((tmp_path / "out").rglob("*")):
        if path.suffix in (".tar", ".idx", ".jsonl"):
            digest.update(str(path.relative_to(tmp_path / "out")).encode() + b"\0" + path.read_bytes())
    assert digest.hexdigest() == sha256


def test_the_order_is_that_of_the_whole_digests_also_where_their_first_halves_are_equal(
    monkeypatch: pytest.MonkeyPatch,
):
    images = array_images("x", np.zeros((300, 2, 2), np.uint8), np.zeros(300, np.int64))
    real = hashlib.blake2b

    class Tied:
        """Digests with few different first halves."""

        def __init__(self, data: bytes, digest_size: int) -> None:
            self.data = real(data, digest_size=digest_size).digest()

        def digest(self) -> bytes:
            return bytes(7) + bytes([self.data[0] % 5]) + self.data[8:]

    class Library:
        blake2b = Tied

    monkeypatch.setattr(shard_plan, "hashlib", Library)
    plan = make_plan(Source("x", ("a",), {"train": images}), PackRequest())
    keys = [Tied(f"0\0shuffle-train\0x/{row}".encode(), 16).digest() for row in range(300)]
    assert plan.numbers.tolist() == sorted(range(300), key=keys.__getitem__)


def test_what_is_no_unicode_in_a_name_comes_through_the_plan(tmp_path: Path):
    root = tmp_path / "in"
    write_folder(root, {"cat": 3, "dog": 3})
    os.rename(root / "cat/im. 0.png", os.fsencode(root) + b"/cat/im-\xff.png")
    report = quiet(str(root), tmp_path / "out", samples_per_shard=2)
    assert report.num_images == 6 and report.counts.unreadable == 0


def test_the_plan_survives_writing_and_reading(source: Path):
    out = source.parent / "out"
    steps(source, out, ("plan", 0, 1))
    job = load_job(str(out))
    assert job is not None and sum(job.plan.sizes) == 40 and replace(job) == job
    shards = [job.shard(number) for number in range(len(job.plan.sizes))]
    assert [shard.file for shard in shards if shard.split == "val"] == ["in-val-000000.tar", "in-val-000001.tar"]
    assert sorted(np.concatenate([shard.numbers for shard in shards]).tolist()) == list(range(40))
    assert np.array_equal(job.numbers(job.plan), np.concatenate([shard.numbers for shard in shards]))
    assert job.lines(job.plan, [0, 39])[39]["key"] == shards[-1].key(len(shards[-1]) - 1)


def test_pack_without_a_step_reports_what_the_steps_report(source: Path, expected: dict[str, str]):
    out = source.parent / "out"
    steps(source, out, ("plan", 0, 1), ("shards", 0, 1))
    lines: list[str] = []
    pack(str(source), out, step="finish", report=lines.append, **OPTIONS)
    assert any("39 images" in line or "packed in" in line for line in lines) and tree(out) == expected


@pytest.mark.parametrize(
    "change", ["{", "[]", "null", "content", "plan", "containers", {"content": {}}, {"source": "x"}]
)
def test_a_broken_plan_is_one_sentence(source: Path, change: Any):
    out = source.with_name("out")
    quiet(str(source), out, **OPTIONS, step="plan")
    file = source.with_name(".out.packing") / "plan.json"
    content = json.loads(file.read_text())
    if isinstance(change, str) and change in content:
        del content[change]
        change = content
    elif isinstance(change, dict):
        change = content | change
    file.write_text(change if isinstance(change, str) else json.dumps(change))
    for step in ("plan", "shards", "finish"):
        with pytest.raises(UserError, match=r"plan\.json is broken; delete"):
            quiet(str(source), out, **OPTIONS, step=step)
