"""Run stages on several hosts: an agent on each (`agent`) starts DeepSpeed's single-node launcher.

Rank 0 listens on a port chosen by its host; its agent reports it and we forward it to the others: no port race, no
waiting for a slow file server. --master-port fixes the port. If a host is lost or its ranks fail, the other ranks exit
by themselves (`pipeline.ranks.watch`) or are killed after `_FOLLOW_SECONDS`; an unreachable host's agent ends its own.
"""

import base64
import json
import math
import queue
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from shardvit.data_shards.shards.location import Commands, is_local, local_path
from shardvit.data_shards.shards.manifest import MANIFEST_FILE
from shardvit.data_shards.shards.shard_set import ShardSet
from shardvit.launch.hosts.agent import AgentOrder, rendezvous_name
from shardvit.launch.hosts.hostfile import Fleet, Host
from shardvit.launch.hosts.preflight import Ready, preflight
from shardvit.launch.hosts.remote import Connection
from shardvit.launch.hosts.variables import travelling
from shardvit.launch.local.env import without_place
from shardvit.launch.local.output import say
from shardvit.launch.local.processes import STOP_SIGNALS, handled, overall_code, signal_of
from shardvit.launch.local.start import STOPPING, Launch, rank_arguments, run_stage_locally
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.vocabulary import EXIT_STOPPED, StageName
from shardvit.pipeline.stage.stage_data import open_data
from shardvit.pipeline.transfer.settings import open_few_shot

_HEARTBEAT_SECONDS = 5.0  # to the agents
_SILENCE_SECONDS = 45.0  # longer than ssh's own timeout, so that both sides notice
_GRACE_SECONDS = 120.0  # to save without us
_FOLLOW_SECONDS, _FOLLOW_SAVED_SECONDS = 30.0, 90.0  # after all have saved, rank 0 still sends to MLflow
_ANSWER_SECONDS = 15.0  # to a kill
_POLL_SECONDS = 0.1
_ANY_PORT = 29500  # required by the launcher, otherwise unused


def node_command(launch: Launch, fleet: Fleet, *, node: int, master_addr: str) -> list[str]:
    """Build the command of DeepSpeed's launcher for one node. Pure."""
    world = json.dumps({host.name: host.slots for host in fleet.hosts})
    return [
        *(sys.executable, "-u", "-m", "deepspeed.launcher.launch"),
        f"--world_info={base64.urlsafe_b64encode(world.encode()).decode()}",
        *(f"--node_rank={node}", f"--master_addr={master_addr}", f"--master_port={fleet.master_port or _ANY_PORT}"),
        *("--log_level", "critical", "--no_local_rank", "--module", "shardvit.launch.train", *rank_arguments(launch)),
    ]


def run_stage_on_hosts(launch: Launch, fleet: Fleet, ready: Ready, *, variables: dict[str, str]) -> int:
    """Run the stages; returns the exit code. The caller must hold the run folder's lock. KeyboardInterrupt if the user
    stopped it before any rank saved; OSError if a process could not be started."""
    return _Stage(launch, fleet, ready, variables=variables).run()


def prepare(
    fleet: Fleet,
    *,
    recipe: Recipe,
    runs_root: Path,
    say: Callable[[str], None],
    stages: Sequence[StageName] | None = None,
    commands: Commands = "run",
) -> Callable[[Launch], int]:
    """Check every host, including that it sees the shards of `stages`; returns a multi-host `run_stage_locally`.
    `commands`: run a `pipe:` or refuse it. UserError if hosts are not ready; OSError if `runs_root` is not writable."""
    variables, names = travelling(without_place(), folders=(Path.home(), Path()))
    say(names)
    files: list[Path] = []
    for stage in recipe.stages.trained:
        if stages is None or stage in stages:
            data = open_data(recipe, stage=stage, report=lambda text: None, commands=commands)
            files += shared_files((data.train, *data.held_out.values()))
            few_shot = open_few_shot(recipe, stage=stage, report=lambda text: None, commands=commands)
            files += shared_files([one for each in few_shot for one in (each.train, each.eval)])
    ready = preflight(
        fleet,
        folder=runs_root,
        files=list(dict.fromkeys(files)),
        python_path=variables.get("PYTHONPATH", ""),
        say=say,
    )

    def start(launch: Launch) -> int:
        if launch.stages == ("swap_head",):
            return run_stage_locally(launch)
        return run_stage_on_hosts(launch, fleet, ready, variables=variables)

    return start


def shared_files(sets: Iterable[ShardSet]) -> list[Path]:
    """The manifest of each local shard folder, or one of its tars if it has none."""
    found: dict[Path, Path] = {}
    for shards in sets:
        for shard in shards.shards:
            if not is_local(shard.url):
                continue
            tar = local_path(shard.url)
            if tar.parent not in found:
                manifest = tar.parent / MANIFEST_FILE
                found[tar.parent] = manifest if manifest.is_file() else tar
    return list(found.values())


