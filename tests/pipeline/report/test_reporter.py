"""What a stage tells of itself: shares of its time, spikes and evaluations; by a clock that the test sets."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.checkpoint.train_state import RollBack, TrainState, Trouble
from shardvit.pipeline.ranks import phases
from shardvit.pipeline.ranks.phases import Phases
from shardvit.pipeline.ranks.place import Place
from shardvit.pipeline.ranks.stopping import Stopped
from shardvit.pipeline.report import reporter
from shardvit.pipeline.report.losses import Spike
from shardvit.pipeline.report.reporter import Report, attempt_events
from shardvit.pipeline.runs.logs import EventsLog, read_events
from shardvit.pipeline.runs.run_folder import RunFolder


class Notebook:
    """A log and a progress display that keep everything."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.shown: list[float] = []
        self.notes: list[str] = []

    def append(self, *, step: int, images_seen: int, metrics: dict[str, float]) -> None:
        self.rows.append((step, metrics))

    def update(self, step: int, *, images_per_second: float, waits: str, **more: float) -> None:
        self.shown.append(images_per_second)
        self.waits = waits

    def note(self, text: str) -> None:
        self.notes.append(text)

    def close(self) -> None:
        """Nothing waits."""


def report_to(
    kept: Any, *, training_seconds: float = 0.0, events: EventsLog | None = None, gauges: Any = None
) -> Report:
    watch: Any = SimpleNamespace(progress=lambda step, *, status: None)
    parts = Phases(watch=watch, device=torch.device("cpu"), factor=2.0, least_seconds=1.0)
    plan: Any = SimpleNamespace(samples_per_epoch=128, global_batch_images=64)
    return Report(kept, kept, events, gauges, phases=parts, plan=plan, earlier_seconds=training_seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)  # stands where it is put
    for module in (reporter, phases):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def point(one: Report, step: int, *, stall_seconds: float = 0.0, ratio: float | None = None) -> None:
    state = TrainState(step=step, images_seen=64 * step, skipped_steps=2, substituted_images=3)
    one.curve(state, loss=0.5, more={}, lr=0.1, grad_norm=1.0, slowest_rank_ratio=ratio, stall_seconds=stall_seconds)


def test_the_share_of_the_time_lost_to_checkpoints_is_that_of_this_attempt_so_far(clock: SimpleNamespace) -> None:
    kept = Notebook()
    one = report_to(kept, training_seconds=1000.0)
    for now, stall_seconds in ((110.0, 0.5), (150.0, 5.0)):
        clock.now = now
        point(one, 1, stall_seconds=stall_seconds)
    assert [values["perf/save_stall_frac"] for _, values in kept.rows] == [0.05, 0.1]
    assert (one.attempt_seconds, one.training_seconds) == (50.0, 1050.0)


def test_a_window_counts_its_own_images_and_waiting_and_leaves_out_what_is_aside(clock: SimpleNamespace) -> None:
    kept = Notebook()
    one = report_to(kept)
    for step in (1, 2):
        with one.phases("reading", step=step):
            clock.now += 2.0
        clock.now += 6.0
        one.step(64)
        with one.phases("evaluating", step=step):
            clock.now += 30.0
        point(one, step)
    assert [values["perf/images_per_s"] for _, values in kept.rows] == [8.0, 8.0]
    assert [values["perf/data_wait_frac"] for _, values in kept.rows] == [0.25, 0.25]
    assert [values["train/epoch"] for _, values in kept.rows] == [0.5, 1.0]
    assert kept.shown == [8.0, 8.0]


@pytest.mark.parametrize("threads", [1, 4])
def test_threads_that_wait_for_a_core_are_named_once_and_in_each_line(
    clock: SimpleNamespace, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter.torch, "get_num_threads", lambda: threads)
    kept, waiting = Notebook(), iter((0.1, 0.6, 0.4, 0.2))
    gauges: Any = SimpleNamespace(
        read=lambda *, step, images_per_second: {"perf/core_wait_frac": next(waiting)},
        step_done=lambda *, aside_seconds: None,
    )
    one, lines = report_to(kept, gauges=gauges), list[str]()
    for step in range(1, 5):
        point(one, step)
        lines.append(kept.waits)
    assert [row["perf/core_wait_frac"] for _, row in kept.rows] == [0.1, 0.6, 0.4, 0.2]
    if threads == 1:  # could not be fewer
        assert kept.notes == [] and not any("core wait" in line for line in lines)
    else:
        (note,) = kept.notes
        assert "OMP_NUM_THREADS" in note and "60%" in note
        assert ["core wait" in line for line in lines] == [False, True, True, False]


def test_counters_of_the_state_and_the_slowest_rank_are_on_record(clock: SimpleNamespace) -> None:
    kept = Notebook()
    one = report_to(kept)
    point(one, 1)
    point(one, 2, ratio=2.5)
    assert "perf/slowest_rank_ratio" not in kept.rows[0][1]
    step, values = kept.rows[1]
    wanted = {"opt/skipped_steps": 2.0, "data/substituted_images": 3.0, "perf/slowest_rank_ratio": 2.5}
    assert step == 2 and wanted.items() <= values.items()


