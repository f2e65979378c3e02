"""One process: its limit of open files, its threads, its state between stages."""

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

from shardvit.pipeline.ranks.process import CoreWaits, ProcessState, needed_open_files, settle_threads

ROOT = Path(__file__).resolve().parents[3]
CHILD = """
import resource, sys
from shardvit.pipeline.ranks.process import allow_open_files
soft, hard, needed = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
said = allow_open_files(needed)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], said, sep="|")
"""


@pytest.mark.parametrize(
    ("soft", "hard", "needed", "after", "told"),
    [(256, 2000, 1500, 1500, []), (1000, 2000, 500, 1000, []), (256, 600, 1500, 600, ["1,500", "600", "data.workers"])],
)
def test_the_soft_limit_is_raised_as_far_as_needed_and_allowed(
    soft: int, hard: int, needed: int, after: int, told: list[str]
):
    command = [sys.executable, "-c", CHILD, *map(str, (soft, hard, needed))]
    limit, said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("|")
    assert int(limit) == after and bool(said.strip()) == bool(told)
    assert all(each in said for each in told)


def test_readers_and_peers_are_counted():
    assert needed_open_files(world_size=1, reading_threads=0) < 1024
    assert needed_open_files(world_size=1024, reading_threads=0) > 2 * 1024
    assert needed_open_files(world_size=8, reading_threads=16) > 16 * 256


@pytest.fixture(autouse=True)
def _threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("own", "cores", "asked", "threads", "advice"),
    [
        (8, 8.0, None, 8, ""),
        (8, 2.0, None, 2, ""),
        (8, 1.5, None, 1, ""),  # of two ranks on three cores
        (8, 0.5, None, 1, ""),
        (2, 8.0, None, 2, ""),  # torch leaves out the second threads of cores
        (8, 8.0, 4, 4, ""),
        (8, 2.0, 4, 4, "OMP_NUM_THREADS=2"),
        (8, 0.5, 4, 4, "OMP_NUM_THREADS=1"),
        (8, 0.5, 1, 1, ""),
    ],
)
def test_threads_are_as_many_as_asked_or_as_there_are_cores(
    own: int, cores: float, asked: int | None, threads: int, advice: str
) -> None:
    torch.set_num_threads(own)
    said = settle_threads(cores=cores, asked=asked)
    assert torch.get_num_threads() == threads
    assert advice in said and bool(said) == bool(advice)


def test_the_share_is_of_the_time_since_the_last_call(tmp_path: Path) -> None:
    def thread(number: int, *, ran: int, waited: int) -> None:
        (tmp_path / str(number)).mkdir(exist_ok=True)
        (tmp_path / str(number) / "schedstat").write_text(f"{ran} {waited} 7\n")

    thread(1, ran=1000, waited=9000)
    waits = CoreWaits(tmp_path)
    thread(1, ran=1300, waited=9000)
    thread(2, ran=300, waited=200)
    assert waits.share() == pytest.approx(200 / 800)
    assert waits.share() == 0
    (tmp_path / "2" / "schedstat").unlink()  # it has ended
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "schedstat").write_text("")
    assert waits.share() == 0
    assert CoreWaits(tmp_path / "nowhere").share() == 0


ON_ONE_CORE = """
import os, subprocess, sys, time
from shardvit.pipeline.ranks.process import CoreWaits

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
waits, end = CoreWaits(), time.process_time() + 0.5
while time.process_time() < end:
    pass
print(waits.share())
for other in others:
    other.kill()
    other.wait()
"""


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not say")
def test_who_shares_a_core_waits() -> None:
    """Of four that are busy on one core each runs a quarter of the time."""
    said = subprocess.run([sys.executable, "-c", ON_ONE_CORE], capture_output=True, text=True, check=True)
    assert 0.5 < float(said.stdout) < 1


@pytest.mark.parametrize(
    ("given", "spins"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "")]
)
def test_torch_s_threads_sleep_soon_unless_the_user_says_otherwise(given: dict[str, str], spins: str) -> None:
    """In torch's own words, which its library prints when it is loaded."""
    unset = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    ended = subprocess.run(
        [sys.executable, "-c", "import launch, os, torch; print(os.environ.get('GOMP_SPINCOUNT', ''))"],
        env={**unset, **given, "OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.strip() == spins
    if "GOMP_SPINCOUNT" in ended.stderr and spins:  # elsewhere torch has another library
        assert f"GOMP_SPINCOUNT = '{spins}'" in ended.stderr


def draw() -> tuple[list[float], float, float]:
    return torch.rand(3).tolist(), random.random(), float(numpy.random.rand())


def test_all_generators_return_to_where_they_were_and_again():
    fresh = ProcessState()
    first = draw()
    draw()
    torch.manual_seed(7)
    for _ in range(2):
        fresh.reset()
        assert draw() == first
