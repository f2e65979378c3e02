"""Damaged and missing data, failing stores, a tracking server that is down, gradients that are not finite."""

import json
import shutil
import signal
import socket
import sqlite3
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardvit.data_shards.shards.tar_index import open_index
from shardvit.pipeline.runs.logs import read_metrics
from tests.data_shards.http_server import FaultServer, serve
from tests.faults.conftest import NewCase, Undisturbed
from tests.faults.harness import Case, recipe, send
from tests.faults.rows import Row

CORRUPT = (
    "A damaged image is replaced by another one and listed, up to the recipe's budget; also across a kill the run ends "
    "as it would have without."
)
MISSING = "A shard that is cut short or gone is named in one sentence; brought back, the same command resumes."
STORE = "A store that answers with errors is waited out: the run is the same as from local shards."
TRACKER = "A tracking server that is down or silent neither stops nor changes a run; what it missed is sent later."
NAN = (
    "A step whose gradient is not finite on any rank is skipped on all; too many in a row end the run, and what is "
    "saved stands."
)

KILLED_AT = 26


@pytest.fixture
def own_shards(tmp_path: Path, shards: Path) -> Path:
    """A copy of the suite's shards, to be damaged."""
    shutil.copytree(shards, tmp_path / "own" / shards.name)
    return tmp_path / "own" / shards.name


def one_tar(folder: Path) -> Path:
    return sorted((folder / "train").glob("*.tar"))[1]


def test_a_corrupt_image(own_shards: Path, tmp_path: Path, row: Row) -> None:
    row.is_about("two corrupt images, and kill -9 later", CORRUPT)
    tar = one_tar(own_shards)
    index = open_index(tar)
    with tar.open("r+b") as stream:
        for number in (3, 50):
            stream.seek(int(index.image_offset[number]))
            stream.write(b"\x89PNG\r\n\x1a\n" + bytes(int(index.image_size[number]) - 8))
    changes = {"data.max_corrupt_share": 0.05}
    baseline, case = (Case(tmp_path / name, own_shards, changes=changes) for name in ("baseline", "case"))
    ended = baseline.start().wait()
    row.ends(ended, code=0, says="is damaged .*another one takes its place")
    assert baseline.curve()[-2][1]["data/substituted_images"] > 0
    case.run_until_killed(step=KILLED_AT)
    row.recovers(case, baseline, reached=KILLED_AT)
    listed = [
        {json.loads(line)["key"] for line in (each.stage / "corrupt_samples.jsonl").read_text().splitlines()}
        for each in (case, baseline)
    ]
    assert listed[0] == listed[1] == {index.keys[3], index.keys[50]}


