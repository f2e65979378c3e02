"""The processes that read ahead: deaf to a job's signals, ended with their rank, named when they die."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing import popen_forkserver
from pathlib import Path

import psutil
import pytest

from shardvit.data_shards.errors import WorkerDied
from shardvit.data_shards.loading import assemble
from shardvit.data_shards.loading.loader import TrainLoader
from shardvit.data_shards.shards.shard_set import ShardSet, ShardTable
from tests.data_shards.opened import wait_until
from tests.data_shards.streams import pack_noise, train_batches

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    return pack_noise(tmp_path_factory.mktemp("noise"), count=20, samples_per_shard=5)


class _Deadly:
    """The stream, but whoever comes to `fatal` is killed, as by the kernel or a decoder's crash."""

    def __init__(self, shards: ShardSet, *, fatal: int, number: signal.Signals) -> None:
        self._batches = train_batches(shards)
        self.order, self.layout, self.access = self._batches.order, self._batches.layout, self._batches.access
        self.seed, self._fatal, self._signal = self._batches.seed, fatal, number
        self.upcoming = self._batches.upcoming

    def __getitem__(self, number: int) -> object:
        batch = self._batches[number]
        if number == self._fatal:
            os.kill(os.getpid(), self._signal)
        return batch

    def describe(self, shard: int, *, row: int) -> str:
        return self._batches.describe(shard, row=row)


