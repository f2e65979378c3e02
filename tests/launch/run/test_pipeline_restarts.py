"""A stage that failed is started again, as long as that may help and the user allows it."""

import signal
from types import SimpleNamespace

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.launch.local.start import Launch
from shardvit.launch.run import pipeline_run
from shardvit.launch.run.lock import locked
from shardvit.pipeline.recipe.vocabulary import EXIT_STOPPED
from tests.launch.machine import Machine


class Failing:
    """A stage that ends as told at each start, the last ending for ever; each entry is (exit code, step saved)."""

    def __init__(self, machine: Machine, *endings: tuple[int, int]) -> None:
        self._machine, self._endings = machine, list(endings)

    def __call__(self, launch: Launch) -> int:
        code, saved = self._endings.pop(0) if len(self._endings) > 1 else self._endings[0]
        done = code == 0
        self._machine.folder.update(launch.stage, state="done" if done else "running", last_saved_step=saved)
        return code


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    asked: list[float] = []
    monkeypatch.setattr(pipeline_run, "time", SimpleNamespace(sleep=asked.append))  # other threads sleep, too
    return asked


def test_a_failed_stage_is_started_again_from_where_it_saved(
    machine: Machine, capsys: pytest.CaptureFixture[str], pauses: list[float]
):
    machine.outcome = Failing(machine, (247, 0), (1, 1400), (1, 2000), (0, 3000))
    assert machine.open().execute(max_restarts=3) == 0
    assert machine.started == ["pretrain"] * 4 + ["swap_head", "finetune"] and len(pauses) == 3
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 3
    assert error[0].startswith("shardvit: pretrain is not finished (a process was killed by signal 9")
    assert "restart 1 of 3 from its beginning in" in error[0]
    assert "(exit code 1): restart 2 of 3 from step 1,400 in" in error[1]
    assert "restart 3 of 3 from step 2,000 in" in error[2]


def test_restarts_are_counted_over_all_stages_and_end(
    machine: Machine, capsys: pytest.CaptureFixture[str], pauses: list[float]
):
    machine.outcome = Failing(machine, (1, 10), (0, 20), (1, 0), (0, 0), (1, 5), (1, 6))
    assert machine.open().execute(max_restarts=2) == 1
    assert machine.started == ["pretrain", "pretrain", "swap_head", "swap_head", "finetune"] and len(pauses) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "finetune is not finished" in last and "all 2 restarts are used up" in last and "step 5" in last


def test_restarts_that_do_not_help_end_early(machine: Machine, capsys: pytest.CaptureFixture[str], pauses: list[float]):
    machine.outcome = Failing(machine, (1, 400))
    assert machine.open().execute(max_restarts=50) == 1
    assert len(machine.started) == 3  # the first start, and two restarts that failed at the same place
    assert "2 restarts in a row saved no later step" in capsys.readouterr().err
    machine.started.clear()
    machine.outcome = Failing(machine, (1, 400), (1, 400), (1, 800), (1, 800), (1, 800))
    assert machine.open().execute(max_restarts=50) == 1
    assert len(machine.started) == 5  # progress begins the count again


@pytest.mark.parametrize("code", [2, EXIT_STOPPED])
def test_what_is_no_failure_is_not_started_again(machine: Machine, pauses: list[float], code: int):
    machine.outcome = Failing(machine, (code, 10))
    assert machine.open().execute(max_restarts=5) == code
    assert machine.started == ["pretrain"] and pauses == []


@pytest.mark.parametrize(
    ("kills", "said"),
    [
        ((3, 4), "(the kernel killed a process because memory ran out)"),
        ((3, 3), "(a process was killed by signal 9)"),
        ((None, None), "which is what the kernel does when memory runs out)"),
    ],
)
def test_memory_is_blamed_if_the_kernel_killed_for_it_while_the_stage_ran(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kills: tuple[int | None, int | None],
    said: str,
):
    counts = iter(kills)
    monkeypatch.setattr(pipeline_run, "memory_kills", lambda: next(counts))
    machine.outcome = Failing(machine, (247, 10))
    assert machine.open().execute() == 1
    assert said in capsys.readouterr().err


def test_nothing_is_started_again_unasked(machine: Machine, capsys: pytest.CaptureFixture[str], pauses: list[float]):
    machine.outcome = Failing(machine, (1, 10))
    assert machine.open().execute() == 1
    assert machine.started == ["pretrain"] and pauses == [] and "restart" not in capsys.readouterr().err
    with pytest.raises(UserError, match="--max-restarts: it is -1"):
        machine.open().execute(max_restarts=-1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_in_the_pause_ends_it(number: signal.Signals, machine: Machine, monkeypatch: pytest.MonkeyPatch):
    def interrupted(seconds: float) -> None:
        signal.raise_signal(number)

    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)]

    monkeypatch.setattr(pipeline_run, "time", SimpleNamespace(sleep=interrupted))
    machine.outcome = Failing(machine, (1, 10))
    with pytest.raises(KeyboardInterrupt):
        machine.open().execute(max_restarts=5)
    assert machine.started == ["pretrain"]
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)] == handlers
    with locked(machine.folder.path / ".run.lock", what="it"):
        pass


def test_an_interrupted_restart_goes_on_without_that_flag(machine: Machine, capsys: pytest.CaptureFixture[str]):
    """With it, it would begin again."""
    machine.outcome = Failing(machine, (1, 400))
    assert machine.open(restart="pretrain").execute() == 1
    assert "the same command without --restart resumes from step 400" in capsys.readouterr().err
    machine.outcome = None
    assert machine.open().execute() == 0
