"""After a failed exchange: find the dead rank, name it once per log, and tell the other hosts in one small file.

A rank that fails by an exception, or finds a process of its host dead or hanging, overwrites the news in place. The
lowest living rank of each host reads its host's heartbeats once and then the news, ever more seldom; the other ranks
read the lowest one's heartbeat: some 9 file operations a rank for a death. The kernel knows this host's processes.

Where all hosts write to one log (SLURM, `shardvit run` over ssh), the first to create a certain file speaks. If it is
killed between the two, only its launcher tells.
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

from pipeline.ranks.heartbeat import Heartbeat, read_heartbeat, write_heartbeat
from pipeline.ranks.place import Place
from pipeline.ranks.process import process_started, this_machine

About = Literal["a rank", "nobody known", "a mistake"]

LEAVE_SECONDS = 3.0  # for the main thread to fail by itself; and the launcher sees the dead rank's exit code first
_FIRST_PAUSE_SECONDS = 0.2  # between two looks; each one is twice as long as the one before
_PEER_GONE = re.compile(r"Connection closed by peer|onnection reset|Broken pipe|remote process exited")  # gloo, NCCL

first_word = threading.Lock()  # taken for good by this process's thread that reports another rank's end


def peer_is_gone(error: BaseException) -> bool:
    """True if an exchange between ranks failed because another one has ended."""
    return isinstance(error, RuntimeError) and bool(_PEER_GONE.search(str(error)))


def tell_all_hosts(folder: Path, beat: Heartbeat) -> None:
    """Tell the other hosts that a rank failed or ended the run. The first news stays, but "ended" replaces "failed".
    OSError as for a heartbeat."""
    known = read_heartbeat(folder, "news", attempt=beat.attempt)
    if known is None or (known.state, beat.state) == ("failed", "ended"):
        write_heartbeat(folder, beat, to="news")


def report_gone(folder: Path, *, place: Place, say: Callable[[str], None]) -> None:
    """Name the rank that died, and its host, once per log, after waiting a moment until it is known."""
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
    """Let only the first rank that asks report a mistake that others may find too, where ranks share a log."""
    mine = _own_heartbeat(folder, place=place)
    return mine is None or is_to_say(folder, place=place, attempt=mine.attempt, about="a mistake")


def is_to_say(folder: Path, *, place: Place, attempt: str, about: About) -> bool:
    """Decide if this host reports: always to its own log; to a shared one only if it is the first to ask. "nobody
    known" is not said after a rank was named, but does not keep another host from naming it."""
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
    except OSError:  # rather twice than not at all
        pass
    return True


def said_file(attempt: str) -> str:
    """The name of the file that the first one to name a rank makes beside the heartbeats."""
    return f"said-{hashlib.blake2b(attempt.encode(), digest_size=8).hexdigest()}"


class _Host:
    """The heartbeats of this host's other ranks: each read once, and again when its process has ended."""

    def __init__(self, folder: Path, *, place: Place, attempt: str) -> None:
        self._folder, self._place, self._attempt = folder, place, attempt
        self._seen: dict[int, Heartbeat | None] = {}
        self._is_final: set[int] = set()

    def speaker(self) -> Heartbeat | None:
        """Read again the lowest living rank of this host below this one; None: this one is to speak."""
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
        """True if another rank of this host has reported an end."""
        return any(beat.state == "ended" and beat.is_here for beat in self._beats())

    def gone(self) -> str:
        """A sentence about a dead rank of this host; "" if all are alive or exited cleanly."""
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
                self._is_final.add(rank)  # what a dead process has not written now, it never will
            self._seen[rank] = read_heartbeat(self._folder, rank, attempt=self._attempt) or beat
        return self._seen[rank]


def ranks_of_host(place: Place) -> range:
    """The ranks of this process's host, where they are numbered consecutively."""
    first = max(0, place.rank - place.local_rank)
    return range(first, min(place.world_size, first + place.local_world_size))


def last_step(beat: Heartbeat) -> str:
    """Describe the last heartbeat; a killed process may have done a few more steps."""
    return f"its last known step was {beat.step}, while {beat.status}"


def gone(beat: Heartbeat) -> str:
    """A sentence about a dead process."""
    return f"{beat.name} is gone; {last_step(beat)}"


def failure(beat: Heartbeat) -> str:
    """A sentence about a rank that ended by an exception."""
    return f"{beat.name} has failed ({beat.note}); {last_step(beat)}"


def _sentence(host: _Host, news: Heartbeat | None) -> tuple[str, bool]:
    """What is known, and if this host found it out. An ended run takes precedence over a failed rank."""
    if news is not None and news.state == "ended":
        return news.note, False
    if sentence := host.gone():
        return sentence, True
    return (failure(news) if news else ""), False


def _own_heartbeat(folder: Path, *, place: Place) -> Heartbeat | None:
    """This process's heartbeat; None if it has written none (the file may be an earlier attempt's)."""
    beat, here = read_heartbeat(folder, place.rank), (this_machine(), os.getpid(), process_started(os.getpid()))
    return beat if beat is not None and (beat.machine, beat.pid, beat.started) == here else None
