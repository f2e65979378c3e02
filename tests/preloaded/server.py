"""Has torch, DeepSpeed and MLflow loaded, and does in forks what processes of `shardvit` would load them for first.

    with preloaded() as more:
        subprocess.run([sys.executable, "-m", "shardvit.launch.cli", ...], env={**os.environ, **more})

For tests that look at exit codes, output and files. Whoever kills processes, looks for them or measures them has real
ones. A fork has the caller's arguments, environment, folder, standard streams and session; sitecustomize.py is the
caller's side.
"""

import contextlib
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy

from tests.preloaded.sitecustomize import SERVER

ROOT = Path(__file__).resolve().parents[2]
_ORDER_BYTES = 1 << 20


@contextlib.contextmanager
def preloaded() -> Iterator[dict[str, str]]:
    """What to add to the environment of processes that are to be forks; the server lives as long as this context."""
    if not hasattr(os, "pidfd_open"):  # only Linux has it: elsewhere they are as any others
        yield {}
        return
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as folder:  # pytest's may be too long for the name of a socket
        address = os.path.join(folder, "server")
        server = subprocess.Popen(
            [sys.executable, "-u", "-m", "tests.preloaded.server", address],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": paths, "DS_ACCELERATOR": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            assert server.stdout and server.stdout.readline() == b"ready\n", "the server has not begun"
            yield {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), paths]), SERVER: address}
        finally:
            server.kill()
            server.communicate()


def main(address: str) -> int:
    """Serve until standard input is closed; in a fork, do what was ordered and return its exit code."""
    import accelerate  # noqa: F401  # pyright: ignore[reportUnusedImport]
    import mlflow  # noqa: F401  # pyright: ignore[reportUnusedImport]

    import shardvit.launch.cli
    import shardvit.launch.train  # noqa: F401
    from shardvit.pipeline.engine.deepspeed_engine import import_deepspeed

    import_deepspeed()
    assert threading.active_count() == 1, threading.enumerate()
    gc.collect()
    gc.freeze()  # or each fork's collections would copy all that is loaded
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(64)
    print("ready", flush=True)
    while True:
        readable, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in readable:
            return 0
        caller, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _keep(caller)
        caller.close()


def _keep(caller: socket.socket) -> int:
    """In the first fork: start the second, which does the work, and tell the caller what becomes of it."""
    content, streams, _, _ = socket.recv_fds(caller, _ORDER_BYTES, 3)
    while not content.endswith(b"\n"):
        content += caller.recv(_ORDER_BYTES)
    fork = os.fork()
    if fork == 0:
        caller.close()
        return _work(json.loads(content), streams)
    for stream in (*streams, 0, 1, 2):
        os.close(stream)
    caller.sendall(b"%d\n" % fork)
    ended = os.pidfd_open(fork)
    readable, _, _ = select.select([caller, ended], [], [])
    if ended not in readable:  # the caller is gone
        os.kill(fork, signal.SIGKILL)
    _, status = os.waitpid(fork, 0)
    with contextlib.suppress(OSError):
        caller.sendall(b"%d\n" % status)
    os._exit(0)


def _work(order: dict[str, Any], streams: list[int]) -> int:
    if order["leads"]:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    module, *arguments = order["words"]
    sys.argv = [module, *arguments]
    sys.path[0] = order["folder"]
    random.seed()
    numpy.random.seed()
    sys.modules.pop(module, None)  # it was loaded for what it imports
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
