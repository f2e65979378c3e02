"""One case of the fault suite: a run folder of its own, real processes, and the four questions that a row answers.

    case.start(faults=[case.fault("kill", "backward", rank=1, step=25)])   -> Attempt, running
    attempt.wait()                                                         -> Ended: exit code, output
    row.ends(...); row.recovers(...)                                       loses, equals, leaves_nothing

Two ranks on gloo train a tiny ViT on packed digits for 60 steps, which takes 2 s, and save every 10. The rest is
start-up: 7 s for the ranks alone (`how="srun"`), 20 s through `shardvit run` (`how="run"`). Every process of a case has
its mark in the environment, and its folder for temporary files.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil
import yaml

from shardvit.data_shards.packing.pack import pack
from tests.conftest import python_path
from tests.small_recipe import curve

ROOT = Path(__file__).resolve().parents[2]
INJECT = Path(__file__).with_name("inject")
MARK = "SHARDVIT_FAULT_CASE"
STEPS, SAVE_STEPS = 60, 10
PATIENCE_SECONDS = 240.0  # of an attempt; a row that reaches it has failed
_RANK_COMMANDS = (["-u", "-m", "shardvit.launch.train"],)

How = Literal["srun", "run", "deepspeed"]
Fault = dict[str, Any]  # one entry of SHARDVIT_FAULT, see inject/injected_faults/fault.py


def recipe(shards: Path, changes: Mapping[str, object] | None = None) -> dict[str, Any]:
    """The suite's recipe; `changes` are values by their dotted keys."""
    content: dict[str, Any] = {
        "name": "law",
        "seed": 7,
        "processes": 2,
        "model": {"width": 32, "depth": 1, "heads": 2, "patch_size": 4},
        # Blocking: which checkpoint a fault finds does not hang on how fast the disk is.
        "engine": {"zero_stage": 2, "precision": "bf16", "max_micro_batch_size": 8, "saving": "blocking"},
        "stages": {
            "pretrain": {
                "train": str(shards / "train"),
                "eval": str(shards / "val"),
                "image_size": 8,
                "global_batch_size": 32,
                "duration": f"{STEPS} steps",
                "optimizer": {"name": "adamw", "lr": 0.003, "weight_decay": 0.05},
                "schedule": {"warmup": "10%"},
                "augment": {"mixup_alpha": 0.2, "auto_augment": "3a", "random_erasing": {"probability": 0.2}},
                "dropout": 0.1,
                "log_every": "7 steps",  # no divisor of save_every: points of the curve span checkpoints
                "eval_every": "40%",
                "save_every": f"{SAVE_STEPS} steps",
                "keep_checkpoints": 2,
            }
        },
    }
    for key, value in (changes or {}).items():
        *groups, last = key.split(".")
        place = content
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = copy.deepcopy(value)
    return content


def fault_variables(faults: Sequence[Fault]) -> dict[str, str]:
    """Return the environment variables of a process that runs the repository's code and meets `faults`."""
    if not faults:
        return {"PYTHONPATH": python_path()}
    return {"PYTHONPATH": python_path(INJECT), "SHARDVIT_FAULT": json.dumps(list(faults))}


def pack_shards(out: Path) -> Path:
    """Pack the suite's shards, digits of three classes."""
    pack("digits", out, classes=("0", "1", "2"), holdout=0.2, samples_per_shard=100, report=lambda text: None)
    return out


@dataclass(frozen=True)
class Ended:
    """An attempt that is over."""

    code: int  # negative: killed by that signal
    output: str
    seconds: float

    def sentence(self, pattern: str) -> str:
        """The first line of the output that has `pattern` (a regular expression); AssertionError if none has."""
        for line in self.output.splitlines():
            if re.search(pattern, line):
                return line.strip()
        raise AssertionError(f"nothing matches {pattern!r} in:\n{self.output}")


