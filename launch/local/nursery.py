"""Fork the ranks of this machine from one process that imports the libraries while the command still prepares the run.

N ranks cost one import of torch, timm and DeepSpeed (3 CPU seconds) instead of N, share its memory, and take their
first step sooner. The process uses no GPU and computes nothing, so that its children can. They become the command's
children. It has the command's mark, so that `kill_all` ends it with its ranks: it serves one launch. Linux only.
"""

import ctypes
import importlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from shardvit.data_shards.working_folder import SAFE_PATH, leave_out
from shardvit.launch.local.env import SUPERVISOR_PID, accelerator, num_gpus, without_place
from shardvit.launch.local.forked import Child, fork
from shardvit.launch.local.output import go_on

_PACKET_BYTES = 65_536  # at most
RANK_MODULE = "shardvit.launch.train"  # by name, as for `python -m`: it imports this room
_ADOPT = 36  # PR_SET_CHILD_SUBREAPER: this process becomes the parent of its orphaned grandchildren


class Nursery(AbstractContextManager["Nursery"]):
    """The command's side; leaving the context ends the process."""

    def __init__(self) -> None:
        _adopt(1)
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environ = {**SAFE_PATH, **without_place(), **accelerator(), SUPERVISOR_PID: str(os.getpid())}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "shardvit.launch.local.nursery", str(theirs.fileno())],
                env=self._environ,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
            )

    def start(self, arguments: Sequence[str], environ: Mapping[str, str]) -> Child:
        """Start `launch.train` with these arguments, when the libraries are imported. OSError if the process died."""
        own = {name: value for name, value in environ.items() if self._environ.get(name) != value}
        self._channel.send(json.dumps([list(arguments), own]).encode())
        pid, adopted = (self._channel.recv(_PACKET_BYTES) for _ in range(2))
        if not adopted:
            raise ConnectionResetError("the process that forks ranks has ended")
        return Child(int(pid))

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self._process.kill()
        self._process.wait()
        _adopt(0)


def open_nursery() -> AbstractContextManager[Nursery | None]:
    """Start one where that is possible."""
    return Nursery() if sys.platform == "linux" else nullcontext()


def _adopt(whether: int) -> None:
    ctypes.CDLL(None).prctl(_ADOPT, whether, 0, 0, 0)


def _serve(channel: socket.socket) -> None:
    """Import, then start what the channel asks for until the command closes it."""
    _import_libraries()
    while packet := channel.recv(_PACKET_BYTES):
        arguments, environ = json.loads(packet)
        between = fork(lambda a=arguments, e=environ: _leave_to_command(channel, a, e))
        between.wait()
        channel.send(b"adopted")  # by the command


def _import_libraries() -> None:
    from shardvit.model.without_compiler import import_timm

    import_timm()
    from shardvit.pipeline.training import stages  # noqa: F401

    if not num_gpus():  # else it asks the driver for GPUs, which no fork survives
        from shardvit.pipeline.engine.deepspeed_engine import import_deepspeed

        import_deepspeed()


def _leave_to_command(channel: socket.socket, arguments: list[str], environ: dict[str, str]) -> int:
    between = os.getpid()

    def be_rank() -> int:
        train = importlib.import_module(RANK_MODULE)
        channel.close()
        os.setsid()
        os.environ.update(environ)
        while os.getppid() == between:  # the rank stops when its parent changes
            time.sleep(0.001)
        return train.leave(train.main(arguments))  # which does not return

    channel.send(str(fork(be_rank).pid).encode())
    return 0


if __name__ == "__main__":
    leave_out()
    go_on()
    _serve(socket.socket(fileno=int(sys.argv[1])))
