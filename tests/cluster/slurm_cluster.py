"""A real SLURM for the tests: munged, slurmctld and two slurmd on this machine, each on a port of its own.

    with SlurmCluster(folder) as slurm:
        slurm.run("sbatch", "--parsable", "script.sh")

Everything lies in one folder and in a mount namespace of its own, whose /etc/hosts knows `node1` and `node2`; nothing
of the machine's own SLURM, if it has one, is read or changed. Starting takes two to three seconds, stopping one; the
daemons are killed in any case. There is no accounting database, no cgroup and no GPU: processes are tracked by /proc.

Needs root (slurmd starts jobs as their user), Linux, and Debian's packages slurm-wlm and munge.
"""

import contextlib
import datetime
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

NODES = ("node1", "node2")
KILL_WAIT_SECONDS = 30  # between SIGTERM and SIGKILL, which a process that is to save must not be late for
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel", "unshare")
_PATIENCE_SECONDS = 240.0
_LOOK_SECONDS = 0.1
_MUNGE_KEY_BYTES = 128

# Short waits, so that tests are quick; what decides about jobs is as on a cluster. Long ones for answers: a daemon that
# a busy machine holds up must not be taken for dead, nor its job for lost.
_CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SwitchType=switch/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=100000,batch_sched_delay=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
ReturnToService=2
KillWait={kill_wait}
MessageTimeout=100
BatchStartTimeout=240
MinJobAge=3600
SlurmdTimeout=600
UnkillableStepTimeout=600
"""
_PARTITIONS = """
PartitionName=low Nodes=node1,node2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 OverSubscribe=NO
PartitionName=high Nodes=node1,node2 MaxTime=INFINITE State=UP PriorityTier=10 OverSubscribe=NO
"""


def missing() -> str | None:
    """Why there can be no cluster on this machine; None: there can."""
    if os.geteuid() != 0:
        return "a SLURM of our own needs root"
    absent = [program for program in _PROGRAMS if _program(program) is None]
    if absent:
        return f"{', '.join(absent)} not installed (Debian: slurm-wlm, munge)"
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        return "no mount namespace may be made here"
    return None


@dataclass(frozen=True)
class Done:
    """What a command said."""

    code: int
    out: str
    error: str


class SlurmCluster:
    """The daemons; as a context manager they run inside of it, with all their files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.environment: dict[str, str] = {}  # for a process that talks to this cluster

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def run(
        self,
        *command: str | Path,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        check: bool = True,
    ) -> Done:
        """Run a command of SLURM's, or any that talks to it; AssertionError if it fails and `check`."""
        done = subprocess.run(
            [str(part) for part in command],
            env={**os.environ, **self.environment, **(environment or {})},
            cwd=cwd or self.folder,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=_PATIENCE_SECONDS,
            check=False,
        )
        assert not check or done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        return Done(done.returncode, done.stdout, done.stderr)

    def shown(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says; nothing when SLURM has forgotten the job."""
        words = self.run("scontrol", "--oneliner", "show", "job", job, check=False).out.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def state(self, job: str) -> str:
        """A job's state, such as PENDING, RUNNING, COMPLETED; "" when SLURM has forgotten it."""
        return self.shown(job).get("JobState", "")

    def hurry(self, job: str) -> None:
        """Let a requeued job begin in two seconds instead of two minutes; harmless to any other.

        Not at once: what it was allowed to do in the same second before is revoked, and it would be killed.
        """
        facts = self.shown(job)
        if facts.get("JobState") == "PENDING" and facts.get("Reason") == "BeginTime":
            begins = datetime.datetime.fromisoformat(facts["EligibleTime"])
            if begins - datetime.datetime.now() > datetime.timedelta(seconds=5):
                self.run("scontrol", "update", f"JobId={job}", "StartTime=now+2", check=False)

    def wait_until(
        self, condition: Callable[[], object], *, what: str, patience_seconds: float = _PATIENCE_SECONDS
    ) -> None:
        """Wait for `condition`; AssertionError with the queue and the daemons' last lines if it stays false."""
        deadline = time.monotonic() + patience_seconds
        while not condition():
            if time.monotonic() >= deadline:
                raise AssertionError(f"no {what} after {patience_seconds:.0f} s\n{self._last_words()}")
            time.sleep(_LOOK_SECONDS)

    def cancel_all(self) -> None:
        """Leave no job behind, and both nodes idle."""
        self.run("scancel", "--user=root", check=False)
        self.run("scancel", "--user=root", "--signal=KILL", "--full", check=False)
        self.wait_until(lambda: not self.run("squeue", "-h").out.strip(), what="empty queue")
        for node in NODES:
            self.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
        self.wait_until(self._all_idle, what="idle nodes")

    def stop(self) -> None:
        """End the daemons and what their jobs have left."""
        if self.environment and self._daemons:
            with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
                self.run("scancel", "--user=root", "--signal=KILL", "--full", check=False)
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(timeout=5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()
        for pid in self._left_behind():  # steps that outlive their slurmd
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _start(self) -> None:
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(_MUNGE_KEY_BYTES))
        key.chmod(0o400)
        ports = _free_ports(1 + len(NODES))
        host = socket.gethostname().partition(".")[0]
        lines = [
            _CONFIGURATION.format(
                host=host, folder=self.folder, controller_port=ports[0], kill_wait=KILL_WAIT_SECONDS
            ).strip(),
            *(
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 State=UNKNOWN"
                for node, port in zip(NODES, ports[1:], strict=True)
            ),
            _PARTITIONS.strip(),
        ]
        configuration = self.folder / "slurm.conf"
        configuration.write_text("\n".join(lines) + "\n", encoding="utf-8")
        hosts = self.folder / "hosts"
        hosts.write_text(f"127.0.0.1 localhost {host} {' '.join(NODES)}\n", encoding="utf-8")
        self.environment = {"SLURM_CONF": str(configuration)}
        socket_file = self.folder / "munge.socket"
        self._daemon(
            *("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={socket_file}"),
            *(f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/munged.log"),
            *(f"--seed-file={self.folder}/munged.seed", "--num-threads=2"),
        )
        self.wait_until(socket_file.exists, what="munge socket")
        self._daemon("slurmctld", "-D", "-i")
        for node in NODES:
            self._daemon("slurmd", "-D", "-N", node)
        self.wait_until(self._all_idle, what="idle nodes")

    def _daemon(self, program: str, *arguments: str) -> None:
        command = " ".join(['mount --bind "$1" /etc/hosts; shift; exec "$@"'])
        with (self.folder / f"{program}.output").open("ab") as output:
            self._daemons.append(
                subprocess.Popen(
                    [
                        *("unshare", "--mount", "sh", "-c", command, "sh", str(self.folder / "hosts")),
                        *(_program(program) or program, *arguments),
                    ],
                    env={**os.environ, **self.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            )

    def _all_idle(self) -> bool:
        states = self.run("sinfo", "-h", "-N", "-p", "low", "-o", "%N %T", check=False).out.split("\n")
        return sorted(filter(None, states)) == [f"{node} idle" for node in NODES]

    def _left_behind(self) -> list[int]:
        mark = f"SLURM_CONF={self.folder / 'slurm.conf'}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in path.read_bytes().split(b"\0") and int(path.parent.name) != os.getpid():
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found

    def _last_words(self) -> str:
        words = [self.run("squeue", "-l", check=False).out, self.run("sinfo", "-N", "-l", check=False).out]
        for path in sorted([*self.folder.glob("*.log"), *self.folder.glob("*.output")]):
            words.append(f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-15:]))
        return "\n".join(words)


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _free_ports(count: int) -> list[int]:
    """Below those that the system gives to whoever asks for any: nobody else gets one before the daemons have it."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(10_000, 20_000)
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            ports = sorted({*ports, port})
    return ports