class Attempt:
    """Processes that were started."""

    def __init__(self, process: subprocess.Popen[bytes], *, output: Path, case: Case, faults: Sequence[Fault]) -> None:
        self.process, self._output, self._case, self._faults = process, output, case, faults
        self._start = time.monotonic()

    @property
    def output(self) -> str:
        """What they have printed so far."""
        return self._output.read_text(encoding="utf-8", errors="replace")

    def wait(self, patience_seconds: float = PATIENCE_SECONDS) -> Ended:
        """Wait for the end; AssertionError if a fault has not struck, or it has not ended after `patience_seconds`
        (then everything is killed)."""
        try:
            code = self.process.wait(timeout=patience_seconds)
        except subprocess.TimeoutExpired:
            self.kill_everything()
            raise AssertionError(f"has not ended after {patience_seconds:.0f} s:\n{self.output}") from None
        for fault in self._faults:
            struck = fault["once"] is None or Path(fault["once"]).exists()
            assert struck, f"{fault['action']} at {fault['point']} has not struck:\n{self.output}"
        return Ended(code, self.output, time.monotonic() - self._start)

    def wait_for(self, condition: Callable[[], object], *, what: str) -> None:
        """Wait until `condition` holds, while the attempt runs."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert self.process.poll() is None, f"ended before {what}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {what}:\n{self.output}"
            time.sleep(0.02)

    def wait_for_text(self, text: str) -> None:
        """Wait until `text` is printed."""
        self.wait_for(lambda: text in self.output, what=f"text {text!r}")

    def wait_for_fault(self, fault: Fault) -> None:
        """Wait until `fault` has struck."""
        self.wait_for(Path(fault["once"]).exists, what=f"fault at {fault['point']}")

    def release(self, fault: Fault) -> None:
        """End a hold."""
        Path(fault["release"]).touch()

    def ranks(self) -> list[psutil.Process]:
        """The ranks, in order; worker processes are not among them."""
        found = [process for process in self._case.processes() if _command(process)[1:4] in _RANK_COMMANDS]
        pids = {process.pid for process in found}
        tops = [process for process in found if process.ppid() not in pids]
        return sorted(tops, key=lambda process: int(process.environ().get("RANK", "0")))

    def launchers(self) -> list[psutil.Process]:
        """DeepSpeed's two processes, the first of them first; none under another launcher."""
        return [p for p in self._case.processes() if any("deepspeed.launcher" in part for part in _command(p))]

    def kill_everything(self) -> None:
        """Kill all at once, as a power failure does."""
        while alive := self._case.processes():
            for process in alive:
                try:
                    process.kill()
                except psutil.Error:
                    continue
            time.sleep(0.02)
        self.process.wait()


