import io
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from shardvit.data_shards.errors import UserError
from shardvit.launch.bench import data
from shardvit.launch.bench.data_methods import METHODS, WORKERS, Work
from shardvit.launch.bench.data_prepare import read_photographs
from shardvit.launch.bench.data_results import LoaderRound, Results, find_targets, report_lines
from shardvit.launch.bench.measure import Memory, in_turns, median_ratio, run_told, tree_cpu_seconds, tree_memory
from shardvit.pipeline.recipe.data import DataConfig

ROOT = Path(__file__).resolve().parents[3]


def jpeg(seed: int, *, width: int = 120, height: int = 90, mode: str = "RGB") -> bytes:
    """Smooth random colours, as in a photograph; noise would put the PSNR of any two decoders in question."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (6, 8, 4), dtype=np.uint8)
    image = Image.fromarray(coarse[..., : len(mode)] if mode != "L" else coarse[..., 0], mode=None)
    out = io.BytesIO()
    image.resize((width, height), Image.Resampling.BICUBIC).convert(mode).save(out, format="JPEG", quality=92)
    return out.getvalue()


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photographs")
    for seed in range(9):
        (folder / f"{seed}.jpg").write_bytes(jpeg(seed))
    (folder / "grey.JPEG").write_bytes(jpeg(9, mode="L"))
    return folder


def test_what_stock_code_does_not_read_is_left_out_and_counted(tmp_path, photographs):
    cmyk = io.BytesIO()
    Image.new("CMYK", (40, 30)).save(cmyk, format="JPEG")
    (tmp_path / "cmyk.jpg").write_bytes(cmyk.getvalue())
    (tmp_path / "cut.jpg").write_bytes(jpeg(1)[:700])
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "good.jpg").write_bytes(jpeg(2))
    found = read_photographs(tmp_path)
    assert found.contents == [jpeg(2)] and found.left_out == 3
    assert len(read_photographs(photographs).contents) == 10


@pytest.mark.parametrize("name", ["empty", "absent", "text.tar"])
def test_a_source_without_photographs_is_refused_by_name(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.tar").write_text("no tar")
    with pytest.raises(UserError, match=name):
        read_photographs(tmp_path / name)


def test_the_record_holds_what_the_report_says(tmp_path, photographs, monkeypatch, capsys):
    monkeypatch.setattr(data, "_RESUME_POSITIONS", 0)
    monkeypatch.setattr(data, "_MEMORY_EPOCHS", 1)
    record = tmp_path / "records" / "data.json"
    # So many that no worker can have read all of it ahead while this process stood still: reading costs something.
    options = ["--images", "640", "--rounds", "1", "--methods", "webdataset,ours", "--record", str(record)]
    data.app([str(photographs), *options], exit_on_error=False, result_action="return_value")

    content = json.loads(record.read_text())
    assert content["setting"]["images"] == 640 and content["setting"]["versions"]["torch"]
    assert set(content["loaders"]) == {"webdataset", "ours"}
    for (one,) in content["loaders"].values():
        assert min(one.values()) > 0
    # Itself and two workers; threads.
    assert {name: one["processes"] for name, (one,) in content["loaders"].items()} == {"webdataset": 3, "ours": 1}
    for costs in (content["transform_ms"],):
        assert all(min(values) > 0 for values in costs.values())
    assert content["psnr"]["worst"] > 50
    (from_start,) = content["resume"]
    assert from_start["step"] == 0 and from_start["first_seconds"] > from_start["after_imports_seconds"] > 0
    assert len(content["memory_mib"]) == 10 and min(content["memory_mib"]) > 0
    assert str(tmp_path) not in record.read_text() and str(photographs) not in record.read_text()

    report = record.with_suffix(".txt").read_text()
    assert report in capsys.readouterr().out
    assert len(content["targets"]) >= 9
    for target in content["targets"]:
        assert target["text"] in report and target["measured"] in report


def test_a_peer_that_is_not_installed_or_fails_is_skipped_with_the_reason(tmp_path, monkeypatch, capsys):
    absent = replace(METHODS["grain"], needs=("loader_of_tomorrow.part",))
    monkeypatch.setitem(METHODS, "tomorrow", absent)
    results = Results(setting={})
    data._loaders(results, ("tomorrow", "torch"), work=Work(tmp_path / "nothing"), images=512, rounds=2)
    assert results.loaders == {}
    assert results.skipped["tomorrow"] == "loader_of_tomorrow.part is not installed"
    assert results.skipped["torch"].startswith("exit code 1: FileNotFoundError")
    assert capsys.readouterr().out.count("skipped: ") == 2


@pytest.mark.parametrize(
    ("options", "named"),
    [({"images": 100}, "--images 100"), ({"methods": "tensorflow"}, "tensorflow"), ({"parts": "speed"}, "speed")],
)
def test_options_that_make_no_sense_are_refused_before_anything_is_done(photographs, options, named):
    with pytest.raises(UserError, match=named):
        data.bench(photographs, **options)


BURN = "import time\nwhile time.process_time() < {seconds}: pass\n"


def test_cpu_time_of_children_counts_while_they_live_and_after_they_were_waited_for():
    before = tree_cpu_seconds(psutil.Process())
    subprocess.run([sys.executable, "-c", BURN.format(seconds=0.3)], check=True)
    assert tree_cpu_seconds(psutil.Process()) - before > 0.25  # the kernel counts in hundredths
    with subprocess.Popen([sys.executable, "-c", BURN.format(seconds=30)]) as child:
        alive = psutil.Process(child.pid)
        while sum(alive.cpu_times()[:2]) < 0.3:
            pass
        assert tree_cpu_seconds(psutil.Process()) - before > 0.5
        child.kill()


TELLS = """
import os, subprocess, sys, time
from shardvit.launch.bench.measure import Teller
teller = Teller(int(sys.argv[1]))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
teller.mark("first", value=7)
while not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
teller.mark("child", pid=child.pid)
teller.mark("end")
time.sleep(600)
"""


def told(code: str, *arguments: str, timeout_seconds: float = 240.0):
    return run_told(
        lambda descriptor: [sys.executable, "-c", code, str(descriptor), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout_seconds=timeout_seconds,
    )


def test_a_measured_process_is_watched_and_ended_with_its_children(tmp_path, monkeypatch):
    watched = tmp_path / "watched"

    def look(root: psutil.Process) -> Memory:
        found = tree_memory(root)
        if found.processes == 2:
            watched.touch()  # for this the process waits
        return found

    monkeypatch.setattr("shardvit.launch.bench.measure.tree_memory", look)
    monkeypatch.setattr("shardvit.launch.bench.measure._SAMPLE_SECONDS", 0.05)
    monkeypatch.setattr("shardvit.launch.bench.measure._LEAVE_SECONDS", 0.1)
    found = told(TELLS, str(watched))
    assert found.failure is None and found.marks["first"]["value"] == 7
    assert found.peak.processes == 2 and found.peak.pss_mib > 5
    assert 0 < found.marks["first"]["seconds"] < found.marks["end"]["seconds"]
    deadline = time.monotonic() + 240
    while is_alive(found.marks["child"]["pid"]):  # a kill takes effect when the kernel comes to it
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_measured_process_that_fails_or_hangs_is_told_with_its_last_words(monkeypatch):
    monkeypatch.setattr("shardvit.launch.bench.measure._LEAVE_SECONDS", 5)
    failed = told("print('hello'); raise ValueError('the third batch')")
    assert failed.failure == "exit code 1: ValueError: the third batch"
    hung = told("import time; time.sleep(60)", timeout_seconds=0.3)
    assert hung.failure == "ended after 0.3 s"


def test_methods_take_turns_on_the_same_items():
    log: list[tuple[str, int]] = []
    methods = {name: lambda item, name=name: log.append((name, item)) for name in ("a", "b")}
    costs = in_turns(methods, range(25), rounds=2)
    assert {name: len(values) for name, values in costs.items()} == {"a": 2, "b": 2}
    one_round = [("a", i) for i in range(20)] + [("b", i) for i in range(20)]
    one_round += [("a", i) for i in range(20, 25)] + [("b", i) for i in range(20, 25)]
    assert log == one_round * 2


def test_ratios_are_taken_within_a_round():
    assert median_ratio([10, 20, 3], [1, 2, 30]) == 10


def results(*, ours_ms: float) -> Results:
    """Made up: two rounds, in which the machine was twice as slow the second time."""

    def rounds(cpu_ms: float, *, pss: float, processes: int) -> list[LoaderRound]:
        return [LoaderRound(cpu_ms * slow, 1000 / cpu_ms, 2.0, pss, processes) for slow in (1, 2)]

    return Results(
        setting={"versions": {}},
        transform_ms={"stock": [3.2, 6.4], "ours": [1.0, 2.0], "decode": [0.9, 1.8], "limit": [0.8, 1.6]},
        psnr={"median": 57.0, "worst": 54.0},
        loaders={
            "webdataset": rounds(7.0, pss=900, processes=3),
            "grain-fast": rounds(2.0, pss=600, processes=1),
            "ours": rounds(ours_ms, pss=500, processes=2),
            "ours-processes": rounds(9.0, pss=900, processes=5),
            "ours-320": rounds(1.0, pss=500, processes=2),
        },
        resume=[{"step": 0, "first_seconds": 1.9, "after_imports_seconds": 0.4}],
        memory_mib=[500.0] * 10 + [520.0] * 10,
    )  # fmt: skip


def test_targets_are_met_or_missed_as_measured():
    met = {target.text.split(":")[0].split(" (")[0]: target.met for target in find_targets(results(ours_ms=1.5))}
    assert met == {
        "training transform to stock torchvision": True,
        "training transform to the limit": True,
        "pixels of the worst image, PSNR": False,
        "loader, CPU per image to stock": True,
        "loader on resized shards to stock on the originals": True,
        "loader, CPU per image below every peer": True,
        "peak PSS, MiB": True,
        "seconds to the first batch": True,
        "processes": False,
        "resume in 1,000 shards, slowest position": True,
        "memory, last epoch over the first": False,
    }
    slow = {target.text: target for target in find_targets(results(ours_ms=2.5))}
    assert not slow["loader, CPU per image to stock"].met
    nearest = slow["loader, CPU per image below every peer (nearest: grain-fast)"]
    assert not nearest.met and nearest.measured == "1.25 of it"


def test_ours_is_what_the_recipe_makes_of_two_workers():
    config = DataConfig(workers=WORKERS)
    assert METHODS["ours"].kind == METHODS["ours-320"].kind == config.kind_of_workers(WORKERS) == "thread"
    assert METHODS["ours-processes"].kind == "process"


def test_the_report_shows_every_method_and_target():
    found = results(ours_ms=1.5)
    report = "\n".join(report_lines(found))
    for name in found.loaders:
        assert f"{name}: {METHODS[name].label}" in report
    assert report.count("MISSED") == 3 and report.count("  met") == 8
