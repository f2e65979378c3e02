"""What a stage writes in place: in a hard-linked copy (`cp -rl`) it is the copy's own, and the original stays."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shardvit.data_shards.loading.batch import Fault
from shardvit.launch.draw_and_send import DrawAndSend
from shardvit.pipeline.ranks.dead_ranks import tell_all_hosts
from shardvit.pipeline.ranks.heartbeat import Heartbeat, write_heartbeat
from shardvit.pipeline.ranks.stacks import StackDumps, stack_file
from shardvit.pipeline.runs.logs import EventsLog, MetricsLog
from shardvit.pipeline.runs.run_folder import RunFolder
from tests.pipeline.stage.test_damage import batch_with, ledger, settle_alone

BEAT = Heartbeat(0, "1", "here", "x", 1, 0.0, 1, 1, 400, 1, "", 0.0, waiting=False, state="failed")


def metrics(stage: Path) -> None:
    with MetricsLog(stage / "metrics.jsonl", resume_step=0) as log:
        log.append(step=1, images_seen=1, metrics={})


def events(stage: Path) -> None:
    with EventsLog(stage / "events.jsonl", say=pytest.fail) as log:
        log.append("note", "new", step=1, images_seen=1)


def stacks(stage: Path) -> None:
    dumps = StackDumps(stack_file(stage / "ranks", 0))
    dumps.open()
    dumps.dump()
    dumps.close()


def faults(stage: Path) -> None:
    account = ledger(stage)
    account.note(batch_with(Fault("s.tar", "new", "broken")), use="train", rows=4)
    settle_alone(account)


def pictures(stage: Path) -> None:
    folder = RunFolder(stage.parents[1], stage.parent.name)
    with DrawAndSend(folder, environ=dict(os.environ), pictures="draw", say=print) as beside:
        beside.ask("masked_patch", "begin", 0)
        beside.close(patience_seconds=300)


WRITERS: dict[str, Callable[[Path], None]] = {
    "metrics.jsonl": metrics,
    "events.jsonl": events,
    "ranks/rank-0.json": lambda stage: write_heartbeat(stage / "ranks", BEAT),
    "ranks/news.json": lambda stage: tell_all_hosts(stage / "ranks", BEAT),
    "ranks/stack-rank-0.txt": stacks,
    "corrupt_samples.jsonl": faults,
    "../pictures.log": pictures,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_hard_linked_copy_is_written_to_and_the_original_is_not(tmp_path: Path, name: str) -> None:
    stage = tmp_path / "runs/law/pretrain"
    (stage / "ranks").mkdir(parents=True)
    original, file = tmp_path / "original", stage / name
    original.write_text('{"step": 0, "images_seen": 0, "time": 0.0, "metrics": {}}\n')
    before = original.read_bytes(), original.stat().st_mtime_ns
    os.link(original, file)
    WRITERS[name](stage)
    assert (original.read_bytes(), original.stat().st_mtime_ns) == before
    assert file.read_bytes() != before[0] and file.stat().st_nlink == 1
