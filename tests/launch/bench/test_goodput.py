"""Goodput: the formula against simulated failures, the split of a run's time against one whose times are known."""

import json
import random
from collections import Counter
from pathlib import Path
from statistics import fmean, stdev

import pytest
from scipy.optimize import minimize_scalar

from shardvit.launch.bench.goodput import Assumed, changes, forecast, report, restart, setup
from shardvit.launch.bench.goodput_model import Saves, first_order, goodput, most_restart_seconds, youngs_interval
from shardvit.launch.bench.goodput_runs import FailureCosts, Range, measure
from shardvit.launch.bench.goodput_spent import CATEGORIES, spent
from shardvit.launch.run.restarts import PAUSE_SECONDS
from shardvit.pipeline.runs.read import read_run, run_folder_at

HOUR = 3600.0
TOTAL_STEPS, EVALUATION_STEPS = 600, 30
EVALUATION_SECONDS, SAVE_SECONDS = 0.7, 0.2
MEASURED = FailureCosts(
    failures=3,
    noticing=Range(0.1, 0.2),
    ending=Range(6.5, 7.0),
    start=Range(5.5, 8.0),
    imports=Range(4.0, 6.0),
    start_cpu=Range(4.0, 5.0),
    stall=Range(0.03, 0.05),
    building={"L": 3.0, "H": 6.0},
    writing=5.0,
    writing_cpu=4.0,
)
CASES = {  # saves, restart, between failures
    "cheap": (Saves(interval=60, stall=0.1, commit=8), 60.0, HOUR),
    "blocking": (Saves(interval=600, stall=40, commit=40), 300.0, HOUR),
    "committed late": (Saves(interval=300, stall=1, commit=290), 30.0, HOUR),
    "hopeless": (Saves(interval=3000, stall=100, commit=1000), 1500.0, HOUR),
}


def simulated(saves: Saves, *, restart_seconds: float, failure_seconds: float, failures: int, seed: int) -> float:
    """Share of the time that trained, from one event to the next: failures strike a clock that knows no restarts."""
    draw = random.Random(seed)
    now, failure = 0.0, draw.expovariate(1 / failure_seconds)
    trained = kept = 0.0  # seconds of steps: so far, and safe
    struck = 0
    while struck < failures:
        events = [(now + restart_seconds, "restarted")]
        pending = list[tuple[float, float]]()  # when a save counts, and what it holds
        while True:
            time, what = events.pop(0)
            while pending and pending[0][0] <= min(time, failure):
                kept = pending.pop(0)[1]
            if time > failure:
                break
            now = time
            if what == "due":
                trained += saves.interval
                pending.append((now + saves.commit, trained))
                events.append((now + saves.stall, "goes on"))
            else:
                events.append((now + saves.interval, "due"))
        now, struck = failure, struck + 1
        failure, trained = now + draw.expovariate(1 / failure_seconds), kept
    return kept / now


@pytest.mark.parametrize("case", CASES)
def test_the_formula_is_what_simulated_failures_cost(case: str):
    saves, restart_seconds, failure_seconds = CASES[case]
    times = {"restart_seconds": restart_seconds, "failure_seconds": failure_seconds}
    shares = [simulated(saves, **times, failures=1000, seed=seed) for seed in range(20)]
    error = stdev(shares) / len(shares) ** 0.5
    assert error < 0.005
    assert abs(goodput(saves, **times) - fmean(shares)) < 4 * error


def test_for_small_costs_it_is_the_sum_of_the_losses_and_a_second_of_each_costs_its_share_of_the_hour():
    saves = Saves(interval=20, stall=0.02, commit=2)
    times = {"restart_seconds": 30.0, "failure_seconds": HOUR}
    share = goodput(saves, **times)
    assert share == pytest.approx(first_order(saves, **times), abs=2e-4)
    for later in (
        goodput(saves, restart_seconds=31.0, failure_seconds=HOUR),
        goodput(Saves(interval=20, stall=0.02, commit=3), **times),
        goodput(Saves(interval=22, stall=0.022, commit=2), **times),
    ):
        assert share - later == pytest.approx(1 / HOUR, rel=0.03)


