"""One rank that does steps in lockstep with the others and is watched. Started by test_watch_processes.py.

`python watch_worker.py FOLDER RANK WORLD HANG_SECONDS FAULT`: when FOLDER/go-RANK appears, the rank does FAULT.
Instead of a collective it waits for the other ranks' step files. FOLDER/stop holds the step at which all leave.
"""

import ctypes
import sys
import time
from pathlib import Path

from pipeline.process import Place
from pipeline.watch import Watch

folder, rank, world, hang_seconds, fault = Path(sys.argv[1]), *map(int, sys.argv[2:4]), float(sys.argv[4]), sys.argv[5]


def loop_for_ever():
    while True:
        pass


def sleep_with_the_lock():
    ctypes.PyDLL(None).sleep(600)


def do_fault(watch):
    match fault:
        case "loop":
            loop_for_ever()
        case "c-call":
            sleep_with_the_lock()
        case "slow":  # beats, and so does not hang
            for part in range(40):
                watch.beat(step, doing=f"part {part}")
                time.sleep(hang_seconds / 20)
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


def put_step(step):
    beside = folder / f"step-{rank}.new"
    beside.write_text(str(step))
    beside.replace(folder / f"step-{rank}")


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
    while not (folder / "stop").exists() or step < int((folder / "stop").read_text()):
        watch.beat(step, doing="forward")
        if not done and (folder / f"go-{rank}").exists():
            done = True
            do_fault(watch)
        watch.beat(step, doing="backward")
        put_step(step)
        wait_for_the_others(step)
        step += 1
