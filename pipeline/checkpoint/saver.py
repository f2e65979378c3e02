"""Save checkpoints, in the background or blocking.

In a background save a thread of each rank copies the state to host memory during the next forward and backward pass
(`host_copy`), then writes it. Each step's message says whether any is still at it (`is_busy`), so a save costs a step
nothing; then a thread of rank 0 commits and another prunes. A save due earlier waits for them. Without host memory for
the copy, the save blocks instead and says so once. A full or failing disk on any rank ends the save on all with the
same error and removes its files; earlier checkpoints stay. `state_files` writes and verifies, `store` commits.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import platform
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.text import show_bytes
from shardvit.pipeline.checkpoint.disk_space import free_bytes, spare_host_bytes
from shardvit.pipeline.checkpoint.identity import STATE
from shardvit.pipeline.checkpoint.store import (
    Retention,
    beside_of,
    collect_leftovers,
    commit_checkpoint,
    open_beside,
    prune_checkpoints,
)
from shardvit.pipeline.checkpoint.train_state import TrainState
from shardvit.pipeline.engine.base import Engine
from shardvit.pipeline.engine.saved_state.host_copy import HostBuffer, HostCopy, copy_bytes
from shardvit.pipeline.engine.saved_state.state_files import Abandoned, Seal, StateFile, text_file, write_file
from shardvit.pipeline.ranks.group import Ranks
from shardvit.pipeline.recipe.vocabulary import RECIPE_FILE
from shardvit.pipeline.runs.run_folder import checkpoint_folders

_PROGRESS_SECONDS = 5.0
# An unreachable file server or one bad transfer: a retry may succeed unaided.
_TRANSIENT = {
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.ECONNRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.EREMOTEIO,
}


class SaveFailed(Exception):
    """A checkpoint could not be written, perhaps for a transient reason; the message names the newest one."""


@dataclass(frozen=True)
class _Problem:
    text: str
    transient: bool = False


@dataclass(frozen=True)
class _Needs:
    host: str
    file_bytes: int
    copy_bytes: int
    spare_bytes: int  # host memory
    free_bytes: int  # disk, on rank 0
    problem: _Problem | None  # rank 0 could not make the folder


@dataclass(frozen=True)
class Origin:
    """Provenance to store in a checkpoint."""

    identity: dict[str, Any]  # must match to restore: stage, recipe, layout
    written_by: dict[str, str]  # facts about this process
    inputs: Mapping[str, str]  # digests of the stage's inputs
    recipe_text: str


@dataclass(frozen=True)
class SaveHooks:
    """A saver's callbacks."""

    say: Callable[[str], None]  # prints a line, on rank 0
    on_commit: Callable[[TrainState], None]  # on every rank, with the committed state
    progress: Callable[[int], None] = lambda step: None  # the step, while a blocking save makes progress