@pytest.mark.parametrize("stall", [0.01, 0.5, 5.0])
def test_youngs_interval_is_as_good_as_the_best(stall: float):
    def lost(interval: float) -> float:
        saves = Saves(interval=interval, stall=stall, commit=0)
        return -goodput(saves, restart_seconds=60, failure_seconds=HOUR)

    best = minimize_scalar(lost, bounds=(0.1, HOUR), method="bounded", options={"xatol": 1e-3})
    assert -lost(youngs_interval(stall=stall, failure_seconds=HOUR)) > -best.fun - 1e-4


def test_the_longest_restart_that_meets_a_goal_meets_it():
    saves = Saves(interval=60, stall=0.1, commit=8)
    most = most_restart_seconds(saves, goal=0.97, failure_seconds=HOUR)
    assert most > 0
    assert goodput(saves, restart_seconds=most, failure_seconds=HOUR) == pytest.approx(0.97, abs=1e-12)


def test_a_save_that_outlasts_the_interval_is_refused_by_the_model_and_stalls_in_the_forecast():
    with pytest.raises(ValueError, match="waits"):
        Saves(interval=10, stall=0, commit=11)
    slow = Assumed(client_gb=0.01)
    at = setup("H", ranks=64, gpu="h100")
    costs = forecast(at, MEASURED, slow, interval=30).saves
    assert costs.interval + costs.stall == pytest.approx(costs.commit)


def test_each_assumption_moves_the_goodput_the_way_it_should():
    setups = [setup(model, ranks=ranks, gpu="h100") for model in ("L", "H") for ranks in (64, 1024)]
    assert forecast(setups[0], MEASURED, Assumed()).goodput > forecast(setups[-1], MEASURED, Assumed()).goodput
    assert all(sum(restart(at, MEASURED, Assumed()).values()) > PAUSE_SECONDS for at in setups)
    base, *others = (
        forecast(setups[-1], MEASURED, own, failure_seconds=seconds).goodput
        for own, seconds in changes(Assumed()).values()
    )
    better = [what for what, share in zip([*changes(Assumed())][1:], others, strict=True) if share > base]
    assert better == [what for what, (_, seconds) in changes(Assumed()).items() if seconds > HOUR]
    text = "\n".join(report(setups, MEASURED, Assumed()))
    assert f"{base:.2%}" in text
    assert "MISSED" not in text
    assert "MISSED" in "\n".join(report(setups, MEASURED, Assumed(queue_seconds=121.0)))


