"""After a failed exchange: find the dead rank, name it once per log, and tell the other hosts through one small file.

A rank that fails by an exception, or finds a process of its host dead or hanging, overwrites that file (the news). The
lowest living rank of each host reads its host's heartbeats once and then polls the news, ever less often; the others
read its heartbeat: some 9 file operations a rank for a death. The kernel knows this host's processes. Where all hosts
share a log (SLURM, `shardvit run` over ssh), the first to create a certain file reports; if killed before, only its
launcher does.
"""

import hashlib
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from shardvit.pipeline.ranks.heartbeat import Heartbeat, read_heartbeat, write_heartbeat
from shardvit.pipeline.ranks.place import Place
from shardvit.pipeline.ranks.process import process_started, this_machine

About = Literal["a rank", "nobody known", "a mistake"]

LEAVE_SECONDS = 3.0  # lets the main thread fail by itself, and the launcher see the dead rank's exit code first
_FIRST_PAUSE_SECONDS = 0.2  # between the first polls; doubles each time
_PEER_GONE = re.compile(r"Connection closed by peer|onnection reset|Broken pipe|remote process exited")  # gloo, NCCL

first_word = threading.Lock()  # held for good by the thread of this process that reports another rank's end


def peer_is_gone(error: BaseException) -> bool:
    """True if an exchange failed because another rank ended."""
    return isinstance(error, RuntimeError) and bool(_PEER_GONE.search(str(error)))


def tell_all_hosts(folder: Path, beat: Heartbeat) -> None:
    """Write the news that a rank failed or ended the run; existing news stays, but "ended" replaces "failed". OSError
    as in `write_heartbeat`."""
    known = read_heartbeat(folder, "news", attempt=beat.attempt)
    if known is None or (known.state, beat.state) == ("failed", "ended"):
        write_heartbeat(folder, beat, to="news")


def report_gone(folder: Path, *, place: Place, say: Callable[[str], None]) -> None:
    """Name the dead rank and its host, once per log; waits up to `LEAVE_SECONDS` to learn it."""
    mine = _own_heartbeat(folder, place=place)
    host = _Host(folder, place=place, attempt=mine.attempt) if mine else None
    deadline, pause_seconds = time.monotonic() + LEAVE_SECONDS, _FIRST_PAUSE_SECONDS
    sentence, is_first_hand, speaker = "", False, None
    while True:
        if host and mine:
            speaker = host.speaker()
            if speaker is not None and speaker.state == "ended":
                return
            if speaker is None:
                news = read_heartbeat(folder, "news", attempt=mine.attempt)
                if host.has_said() or (news and news.state == "ended" and news.is_here and news.rank != mine.rank):
                    return
                sentence, is_first_hand = _sentence(host, news)
        left_seconds = deadline - time.monotonic()
        if sentence or left_seconds <= 0:
            break
        time.sleep(min(pause_seconds, left_seconds))
        pause_seconds *= 2
    if speaker is not None or not first_word.acquire(blocking=False):
        return
    about: About = "a rank" if sentence else "nobody known"
    sentence = sentence or "another process of the run died; which one is not known on this host"
    if mine is not None:
        ended = replace(mine, state="ended", note=sentence)
        with suppress(OSError):
            write_heartbeat(folder, ended)
            if is_first_hand:
                tell_all_hosts(folder, ended)
    if mine is None or is_to_say(folder, place=place, attempt=mine.attempt, about=about):
        say(sentence)


def is_to_say_mistake(folder: Path, *, place: Place) -> bool:
    """True if this rank should report a mistake that others may find too: in a shared log, only the first to ask."""
    mine = _own_heartbeat(folder, place=place)
    return mine is None or is_to_say(folder, place=place, attempt=mine.attempt, about="a mistake")


