"""Real training over two hosts: the losses of two processes on one, stops, a cut cable, restarts, and nothing left."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.hosts.conftest import run_on, start_on
from tests.cluster.hosts.two_hosts import TwoHosts
from tests.faults.harness import MARK, Attempt, Case, recipe
from tests.faults.rows import Row
from tests.traps import ROOMS, lay_traps

NewCase = Callable[..., Case]
STEP = 26  # in which something happens
HANG_SECONDS = 15
# Found by both sides: by the ranks after HANG_SECONDS, by ssh after 30 s; then what is left is given up, in 45 s.
CUT_SECONDS = 120.0
ACCELERATE = {"engine": {"backend": "accelerate", "precision": "fp32", "max_micro_batch_size": 8}}
NEEDS_PDSH = pytest.mark.skipif(shutil.which("pdsh") is None, reason="needs pdsh (package pdsh)")

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def one_host(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Callable[..., Case]:
    """`one_host({...})`: the run of two processes on one host; each is done once."""
    done: dict[str, Case] = {}

    def make(changes: dict[str, Any] | None = None) -> Case:
        key = repr(sorted((changes or {}).items()))
        if key not in done:
            content = recipe(shards, changes)
            done[key] = Case(tmp_path_factory.mktemp("one-host") / "case", shards, content=content)
            ended = done[key].start().wait()
            assert ended.code == 0, ended.output
        return done[key]

    return make


def in_the_middle(hosts: TwoHosts, case: Case, *arguments: str) -> Attempt:
    """An attempt whose rank 0 sleeps a few seconds after step 26."""
    pause = case.fault("sleep", "between_steps", rank=0, step=STEP, seconds=4)
    attempt = run_on(hosts, case, *arguments, faults=[pause])
    attempt.wait_for_fault(pause)
    return attempt


def shardvit_run(case: Case) -> psutil.Process:
    """The process of the command, on alpha."""
    return next(
        process for process in case.processes() if process.cmdline()[1:4] == ["-m", "shardvit.launch.cli", "run"]
    )


def is_like(case: Case, baseline: Case, *, besides: tuple[str, ...] = ()) -> None:
    """Losses, results and weights to the last bit; nothing is left on either host."""
    row = Row(name=case.folder.name)
    row.equals(case, baseline)
    row.leaves_nothing(case, baseline, besides=besides)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"engine.zero_stage": 1}, id="ZeRO 1"),
        pytest.param({"engine.zero_stage": 3}, id="ZeRO 3", marks=pytest.mark.slow),
        pytest.param(ACCELERATE, id="accelerate", marks=pytest.mark.slow),
    ],
)
def test_two_hosts_end_with_the_losses_of_two_processes_on_one(
    changes: dict[str, Any],
    shards: Path,
    hosts: TwoHosts,
    new_case: NewCase,
    one_host: Callable[..., Case],
):
    case = new_case(content=recipe(shards, changes))
    sprung = lay_traps(case.folder)
    ended = run_on(hosts, case).wait()
    assert (ended.code, sprung()) == (0, []), ended.output
    assert ended.sentence("^beta .*ready$") and ended.sentence("pretrain: done, held-out top-1")
    is_like(case, one_host(changes))


@pytest.mark.slow
@NEEDS_PDSH
def test_deepspeed_by_hand_does_the_same(hosts: TwoHosts, case: Case, one_host: Callable[..., Case]):
    """`deepspeed --hostfile`, without `shardvit run`: its `.deepspeed_env`, its `--local_rank`, its port."""
    # gloo takes the interface that the host's name leads to; and a name of ours marks the processes for this test.
    lines = ["OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=veth0", f"{MARK}={case.mark}"]
    (case.folder / ".deepspeed_env").write_text("\n".join(lines) + "\n")
    sprung = lay_traps(case.folder, names=ROOMS)
    deepspeed = ("-m", "deepspeed.launcher.runner", "--hostfile", "hostfile", "--module", "shardvit.launch.train")
    ended = start_on(hosts, case, *deepspeed, "recipe.yaml", "--stage", "pretrain").wait()
    assert (ended.code, sprung()) == (0, []), ended.output
    is_like(case, one_host())


@pytest.mark.slow
def test_sigterm_saves_on_both_and_the_same_command_goes_on(hosts: TwoHosts, case: Case, one_host: Callable[..., Case]):
    attempt = in_the_middle(hosts, case)
    assert {process.environ()["OMP_NUM_THREADS"] for process in attempt.ranks()} == {"1"}  # of .deepspeed_env
    assert len(attempt.ranks()) == 2
    shardvit_run(case).send_signal(signal.SIGTERM)
    ended = attempt.wait()
    assert ended.code == 75 and ended.sentence("the same command resumes from step"), ended.output
    stopped = case.saved()[-1]
    assert STEP < stopped <= STEP + 2
    Row(name="stopped").leaves_nothing(case)
    Row(name="continued").loses(run_on(hosts, case).wait(), reached=stopped, at_most=0)
    is_like(case, one_host())


@pytest.mark.slow
def test_a_cut_cable_ends_the_run_with_a_clear_error_and_it_goes_on_afterwards(
    hosts: TwoHosts, new_case: NewCase, one_host: Callable[..., Case]
):
    case = new_case(changes={"engine.hang_seconds": HANG_SECONDS})
    attempt = in_the_middle(hosts, case)
    hosts.cut()
    ended = attempt.wait(CUT_SECONDS)
    assert ended.code == 1, ended.output
    assert ended.sentence(r"rank \d .*hangs") and ended.sentence("the connection to beta was lost")
    Row(name="cut").leaves_nothing(case)
    hosts.mend()
    Row(name="mended").loses(run_on(hosts, case, "engine.hang_seconds=900").wait(), reached=STEP)
    is_like(case, one_host(), besides=("ranks/stack-rank-",))


@pytest.mark.slow
def test_a_rank_that_is_killed_on_the_other_host_is_started_again_with_max_restarts(
    hosts: TwoHosts, case: Case, one_host: Callable[..., Case]
):
    fault = case.fault("kill", "backward", rank=1, step=STEP)
    ended = run_on(hosts, case, "--max-restarts", "1", faults=[fault]).wait()
    assert ended.code == 0 and ended.sentence("a process was killed by signal 9.*restart 1 of 1"), ended.output
    is_like(case, one_host())


@pytest.mark.slow
def test_a_host_that_dies_ends_the_run_and_it_goes_on_when_the_host_is_back(
    hosts: TwoHosts, case: Case, one_host: Callable[..., Case]
):
    attempt = in_the_middle(hosts, case)
    hosts.die("beta")
    ended = attempt.wait(CUT_SECONDS)
    assert ended.code == 1 and ended.sentence("the connection to beta was lost"), ended.output
    Row(name="died").leaves_nothing(case)
    hosts.boot("beta")
    Row(name="back").loses(run_on(hosts, case).wait(), reached=STEP)
    is_like(case, one_host(), besides=("ranks/stack-rank-",))


@pytest.mark.slow
def test_when_shardvit_run_is_killed_the_ranks_of_both_hosts_save(
    hosts: TwoHosts, case: Case, one_host: Callable[..., Case]
):
    attempt = in_the_middle(hosts, case)
    shardvit_run(case).kill()
    attempt.process.wait()
    Row(name="killed").leaves_nothing(case, besides=(".hosts-",))
    assert STEP < case.saved()[-1] <= STEP + 2
    stopped = case.saved()[-1]
    Row(name="continued").loses(run_on(hosts, case).wait(), reached=stopped, at_most=0)
    is_like(case, one_host())