def written(folder: Path, *, seed: int) -> Counter[str]:
    """Write a run's records as they are after several attempts; returns the seconds spent, repeated ones as steps,
    evaluations and saves."""
    draw = random.Random(seed)
    step_seconds, batch, log_steps, save_steps, total = 0.05, 32, 20, 50, TOTAL_STEPS
    truth, now, events, rows = Counter[str](), 1_800_000_000.0, list[dict[str, object]](), list[dict[str, object]]()
    step = logged = 0

    def event(kind: str, text: str = "") -> None:
        events.append({"time": now, "step": step, "images_seen": step * batch, "kind": kind, "text": text})

    while step < total:
        began, restoring = draw.uniform(3, 9), 0.5 if step else 0.0
        truth["start"] += began + 0.4
        truth["restoring"] += restoring
        now += began + restoring
        again = logged - step
        rows = [row for row in rows if int(str(row["step"])) <= step]
        event("start", f"from step {step:,}, 2 processes on 1 host" + (f"; repeats {again} steps" if again else ""))
        opened, first, stalled, last_logged = now, step, 0.0, step
        now += 0.4
        parts = f"importing libraries {began:.1f}" + (f", restoring a checkpoint {restoring}" if restoring else "")
        event("note", f"pretrain: first step after {began + restoring + 0.4:.9f} s (3.0 s of CPU): {parts}")
        until = draw.randrange(first + 60, first + 200)
        how = draw.choice(("killed", "stopped"))
        done = dict[int, float]()  # seconds of steps, by step
        while step < total and not (step >= until and (how == "stopped" or step == logged)):
            step += 1
            now += step_seconds
            done[step] = step_seconds
            if step % log_steps == 0:
                seconds = (step - last_logged) * step_seconds
                metrics = {
                    "perf/images_per_s": (step - last_logged) * batch / seconds,
                    "perf/save_stall_frac": stalled / (now - opened),
                }
                rows.append({"step": step, "images_seen": step * batch, "time": now, "metrics": metrics})
                logged = last_logged = step
            if step % EVALUATION_STEPS == 0 and step < total:
                now += EVALUATION_SECONDS
                truth["evaluation"] += EVALUATION_SECONDS
                rows.append({"step": step, "images_seen": step * batch, "time": now, "metrics": {"val/loss": 1.0}})
                event("evaluation")
            if step % save_steps == 0:
                now += SAVE_SECONDS
                stalled += SAVE_SECONDS
                truth["saving"] += SAVE_SECONDS
                event("checkpoint")
        if step == total:
            truth["useful"] += sum(done.values())
            break
        saved = step if how == "stopped" else step // save_steps * save_steps
        truth["useful"] += sum(seconds for at, seconds in done.items() if at <= saved)
        truth["repeated"] += sum(seconds for at, seconds in done.items() if at > saved)
        if how == "stopped":
            now += 0.3
            truth["saving"] += 0.3
            event("stopped", "by SIGTERM, after saving")
            logged = step
        step = saved
        away = draw.uniform(5, 12)
        truth["waiting"] += away
        now += away
    now += 1.5
    truth["ending"] += 1.5
    event("done")
    stage = folder / "pretrain"
    stage.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("")
    for name, lines in (("events.jsonl", events), ("metrics.jsonl", rows)):
        (stage / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return truth


@pytest.mark.parametrize("seed", range(6))
def test_a_runs_time_is_split_as_it_was_spent(tmp_path: Path, seed: int):
    truth = written(tmp_path / "run", seed=seed)
    found = spent(read_run(run_folder_at(tmp_path / "run")))
    assert found.attempts > 2
    assert found.wall_seconds == pytest.approx(sum(truth.values()), abs=1e-3)
    exact = ("useful", "start", "restoring")
    assert [found.seconds[name] for name in exact] == pytest.approx([truth[name] for name in exact], abs=1e-3)
    kept = EVALUATION_SECONDS * (TOTAL_STEPS // EVALUATION_STEPS - 1)  # the others are repeated work
    assert found.seconds["evaluation"] == pytest.approx(kept, abs=SAVE_SECONDS)
    assert truth["repeated"] - 1e-3 <= found.seconds["repeated"]
    # What a killed attempt did after its last record.
    unseen = (EVALUATION_SECONDS + SAVE_SECONDS) * found.attempts
    assert 0 <= found.seconds["waiting"] - truth["waiting"] + 1e-3 <= unseen


def test_time_before_the_first_process_and_after_the_last_event_belongs_to_the_run(tmp_path: Path):
    truth = written(tmp_path / "run", seed=0)
    run = read_run(run_folder_at(tmp_path / "run"))
    begun, last = 1_800_000_000.0, run.stages[0].events[-1].time
    more, less = spent(run, started=begun - 7, ended=last + 3), spent(run)
    gained = {name: more.seconds[name] - less.seconds[name] for name in CATEGORIES}
    assert {name: seconds for name, seconds in gained.items() if seconds > 1e-3} == pytest.approx(
        {"waiting": 7.0, "ending": 3.0}, abs=1e-3
    )
    assert more.wall_seconds == pytest.approx(sum(truth.values()) + 10, abs=1e-3)


@pytest.mark.slow  # a real run, with kills
def test_what_a_real_kill_costs_is_in_the_records():
    found = measure(failures=2)
    assert found.failures == 2
    assert found.noticing.least >= 0
    assert found.ending.least >= PAUSE_SECONDS
    assert 0 < found.imports.least < found.start.least
    assert found.start_cpu.least > 0 and found.stall.least > 0
    assert 0 < found.building["L"] < found.building["H"]
    assert found.writing_cpu > 0