def is_to_say(folder: Path, *, place: Place, attempt: str, about: About) -> bool:
    """True if this host should report: always to its own log, to a shared one if it is the first to ask. "nobody known"
    is dropped once a rank is named, but does not stop another host from naming one."""
    if place.log == "of a host":
        return True
    named = folder / said_file(attempt)
    try:
        if about == "nobody known" and named.exists():
            return False
        file = named if about == "a rank" else named.with_suffix("." + about.replace(" ", "-"))
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
    except FileExistsError:
        return False
    except OSError:  # better twice than never
        pass
    return True


def said_file(attempt: str) -> str:
    """Name the file, next to the heartbeats, that the first host to name a rank creates."""
    return f"said-{hashlib.blake2b(attempt.encode(), digest_size=8).hexdigest()}"


class _Host:
    """Heartbeats of this host's other ranks, each read once, and again after its process ends."""

    def __init__(self, folder: Path, *, place: Place, attempt: str) -> None:
        self._folder, self._place, self._attempt = folder, place, attempt
        self._seen: dict[int, Heartbeat | None] = {}
        self._is_final: set[int] = set()

    def speaker(self) -> Heartbeat | None:
        """Re-read the heartbeat of this host's lowest living rank; None if that is this rank, which then reports."""
        for rank in ranks_of_host(self._place):
            if rank >= self._place.rank:
                return None
            beat = self._beat(rank)
            if beat is not None and beat.is_here and not beat.is_gone:
                self._seen[rank] = read_heartbeat(self._folder, rank, attempt=self._attempt)
                return self._seen[rank] or beat
            if beat is not None and beat.is_here and beat.state == "ended":
                return beat
        return None

    def has_said(self) -> bool:
        return any(beat.state == "ended" and beat.is_here for beat in self._beats())

    def gone(self) -> str:
        """Describe a dead rank of this host; "": none."""
        beats = self._beats()
        ended = [beat.note for beat in beats if beat.state == "ended"]
        dead = [gone(beat) for beat in beats if beat.state == "running" and beat.is_gone]
        failed = [failure(beat) for beat in beats if beat.state == "failed"]
        return next(iter([*ended, *dead, *failed]), "")

    def _beats(self) -> list[Heartbeat]:
        others = [rank for rank in ranks_of_host(self._place) if rank != self._place.rank]
        return [beat for rank in others if (beat := self._beat(rank)) is not None]

    def _beat(self, rank: int) -> Heartbeat | None:
        beat = self._seen.get(rank)
        if rank not in self._seen or (beat and beat.is_gone and rank not in self._is_final):
            if beat is not None:
                self._is_final.add(rank)  # a dead process writes no more
            self._seen[rank] = read_heartbeat(self._folder, rank, attempt=self._attempt) or beat
        return self._seen[rank]


def ranks_of_host(place: Place) -> range:
    """Ranks of this process's host, assuming consecutive numbers."""
    first = max(0, place.rank - place.local_rank)
    return range(first, min(place.world_size, first + place.local_world_size))


def last_step(beat: Heartbeat) -> str:
    """Describe the last heartbeat; a killed process may have gone a few steps further."""
    return f"its last known step was {beat.step}, while {beat.status}"


def gone(beat: Heartbeat) -> str:
    """Describe a dead process."""
    return f"{beat.name} is gone; {last_step(beat)}"


def failure(beat: Heartbeat) -> str:
    """Describe a rank that ended by an exception."""
    return f"{beat.name} has failed ({beat.note}); {last_step(beat)}"


def _sentence(host: _Host, news: Heartbeat | None) -> tuple[str, bool]:
    """Return what is known, and whether this host found it. An ended run takes precedence over a failed rank."""
    if news is not None and news.state == "ended":
        return news.note, False
    if sentence := host.gone():
        return sentence, True
    return (failure(news) if news else ""), False


def _own_heartbeat(folder: Path, *, place: Place) -> Heartbeat | None:
    """Read this process's heartbeat; None if the file is missing or an earlier attempt's."""
    beat, here = read_heartbeat(folder, place.rank), (this_machine(), os.getpid(), process_started(os.getpid()))
    return beat if beat is not None and (beat.machine, beat.pid, beat.started) == here else None
