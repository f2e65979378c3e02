"""Ranks watch each other: name one that died, hangs or is stopped, and end the run so that it can restart.

A thread of each rank writes a heartbeat, checks every second for dead processes of this host, and, once this rank has
made no progress for a quarter of `hang_seconds`, reads all heartbeats. When no rank made any for all of it,
`find_suspects` names those that hang. Each host's ranks dump their stacks to STAGE/ranks/stack-rank-N.txt; one process
per host reports, kills the hanging ones there and exits with 1. Costs a 4 KiB file every 2 seconds, less often above 64
ranks. Cannot end a process alone on its host that is stopped or in a C call holding the GIL (the other hosts name it
and end; the launcher must kill it), nor one in an uninterruptible system call. If a host's ranks are not numbered
consecutively, a dead one is only found as a hang.
"""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from shardvit.data_shards.durable import make_folders
from shardvit.pipeline.ranks.dead_ranks import (
    LEAVE_SECONDS,
    failure,
    first_word,
    gone,
    is_to_say,
    last_step,
    peer_is_gone,
    ranks_of_host,
    said_file,
    tell_all_hosts,
)
from shardvit.pipeline.ranks.heartbeat import (
    Heartbeat,
    Sightings,
    State,
    Suspect,
    WakingClock,
    find_suspects,
    heartbeat_file,
    read_heartbeat,
    write_heartbeat,
)
from shardvit.pipeline.ranks.place import Place
from shardvit.pipeline.ranks.process import describe_process, is_stopped, process_started, this_machine
from shardvit.pipeline.ranks.stacks import (
    DUMP_SIGNAL,
    StackDumps,
    is_whole,
    main_thread_waits,
    stack_excerpt,
    stack_file,
)

_WRITE_SECONDS, _FILES_PER_SECOND = 2.0, 32
_LOOK_SECONDS = 1.0  # between checks of this host's processes
_FOLLOW_SECONDS = 6.0  # until a rank exits after another on its host ended the run
_STACK_SECONDS = 10.0  # for a process to write its whole stack to a busy disk
_CLOSE_SECONDS = 60.0  # for a delayed last "running", which after "left" would make this rank look dead
_SAY_SECONDS, _FIRST_STEP_SECONDS = 5.0, 600.0
_MOST_NAMED = 4


