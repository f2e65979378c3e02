"""Fork the ranks of this machine from one process that imports the libraries while the command still prepares the run.

N ranks cost one import of torch, timm and DeepSpeed (3 CPU seconds) instead of N, share its memory, and take their
first step sooner. The process uses no GPU and computes nothing, so that its children can. It has the command's mark, so
that `kill_all` ends it with its ranks: it serves one launch. It ends with the command. Linux only, as are its packets.
"""

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from signal import SIGKILL, SIGTERM
from typing import Any

from shardvit.data_shards.working_folder import SAFE_PATH, leave_out
from shardvit.launch.local.env import SUPERVISOR_PID, accelerator, num_gpus, without_place
from shardvit.launch.local.forked import Forked
from shardvit.launch.local.output import go_on

_POLL_SECONDS = 0.05
_PACKET_BYTES = 65_536  # at most


class Nursery(AbstractContextManager["Nursery"]):
    """The command's side; leaving the context ends the process."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environ = {**SAFE_PATH, **without_place(), **accelerator(), SUPERVISOR_PID: str(os.getpid())}
        self._codes: dict[int, int] = {}  # of ranks that have ended
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "shardvit.launch.local.nursery", str(theirs.fileno())],
                env=self._environ,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
            )

    def start(self, arguments: Sequence[str], environ: Mapping[str, str]) -> "ForkedRank":
        """Start `launch.train` with these arguments, when the libraries are imported. OSError if the process died."""
        own = {name: value for name, value in environ.items() if self._environ.get(name) != value}
        self._channel.send(json.dumps([list(arguments), own]).encode())
        while (pid := self._receive()) is None:
            pass
        return ForkedRank(self, pid)

    def code(self, pid: int) -> int | None:
        """Return a rank's exit code; None while it runs."""
        while pid not in self._codes and select.select([self._channel], [], [], 0)[0]:
            try:
                self._receive()
            except ConnectionError:  # it was killed, and ranks stop when their launcher dies
                self._codes[pid] = -SIGKILL
        return self._codes.get(pid)

    def _receive(self) -> int | None:
        """Return the PID of a rank that was started; None: one has ended."""
        pid, code = json.loads(self._channel.recv(_PACKET_BYTES) or self._gone())
        if code is None:
            return pid
        self._codes[pid] = code
        return None

    def _gone(self) -> bytes:
        raise ConnectionResetError(f"the process that starts ranks has ended ({self._process.poll()})")

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self._process.kill()
        self._process.wait()


def open_nursery() -> AbstractContextManager[Nursery | None]:
    """Start one where that is possible."""
    return Nursery() if sys.platform == "linux" else nullcontext()


class ForkedRank:
    """A rank, with what `run_ranks` needs of a `Popen`."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid, self.returncode = pid, None
        self._nursery = nursery

    def poll(self) -> int | None:
        self.returncode: int | None = self._nursery.code(self.pid)
        return self.returncode

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, SIGTERM)

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(_POLL_SECONDS)
        return code


# The process.


def main(channel: socket.socket) -> None:
    """Import, then start what the channel asks for and tell who ends, until the command dies."""
    _import_libraries()
    children: list[Forked] = []
    while True:
        if select.select([channel], [], [], _POLL_SECONDS)[0]:
            if not (packet := channel.recv(_PACKET_BYTES)):
                os._exit(0)
            arguments, environ = json.loads(packet)
            children.append(Forked(lambda a=arguments, e=environ: _be_rank(channel, a, e)))
            channel.send(json.dumps([children[-1].pid, None]).encode())
        for child in [each for each in children if each.poll() is not None]:
            children.remove(child)
            channel.send(json.dumps([child.pid, child.returncode]).encode())


def _import_libraries() -> None:
    from shardvit.model.without_compiler import import_timm

    import_timm()
    from shardvit.pipeline.training import stages  # noqa: F401

    if not num_gpus():  # else it asks the driver for GPUs, which no fork survives
        from shardvit.pipeline.engine.deepspeed_engine import import_deepspeed

        import_deepspeed()


def _be_rank(channel: socket.socket, arguments: list[str], environ: dict[str, Any]) -> int:
    from shardvit.launch.train import leave
    from shardvit.launch.train import main as train

    channel.close()
    os.setsid()
    os.environ.update(environ)
    leave(train(arguments))


if __name__ == "__main__":
    leave_out()
    go_on()
    main(socket.socket(fileno=int(sys.argv[1])))