@pytest.mark.parametrize("fault", ["truncated", "gone"])
def test_a_shard_is_damaged_while_the_run_is_killed(
    fault: str, own_shards: Path, new_case: NewCase, undisturbed: Undisturbed, row: Row
) -> None:
    row.is_about(f"a tar {fault} when the run continues", MISSING)
    baseline, case = undisturbed(), new_case(content=recipe(own_shards))
    case.run_until_killed(step=KILLED_AT)
    tar = one_tar(own_shards)
    whole = tar.read_bytes()
    if fault == "gone":
        tar.unlink()
    else:
        tar.write_bytes(whole[: len(whole) // 3])
    row.ends(case.start().wait(), code=2, says=tar.name)
    tar.write_bytes(whole)
    row.recovers(case, baseline, reached=KILLED_AT)


def test_a_shard_vanishes_in_mid_run(own_shards: Path, new_case: NewCase, undisturbed: Undisturbed, row: Row) -> None:
    row.is_about("all tars vanish in mid-run", MISSING)
    baseline, case = undisturbed(), new_case(content=recipe(own_shards))
    attempt, rank = case.start_stopped(step=0)
    aside = own_shards.with_name("aside")
    (own_shards / "train").rename(aside)
    send(rank, signal.SIGCONT)
    row.ends(attempt.wait(), code=2, says=r"\.tar")
    aside.rename(own_shards / "train")
    row.recovers(case, baseline, reached=0, besides=["corrupt_samples.jsonl"])


def test_a_store_that_answers_with_errors(
    shards: Path, tmp_path: Path, new_case: NewCase, undisturbed: Undisturbed, row: Row
) -> None:
    row.is_about("HTTP store answers 503, breaks off, sends garbage", STORE)
    baseline = undisturbed()
    files = {f"/{path.relative_to(shards)}": path.read_bytes() for path in shards.rglob("*") if path.is_file()}
    tars = sorted(name for name in files if name.endswith(".tar"))
    faults = {name: deque(fault) for name, fault in zip(tars, (["503"], ["cut:9000"], ["garbage"]), strict=False)}
    faults |= {f"/{split}/manifest.json": deque(["503"]) for split in ("train", "val")}
    with serve(FaultServer(files=files, faults=faults)) as told:
        content = recipe(shards, {"data.cache.folder": str(tmp_path / "cache")})
        for use, split in (("train", "train"), ("eval", "val")):
            content["stages"]["pretrain"][use] = f"{told.url}/{split}"
        case = new_case(content=content)
        row.ends(case.start().wait(), code=0)
    assert not any(faults.values())  # all have been met
    row.is_unharmed(case, baseline)
    assert not list((tmp_path / "cache").rglob("*.part"))


def test_a_tracking_server_that_never_answers(case: Case, undisturbed: Undisturbed, row: Row) -> None:
    row.is_about("tracking server silent, kill -9, then one that works", TRACKER)
    baseline, database = undisturbed(), case.folder / "mlflow.db"
    with silent_server() as address:
        silent = {"MLFLOW_TRACKING_URI": f"http://{address}"}
        fault = case.fault("kill_all", "between_steps", rank=0, step=KILLED_AT)
        row.ends(case.start(faults=[fault], environment=silent).wait(), code=-9)
    continued = case.start(environment={"MLFLOW_TRACKING_URI": f"sqlite:///{database}"}).wait()
    row.recovers(case, baseline, continued, reached=KILLED_AT, besides=["mlflow"])
    points = {(row.step, name) for row in read_metrics(case.stage / "metrics.jsonl") for name in row.metrics}
    with sqlite3.connect(database) as connection:
        sent = set(connection.execute("SELECT step, key FROM metrics WHERE key != 'images_seen'"))
    connection.close()
    assert points <= sent


def test_gradients_are_not_finite_for_a_few_steps(tmp_path: Path, shards: Path, new_case: NewCase, row: Row) -> None:
    row.is_about("NaN in rank 1's gradients at steps 20 to 22, and kill -9 later", NAN)
    baseline, case = new_case("baseline"), new_case()
    nan = case.fault("nan", "backward", rank=1, step=20, last_step=22, once=None)
    row.ends(baseline.start(faults=[nan]).wait(), code=0)
    assert max(skipped(baseline)) == 3
    kill = case.fault("kill_all", "between_steps", rank=0, step=22)
    assert case.start(faults=[nan, kill]).wait().code == -9
    row.recovers(case, baseline, case.start(faults=[nan]).wait(), reached=22)
    assert max(skipped(case)) == 3


def test_gradients_are_not_finite_for_ever(new_case: NewCase, undisturbed: Undisturbed, row: Row) -> None:
    row.is_about("NaN in rank 1's gradients for ever, ZeRO 0 in fp32", NAN)
    # The one mode in which DeepSpeed does not look at its gradients.
    changes = {"engine.max_skipped_steps": 5, "engine.zero_stage": 0, "engine.precision": "fp32"}
    baseline, case = undisturbed(changes=changes), new_case(changes=changes)
    nan = case.fault("nan", "backward", rank=1, step=22, last_step=10_000, once=None)
    row.ends(case.start(faults=[nan]).wait(), code=1, says="5 steps in a row had gradients that are not finite")
    row.recovers(case, baseline, reached=22)


def skipped(case: Case) -> set[float]:
    """The counts of skipped steps in the curve."""
    return {values["opt/skipped_steps"] for _, values in case.curve() if "opt/skipped_steps" in values}


@contextmanager
def silent_server() -> Iterator[str]:
    """Takes connections and never answers; its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken: list[socket.socket] = []

        def take() -> None:
            while True:
                try:
                    taken.append(server.accept()[0])
                except OSError:
                    return

        threading.Thread(target=take, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        for each in taken:
            each.close()
