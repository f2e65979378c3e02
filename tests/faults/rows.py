"""A row of the table: what was promised, and what was seen. A row that leaves a question open has not passed."""

import fcntl
import re
import textwrap
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.harness import SAVE_STEPS, Case, Ended, signal_name, went_on_from
from tests.left_behind import BY_THE_START, matches

LEAVING_SECONDS = 60.0  # for processes that notice that all is over, on a machine that lets them wait
_LOCK = re.compile(r"^\.(run|train)\.lock(\.\d+)?$")  # these stay, and are let go of
_OUR_CODE = re.compile(r'File "[^"]*/(data_shards|launch|model|pipeline)/[^"]*\.py", line')
COLUMNS = ("fault", "ended", "lost", "continued run", "left behind", "verdict")


@dataclass
class Row:
    """One line of the table, filled by the test as it goes."""

    name: str  # the test's id
    fault: str = ""  # in a few words
    promise: str = ""  # one sentence for the user
    ended: str = ""
    lost: str = ""
    continued: str = ""
    left_behind: str = ""
    verdict: str = "FAILED"
    seconds: float = 0.0
    _open: tuple[str, ...] = field(
        default=("fault", "promise", "ended", "lost", "continued", "left_behind"), init=False
    )

    def is_about(self, fault: str, promise: str) -> None:
        """Say what the row is about."""
        self.fault, self.promise = fault, promise

    def ends(self, ended: Ended, *, code: int | Collection[int], says: str = "") -> None:
        """The attempt ended with one of these codes (negative: a signal's) and printed what matches `says`."""
        codes = {code} if isinstance(code, int) else set(code)
        self.ended = signal_name(ended.code)
        assert ended.code in codes, f"{signal_name(ended.code)}, not {sorted(codes)}:\n{ended.output}"
        if says:
            self.ended += f": {ended.sentence(says).removeprefix('shardvit: ')}"
        if ended.code in (0, 2, 75):  # a launcher may answer a signal with one of its own
            assert "Traceback" not in ended.output or not _OUR_CODE.search(ended.output), ended.output

    def loses(self, continued: Ended, *, reached: int, at_most: int = SAVE_STEPS) -> None:
        """`continued` came to its end, from no more than `at_most` steps before `reached`."""
        assert continued.code == 0, f"continued, {signal_name(continued.code)}:\n{continued.output}"
        lost = max(0, reached - went_on_from(continued))
        self.lost = f"{lost} steps" if lost else "nothing"
        assert lost <= at_most, f"lost {lost} steps of {reached}:\n{continued.output}"

    def equals(self, case: Case, undisturbed: Case, *, tolerance: float = 0.0) -> None:
        """The curve, the held-out result and the final weights are those of the undisturbed run."""
        ours, theirs = case.curve(), undisturbed.curve()
        assert [step for step, _ in ours] == [step for step, _ in theirs], "the curves have other steps"
        if tolerance:
            worst = _worst_difference(case, undisturbed)
            self.continued = f"within {worst:.1e}, limit {tolerance:.0e}"
            assert worst <= tolerance
            return
        for (step, left), (_, right) in zip(ours, theirs, strict=True):
            assert left == right, f"step {step}: {left} instead of {right}"
        assert case.record()["results"] == undisturbed.record()["results"]
        assert case.record()["model_digest"] == undisturbed.record()["model_digest"]
        self.continued = "bit-exact"

    def recovers(
        self,
        case: Case,
        undisturbed: Case,
        continued: Ended | None = None,
        *,
        reached: int,
        at_most: int = SAVE_STEPS,
        tolerance: float = 0.0,
        besides: Collection[str] = (),
    ) -> None:
        """The same command again, or what `continued` is the end of, loses little, equals and leaves nothing."""
        self.loses(continued or case.start().wait(), reached=reached, at_most=at_most)
        self.equals(case, undisturbed, tolerance=tolerance)
        self.leaves_nothing(case, undisturbed, besides=besides)

    def is_unharmed(self, case: Case, undisturbed: Case, *, besides: Collection[str] = ()) -> None:
        """The fault did not end the run, which equals and leaves nothing."""
        self.has_no("lost")
        self.equals(case, undisturbed)
        self.leaves_nothing(case, undisturbed, besides=besides)

    def has_the_same_bytes(self, made: object, expected: object) -> None:
        """Nothing is lost where the same command makes the same files and, as the test has seen, no others."""
        assert made == expected
        self.lost, self.continued, self.left_behind = "-", "same bytes", "nothing"

    def leaves_nothing(self, case: Case, undisturbed: Case | None = None, *, besides: Collection[str] = ()) -> None:
        """No process, no lock, no shared memory, and no file that the undisturbed run has not (without one, no
        temporary file) but for `besides`: paths in the run folder, or parts of such."""
        deadline = time.monotonic() + LEAVING_SECONDS
        while (alive := case.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not alive, f"processes are left: {[(process.pid, process.cmdline()) for process in alive]}"
        usual = undisturbed.files() if undisturbed else {name for name in case.files() if not _looks_temporary(name)}
        left = {name for name in case.files() - usual if not _LOCK.search(name)}
        left = {name for name in left if not matches(name, BY_THE_START) and not any(part in name for part in besides)}
        assert not left, f"files are left in the run folder: {sorted(left)}"
        temporary = [path.name for path in case.temporary.iterdir() if not path.name.startswith("torchinductor_")]
        assert not temporary, f"temporary files are left: {temporary}"
        while (shared := case.new_in_shm()) and time.monotonic() < deadline:  # another's that is just being made
            time.sleep(0.05)
        assert not shared, f"left in /dev/shm: {shared}"
        for lock in case.run.glob(".*.lock"):
            assert _is_free(lock), f"{lock} is held"
        self.left_behind = "nothing"

    def has_no(self, question: str) -> None:
        """A question that this fault does not raise (`lost`, `continued`, `left_behind`), shown as a dash."""
        setattr(self, question, "-")

    def unanswered(self) -> list[str]:
        """What the test has not looked at."""
        return [question for question in self._open if not getattr(self, question)]

    def cells(self) -> tuple[str, ...]:
        """The row's cells, in the order of `COLUMNS`."""
        return (self.fault or self.name, self.ended, self.lost, self.continued, self.left_behind, self.verdict)


def table(rows: Collection[Row], *, widest: int = 72) -> list[str]:
    """The rows as aligned lines; a long cell is cut."""
    lines = [COLUMNS, *(tuple(_cut(cell, widest) for cell in row.cells()) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    shown = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return [shown[0], "-+-".join("-" * width for width in widths), *shown[1:]]


def _cut(text: str, widest: int) -> str:  # after a word: CI spells what is kept of the table
    return textwrap.shorten(text, widest, placeholder=" ...")


def _looks_temporary(name: str) -> bool:
    return name.endswith((".tmp", ".partial", ".writing")) or any(part.startswith(".") for part in Path(name).parts)


def _is_free(lock: Path) -> bool:
    with lock.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def _worst_difference(case: Case, undisturbed: Case) -> float:
    """The largest difference of any value of the curve and of any weight, but for the keys' biases.

    A softmax does not see what all keys have in common, so the gradient of their biases is zero but for rounding; and
    Adam divides by its size: they walk at random by the learning rate, and nothing comes of it.
    """
    from safetensors.torch import load_file

    differences = [0.0]
    for (step, left), (_, right) in zip(case.curve(), undisturbed.curve(), strict=True):
        assert left.keys() == right.keys(), f"step {step}: {sorted(left)} instead of {sorted(right)}"
        differences += [abs(left[name] - right[name]) for name in left]
    ours, theirs = (load_file(each.stage / "model" / "model.safetensors") for each in (case, undisturbed))
    assert ours.keys() == theirs.keys()
    for name in ours:
        difference = (ours[name] - theirs[name]).abs()
        if name.endswith("qkv.bias"):
            difference = difference.view(3, -1)[[0, 2]]
        differences.append(difference.max().item())
    return max(differences)