class CheckpointSaver:
    """Saves a stage's state under `root`; all methods but `close` are collective. `stall_seconds` is how long this
    process's training waited for saves, without a GPU stream's waits."""

    def __init__(
        self,
        root: Path,
        *,
        engine: Engine,
        ranks: Ranks,
        origin: Origin,
        retention: Retention,
        mode: Literal["background", "blocking"],
        hooks: SaveHooks,
    ) -> None:
        self.stall_seconds = 0.0
        self._root = root
        self._engine = engine
        self._ranks = ranks
        self._origin = origin
        self._retention = retention
        self._mode = mode
        self._hooks = hooks
        self._writing: _Writing | None = None
        self._committing: _Beside | None = None  # commits what `_writing` wrote
        self._phase_step = 0  # after which what is in flight began to be written, or committed
        self._warned_of_memory = False
        self._buffer = HostBuffer(engine.device)
        self._pruning: _Beside | None = None

    def prepare(self, num_bytes: int) -> None:
        """Page-lock host memory for background saves of about `num_bytes` of this rank, before the first step rather
        than beside a later one."""
        mine = _Needs(platform.node(), 0, num_bytes, spare_host_bytes(), free_bytes=0, problem=None)
        if self._mode == "blocking" or not self._memory_holds(self._ranks.gather_objects(mine)):
            return
        with contextlib.suppress(MemoryError):  # the first save will say so
            self._buffer.reserve(num_bytes)
        hosts = self._ranks.gather_objects(mine.host if self._buffer.is_refused else "")
        if refused := sorted({*hosts} - {""}):
            self._hooks.say(
                f"CUDA does not page-lock memory for a checkpoint's copy on {', '.join(refused)}: after each save a "
                f"step waits until {show_bytes(num_bytes)} are copied"
            )

    def save(self, state: TrainState) -> None:
        """Save `state` and the engine's, after finishing a save in flight. UserError if the disk is full or cannot be
        written, for either save; SaveFailed if it failed."""
        with self._counting_stall():
            self._finish()
            state = copy.deepcopy(state)  # the loop keeps changing its own
            room_bytes, problem = self._open_folder(state.step)
            files = self._engine.snapshot()
            if self._ranks.place.is_main:
                files = (*files, *self._our_files(state))
            needs = self._ranks.gather_objects(
                _Needs(
                    host=platform.node(),
                    file_bytes=sum(file.num_bytes for file in files),
                    copy_bytes=max(0, copy_bytes(files) - self._buffer.num_bytes),
                    spare_bytes=spare_host_bytes(),
                    free_bytes=room_bytes,
                    problem=problem,
                )
            )
            needed_bytes = sum(need.file_bytes for need in needs)
            if needs[0].problem:
                self._fail(state.step, needs[0].problem)
            if needs[0].free_bytes < needed_bytes:
                room = f"it needs {show_bytes(needed_bytes)}, {show_bytes(needs[0].free_bytes)} are free"
                self._fail(state.step, _Problem(room))
            background = self._mode == "background" and self._memory_holds(needs)
            copy_of = HostCopy(files, buffer=self._buffer) if background else files
            self._writing = _Writing(beside_of(self._root, state.step), files=copy_of, state=state)
            self._writing.start()
            self._phase_step = state.step
            if isinstance(copy_of, HostCopy):
                self._engine.hold.set(partial(self._wait_for, copy_of))
            else:
                self._finish()

    @property
    def is_busy(self) -> bool:
        """True while this rank's part of the current phase of a save is unfinished."""
        phase = self._committing or self._writing
        return phase is not None and phase.is_alive()

    def poll(self, step: int, *, others: Literal["busy", "done"]) -> bool:
        """Advance the save in flight; call after each step. `others`: whether any rank's `is_busy` was true when the
        step before was sent. Returns True, on all ranks alike, while a save is in flight. Raises as `save`."""
        if self._writing is not None and others == "done" and step - 1 > self._phase_step:  # else of an earlier phase
            with self._counting_stall():
                self._go_on()
                self._phase_step = step
        return self._writing is not None

    def finish(self) -> None:
        """Wait for the save in flight, if any, and commit it. Raises as `save`."""
        with self._counting_stall():
            self._finish()

    def close(self) -> None:
        """Abandon this rank's part of a save in flight unless it is committing; for failures, not collective."""
        if self._writing is not None:
            self._writing.abandoned.set()
        for each in (self._writing, self._committing, self._pruning):
            if each is not None:
                each.end()
        self._writing = self._committing = self._pruning = None
        self._buffer.free()

    def _wait_for(self, copy_of: HostCopy) -> None:
        with self._counting_stall():
            copy_of.wait()

    def _finish(self) -> None:
        while self._writing is not None:
            self._go_on()
        if self._pruning is not None:
            self._pruning.end()
            self._pruning = None

    def _go_on(self) -> None:
        """Start the commit of what all have written, or announce it on all ranks."""
        assert self._writing is not None
        if self._committing is None:
            self._begin_commit(self._writing)
        else:
            self._end_commit(self._writing.state, self._committing)

    def _begin_commit(self, writing: _Writing) -> None:
        step, moved_bytes = writing.state.step, -1
        writing.join(_PROGRESS_SECONDS)
        while writing.is_alive():
            if writing.moved_bytes > moved_bytes:  # a disk that accepts nothing more is a hang
                moved_bytes = writing.moved_bytes
                self._hooks.progress(step)
            writing.join(_PROGRESS_SECONDS)
        parts = self._ranks.gather_objects((writing.seals, writing.failure))
        failures = [(rank, failure) for rank, (_, failure) in enumerate(parts) if failure]
        if failures:
            self._writing = None
            rank, first = failures[0]
            transient = all(failure.transient for _, failure in failures)
            self._fail(step, _Problem(f"rank {rank}: {first.text}", transient=transient))
        seals = {name: seal for each, _ in parts for name, seal in each.items()}
        # A thread, since flushes wait for the disk; started only on rank 0.
        self._committing = _Beside("commit", partial(commit_checkpoint, self._root, step=step, seals=seals))
        if self._ranks.place.is_main:
            self._committing.start()

    def _end_commit(self, state: TrainState, committing: _Beside) -> None:
        committing.end()
        self._writing = self._committing = None
        if problem := self._ranks.from_main(committing.failure):
            self._fail(state.step, problem)
        self._hooks.on_commit(state)  # before pruning, which may be slow on a file server
        if self._ranks.place.is_main:  # its failures are retried after the next save
            prune = partial(prune_checkpoints, self._root, newest_step=state.step, retention=self._retention)
            self._pruning = _Beside("pruning", prune)
            self._pruning.start()

    def _fail(self, step: int, problem: _Problem) -> NoReturn:
        """Remove the save's files and raise, with the same message on every rank."""
        words = ""
        if self._ranks.place.is_main:
            try:
                collect_leftovers(self._root)
                newest = next(iter(checkpoint_folders(self._root)), None)
                stands = f"{newest.name} is kept" if newest else "there is no earlier one"
            except OSError as error:  # the other ranks wait for this message
                stands = f"the earlier ones cannot be read ({_problem(error).text})"
            words = f"the checkpoint of step {step} could not be written to {self._root} ({problem.text}); {stands}: "
            words += (
                "it may be transient, or something there needs repair"
                if problem.transient
                else "make room or repair the disk"
            )
            words += "; the same command resumes"
        raise (SaveFailed if problem.transient else UserError)(self._ranks.gather_objects(words)[0])

    def _open_folder(self, step: int) -> tuple[int, _Problem | None]:
        """Make the folder on rank 0; return its disk's free bytes, and why it failed."""
        if not self._ranks.place.is_main:
            return 0, None
        try:
            open_beside(self._root, step=step)
            return free_bytes(self._root), None
        except OSError as error:
            return 0, _problem(error)

    def _our_files(self, state: TrainState) -> tuple[StateFile, ...]:
        origin = self._origin
        content = {"identity": origin.identity, "written_by": origin.written_by, "inputs": dict(origin.inputs)}
        content["state"] = asdict(state)
        return text_file(STATE, json.dumps(content, indent=1) + "\n"), text_file(RECIPE_FILE, origin.recipe_text)

    def _memory_holds(self, needs: Sequence[_Needs]) -> bool:
        """True if every host has memory for its ranks' copies; if not, say so once."""
        for host in {need.host for need in needs}:
            local = [need for need in needs if need.host == host]
            copies, spare = sum(need.copy_bytes for need in local), min(need.spare_bytes for need in local)
            if copies > spare:
                if self._ranks.place.is_main and not self._warned_of_memory:
                    self._hooks.say(
                        f"checkpoints are written while training stands still: a copy takes {show_bytes(copies)} of "
                        f"{host}'s memory, {show_bytes(spare)} are left"
                    )
                self._warned_of_memory = True
                return False
        return True

    @contextlib.contextmanager
    def _counting_stall(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.stall_seconds += time.perf_counter() - begin


class _Beside(threading.Thread):
    """Background work that keeps its failure, so that no rank fails alone and leaves the others waiting."""

    def __init__(self, name: str, work: Callable[[], object]) -> None:
        # Not a daemon: one inside torch's C++ at interpreter exit would abort the process.
        super().__init__(name=name, daemon=False)
        self.failure: _Problem | None = None
        self._work = work

    def run(self) -> None:
        try:
            self._work()
        except Abandoned:
            self.failure = _Problem("abandoned")
        except OSError as error:
            self.failure = _problem(error)
        except MemoryError as error:
            self.failure = _Problem(f"{platform.node()} has no memory for a copy of the state: {error}", transient=True)
        except Exception as error:  # noqa: BLE001 - a bug
            traceback.print_exc()
            self.failure = _Problem(f"{type(error).__name__}: {error}", transient=True)

    def end(self) -> None:
        if self.ident is not None:
            self.join()


class _Writing(_Beside):
    """Copies the files to the host if needed, and writes them in turn."""

    def __init__(self, folder: Path, *, files: Sequence[StateFile] | HostCopy, state: TrainState) -> None:
        super().__init__("checkpoint", self._write)
        self.state = state
        self.abandoned = threading.Event()  # stops writing at the next piece
        self.seals: dict[str, Seal] = {}
        self.moved_bytes = 0
        self._folder, self._files = folder, files

    def _write(self) -> None:
        try:
            files = self._files.run(abandoned=self.abandoned) if isinstance(self._files, HostCopy) else self._files
            for file in files:
                self.seals[file.path] = write_file(self._folder, file, abandoned=self.abandoned, on_bytes=self._count)
        finally:
            self._files = ()

    def _count(self, num_bytes: int) -> None:
        self.moved_bytes += num_bytes


def _problem(error: OSError) -> _Problem:
    return _Problem(error.strerror or str(error), transient=error.errno in _TRANSIENT)
