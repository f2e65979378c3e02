"""On every host: start its ranks, pass wishes on to them, and leave none behind. Started by `shardvit run` over ssh.

The first line of its standard input is an `Order`; each further line is a message: `alive`; `address HOST PORT`, where
rank 0 listens; `stop`, the ranks are to save and leave; `kill`; `end`. What the ranks print goes to its standard
output, and between it lines that begin with the order's word: `ready`, `address PORT`, `ended CODE`.

Why wishes travel like this: DeepSpeed's launcher leaves orphans when it is signalled, a file in the shared run folder
is seen late on a network file system, and the process numbers in the heartbeats may mean another process by now. The
connection that started the ranks is there anyway, and its end is news as well: when nothing is heard of `shardvit run`
for `silence_seconds`, or its side is closed, the ranks are asked to save and leave, and killed `grace_seconds` later.

The ranks carry the run folder in their environment. What carries it when an agent begins is from an attempt that was
cut off, and is killed: the caller holds the run folder's lock. Costs one small process a host.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from data_shards.durable import replace_text
from launch.env import RENDEZVOUS, SUPERVISOR_PID, num_gpus, without_place
from launch.processes import join_thread, kill_all, marked, marked_ranks

RUN_MARK = "SHARDVIT_RUN_ON_HOSTS"
_LOOK_SECONDS = 0.05
_MOST_LINES = 1000
_PUT_SECONDS, _DRAIN_SECONDS = 0.5, 5.0
_SCAN_SECONDS = 0.5  # of all processes
_LINGER_SECONDS = 1.0  # for what another launcher was about to start
_ADDRESS_FILE = "address"  # as pipeline.ranks.group, which a process without torch does not import


@dataclass(frozen=True)
class Order:
    """What an agent is to do.

    Attributes:
        word: begins the lines that are no rank's.
        run_folder: the mark of the processes.
        command: starts the ranks of this host; empty: another launcher does, and they are only looked after.
        environment: for them, over that of the login.
        rendezvous: folder to make here, in which rank 0's address is put; empty: MASTER_ADDR and MASTER_PORT tell it.
        is_first: whether rank 0 is here.
        silence_seconds: without a message, after which `shardvit run` is taken for gone.
        grace_seconds: for the ranks to save and leave then.
    """

    word: str
    run_folder: str
    command: list[str]
    environment: dict[str, str]
    rendezvous: str
    is_first: bool
    silence_seconds: float
    grace_seconds: float

    def line(self) -> str:
        """As it is sent."""
        return json.dumps(asdict(self)) + "\n"


class Agent:
    """One host's part of a stage."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._mark = (RUN_MARK, order.run_folder)
        self._folder = Path(order.rendezvous) if order.rendezvous else None
        self._messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._heard = time.monotonic()
        self._has_address = False
        self._asked = self._is_over = False
        self._told: set[int] = set()  # ranks that were asked to stop
        self._next_look = 0.0
        self._kill_at: float | None = None
        self._lines: queue.Queue[bytes | None] = queue.Queue(maxsize=_MOST_LINES)  # not written yet

    def run(self) -> int:
        """Until the ranks are gone; returns the launcher's exit code."""
        kill_all(*self._mark)
        if self._folder is not None:
            _make_own(self._folder)
        child = None
        try:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):  # this host is shut down
                signal.signal(number, lambda *_: self._messages.put("stop"))
            child = self._start()
            writer = threading.Thread(target=self._write_lines, daemon=True, name="write")
            for thread in (threading.Thread(target=self._listen, daemon=True, name="listen"), writer):
                thread.start()
            self._say("ready")
            pump = self._start_pump(child)  # now, so that this was the first line
            code = self._look_after(child)
            if pump is not None:
                join_thread(pump, seconds=_DRAIN_SECONDS)
        finally:
            kill_all(*self._mark)
            if child is None:
                time.sleep(_LINGER_SECONDS)
                kill_all(*self._mark)
            else:
                child.wait()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
        self._say(f"ended {code}")
        self._put(None)
        join_thread(writer, seconds=_DRAIN_SECONDS)
        return code

    def _start(self) -> subprocess.Popen[bytes] | None:
        if not self._order.command:
            return None
        environment = {
            **without_place(),
            **({} if num_gpus() else {"DS_ACCELERATOR": "cpu"}),
            **self._order.environment,
            **{self._mark[0]: self._mark[1], SUPERVISOR_PID: str(os.getpid()), "PYTHONUNBUFFERED": "1"},
            **({RENDEZVOUS: self._order.rendezvous} if self._order.rendezvous else {}),
        }
        return subprocess.Popen(
            self._order.command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _start_pump(self, child: subprocess.Popen[bytes] | None) -> threading.Thread | None:
        if child is None:
            return None
        pump = threading.Thread(target=self._pump, args=(child,), daemon=True, name="pump")
        pump.start()
        return pump

    def _look_after(self, child: subprocess.Popen[bytes] | None) -> int:
        stopped_early = False
        while True:
            code = child.poll() if child is not None else (0 if self._is_over else None)
            if code is not None and not (self._asked and marked_ranks(*self._mark)):  # a launcher may leave before them
                break
            self._tell_address()
            while not self._messages.empty():
                stopped_early |= self._obey(self._messages.get())
            now = time.monotonic()
            if child is None and self._asked and now >= self._next_look:
                self._next_look = now + _SCAN_SECONDS
                self._ask_ranks()  # the other launcher may have been about to start them
            if now - self._heard > self._order.silence_seconds:
                self._lose_contact("nothing was heard of shardvit run")
            if self._kill_at is not None and (now >= self._kill_at or (child is None and not marked(*self._mark))):
                kill_all(*self._mark)
                self._is_over = True
            time.sleep(_LOOK_SECONDS)
        return 128 + signal.SIGTERM if stopped_early else code if code >= 0 else 128 - code

    def _obey(self, message: str) -> bool:
        """Do what was said; whether the ranks had not begun and were killed therefore."""
        word, _, rest = message.partition(" ")
        match word:
            case "address" if self._folder is not None and not self._has_address:
                self._has_address = True
                replace_text(self._folder / _ADDRESS_FILE, rest, sync="none")
            case "stop" if not self._asked:
                self._asked = True
                if not self._ask_ranks():
                    kill_all(*self._mark)
                    return True
            case "kill":
                kill_all(*self._mark)
            case "end":
                self._is_over = True
            case "lost":
                self._lose_contact("the connection to shardvit run is gone")
            case _:
                pass
        return False

    def _ask_ranks(self) -> bool:
        """Ask the ranks that were not asked yet; whether there are any."""
        there = marked_ranks(*self._mark)
        for rank in there:
            if rank.pid not in self._told:
                with suppress(psutil.Error):  # it ended meanwhile
                    rank.terminate()
                self._told.add(rank.pid)
        return bool(there)

    def _lose_contact(self, why: str) -> None:
        if self._kill_at is None:
            self._kill_at = time.monotonic() + self._order.grace_seconds
            self._put(f"shardvit: {why}: the ranks of this host are asked to save and leave\n".encode())
            self._obey("stop")

    def _tell_address(self) -> None:
        if self._folder is None or not self._order.is_first or self._has_address:
            return
        with suppress(OSError, ValueError):
            _, port = (self._folder / _ADDRESS_FILE).read_text(encoding="utf-8").split()
            self._has_address = True
            self._say(f"address {port}")

    def _listen(self) -> None:
        for line in sys.stdin:
            self._heard = time.monotonic()
            if line.strip() != "alive":
                self._messages.put(line.strip())
        self._messages.put("lost")

    def _pump(self, child: subprocess.Popen[bytes]) -> None:
        """The ranks write to a pipe of ours: a connection that is gone must not end them by a failed print."""
        assert child.stdout is not None
        for line in child.stdout:
            whole = line if line.endswith(b"\n") else line + b"\n"
            while not self._put(whole) and self._kill_at is None:
                pass  # nobody reads at the moment: the ranks wait with us; once contact is lost, lines are dropped

    def _say(self, text: str) -> None:
        self._put(f"{self._order.word} {text}\n".encode())

    def _put(self, line: bytes | None) -> bool:
        try:
            self._lines.put(line, timeout=_PUT_SECONDS)
        except queue.Full:
            return False
        return True

    def _write_lines(self) -> None:
        """In a thread of its own: where a cable is cut a write may wait for ever, and nobody else may."""
        while (line := self._lines.get()) is not None:
            with suppress(OSError):
                os.write(1, line)


def rendezvous_name(run_folder: str, *, node: int | None) -> str:
    """A fresh name of a folder; with `node`, the agent there removes what earlier ones of the same run have left."""
    run = hashlib.blake2b(run_folder.encode(), digest_size=4).hexdigest()
    return f"shardvit-{run}-{secrets.token_hex(8)}" + ("" if node is None else f"-{node}")


def _make_own(folder: Path) -> None:
    """A folder that only this user reads."""
    start, run, *_, node = folder.name.split("-")
    if folder.name.count("-") == 3:
        for left in folder.parent.glob(f"{start}-{run}-*-{node}"):
            shutil.rmtree(left, ignore_errors=True)
    folder.mkdir(mode=0o700)


def main() -> int:
    """Read the order and carry it out."""
    text = sys.stdin.readline()
    if not text:
        return 1
    return Agent(Order(**json.loads(text))).run()


if __name__ == "__main__":
    sys.exit(main())
