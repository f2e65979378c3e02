"""A pipeline on hosts: asked first, then trained there, with as many processes as there are slots."""

from pathlib import Path

import pytest

from shardvit.data_shards.errors import UserError
from shardvit.launch.hosts import stage
from shardvit.launch.hosts.hostfile import Fleet, Host
from shardvit.launch.hosts.preflight import Ready
from shardvit.launch.local.start import Launch
from shardvit.launch.run import pipeline_run
from shardvit.launch.run.pipeline_run import PipelineRun
from shardvit.pipeline.recipe.io import load_recipe
from shardvit.pipeline.recipe.vocabulary import EXIT_STOPPED
from tests.launch.machine import Machine, each_once, make_shards, on_shards

FLEET = Fleet((Host("a", (0, 1)), Host("b", (1, 2))), Path("hosts"))


class Cluster:
    """Stands in for the hosts; the machine stands in for what runs on it."""

    def __init__(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.machine, self.log = machine, list[str]()
        self.files: list[Path] = []
        monkeypatch.setattr(stage, "preflight", self.preflight)
        monkeypatch.setattr(stage, "run_stage_on_hosts", self.run_there)
        monkeypatch.setattr(stage, "run_stage_locally", self.run_here)

    def preflight(self, fleet: Fleet, *, files: list[Path], **_: object) -> Ready:
        assert not self.machine.folder.stage("swap_head").exists()
        self.log.append("asked")
        self.files = files
        return Ready("10.0.0.1", {})

    def run_there(self, launch: Launch, fleet: Fleet, ready: Ready, *, variables: dict[str, str]) -> int:
        assert (fleet, ready.address, launch.processes) == (FLEET, "10.0.0.1", 4)
        self.log.append(f"{' '.join(launch.stages)} there")
        return self.machine.start(launch)

    def run_here(self, launch: Launch) -> int:
        self.log.append(f"{' '.join(launch.stages)} here")
        return self.machine.start(launch)

    def open(self, *overrides: str, fleet: Fleet | None = FLEET) -> PipelineRun:
        shards = on_shards(self.machine.root / "shards")
        changes = each_once(*shards, "stages.pretrain.global_batch_size=64", *overrides)
        recipe = load_recipe("digits", overrides=tuple(changes))
        return PipelineRun.open(recipe, runs_root=self.machine.root / "runs", fleet=fleet)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    for split in ("train", "val"):
        make_shards(tmp_path / "shards" / split)
    return Cluster(Machine(tmp_path), monkeypatch)


def test_the_hosts_are_asked_once_and_all_stages_go_on_in_their_processes(cluster: Cluster, tmp_path: Path):
    assert cluster.open("processes=auto").execute() == 0
    assert cluster.log == ["asked", "pretrain swap_head finetune there"]
    assert cluster.files == [tmp_path / "shards" / split / "manifest.json" for split in ("train", "val")]


def test_a_head_swap_that_comes_first_is_this_hosts_as_its_model_may_be_here_alone(cluster: Cluster):
    assert cluster.open("processes=auto").execute(only="pretrain") == 0
    assert cluster.open("processes=auto").execute() == 0
    assert cluster.log == ["asked", "pretrain there", "asked", "swap_head here", "finetune there"]


def test_a_dry_run_asks_and_starts_nothing(cluster: Cluster, capsys: pytest.CaptureFixture[str]):
    assert cluster.open("processes=4").execute(mode="dry-run") == 0
    assert cluster.log == ["asked"] and "global_batch_size" in capsys.readouterr().out
    assert not cluster.machine.folder.path.exists()


def test_the_processes_are_the_slots_and_this_machines_gpus_do_not_matter(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pipeline_run, "num_gpus", lambda: 1)
    assert cluster.open("processes=auto").processes == 4
    with pytest.raises(UserError, match="processes is 2, but the slots of hosts that are used are 4: set processes="):
        cluster.open("processes=2")


def test_hosts_that_are_not_ready_cost_nothing(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> Ready:
        raise UserError("b is away")

    monkeypatch.setattr(stage, "preflight", refuse)
    with pytest.raises(UserError, match="b is away"):
        cluster.open("processes=auto").execute()
    assert cluster.log == [] and not (cluster.machine.folder.path / "recipe.yaml").exists()


def test_a_stage_that_fails_there_is_restarted_there(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(pipeline_run, "PAUSE_SECONDS", 0.0)
    codes = [247, 0]

    def outcome(launch: Launch) -> int:
        code = codes.pop(0)
        if code == 0:
            cluster.machine.folder.update(launch.stage, state="done")
        return code

    cluster.machine.outcome = outcome
    assert cluster.open("processes=auto").execute(only="pretrain", max_restarts=1) == 0
    assert cluster.log == ["asked", "pretrain there", "pretrain there"]
    # Of another host's memory the kernel of this one knows nothing.
    assert "killed by signal 9, which is what the kernel does when memory runs out" in capsys.readouterr().err


def test_a_stop_there_is_a_stop_here(cluster: Cluster):
    cluster.machine.outcome = lambda launch: EXIT_STOPPED
    assert cluster.open("processes=auto").execute(max_restarts=3) == EXIT_STOPPED
    assert cluster.log == ["asked", "pretrain swap_head finetune there"]
    assert cluster.machine.started == ["pretrain"]
