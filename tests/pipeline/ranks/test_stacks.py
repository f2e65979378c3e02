"""Stack dumps: what a message shows of them, when one is complete, and which frames wait for other ranks."""

import faulthandler
import subprocess
import sys
import threading
import time

import pytest

from shardvit.pipeline.ranks import stacks
from shardvit.pipeline.ranks.stacks import is_whole, main_thread_waits, stack_excerpt


def test_an_excerpt_has_the_innermost_lines_of_the_thread_and_those_of_this_project(tmp_path):
    path = tmp_path / "stack"
    with path.open("w") as file:
        other = threading.Thread(target=faulthandler.dump_traceback, kwargs={"file": file, "all_threads": True})

        def in_a_function_of_ours():
            other.start()
            other.join()

        in_a_function_of_ours()
    lines = stack_excerpt(path.read_text(), thread=threading.main_thread().ident)
    assert any("in in_a_function_of_ours" in line for line in lines[:4])
    assert len(lines) <= 10
    assert stack_excerpt(path.read_text(), thread=1) == []


def test_a_dump_is_whole_from_its_last_line_on_and_not_before(tmp_path):
    code = "import faulthandler, sys, threading\n"
    code += "def f():\n  faulthandler.dump_traceback(sys.stdout, all_threads=True)\n"
    code += "print(threading.main_thread().ident)\nsys.stdout.flush()\nwait = threading.Event()\n"
    code += "threading.Thread(target=wait.wait).start()\nf()\nwait.set()\n"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    thread, _, dump = answer.partition("\n")
    assert dump.count("most recent call first") == 2  # the main thread is the last one
    assert is_whole(dump, main_thread=int(thread))
    assert not any(is_whole(dump[:end], main_thread=int(thread)) for end in range(len(dump.rstrip())))


def test_lines_of_this_project_are_shown_however_deep_the_libraries_are():
    root = stacks.__file__.removesuffix("/pipeline/ranks/stacks.py")
    dump = "\n".join(
        [
            "Thread 0x00000000000000aa (most recent call first):",
            '  File "/x.py", line 1 in other_thread',
            "",
            "Current thread 0x00000000000000bb [python] (most recent call first):",
            *[f'  File "/site-packages/library.py", line {number} in deep' for number in range(30)],
            f'  File "{root}/pipeline/training/train_loop.py", line 91 in train',
        ]
    )
    lines = stack_excerpt(dump, thread=0xBB)
    assert [line.split()[-1] for line in lines] == ["deep"] * 4 + ["train"]
    assert len(stack_excerpt(dump + "\n\n" + dump, thread=0xBB)) == 5  # of two dumps the last


def waits_inside(file: str, *, function: str) -> bool:
    """Whether a main thread whose innermost frame is that function counts as waiting."""
    namespace = {"ask": lambda: ask_from_a_thread()}
    # The frame that is looked at is the innermost Python frame, so the wait itself is a lock's, in C.
    exec(compile(f"def {function}(lock):\n    lock.acquire()\n", file, "exec"), namespace)
    lock, answer = threading.Lock(), []
    lock.acquire()

    def ask_from_a_thread():
        deadline = time.monotonic() + 240
        while sys._current_frames()[threading.main_thread().ident].f_code.co_filename != file:
            assert time.monotonic() < deadline
        answer.append(main_thread_waits())
        lock.release()

    thread = threading.Thread(target=ask_from_a_thread)
    thread.start()
    namespace[function](lock)
    thread.join()
    return answer[0]


@pytest.mark.parametrize(
    ("file", "function", "expected"),
    [
        ("/site-packages/torch/distributed/distributed_c10d.py", "all_gather", True),
        ("/site-packages/deepspeed/comm/torch.py", "all_reduce", True),
        ("/site-packages/deepspeed/runtime/zero/partition_parameters.py", "wait", True),
        ("/repository/pipeline/ranks/group.py", "result", True),
        ("/site-packages/torch/autograd/graph.py", "_engine_run_backward", True),
        ("/site-packages/deepspeed/runtime/zero/stage_1_and_2.py", "step", False),
        ("/repository/pipeline/training/train_loop.py", "train", False),
        ("/site-packages/torch/nn/functional.py", "linear", False),
    ],
)
def test_a_main_thread_inside_an_exchange_waits_for_others(file, function, expected):
    assert waits_inside(file, function=function) is expected
