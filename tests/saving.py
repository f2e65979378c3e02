"""What the tests of checkpoints share: an engine of a few numbers, ranks in threads, and one save after another."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from shardvit.pipeline.checkpoint import saver
from shardvit.pipeline.checkpoint.saver import CheckpointSaver, Origin, SaveHooks
from shardvit.pipeline.checkpoint.store import Restored, Retention, restore_checkpoint
from shardvit.pipeline.checkpoint.train_state import TrainState
from shardvit.pipeline.engine.base import Hold
from shardvit.pipeline.engine.saved_state.state_files import StateFile, state_file, text_file, write_file
from shardvit.pipeline.ranks.place import Place

IDENTITY: dict[str, Any] = {
    "stage": "pretrain",
    "recipe": "abc",
    "backend": "deepspeed",
    "precision": "bf16",
    "zero_stage": 1,
    "processes": 1,
}
EXACT = 0.1 + 0.2  # 0.30000000000000004: no short decimal
RANK_FILE_BYTES = 300
KEEP_ALL = Retention(last=99)


@dataclass
class TinyEngine:
    """One number as the model, saved like DeepSpeed's: files in a folder below, one a rank, and a shared one."""

    value: int = 0
    rank: int = 0
    loads: list[Path] = field(default_factory=list)
    written: list[dict[str, Any]] = field(default_factory=list)
    hold: Hold = field(default_factory=Hold)
    device: torch.device = torch.device("cpu")  # noqa: RUF009 -- immutable

    def snapshot(self) -> tuple[StateFile, ...]:
        mine = StateFile(f"deepspeed/rank{self.rank}.pt", bytes([self.value]) * RANK_FILE_BYTES)
        return (mine, text_file("deepspeed/shared.pt", str(self.value))) if self.rank == 0 else (mine,)

    def load(self, folder: Path, *, written: dict[str, Any]) -> None:
        self.loads.append(folder)
        self.written.append(written)
        (self.value,) = set((folder / "deepspeed" / f"rank{self.rank}.pt").read_bytes())
        assert self.value == int((folder / "deepspeed" / "shared.pt").read_text())


class TensorEngine:
    """Weights as views of one flat buffer, averages of their own, and counters: what ZeRO has, in small."""

    def __init__(self, value: float, *, rank: int = 0) -> None:
        self.rank, self.hold, self.device = rank, Hold(), torch.device("cpu")
        self.flat = torch.full((2000,), value)
        self.counters = {"step": 1, "scale": [value]}
        self.state = {"average": torch.full((64, 8), value).t(), "step": torch.tensor(value)}

    def snapshot(self) -> tuple[StateFile, ...]:
        weights = {"kernel": self.flat[:1000].view(100, 10), "bias": self.flat[1000:1010], "none": torch.empty(0)}
        return (
            state_file(f"deepspeed/weights{self.rank}.pt", {"module": weights, "counters": self.counters}),
            state_file(f"deepspeed/optimizer{self.rank}.pt", {"state": self.state, "rows": [self.flat[1990:]] * 2}),
        )

    def change(self, value: float) -> None:
        """What training does in place: weights, averages, counters; and what it replaces."""
        self.hold.release()
        self.flat.fill_(value)
        for tensor in self.state.values():
            tensor.fill_(value)
        self.counters["step"] += 1
        self.counters["scale"][0] = value
        self.state["average"] = torch.zeros(3)


class ThreadRanks:
    """`Ranks` for several ranks in the threads of one process."""

    def __init__(self, place: Place, *, barrier: threading.Barrier, board: list[object]) -> None:
        self.place, self._barrier, self._board = place, barrier, board

    def barrier(self) -> None:
        self._barrier.wait(timeout=240)

    def gather_objects(self, value: object) -> list[object]:
        self._board[self.place.rank] = value
        self.barrier()
        everyone = list(self._board)
        self.barrier()
        return everyone

    def from_main(self, value: object) -> object:
        return self.gather_objects(value)[0]


class Steps:
    """Calls `poll` as the loop does: a step says whether a rank is busy, which is read after the next one."""

    def __init__(self, saver: CheckpointSaver, ranks: Any, *, after: int) -> None:
        self.step, self._saver, self._ranks = after, saver, ranks
        self._sent: Literal["busy", "done"] = "done"

    def __call__(self) -> bool:
        self.step += 1
        others = self._sent
        self._sent = "busy" if any(self._ranks.gather_objects(self._saver.is_busy)) else "done"
        return self._saver.poll(self.step, others=others)


def one_rank() -> ThreadRanks:
    return ThreadRanks(Place(), barrier=threading.Barrier(1), board=[None])


def on_ranks(num_ranks: int, work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """What `work` returned or raised on each rank."""
    barrier, board = threading.Barrier(num_ranks), [None] * num_ranks
    results: list[Any] = [None] * num_ranks

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadRanks(Place(rank=rank, world_size=num_ranks), barrier=barrier, board=board))
        except Exception as error:  # noqa: BLE001 - shown by the assertions on it
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def saver_of(
    root: Path,
    *,
    ranks: Any,
    engine: Any,
    mode: Literal["background", "blocking"] = "blocking",
    retention: Retention = KEEP_ALL,
    said: list[str] | None = None,
    committed: list[TrainState] | None = None,
    progress: Callable[[int], None] = lambda step: None,
) -> CheckpointSaver:
    return CheckpointSaver(
        root,
        engine=engine,
        ranks=ranks,
        origin=Origin(IDENTITY, {"torch": "2.0", "host": "here"}, inputs={}, recipe_text="name: test\n"),
        retention=retention,
        mode=mode,
        hooks=SaveHooks(
            (said if said is not None else []).append, (committed if committed is not None else []).append, progress
        ),
    )


class Gate:
    """Holds the writers back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, path: str = "") -> None:
        self.opened, self.reached = threading.Event(), threading.Event()

        def write(folder: Path, file: StateFile, **keywords: Any) -> Any:
            if path in file.path:
                self.reached.set()
                assert self.opened.wait(240)
            return write_file(folder, file, **keywords)

        monkeypatch.setattr(saver, "write_file", write)


def state_at(step: int, **changes: Any) -> TrainState:
    exact = {"losses_since_log": [EXACT, 1 / 3], "training_seconds": EXACT}
    return TrainState(step=step, images_seen=64 * step, **exact, **changes)


def save(
    root: Path,
    step: int,
    *,
    ranks: Any,
    keep: int = 9,
    mode: Literal["background", "blocking"] = "blocking",
    engine: TinyEngine | None = None,
) -> Path:
    """One checkpoint, written by a saver of its own."""
    engine = engine or TinyEngine(value=step % 256, rank=ranks.place.rank)
    saver = saver_of(root, ranks=ranks, engine=engine, mode=mode, retention=Retention(last=keep))
    saver.save(state_at(step))
    saver.finish()
    return root / f"step-{step:08d}"


def restore(root: Path, *, ranks: Any, identity: dict[str, Any] = IDENTITY) -> tuple[Restored | None, TinyEngine]:
    engine = TinyEngine(value=255, rank=ranks.place.rank)
    return restore_checkpoint(root, engine=engine, ranks=ranks, identity=identity), engine


def steps(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in root.glob("step-*"))


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())
