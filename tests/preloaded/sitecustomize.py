"""Python imports this at the start of every process that has this folder on its PYTHONPATH: see server.py.

`python -m shardvit.launch.cli ...` and `python -u -m shardvit.launch.train ...` go no further: a fork of the server
does their work, and this process has the number, the environment and the command line that others look for. It passes
signals on and ends as the fork does. When it is killed, so is the fork.
"""

import os
import sys

MODULES = (
    "shardvit.launch.cli",
    "shardvit.launch.train",
    "tests.preloaded.waiting",
)  # the last: for a test of these forks
SERVER = "SHARDVIT_TEST_SERVER"


def delegate(address: str, words: list[str]) -> None:
    """Have the module `words[0]` run with the other words as its arguments; never returns."""
    import json
    import signal
    import socket

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # until it is known whom to pass them on to
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.connect(address)
        leads = os.getsid(0) == os.getpid()
        order = {"words": words, "environment": dict(os.environ), "folder": os.getcwd(), "leads": leads}
        socket.send_fds(server, [json.dumps(order).encode() + b"\n"], [0, 1, 2])
        with server.makefile("r") as answers:
            fork = int(answers.readline())
            for number in numbers:
                signal.signal(number, lambda number, frame: os.kill(fork, number))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
            code = os.waitstatus_to_exitcode(int(answers.readline() or "256"))  # nothing: the server is gone
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


_words = sys.orig_argv[1:]
_words = _words[1:] if _words[:1] == ["-u"] else _words
if os.environ.get(SERVER) and _words[:1] == ["-m"] and _words[1:2] and _words[1] in MODULES:
    delegate(os.environ[SERVER], _words[1:])