def test_a_dead_worker_is_named_with_the_sample_it_was_at(shards: ShardSet):
    deadly = _Deadly(shards, fatal=3, number=signal.SIGSEGV)
    loader = TrainLoader(deadly, stop_step=50, workers=2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(WorkerDied) as caught:
        list(loader)
    refs = deadly.order.rank_batch(3, rank=0, world_size=1)
    last = deadly.describe(int(refs.shard[-1]), row=int(refs.row[-1]))
    assert f"killed by signal 11 while reading sample {last}" in str(caught.value)
    assert str(caught.value).count("data worker") == 1


class _DeadlyInTheDecoder(_Deadly):
    """Killed while the images of batch `fatal` are decoded in one call."""

    def __getitem__(self, number: int) -> object:
        if number == self._fatal:
            assemble.decode_together = lambda parts: os.kill(os.getpid(), self._signal)  # in this worker alone
        return super().__getitem__(number)


def test_a_worker_that_dies_over_several_samples_is_named_with_them_all(shards: ShardSet):
    deadly = _DeadlyInTheDecoder(shards, fatal=3, number=signal.SIGSEGV)
    with pytest.raises(WorkerDied) as caught:
        list(TrainLoader(deadly, stop_step=50, workers=2))  # pyright: ignore[reportArgumentType]
    refs = deadly.order.rank_batch(3, rank=0, world_size=1)
    names = [deadly.describe(shard, row=row) for shard, row in zip(refs.shard.tolist(), refs.row.tolist(), strict=True)]
    assert len(names) > 1
    assert "killed by signal 11 while reading one of sample " + ", sample ".join(names) + ":" in str(caught.value)


class _DeadlyBehindABusyServer(_Deadly):
    """The fork server, which tells of the deaths, is at a standstill just then, and for a while.

    In `folder` is `begun` when the reader has its first batch, and `stopped` when the server is.
    """

    folder = Path()

    def __getitem__(self, number: int) -> object:
        if number == self._fatal:
            wait_until((self.folder / "begun").exists)
            server = os.getppid()
            script = f"kill -STOP {server}; touch {self.folder}/stopped; sleep 2; kill -CONT {server}"
            subprocess.Popen(["sh", "-c", script], start_new_session=True)
            wait_until((self.folder / "stopped").exists)
        return super().__getitem__(number)


def test_a_dead_worker_is_named_where_its_death_is_told_late(shards: ShardSet, tmp_path: Path):
    deadly = _DeadlyBehindABusyServer(shards, fatal=3, number=signal.SIGKILL)
    deadly.folder = tmp_path
    loader = TrainLoader(deadly, stop_step=50, workers=1)  # pyright: ignore[reportArgumentType]
    next(loader)
    (tmp_path / "begun").touch()
    wait_until((tmp_path / "stopped").exists)
    time.sleep(0.5)  # by then it is dead, and does not hand over the second batch; the outcome is the same if it does
    with pytest.raises(WorkerDied, match="killed by signal 9 while reading sample"):
        list(loader)


ENDLESS = """
import sys
from shardvit.data_shards.loading.loader import TrainLoader
from shardvit.data_shards.reading.opening import open_shards
from tests.data_shards.streams import train_batches

if __name__ == "__main__":
    batches = TrainLoader(train_batches(open_shards(sys.argv[1])), stop_step=10**9, workers=2)
    for number, _ in enumerate(batches):  # the name keeps the loader and its workers until the very end
        print(number, flush=True)
        if not sys.stdin.readline():
            raise RuntimeError("an exception of the rank's")
"""


@pytest.mark.parametrize("end", ["an exception", "SIGKILL"])
def test_a_jobs_signals_leave_workers_at_work_and_they_end_with_their_rank(shards: ShardSet, tmp_path: Path, end: str):
    """Slurm sends SIGTERM and the like to every process of a job; the rank must be able to finish its step and save."""
    (tmp_path / "endless.py").write_text(ENDLESS)
    root = Path(__file__).resolve().parents[3]
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", tmp_path / "endless.py", Path(shards.shards[0].url).parent],
        env={"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin and process.stdout
    helpers: list[psutil.Process] = []
    try:
        assert process.stdout.readline() == "0\n"
        helpers = psutil.Process(process.pid).children(recursive=True)
        assert len(helpers) == 4  # the resource tracker, the fork server and its two workers
        for helper in helpers:
            for number in (15, 2, 10):  # SIGTERM, SIGINT, SIGUSR1
                helper.send_signal(number)
        time.sleep(0.5)
        for number in range(1, 15):  # more than was read ahead
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == f"{number}\n"
        assert all(helper.is_running() and helper.status() != psutil.STATUS_ZOMBIE for helper in helpers)
        if end == "SIGKILL":
            process.kill()
        else:
            process.stdin.close()
            assert process.wait(timeout=240) == 1
        _, alive = psutil.wait_procs(helpers, timeout=240)
        assert not alive
    finally:
        for left in (process, *helpers):
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_what_a_worker_process_is_sent_does_not_grow_with_the_number_of_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Large columns lie in memory that all of them share; each sample arrives all the same."""
    sent: list[int] = []
    dump = popen_forkserver.reduction.dump

    def counted(content: object, file: io.BytesIO, *rest: object) -> None:
        dump(content, file, *rest)
        sent.append(file.tell())

    small = pack_noise(tmp_path / "small", count=20, samples_per_shard=5)
    monkeypatch.setattr(popen_forkserver.reduction, "dump", counted)
    expected = [batch.keys for batch in TrainLoader(train_batches(small), stop_step=3, workers=2)]
    few, count = max(sent), 20_000
    joined = ShardTable.join([small.shards] * (count // len(small.shards)))
    large = replace(small, shards=replace(joined, sources=(replace(joined.sources[0], num_shards=count),)))
    sent.clear()
    seen = [batch.keys for batch in TrainLoader(train_batches(large), stop_step=3, workers=2)]
    assert len(seen) == len(expected)
    assert max(sent) < few + 50_000  # they are 2 MB


def test_a_temporary_folder_that_is_too_long_for_a_socket_is_named(tmp_path: Path):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    code = "from shardvit.data_shards.loading.workers import start_fork_server as start\nstart()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TMPDIR": str(long)},
        capture_output=True,
        text=True,
        check=False,
    )
    # later versions of Python fall back on /tmp
    assert done.returncode == 0 or f"UserError: TMPDIR: {long}" in done.stderr