class Watch:
    """One rank's watcher. All ranks share `folder` for heartbeats and stacks; `attempt` identifies this start of the
    ranks; `hang_seconds` limits the time without progress after the first step (before it, at least 10 minutes; 0: no
    limit, but dead processes are found); `say` is called from another thread."""

    def __init__(
        self, folder: Path, *, place: Place, attempt: str, hang_seconds: float, say: Callable[[str], None]
    ) -> None:
        self._folder, self._place, self._attempt = folder, place, attempt
        self._hang_seconds, self._say = hang_seconds, say
        self._write_seconds = max(_WRITE_SECONDS, place.world_size / _FILES_PER_SECOND)
        if hang_seconds:
            self._write_seconds = min(self._write_seconds, hang_seconds / 8)
        self._look_seconds = min(_LOOK_SECONDS, self._write_seconds)
        self._siblings = [rank for rank in ranks_of_host(place) if rank != place.rank]
        self._others = [rank for rank in range(place.world_size) if rank not in (place.rank, *self._siblings)]
        self._clock = WakingClock(most_seconds=4 * self._look_seconds)
        self._sightings = Sightings()
        self._progress = (0, 0, "starting")  # step, turn, status: the main thread replaces the tuple
        self._seen_progress = self._progress
        self._progressed_at = self._next_write = 0.0
        self._looked_at = -math.inf  # last read of all heartbeats
        self._sequence = 0
        self._has_complained = False
        # Imports, loading and compiling before the first step report no progress.
        self._patience_seconds = max(hang_seconds, _FIRST_STEP_SECONDS)
        self._ended = ""  # the message, if this rank ended the run
        self._stacks = StackDumps(stack_file(folder, place.rank))
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="watch")

    def __enter__(self) -> Watch:
        """Call in the main thread."""
        with suppress(OSError):
            make_folders(self._folder, below=self._folder.parent.parent)  # the run folder, which may be gone
            if self._place.is_main:
                _forget(self._folder, ranks_from=self._place.world_size, said_but=said_file(self._attempt))
                # NFS caches a missing file, so create it now.
                heartbeat_file(self._folder, "news").open("ab").close()
        self._stacks.open()  # before the first heartbeat: others may then ask for a stack
        self._write("running")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # With Stopped all ranks leave together; a rank that only lost its peer has not failed either.
        innocent = error is None or peer_is_gone(error) or type(error).__name__ == "Stopped"
        self.close(failure="" if innocent else f"{type(error).__name__}: {error}")

    def progress(self, step: int, *, status: str = "training") -> None:
        """Report progress after `step` steps, from the main thread, not while waiting for other ranks. Free."""
        last_step, turn, _ = self._progress
        self._progress = (step, turn + 1 if step == last_step else 0, status)
        if step == last_step + 1:
            self._patience_seconds = self._hang_seconds

    def close(self, *, failure: str = "") -> None:
        """Sign off, so that this process's end raises no alarm; `failure` is the error it ends with."""
        self._closing.set()
        self._thread.join(timeout=_CLOSE_SECONDS)
        if not self._ended:
            self._write("failed" if failure else "left", note=failure)
        self._stacks.close()

    def _run(self) -> None:
        while not self._closing.wait(self._look_seconds):
            now = self._clock.tick()
            if self._progress != self._seen_progress:
                self._seen_progress, self._progressed_at = self._progress, now
            if now >= self._next_write:
                self._next_write = now + self._write_seconds
                self._write("running")
                self._read(self._siblings)
            self._look_for_deaths()
            if self._hang_seconds:
                self._look_for_hangs()

    def _look_for_deaths(self) -> None:
        for rank in self._siblings:
            beat = self._sightings.of(rank)
            if beat is None or not (beat.is_gone or (beat.is_here and beat.state == "ended")):
                continue
            self._read([rank])  # it may have signed off since
            beat = self._sightings.of(rank) or beat
            if beat.state == "ended":  # it reported why, and the launcher ends us
                self._end_quietly()
            if beat.state == "running" and beat.is_gone:
                self._end_because_of(gone(beat))

    def _end_quietly(self) -> None:
        first_word.acquire(blocking=False)
        if not self._closing.wait(_FOLLOW_SECONDS):
            os._exit(1)

    def _end_because_of(self, sentence: str) -> None:
        """Report and exit, unless the main thread fails in its next exchange and closes this watch, as usual."""
        self._read(self._siblings)
        if not self._reports() or self._is_run_gone():
            return self._end_quietly()
        if first_word.acquire(blocking=False):
            self._ended = sentence
            self._write("ended", note=sentence)
            if is_to_say(self._folder, place=self._place, attempt=self._attempt, about="a rank"):
                self._tell(sentence)
        if not self._closing.wait(LEAVE_SECONDS):
            os._exit(1)

    def _look_for_hangs(self) -> None:
        now, idle, patience = self._clock.now, self._clock.now - self._progressed_at, self._patience_seconds
        # One rank per host does this, the others only if that one seems stuck.
        if idle < patience / 4 or not (self._reports() or idle > 1.5 * patience):
            return
        # Silence shows after two reads, and judging needs a fresh one; a read costs a file operation per rank.
        pause_seconds = self._write_seconds if idle >= patience else max(self._write_seconds, patience / 4)
        if now - self._looked_at >= pause_seconds:
            self._looked_at = now
            self._read(self._others)
        if idle < patience:
            return
        self._sightings.note(self._beat("running"), now=now)
        suspects = find_suspects(
            self._sightings,
            ranks=range(self._place.world_size),
            now=now,
            hang_seconds=patience,
            slack_seconds=2 * (self._write_seconds + self._look_seconds),
        )
        if suspects and first_word.acquire(blocking=False):
            self._end_the_run(suspects)

    def _end_the_run(self, suspects: list[Suspect]) -> None:
        here = [beat for rank in self._siblings if (beat := self._sightings.of(rank)) and beat.is_signalable]
        kernel = {beat.rank: describe_process(beat.pid) for beat in here}
        # Resumed, a stopped process would train on, and its dump could crash (see `stacks`).
        asked = [beat for beat in here if not is_stopped(beat.pid)]
        stacks = self._collect_stacks([self._beat("running"), *asked])
        named = [self._describe(suspect, kernel=kernel, stacks=stacks) for suspect in suspects[:_MOST_NAMED]]
        if len(suspects) > _MOST_NAMED:
            named.append(f"{len(suspects) - _MOST_NAMED} more processes are at the same place")
        if not any(suspect.rank in stacks for suspect in suspects):
            named.append(f"the stacks of this host's processes are in {self._folder}")
        self._ended = named[0].partition("\n")[0]
        self._write("ended", note=self._ended)
        self._tell("\n".join(named))
        for beat in here:
            if any(suspect.rank == beat.rank for suspect in suspects) and beat.is_signalable:
                with suppress(ProcessLookupError):
                    os.kill(beat.pid, signal.SIGKILL)
        os._exit(1)

    def _collect_stacks(self, beats: list[Heartbeat]) -> dict[int, list[str]]:
        """Make this host's ranks dump their stacks; return the relevant lines by rank."""
        before = {beat.rank: _size(stack_file(self._folder, beat.rank)) for beat in beats}
        for beat in beats:
            if beat.rank == self._place.rank:
                self._stacks.dump()
                continue
            with suppress(ProcessLookupError):
                os.kill(beat.pid, DUMP_SIGNAL)
        deadline, dumps, missing = time.monotonic() + _STACK_SECONDS, dict[int, str](), beats
        while missing:
            for beat in missing:
                with suppress(OSError), stack_file(self._folder, beat.rank).open("rb") as file:
                    file.seek(before[beat.rank])
                    dumps[beat.rank] = file.read().decode(errors="replace")
            missing = [beat for beat in missing if not is_whole(dumps.get(beat.rank, ""), main_thread=beat.main_thread)]
            if time.monotonic() >= deadline:
                break
            time.sleep(0.1 if missing else 0.0)
        threads = {beat.rank: beat.main_thread for beat in beats}
        return {rank: stack_excerpt(dump, thread=threads[rank]) for rank, dump in dumps.items()}

    def _describe(self, suspect: Suspect, *, kernel: dict[int, str], stacks: dict[int, list[str]]) -> str:
        beat = suspect.beat
        if beat is None:
            return f"rank {suspect.rank} has not started: it has no heartbeat in {self._folder}"
        if suspect.why == "failed":
            return beat.note if beat.state == "ended" else failure(beat)
        text = f"{beat.name} hangs: it has made no progress for {suspect.idle_seconds:.0f} s"
        text += " and its heartbeat is stale" if suspect.why == "silent" else " (engine.hang_seconds)"
        text = "; ".join(filter(None, [text, last_step(beat), kernel.get(suspect.rank)]))
        file = stack_file(self._folder, suspect.rank)
        if stacks.get(suspect.rank):
            return "\n".join([f"{text}. Its main thread ({file}):", *stacks[suspect.rank]])
        return f"{text}; it did not answer with a stack" if suspect.rank in stacks else text

    def _reports(self) -> bool:
        """True if this rank should report: it is its host's lowest that can, and none has yet."""
        for rank in self._siblings:
            beat = self._sightings.of(rank)
            if beat is None or not beat.is_here:
                continue
            if beat.state == "ended":
                return False
            is_stale = self._sightings.silent_seconds(rank, now=self._clock.now) > 4 * self._write_seconds
            # Alive with its watch closed: it lost a peer, and reports through `report_gone`.
            if rank < self._place.rank and not beat.is_gone and not (beat.state == "running" and is_stale):
                return False
        return True

    def _read(self, ranks: list[int]) -> None:
        for rank in ranks:
            beat = read_heartbeat(self._folder, rank, attempt=self._attempt)
            if beat is not None:
                self._sightings.note(beat, now=self._clock.now)

    def _write(self, state: State, *, note: str = "") -> None:
        self._sequence += 1
        beat = self._beat(state, note=note)
        try:
            write_heartbeat(self._folder, beat)
            if state in ("failed", "ended"):
                tell_all_hosts(self._folder, beat)
        except OSError as error:
            if not self._has_complained and not self._is_run_gone():
                self._has_complained = True
                self._tell(
                    f"rank {self._place.rank}: heartbeats cannot be written to {self._folder} ({error.strerror}), so "
                    "the wrong process may be named if one hangs; training continues"
                )

    def _is_run_gone(self) -> bool:
        return not self._folder.parent.exists()  # deleted or renamed: reported elsewhere, and ends all ranks

    def _beat(self, state: State, *, note: str = "") -> Heartbeat:
        step, turn, status = self._progress
        idle = self._clock.now - self._progressed_at
        return Heartbeat(
            rank=self._place.rank,
            attempt=self._attempt,
            host=socket.gethostname(),
            machine=this_machine(),
            pid=os.getpid(),
            started=process_started(os.getpid()) or 0.0,
            main_thread=threading.main_thread().ident or 0,
            sequence=self._sequence,
            step=step,
            turn=turn,
            status=status,
            idle_seconds=idle,
            waiting=idle > 2 * self._look_seconds and main_thread_waits(),
            state=state,
            note=note,
        )

    def _tell(self, text: str) -> None:
        """Print from a thread, so that a blocked terminal or a lock of the main thread does not block the watch."""
        thread = threading.Thread(target=self._say, args=(text,), daemon=True)
        thread.start()
        thread.join(timeout=_SAY_SECONDS)


def _forget(folder: Path, *, ranks_from: int, said_but: str) -> None:
    """Remove earlier attempts' files of higher ranks and `said_file`s."""
    for path in folder.iterdir():
        number = re.search(r"rank-(\d+)\.", path.name)
        if (number and int(number[1]) >= ranks_from) or (path.name.startswith("said-") and path.stem != said_but):
            path.unlink(missing_ok=True)


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0
