"""What the tests of whole runs share: packed shards of nothing, and a machine that starts no processes."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

from shardvit.data_shards.shards.manifest import Manifest, Shard
from shardvit.launch.local.start import Launch
from shardvit.launch.run.pipeline_run import PipelineRun
from shardvit.pipeline.recipe.io import load_recipe
from shardvit.pipeline.recipe.vocabulary import StageName
from shardvit.pipeline.report.best import describe_results
from shardvit.pipeline.runs.run_folder import RunFolder
from tests.data_shards.written import write_manifest


def each_once(*overrides: str) -> list[str]:
    """The overrides, of those with one key the last: defaults of a test, and what it changes."""
    return list({override.partition("=")[0]: override for override in overrides}.values())


def on_shards(root: Path, *, stages: tuple[StageName, ...] = ("pretrain", "finetune")) -> list[str]:
    """The overrides that train these stages on `root`/train and evaluate them on `root`/val."""
    return [
        f"stages.{stage}.{key}={root / split}"
        for stage in stages
        for key, split in (("train", "train"), ("eval", "val"))
    ]


def make_shards(folder: Path, *, images: int = 100) -> None:
    folder.mkdir(parents=True)
    (folder / "a.tar").write_bytes(b"12345")
    shards = (Shard("a.tar", num_samples=images, num_bytes=5, sha256=sha256(folder.name.encode()).hexdigest()),)
    write_manifest(Manifest(folder, name="a", split=folder.name, classes=("x", "y"), shards=shards, source="here"))


@dataclass
class Machine:
    """Stands in for the processes: notes what was started, and does what the test says."""

    root: Path
    outcome: Callable[[Launch], int] | None = None
    started: list[StageName] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    together: list[tuple[StageName, ...]] = field(default_factory=list)  # of each start of processes

    def start(self, launch: Launch) -> int:
        """Its stages in turn, up to one that is not done; `outcome` is asked for each, as if it were alone."""
        self.together.append(launch.stages)
        code = 0
        for stage in launch.stages:
            code = self._run(replace(launch, stage=stage, then=()))
            folder = RunFolder(runs_root=launch.runs_root, name=launch.recipe.name)
            if code or folder.peek(stage).state != "done":
                break
            if stage != launch.stages[-1]:  # as rank 0 does
                print(f"{stage}: done{describe_results(folder, stage=stage)}")
        return code

    def _run(self, launch: Launch) -> int:
        self.started.append(launch.stage)
        self.launches.append(launch)
        if self.outcome is not None:
            return self.outcome(launch)
        folder = RunFolder(runs_root=launch.runs_root, name=launch.recipe.name)
        folder.update(launch.stage, state="done", images_seen=64, results={"val/top1": 0.75})
        return 0

    def open(
        self,
        *overrides: str,
        recipe: str = "digits",
        restart: StageName | None = None,
        shards_of: tuple[StageName, ...] = ("pretrain", "finetune"),
    ) -> PipelineRun:
        changes = each_once(*on_shards(self.root / "shards", stages=shards_of), *overrides)
        return PipelineRun.open(load_recipe(recipe, overrides=changes), runs_root=self.root / "runs", restart=restart)

    @property
    def folder(self) -> RunFolder:
        return RunFolder(runs_root=self.root / "runs", name="digits")
