"""A child process forked with what this one has imported: it starts in milliseconds and shares that memory.

Fork before this process uses a GPU, joins a process group or starts workers: none of them survives in a child.
"""

import os
import sys
import traceback
from collections.abc import Callable
from functools import partialmethod
from signal import SIGKILL, SIGTERM


class Child:
    """A child of this process, with what its code needs of a `Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None  # negative: killed by a signal

    def wait(self, options: int = 0) -> int | None:
        if self.returncode is None and (ended := os.waitpid(self.pid, options))[0]:
            self.returncode = os.waitstatus_to_exitcode(ended[1])
        return self.returncode

    def kill(self, number: int = SIGKILL) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    poll = partialmethod(wait, os.WNOHANG)
    terminate = partialmethod(kill, SIGTERM)


def fork(work: Callable[[], int]) -> Child:
    """Run `work` in a child, which exits with what it returns, 1 if it raises."""
    for stream in (sys.stdout, sys.stderr):  # else the child writes what they hold, too
        stream.flush()
    if pid := os.fork():
        return Child(pid)
    code = 1
    try:
        code = work()
    except BaseException:  # noqa: BLE001 - the parent's code must not go on here
        traceback.print_exc()
    finally:
        os._exit(code)
