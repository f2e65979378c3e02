"""Run a pipeline without importing torch: check everything, start processes for unfinished stages, restart failures."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.shards.location import CommandRefused, Commands, redacted
from shardvit.launch.hosts.hostfile import Fleet
from shardvit.launch.local.env import SUPERVISOR_PID, num_gpus, tracking_uri
from shardvit.launch.local.nursery import Nursery
from shardvit.launch.local.output import say
from shardvit.launch.local.processes import handled, kill_all, memory_kills, reason
from shardvit.launch.local.start import Launch, run_stage_locally
from shardvit.launch.run.disk import Presence, disk_problem
from shardvit.launch.run.lock import locked
from shardvit.launch.run.restarts import PAUSE_SECONDS, Restarts
from shardvit.pipeline.checkpoint.identity import check_newest, checkpoint_identity
from shardvit.pipeline.checkpoint.mend_record import mend_records
from shardvit.pipeline.own_code.by_path import own_digests
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.stages.teaching import DistillConfig
from shardvit.pipeline.recipe.stages.train_stage import TrainStage
from shardvit.pipeline.recipe.vocabulary import EXIT_STOPPED, EXIT_USER_ERROR, StageName
from shardvit.pipeline.report.best import describe_results
from shardvit.pipeline.runs.run_folder import RunFolder, check_inputs
from shardvit.pipeline.stage.data_record import check_data, has_record, kept_manifests
from shardvit.pipeline.stage.initial_model import check_kept_head, model_from_elsewhere

_GONE_SECONDS = 20.0  # for the ranks to notice, report it and exit


@dataclass(frozen=True)
class PipelineRun:
    """A recipe and a run folder that matches it."""

    recipe: Recipe
    folder: RunFolder
    processes: int
    restart: StageName | None
    fleet: Fleet | None = None  # None: this machine
    commands: Commands = "run"
    shards: Literal["needed", "if there"] = "needed"
    difference: str = ""  # to the recipe's parent
    nursery: Nursery | None = None  # forks the ranks of the next launch on this machine

    @classmethod
    def open(
        cls,
        recipe: Recipe,
        *,
        runs_root: Path,
        restart: StageName | None = None,
        fleet: Fleet | None = None,
        shards: Literal["needed", "if there"] = "needed",
        difference: str = "",
        nursery: Nursery | None = None,
    ) -> PipelineRun:
        """Check everything, write nothing; UserError for anything that would stop a stage from starting. `restart`
        begins this stage and later ones again. `shards="if there"` skips missing shards and starts no `pipe:`."""
        if restart is not None and restart not in recipe.stages.names:
            raise UserError(f"--restart {restart}: the recipe has only the stages {', '.join(recipe.stages.names)}")
        processes = _processes_here(recipe) if fleet is None else _processes_of(fleet, recipe)
        folder = RunFolder(runs_root=runs_root, name=recipe.name)
        folder.check_recipe(recipe, restart=restart)
        commands: Commands = "run" if shards == "needed" else "refuse"
        run = cls(recipe, folder, processes, restart, fleet, commands, shards, difference, nursery)
        for note in run.check_stages():
            say(note)
        return run

    def execute(
        self,
        *,
        only: StageName | None = None,
        mode: Literal["train", "dry-run"] = "train",
        max_restarts: int = 0,
        keys: Literal["changed", "all"] = "changed",
    ) -> int:
        """Run the unfinished stages, or `only` one; returns the exit code. A dry run prints a summary and the recipe's
        `keys`. `max_restarts` counts over all stages. UserError if there is no such stage or the run folder is in use
        or not writable; KeyboardInterrupt if stopped between stages or before a restart."""
        names = self.recipe.stages.names
        if only is not None and only not in names:
            raise UserError(f"--stage {only}: the recipe has only the stages {', '.join(names)}")
        if only is not None:
            self._demand_earlier(only)
        if max_restarts < 0:
            raise UserError(f"--max-restarts: it is {max_restarts}; give 0 or more")
        stages: list[StageName] = list(names if only is None else (only,))
        if mode == "dry-run":
            from shardvit.launch.plan.dry_run import printed, summary

            self._starter()  # checks the hosts
            text = summary(
                self.recipe, folder=self.folder, processes=self.processes, stages=tuple(stages), state=self._state
            )
            print(printed(text, recipe=self.recipe, keys=keys), end="")
            return 0
        try:
            return self._run(stages, restarts=Restarts(max_restarts))
        except OSError as error:
            problem = disk_problem(error, folder=self.folder.path)
            if problem is None:
                raise
            raise UserError(problem) from error

    def _run(self, stages: list[StageName], *, restarts: Restarts) -> int:
        # Between stages there is nothing to save: these signals act like Ctrl-C.
        interrupting = handled((signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1), signal.default_int_handler)
        lock = locked(
            self.folder.path / ".run.lock",
            what=f"run {self.folder.path}",
            gone_seconds=_GONE_SECONDS,
            end_others=lambda: kill_all(SUPERVISOR_PID, str(os.getpid())),
        )
        with interrupting, lock as there, there.demanded():
            start = self._starter()
            for note in self.folder.open(self.recipe, restart=self.restart):
                print(note)
            self.folder.note_difference(self.difference)
            for note in mend_records(self.folder, self.recipe.stages.names):
                print(note, flush=True)
            while stages:
                if code := self._run_first(stages, start=start, there=there, restarts=restarts):
                    return code
        return 0

    def _starter(self) -> Callable[[Launch], int]:
        """Return the function that starts stages, here or on the hosts; checks the hosts first."""
        if self.fleet is None:
            return run_stage_locally
        from shardvit.launch.hosts.stage import prepare

        return prepare(
            self.fleet,
            recipe=self.recipe,
            stages=[name for name in self.recipe.stages.names if not self._unopened(name)],
            runs_root=self.folder.runs_root,
            say=lambda text: print(text, file=sys.stderr, flush=True),
            commands=self.commands,
        )

    def _run_first(
        self, stages: list[StageName], *, start: Callable[[Launch], int], there: Presence, restarts: Restarts
    ) -> int:
        """Run the first of `stages`, and in the same processes those after it; removes the done ones."""
        stage = stages[0]
        if self.folder.record(stage).state == "done":
            print(f"{stage}: done already{describe_results(self.folder, stage=stage)}", flush=True)
            stages.pop(0)
            return 0
        together = self._together(stages)
        launch = Launch(
            recipe=self.recipe,
            recipe_file=self.folder.path / "recipe.yaml",
            runs_root=self.folder.runs_root,
            stage=stage,
            then=together[1:],
            processes=self.processes,
            nursery=self.nursery,
        )
        print(f"{stage}: starting {self._describe_ranks(launch)}", flush=True)
        kills_before = memory_kills()
        is_interrupted = False
        try:
            code = start(launch)
            if code != EXIT_USER_ERROR:  # else the ranks may have reported it already
                there.demand()
        except KeyboardInterrupt:
            is_interrupted, code = True, EXIT_STOPPED
        while stages and stages[0] in together and self.folder.record(stages[0]).state == "done":
            stages.pop(0)
        if not stages or stages[0] not in together:
            last = together[-1]  # the ranks announced the earlier ones
            print(f"{last}: done{describe_results(self.folder, stage=last)}", flush=True)
            if is_interrupted and last != self.recipe.stages.names[-1]:
                raise KeyboardInterrupt
            return 0
        if code == EXIT_USER_ERROR:
            return code
        kills = memory_kills()
        out_of_memory = None if kills is None or kills_before is None or self.fleet else kills > kills_before
        why = "stopped" if is_interrupted else reason(code, out_of_memory=out_of_memory)
        if stages[0] != stage and self.folder.record(stages[0]).state == "new":  # ended between two stages
            if is_interrupted:
                raise KeyboardInterrupt
            if code != EXIT_STOPPED:
                say(f"the processes ended before {stages[0]} began ({why}): they are started again")
                return 0
        return self._restart(stages[0], code=code, why=why, restarts=restarts)

    def _restart(self, stage: StageName, *, code: int, why: str, restarts: Restarts) -> int:
        """Pause before restarting an unfinished stage and return 0, or say how to resume it and return the code."""
        saved_step = self.folder.record(stage).last_saved_step
        saved = f"step {saved_step:,}" if saved_step else "its beginning"
        remedy = f"the same command{' without --restart' if self.restart else ''} resumes from {saved}"
        if code != EXIT_STOPPED:
            refusal = restarts.after_failure(stage, last_saved_step=saved_step)
            if refusal is None:
                count = f"restart {restarts.used} of {restarts.allowed} from {saved} in {PAUSE_SECONDS:g} seconds"
                say(f"{stage} is not finished ({why}): {count}")
                time.sleep(PAUSE_SECONDS)  # Ctrl-C ends the run
                return 0
            if restarts.allowed:
                remedy = f"{refusal}; once the cause is fixed, {remedy}"
        say(f"{stage} is not finished ({why}): {remedy}")
        return EXIT_STOPPED if code == EXIT_STOPPED else 1

    def _together(self, stages: Sequence[StageName]) -> tuple[StageName, ...]:
        """Return the first of `stages` and those that can follow in its processes."""
        if self.fleet is not None and stages[0] == "swap_head":  # its model may exist only on this machine
            return (stages[0],)
        count = 1
        while count < len(stages) and self.folder.record(stages[count]).state != "done":
            count += 1
        return tuple(stages[:count])

    def _describe_ranks(self, launch: Launch) -> str:
        number = f"{launch.ranks} process{'es' if launch.ranks > 1 else ''}"
        if self.fleet is not None and launch.stages != ("swap_head",):
            return f"{number} on {len(self.fleet.hosts)} hosts"
        return f"{number} on this machine ({'GPU' if num_gpus() else 'CPU'})"

    def check_stages(self) -> list[str]:
        """Check tracking and every stage's data, sizes, model and checkpoints; returns what went unchecked."""
        from shardvit.pipeline.recipe.stage_plan import plan_stage  # imports numpy: only for a valid recipe
        from shardvit.pipeline.stage.stage_data import open_data, training_order
        from shardvit.pipeline.tracking.sinks.choose import check_sinks
        from shardvit.pipeline.transfer.settings import open_few_shot

        tracking_uri()  # UserError if it is no address
        check_sinks(self.recipe.tracking.to)
        notes: list[str] = []
        if self.recipe.model.custom is not None:
            from shardvit.pipeline.training.stages import check_own_model

            check_own_model(self.recipe)
        begun: list[StageName] = [each for each in self.recipe.stages.trained if not self._begins_again(each)]
        kept, classes = kept_manifests(self.folder, stages=begun), tuple[str, ...]()
        for stage in self.recipe.stages.names:
            is_open = not self._stays_done(stage)
            config = getattr(self.recipe.stages, stage)
            if not isinstance(config, TrainStage):  # swap_head
                if is_open:
                    model_from_elsewhere(self.recipe)
                continue
            resumes = not self._begins_again(stage) and self.folder.peek(stage).last_saved_step > 0
            if is_open and config.init_weights is not None and not resumes:
                from shardvit.pipeline.using.start_weights import check_weights  # imports torch

                check_weights(self.recipe, stage=stage)
            if is_open and config.optimizer.frozen_needs_model:
                # Imports torch and timm (5 s), only where weight names matter.
                from shardvit.pipeline.training.stages import check_frozen

                check_frozen(self.recipe, stage=stage)
            data = None
            try:
                if not self._unopened(stage):  # else the dry run's summary checks as much as possible
                    say = (lambda line: None) if kept else print  # the ranks will
                    data = open_data(self.recipe, stage=stage, report=say, commands=self.commands, manifests=kept)
                    pins = data.manifests
                    open_few_shot(self.recipe, stage=stage, report=say, commands=self.commands, manifests=pins)
            except CommandRefused as error:
                notes.append(f"stages.{stage}: its images and their number were not checked: {error}")
            if is_open and config.distillation is not None:
                notes += self._check_teacher(stage, config.distillation, classes=data and data.train.classes)
            if data is not None:
                images = data.train.num_samples
                plan = plan_stage(self.recipe, stage=stage, samples_per_epoch=images, world_size=self.processes)
                training_order(self.recipe, data=data, plan=plan)
                check_kept_head(self.recipe, before=classes or data.train.classes, classes=data.train.classes)
                classes = data.train.classes
            own_code = own_digests(config.model_dump(mode="json"))
            if is_open and not self._begins_again(stage):
                check_inputs(self.folder, stage=stage, inputs=own_code)
                identity = checkpoint_identity(self.recipe, stage=stage, processes=self.processes)
                check_newest(self.folder.checkpoints(stage), expected=identity)
                if data is not None and has_record(self.folder, stage=stage):
                    check_data(self.folder, stage=stage, data=data)
        return notes

    def _check_teacher(
        self, stage: StageName, distill: DistillConfig, *, classes: Sequence[str] | None
    ) -> Iterator[str]:
        """UserError if it does not fit; yields why it was not looked at, which is for a dry run without data alone."""
        from shardvit.pipeline.using.hub import is_elsewhere
        from shardvit.pipeline.using.teacher import check_teacher  # imports torch

        if self._unopened(stage) and is_elsewhere(distill.teacher):
            yield f"stages.{stage}.distill.teacher: {redacted(distill.teacher)} was not checked"
        else:
            check_teacher(self.recipe, stage=stage, classes=classes)

    def _unopened(self, stage: StageName) -> tuple[str, ...]:
        """Describe the stage's shards that a dry run does not open."""
        if self.shards == "needed" or stage not in self.recipe.stages.trained:
            return ()
        from shardvit.launch.plan.shards import look

        return look(self.recipe, stage=stage).unopened

    def _state(self, stage: StageName) -> str:
        record = self.folder.peek(stage)
        if self._begins_again(stage) and record.state != "new":
            return "begins again"
        if record.state == "running":
            return f"at step {record.last_saved_step:,}" if record.last_saved_step else "begun"
        return record.state

    def _demand_earlier(self, stage: StageName) -> None:
        names = self.recipe.stages.names
        missing = [name for name in names[: names.index(stage)] if not self._stays_done(name)]
        if missing:
            raise UserError(
                f"--stage {stage}: in {self.folder.path}, {' and '.join(missing)} must be done first: leave out "
                f"--stage, or begin with --stage {missing[0]}"
            )

    def _stays_done(self, stage: StageName) -> bool:
        return not self._begins_again(stage) and self.folder.peek(stage).state == "done"

    def _begins_again(self, stage: StageName) -> bool:
        names = self.recipe.stages.names
        return self.restart is not None and names.index(stage) >= names.index(self.restart)


def _processes_here(recipe: Recipe) -> int:
    gpus = num_gpus()
    processes = max(1, gpus) if recipe.processes == "auto" else recipe.processes
    if gpus and processes > gpus:
        raise UserError(f"processes is {processes}, but this machine has {gpus} GPUs: set processes={gpus}")
    if recipe.engine.precision == "fp16" and not gpus:
        raise UserError("engine.precision fp16 needs a GPU: use bf16 or fp32 on this machine")
    return processes


def _processes_of(fleet: Fleet, recipe: Recipe) -> int:
    if recipe.processes not in ("auto", fleet.processes):
        raise UserError(
            f"processes is {recipe.processes}, but the slots of {fleet.source} that are used are {fleet.processes}: "
            "set processes=auto, or change the slots"
        )
    return fleet.processes