def test_every_spike_is_a_line_on_the_screen() -> None:
    kept = Notebook()
    found = [Spike(step=step, loss=9.0, mean=1.0, sigma=0.5) for step in (3, 4)]
    report_to(kept).spikes(found)
    assert kept.notes == [spike.describe() for spike in found] and kept.notes[0].startswith("step 3: the loss jumps")


@pytest.mark.parametrize(("score", "words"), [("top1", "top-1 0.7500"), ("accuracy", "accuracy 0.7500")])
def test_an_evaluation_is_on_record_and_on_the_screen(score: str, words: str) -> None:
    kept = Notebook()
    values: dict[str, Any] = {"val/loss": 0.5, f"val/{score}": 0.75, "val/images": 1234.0}
    report_to(kept).evaluation(TrainState(step=7, evaluation=values))
    assert kept.rows == [(7, values)]
    assert kept.notes == [f"step 7: held-out loss 0.5000, {words} of 1,234 images"]


def test_beside_each_top1_stand_balanced_accuracy_and_the_share_of_the_commonest_class() -> None:
    kept = Notebook()
    values: dict[str, Any] = {"val/loss": 0.5, "val/images": 9.0, "val/commonest_class_share": 0.614}
    values |= {"val/top1": 0.6141, "val/balanced_accuracy": 0.5, "val_new/top1": 0.7, "val_new/balanced_accuracy": 0.51}
    values |= {"val/ema_loss": 0.25, "val/ema_top1": 0.8, "val/ema_balanced_accuracy": 0.52}
    report_to(kept).evaluation(TrainState(step=7, evaluation=values))
    (note,) = kept.notes
    assert "top-1 0.6141 (balanced accuracy 0.5000, commonest class 0.6140) of 9 images" in note
    assert "top-1 0.8000 (balanced accuracy 0.5200, commonest class 0.6140)" in note
    assert note.endswith("new: top-1 0.7000 (balanced accuracy 0.5100)")


def test_steps_that_were_skipped_are_told_as_ranges_at_the_next_point_and_at_the_end(
    clock: SimpleNamespace, tmp_path: Path
) -> None:
    with EventsLog(tmp_path / "events.jsonl") as events:
        kept = Notebook()
        one = report_to(kept, events=events)
        for step in (3, 5, 6, 7):
            one.skipped(step)
        assert read_events(events.path) == []
        point(one, 8)
        one.skipped(9)
        one.note("and more")
        one.close()
    found = [(each.kind, each.step, each.images_seen, each.text) for each in read_events(tmp_path / "events.jsonl")]
    assert [each[:3] for each in found] == [("skipped", 7, 7 * 64), ("note", 8, 8 * 64), ("skipped", 9, 9 * 64)]
    assert found[0][3].startswith("step 3, steps 5 to 7:") and found[2][3].startswith("step 9:")


class Ended(Exception):
    """Something that training does not know."""


@pytest.mark.parametrize("last_step", [0, 20, 21, 1030])
@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (None, "done", "40"),
        (Stopped(), "stopped", "SIGTERM"),
        (RollBack(Trouble(3, 4, "the loss jumps")), "rollback", "the loss jumps"),
        (UserError("a sentence"), "failed", "a sentence"),
        (Ended("oh"), "failed", "Ended: oh"),
        (KeyboardInterrupt(), "failed", "KeyboardInterrupt"),
    ],
)
def test_an_attempts_start_and_end_are_events_whatever_ends_it(
    tmp_path: Path, error: BaseException | None, kind: str, words: str, last_step: int
) -> None:
    folder = RunFolder(runs_root=tmp_path, name="r")
    folder.stage("pretrain").mkdir(parents=True)
    context: Any = SimpleNamespace(
        folder=folder,
        ranks=SimpleNamespace(place=Place(rank=0, world_size=8, local_rank=0, local_world_size=4)),
        job_tags={"shardvit.slurm_job_id": "77"},
        stop=SimpleNamespace(reason="SIGTERM"),
    )
    state = TrainState(step=20, images_seen=160)
    with (
        contextlib.suppress(Exception, KeyboardInterrupt),
        attempt_events(context, stage="pretrain", state=state, say=lambda text: None, last_step=last_step),
    ):
        state.step, state.images_seen = 40, 320
        if error is not None:
            raise error
    start, end = read_events(folder.stage("pretrain") / "events.jsonl")
    assert (start.kind, start.step) == ("start", 20) and "8 processes on 2 hosts, SLURM job 77" in start.text
    repeats = {0: "", 20: "", 21: "; repeats 1 step", 1030: "; repeats 1,010 steps"}
    assert start.text.endswith(f"SLURM job 77{repeats[last_step]}")
    assert (end.kind, end.step, end.images_seen) == (kind, 40, 320) and words in end.text
