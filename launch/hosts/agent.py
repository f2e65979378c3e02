"""Start one host's ranks, forward requests to them, and leave none behind. `shardvit run` starts it over ssh.

Standard input: first an `AgentOrder`, then messages: `alive` (heartbeat), `address HOST PORT` (where rank 0 listens),
`stop` (save and leave), `kill`. Standard output: the ranks' output, and lines prefixed with the order's word: `ready`,
`address PORT`, `ended CODE`. If messages stop for `silence_seconds` or the connection closes, the agent asks the ranks
to save and leave, and kills them `grace_seconds` later.

Why ssh: DeepSpeed's launcher leaves orphans on a signal, network file systems show files late, and the PID in a
heartbeat file may be reused. Kills leftovers of earlier attempts first (the caller holds the run folder's lock).
"""

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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from shardvit.data_shards.durable import replace_text
from shardvit.launch.local.env import RENDEZVOUS, RUN_MARK, SUPERVISOR_PID, accelerator, without_place
from shardvit.launch.local.processes import join_thread, kill_all, marked_ranks

_POLL_SECONDS = 0.05
_MOST_LINES = 1000
_PUT_SECONDS, _DRAIN_SECONDS = 0.5, 5.0
_ADDRESS_FILE = "address"  # same as in shardvit.pipeline.ranks.group, which would import torch


@dataclass(frozen=True)
class AgentOrder:
    """Everything an agent needs to start and supervise its ranks."""

    word: str  # prefix of the agent's own lines
    run_folder: str  # identifies the processes
    command: list[str]  # starts the ranks of this host
    environment: dict[str, str]  # for the ranks, overrides the login's
    rendezvous: str  # folder to create here for rank 0's address; empty: use MASTER_ADDR and MASTER_PORT
    is_first: bool  # hosts rank 0
    silence_seconds: float  # without a message before the connection counts as lost
    grace_seconds: float  # for the ranks to save and leave after that

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"


class Agent:
    """Supervise one host's ranks."""

    def __init__(self, order: AgentOrder) -> None:
        self._order = order
        self._mark = (RUN_MARK, order.run_folder)
        self._folder = Path(order.rendezvous) if order.rendezvous else None
        self._messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._heard = time.monotonic()
        self._has_address = False
        self._asked = False
        self._kill_at: float | None = None
        self._lines: queue.Queue[bytes | None] = queue.Queue(maxsize=_MOST_LINES)  # not written yet

    def run(self) -> int:
        """Run until all ranks have exited; returns the launcher's exit code."""
        kill_all(*self._mark)
        if self._folder is not None:
            _make_own(self._folder)
        child = None
        try:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):  # the host is shutting down
                signal.signal(number, lambda *_: self._messages.put("stop"))
            child = self._start()
            _thread(self._listen)
            writer = _thread(self._write_lines)
            self._say("ready")
            pump = _thread(self._pump, child)  # only now, so that "ready" comes first
            code = self._stand_by(child)
            join_thread(pump, seconds=_DRAIN_SECONDS)
        finally:
            kill_all(*self._mark)
            if child is not None:
                child.wait()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
        self._say(f"ended {code}")
        self._put(None)
        join_thread(writer, seconds=_DRAIN_SECONDS)
        return code

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {
            **without_place(),
            **accelerator(),
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

    def _stand_by(self, child: subprocess.Popen[bytes]) -> int:
        stopped_early = False
        while True:
            code = child.poll()
            if code is not None and not (self._asked and marked_ranks(*self._mark)):  # it may exit before its ranks
                break
            self._tell_address()
            while not self._messages.empty():
                stopped_early |= self._obey(self._messages.get())
            now = time.monotonic()
            if now - self._heard > self._order.silence_seconds:
                self._lose_contact("no heartbeat from shardvit run")
            if self._kill_at is not None and now >= self._kill_at:
                kill_all(*self._mark)
            time.sleep(_POLL_SECONDS)
        return 128 + signal.SIGTERM if stopped_early else code if code >= 0 else 128 - code

    def _obey(self, message: str) -> bool:
        """Carry out a message; returns True if a stop came before any rank existed and killed the launcher."""
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
            case "lost":
                self._lose_contact("the connection to shardvit run is lost")
            case _:
                pass
        return False

    def _ask_ranks(self) -> bool:
        """Ask the ranks to save and leave; returns False if there are none."""
        there = marked_ranks(*self._mark)
        for rank in there:
            with suppress(psutil.Error):  # it has just exited
                rank.terminate()
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
        """Forward the ranks' output: they write to our pipe, so a lost connection cannot break their prints."""
        assert child.stdout is not None
        for line in child.stdout:
            whole = line if line.endswith(b"\n") else line + b"\n"
            while not self._put(whole) and self._kill_at is None:
                pass  # no reader right now: the ranks block; once contact is lost, drop lines

    def _say(self, text: str) -> None:
        self._put(f"{self._order.word} {text}\n".encode())

    def _put(self, line: bytes | None) -> bool:
        try:
            self._lines.put(line, timeout=_PUT_SECONDS)
        except queue.Full:
            return False
        return True

    def _write_lines(self) -> None:
        """Write lines in a thread of its own: writing to a dead connection may block forever."""
        while (line := self._lines.get()) is not None:
            with suppress(OSError):
                os.write(1, line)


def _thread(target: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, daemon=True)
    thread.start()
    return thread


def rendezvous_name(run_folder: str, *, node: int) -> str:
    """Make a unique folder name; the agent of `node` removes those left by earlier attempts at the run."""
    run = hashlib.blake2b(run_folder.encode(), digest_size=4).hexdigest()
    return f"shardvit-{run}-{secrets.token_hex(8)}-{node}"


def _make_own(folder: Path) -> None:
    """Create a folder that only this user can read; remove leftovers of the same run and node."""
    start, run, *_, node = folder.name.split("-")
    for left in folder.parent.glob(f"{start}-{run}-*-{node}"):
        shutil.rmtree(left, ignore_errors=True)
    folder.mkdir(mode=0o700)


def main() -> int:
    """Read the order from standard input and carry it out."""
    text = sys.stdin.readline()
    return Agent(AgentOrder(**json.loads(text))).run() if text else 1


if __name__ == "__main__":
    sys.exit(main())
