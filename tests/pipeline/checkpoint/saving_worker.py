"""One rank of a training that saves in the background: loop, saver and messages are real, the engine is not.

Started by test_save_in_flight.py as `python saving_worker.py OUT RANK WORLD_SIZE`. A save asked for on rank 1 begins
after step 4; rank 1's writer is held back until step 8. After steps 6 and 7 any exchange on the host's group fails.
"""

import itertools
import json
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shardvit.pipeline.checkpoint import saver as module
from shardvit.pipeline.checkpoint.train_state import TrainState
from shardvit.pipeline.engine.base import Flags, reduce_flags, step_numbers
from shardvit.pipeline.engine.saved_state.state_files import write_file
from shardvit.pipeline.ranks.group import Ranks
from shardvit.pipeline.ranks.place import Place
from shardvit.pipeline.ranks.stopping import Requests
from shardvit.pipeline.training.train_loop import train
from tests.looping import saving
from tests.saving import TinyEngine, saver_of

TOTAL_STEPS, ASKED, SILENT, SPOKEN = 20, 2, 6, 8


class Silence:
    """In place of the host's group: whoever uses it fails."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"an exchange beside a step: {name}")


def main() -> None:
    out, rank, world_size = Path(sys.argv[1]), *(int(word) for word in sys.argv[2:4])
    torch.set_num_threads(1)
    ranks: Any = Ranks(
        Place(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size, rendezvous=out),
        timeout_seconds=400,
    )
    whole, _ = saving(kind=Requests, save_steps=0)
    now, group, opened = itertools.count(1), ranks._host_group, threading.Event()
    at_step, commits = [0], list[tuple[int, int]]()

    def write(*words: Any, **keywords: Any) -> Any:
        assert rank == 0 or opened.wait(400)
        return write_file(*words, **keywords)

    class Commits(list[TrainState]):
        def append(self, state: TrainState) -> None:
            commits.append((state.step, at_step[0]))

    module.write_file = write
    engine = TinyEngine(7, rank=rank)
    saver = saver_of(out / "checkpoints", ranks=ranks, engine=engine, mode="background", committed=Commits())

    def step(*, lr: float, flags: Flags, measure: bool) -> torch.Tensor:
        at_step[0] = next(now)
        numbers = step_numbers(grad_norm=1.0, applied=True, flags=reduce_flags(flags, device=torch.device("cpu")))
        if at_step[0] == ASKED and rank == 1:
            whole.requests.ask("save", "the test")
        ranks._host_group = Silence() if SILENT <= at_step[0] < SPOKEN else group
        if at_step[0] == SPOKEN:
            opened.set()
        if at_step[0] >= SPOKEN:
            for thread in (saver._writing, saver._committing):  # so what a step says follows from its number
                if thread is not None:
                    thread.end()
        return numbers

    whole.engine.step = step
    batch = next(whole.batches)
    plan = replace(whole.plan, total_steps=TOTAL_STEPS)
    train(replace(whole, plan=plan, saver=saver, ranks=ranks, batches=itertools.repeat(batch)), TrainState())
    saver.close()
    (out / f"rank-{rank}.json").write_text(json.dumps(commits))
    ranks.leave()


if __name__ == "__main__":
    main()
