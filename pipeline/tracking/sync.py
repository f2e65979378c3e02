"""`shardvit sync`: send once what the sender would have, of a run that nobody trains: after an outage, or offline."""

from __future__ import annotations

from dataclasses import replace

from data_shards.errors import UserError
from data_shards.safe_paths import is_inside
from pipeline.recipe.schema import Recipe
from pipeline.recipe.vocabulary import METRICS_FILE, MLFLOW_FACTS_FILE, StageName
from pipeline.runs.logs import iter_metrics
from pipeline.runs.run_folder import RunFolder
from pipeline.tracking.describe import begin_attempt
from pipeline.tracking.facts import load_facts, now_ms
from pipeline.tracking.run_state import without_credentials
from pipeline.tracking.sender import LONGEST_REASON, Say, Sender, Synced
from pipeline.tracking.sink import Sink


def sync_run(folder: RunFolder, recipe: Recipe, sink: Sink, *, say: Say) -> list[Synced]:
    """Send what the sink lacks of a run that nobody trains: each value once, however often it is asked.

    Raises:
        UserError: the sink cannot be reached or refuses, or nothing was trained.
    """
    begun = [name for name in recipe.stages.names if _settle(folder, recipe, name)]
    if not begun:
        raise UserError(f"{folder.path}: no stage has begun, so there is nothing to send")
    try:
        return Sender(folder, recipe, sink, say=say).send_once()
    except Exception as error:
        reason = without_credentials(" ".join((str(error) or type(error).__name__).split()))[:LONGEST_REASON]
        raise UserError(f"{sink.place} does not take {folder.path}: {reason}") from error


def _settle(folder: RunFolder, recipe: Recipe, stage: StageName) -> bool:
    """Write down how a stage ended that was killed, and what an earlier version did not write down; whether there is
    anything of this run's own."""
    file = folder.stage(stage) / METRICS_FILE
    if not (file.is_file() and is_inside(file, folder=folder.path)):
        return False
    facts = load_facts(folder.stage(stage)) or begin_attempt(folder, recipe, stage, params={}, tags={})
    times = [int(row.time * 1000) for row in iter_metrics(file)]
    if facts.status == "RUNNING":
        done = folder.peek(stage).state == "done"
        facts = replace(facts, status="FINISHED" if done else "KILLED")
    begun_ms, ended_ms = min([facts.begun_ms or now_ms(), *times[:1]]), facts.ended_ms or max(times, default=None)
    settled = replace(facts, begun_ms=begun_ms, ended_ms=ended_ms)
    settled.save(folder.stage(stage) / MLFLOW_FACTS_FILE)
    return True