class Case:
    """One run folder below `folder`, and the attempts at it.

    `changes` are to the recipe, by dotted keys; `content` is another recipe instead.
    """

    def __init__(
        self,
        folder: Path,
        shards: Path,
        *,
        changes: Mapping[str, object] | None = None,
        content: dict[str, Any] | None = None,
    ) -> None:
        self.folder, self.shards = folder, shards
        self.mark = f"{folder.name}-{uuid.uuid4().hex[:12]}"
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        self._faults = self._attempts = 0
        self.write_recipe(recipe(shards, changes) if content is None else content)
        self.shm_before = _shm()

    def write_recipe(self, content: dict[str, Any]) -> None:
        """Write recipe.yaml."""
        self.content = content
        (self.folder / "recipe.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")

    @property
    def run(self) -> Path:
        return self.folder / "runs" / str(self.content["name"])

    @property
    def stage(self) -> Path:
        """The first stage's folder."""
        return self.run / str(next(iter(self.content["stages"])))

    def fault(self, action: str, point: str, **settings: Any) -> Fault:
        """An entry for `start(faults=...)` that strikes once in the life of the case."""
        self._faults += 1
        once = {"once": str(self.folder / f"struck-{self._faults}")}
        release = {"release": str(self.folder / f"release-{self._faults}")} if action == "hold" else {}
        return {"action": action, "point": point, **once, **release, **settings}

    def run_until_killed(self, *, step: int) -> None:
        """Train so many steps, then kill everything at once, as a power failure does."""
        ended = self.start(faults=[self.fault("kill_all", "between_steps", rank=0, step=step)]).wait()
        assert ended.code == -9, ended.output

    def start_stopped(self, *, step: int) -> tuple[Attempt, psutil.Process]:
        """An attempt of which rank 0 has been stopped (SIGSTOP) after so many steps, and that rank."""
        fault = self.fault("stop", "between_steps", rank=0, step=step)
        attempt = self.start(faults=[fault])
        attempt.wait_for_fault(fault)
        rank = attempt.ranks()[0]
        attempt.wait_for(lambda: rank.status() == psutil.STATUS_STOPPED, what="stop of rank 0")
        return attempt, rank

    def wait_until_all_have_ended(self) -> None:
        """Wait for the last process: a kill is there at once, but its process may be a while in the kernel."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while alive := self.processes():
            assert time.monotonic() < deadline, f"processes are left: {alive}"
            time.sleep(0.02)

    def start(
        self,
        *arguments: str,
        how: How = "srun",
        stage: str | None = None,
        processes: int | None = None,
        faults: Sequence[Fault] = (),
        environment: Mapping[str, str] | None = None,
        shell: str = "",
    ) -> Attempt:
        """Start an attempt: `shardvit run` on the whole recipe, with its options and key=value as `arguments`; or the
        ranks of one stage (default: the first), by themselves (srun) or by DeepSpeed, with key=value. `shell`:
        redirections of its streams, such as 2>&-."""
        self._attempts += 1
        output = self.folder / f"output-{self._attempts}.txt"
        count = str(processes or self.content["processes"])
        rank_arguments = ["recipe.yaml", "--stage", stage or self.stage.name, *arguments]
        match how:
            case "run":
                command = ["-m", "shardvit.launch.cli", "run", "recipe.yaml", *arguments]
            case "srun":
                command = ["-m", "tests.faults.srun", count, *rank_arguments]
                with contextlib.suppress(OSError):  # of a folder that is read-only
                    self.run.mkdir(parents=True, exist_ok=True)  # as `shardvit run` has it when it starts ranks
            case "deepspeed":
                command = ["-m", "deepspeed.launcher.runner", "--num_gpus", count, "--module", "shardvit.launch.train"]
                command += rank_arguments
        with output.open("w") as file:
            process = subprocess.Popen(
                ["bash", "-c", f'exec "$0" "$@" {shell}', sys.executable, *command],
                cwd=self.folder,
                env={**self.environment(faults), **(environment or {})},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_DFL),  # else as under nohup: ignored
            )
        return Attempt(process, output=output, case=self, faults=faults)

    def shardvit(self, *arguments: str, faults: Sequence[Fault] = ()) -> Ended:
        """Run another command than `run` in the case's folder to its end."""
        start = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "shardvit.launch.cli", *arguments],
            cwd=self.folder,
            env=self.environment(faults),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        return Ended(done.returncode, done.stdout, time.monotonic() - start)

    def pack_digits(self, *, faults: Sequence[Fault] = ()) -> Ended:
        """Pack the suite's shards once more, into `folder / "packed/digits"`: files are named after the folder."""
        (self.folder / "packed").mkdir(exist_ok=True)
        arguments = ("--classes", "0,1,2", "--holdout", "0.2", "--samples-per-shard", "100")
        return self.shardvit("pack", "digits", "packed/digits", *arguments, faults=faults)

    def environment(self, faults: Sequence[Fault] = ()) -> dict[str, str]:
        """Variables of the case's processes."""
        return {
            **os.environ,
            **fault_variables(faults),
            "TMPDIR": str(self.temporary),
            MARK: self.mark,
            "MLFLOW_TRACKING_URI": "http://127.0.0.1:9",  # nobody there
            "DS_ACCELERATOR": "cpu",
        }

    def processes(self) -> list[psutil.Process]:
        """Everything alive that carries the case's mark."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):  # gone, or somebody else's
                continue
        return found

    def saved(self) -> list[int]:
        """The steps of the checkpoints, oldest first."""
        return sorted(int(path.name.removeprefix("step-")) for path in self.stage.glob("checkpoints/step-*"))

    def record(self) -> dict[str, Any]:
        """stage.json of the first stage."""
        return json.loads((self.stage / "stage.json").read_text(encoding="utf-8"))

    def curve(self) -> list[tuple[int, dict[str, float]]]:
        """The first stage's curve, without times."""
        return curve(self.stage)

    def files(self) -> set[str]:
        """All files and empty folders of the run folder, relative to it."""
        return {
            str(path.relative_to(self.run))
            for path in self.run.rglob("*")
            if not path.is_dir() or not any(path.iterdir())
        }

    def new_in_shm(self) -> list[str]:
        """What is in /dev/shm now, was not when the case began, and belongs to no living process."""
        new = _shm() - self.shm_before
        if not new:
            return []
        in_use = set()
        for process in psutil.process_iter():
            try:
                maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            # Other programs' semaphores and torch's tensors carry their number, and may not be mapped at the moment.
            own = re.compile(rf"[-_]{process.pid}[-_]")
            in_use |= {name for name in new if f"/dev/shm/{name}" in maps or own.search(name)}
        return sorted((new - in_use) & _shm())


def send(process: psutil.Process, number: int) -> None:
    """Send a signal to a process that may be gone already."""
    try:
        process.send_signal(number)
    except psutil.Error:
        return


def went_on_from(ended: Ended) -> int:
    """The step that an attempt went on from; 0: from the beginning."""
    found = re.findall(r"resuming from .*?step ([\d,]+) of", ended.output, flags=re.DOTALL)
    return int(found[-1].replace(",", "")) if found else 0


def signal_name(code: int) -> str:
    """An exit code, in words where it is a signal's."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit {code}"


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _shm() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()
