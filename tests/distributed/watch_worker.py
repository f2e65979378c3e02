"""One rank that does steps in lockstep with the others and is watched. Started by test_watch_processes.py.

`python watch_worker.py FOLDER RANK WORLD HANG_SECONDS FOLLOW_SECONDS FAULT`: when FOLDER/go-RANK appears, the rank does
FAULT. Instead of a collective it waits for the other ranks' step files. FOLDER/stop asks all to leave after the same
step. Where there is a FOLDER/clock, that is the time for the watch, as the test sets it.
"""

import ctypes
import sys
import threading  # noqa: F401 - before the clock is replaced: what waits for threads keeps the real one
import time
from pathlib import Path

folder, rank, world = Path(sys.argv[1]), *map(int, sys.argv[2:4])
hang_seconds, follow_seconds, fault = *map(float, sys.argv[4:6]), sys.argv[6]
ticks = beats = 0


def put(name, value):
    beside = folder / f"{name}.new"
    beside.write_text(str(value))
    beside.replace(folder / name)


def now():
    return float((folder / "clock").read_text()) if (folder / "clock").exists() else 0.0


def tick():
    """The time for the watch, which asks once a look; the test counts how often."""
    global ticks
    value = now()
    ticks += 1
    put(f"ticks-{rank}", ticks)
    return value


if (folder / "clock").exists():
    time.monotonic = tick

from shardvit.pipeline.ranks import watch as watch_module  # noqa: E402 - finds the replaced clock
from shardvit.pipeline.ranks.place import Place  # noqa: E402
from shardvit.pipeline.ranks.watch import Watch  # noqa: E402

if follow_seconds:
    watch_module._FOLLOW_SECONDS = follow_seconds


def progress(status):
    global beats
    watch.progress(step, status=status)
    beats += 1
    put(f"beats-{rank}", beats)


def loop_for_ever():
    while True:
        pass


def sleep_with_the_lock():
    ctypes.PyDLL(None).sleep(600)


def do_fault(watch):
    begin = now()
    put(f"in-fault-{rank}", "")
    match fault:
        case "loop":
            loop_for_ever()
        case "c-call":
            sleep_with_the_lock()
        case "slow":  # beats, and so does not hang
            for part in range(16):
                progress(f"part {part}")
                while now() < begin + (part + 1) * hang_seconds / 8:
                    time.sleep(0.01)
        case "clock":
            real = time.time
            time.time = lambda: real() + 86400 * (1 if rank else -1)
        case "raise":
            raise ValueError("no such thing")
        case "leave":
            watch.close()
            time.sleep(0.5)
            sys.exit(0)


def say(text):
    print(f"{rank} says: {text}", flush=True)


def is_over():
    """Whether all leave before this step. Rank 0 decides it before it ends a step, so that nobody is a step further."""
    last = folder / "last-step"
    if rank == 0 and (folder / "stop").exists() and not last.exists():
        put("last-step", step)
    return last.exists() and step > int(last.read_text())


def wait_for_the_others(step):
    for other in range(world):
        while True:
            try:
                if int((folder / f"step-{other}").read_text()) >= step:
                    break
            except OSError:
                pass
            time.sleep(0.01)


place = Place(rank=rank, world_size=world, local_rank=rank, local_world_size=world)
step = 0
with Watch(folder / "ranks", place=place, attempt="one", hang_seconds=hang_seconds, say=say) as watch:
    done = False
    while not is_over():
        progress("forward")
        if not done and (folder / f"go-{rank}").exists():
            done = True
            do_fault(watch)
        progress("backward")
        put(f"step-{rank}", step)
        wait_for_the_others(step)
        step += 1