class _Stage:
    def __init__(self, launch: Launch, fleet: Fleet, ready: Ready, *, variables: dict[str, str]) -> None:
        self._launch, self._fleet, self._ready, self._variables = launch, fleet, ready, variables
        self._word = f"agent-{secrets.token_hex(8)}"
        self._run_folder = str((launch.runs_root / launch.recipe.name).absolute())
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lines: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._agents: dict[str, Connection] = {}
        self._ready_hosts: set[str] = set()
        self._ended: dict[str, int] = {}  # host -> exit code, in order of exit
        self._asked = self._interrupts = 0
        self._killed = False
        self._over = threading.Event()

    def run(self) -> int:
        with ExitStack() as held:
            # Handlers only queue signals; the loop handles them.
            held.enter_context(handled(STOP_SIGNALS, lambda number, _: self._signals.put(number)))
            held.callback(self._close)
            for node, host in enumerate(self._fleet.hosts):
                self._agents[host.name] = self._connect(node, host)
            threading.Thread(target=self._send_heartbeats, daemon=True, name="alive").start()
            code = self._wait()
        if self._killed or (self._asked and (code == 0 or signal_of(code) in STOP_SIGNALS)):
            raise KeyboardInterrupt
        return code

    def _connect(self, node: int, host: Host) -> Connection:
        connection = Connection(
            host.name,
            ["-u", "-m", "shardvit.launch.hosts.agent"],
            python_path=self._variables.get("PYTHONPATH", ""),
            on_line=lambda line: self._lines.put((host.name, line)),
        )
        # In memory, out of any file server's reach; the host's ranks find rank 0's address there.
        rendezvous = f"/dev/shm/{rendezvous_name(self._run_folder, node=node)}"
        interface = self._ready.interfaces.get(host.name)
        # By default gloo uses the interface of the host's own name, which may be the loopback.
        gloo = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
        order = AgentOrder(
            word=self._word,
            run_folder=self._run_folder,
            command=node_command(self._launch, self._fleet, node=node, master_addr=self._ready.address),
            environment={**gloo, **self._variables},
            rendezvous="" if self._fleet.master_port else rendezvous,
            is_first=node == 0,
            silence_seconds=_SILENCE_SECONDS,
            grace_seconds=_GRACE_SECONDS,
        )
        connection.send(order.line())
        return connection

    def _wait(self) -> int:
        kill_at = give_up_at = math.inf
        while True:
            self._take_lines_and_ends()
            now = time.monotonic()
            while not self._signals.empty():
                self._on_signal(self._signals.get())
            if len(self._ended) == len(self._agents):
                return overall_code([*self._ended.values()], stop_was_asked=bool(self._asked))
            failed = [code for code in self._ended.values() if code]
            if failed and kill_at == math.inf:
                kill_at = now + (_FOLLOW_SAVED_SECONDS if failed[0] == EXIT_STOPPED else _FOLLOW_SECONDS)
            if now >= kill_at and give_up_at == math.inf:
                self._tell("kill")
                give_up_at = now + _ANSWER_SECONDS
            if now >= give_up_at:
                silent = [host for host in self._agents if host not in self._ended]
                do, their = ("does", "its") if len(silent) == 1 else ("do", "their")
                say(f"{', '.join(silent)} {do} not answer: {their} ranks end by themselves when they notice")
                self._ended |= dict.fromkeys(silent, 1)
                continue
            time.sleep(_POLL_SECONDS)

    def _on_signal(self, number: int) -> None:
        self._asked += 1
        self._interrupts += number == signal.SIGINT
        if self._asked == 1:
            print(f"\n{STOPPING}", file=sys.stderr, flush=True)
            self._tell("stop")
        elif self._interrupts > 1:  # batch systems repeat signals; only a second Ctrl-C means kill
            self._killed = True
            self._tell("kill")

    def _take_lines(self) -> None:
        while not self._lines.empty():
            host, line = self._lines.get()
            if not line.startswith(self._word):
                is_first = host == self._fleet.hosts[0].name
                print(line if is_first else f"{host}: {line}", flush=True)
                continue
            match line.removeprefix(self._word).split():
                case ["ready"]:
                    self._ready_hosts.add(host)
                case ["address", port]:
                    for other in self._agents:
                        if other != host:
                            self._agents[other].send(f"address {self._ready.address} {port}\n")
                case ["ended", code]:
                    self._ended.setdefault(host, int(code))
                case _:
                    pass

    def _take_lines_and_ends(self) -> None:
        self._take_lines()
        for host, agent in self._agents.items():
            if agent.code() is None:
                continue
            self._take_lines()  # it may have written more before it exited
            if host not in self._ended:
                self._ended[host] = 1
                say(f"the connection to {host} was lost" if host in self._ready_hosts else agent.failure())

    def _tell(self, message: str) -> None:
        for host, agent in self._agents.items():
            if host not in self._ended:
                agent.send(f"{message}\n")

    def _send_heartbeats(self) -> None:
        """Run in a thread: a terminal stopped by Ctrl-S must not look like our death."""
        while not self._over.wait(_HEARTBEAT_SECONDS):
            for agent in self._agents.values():
                agent.send("alive\n")

    def _close(self) -> None:
        self._over.set()
        for agent in self._agents.values():
            agent.close()
