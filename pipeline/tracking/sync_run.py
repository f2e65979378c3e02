"""Send a run that is not training to a sink: what an outage held back, or all of a run of the past.

Also completes the facts of stages that were killed or written by an old version. Writes only their facts and SINK.json.
"""

from dataclasses import replace

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.safe_paths import is_inside
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.vocabulary import METRICS_FILE, MLFLOW_FACTS_FILE, StageName
from shardvit.pipeline.runs.logs import iter_metrics
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.tracking.describe import begin_attempt
from shardvit.pipeline.tracking.facts import load_facts, now_ms, without_credentials
from shardvit.pipeline.tracking.sender import LONGEST_REASON, Say, Sender, Synced
from shardvit.pipeline.tracking.sinks.sink import Sink


def sync_run(folder: RunFolder, recipe: Recipe, sink: Sink, *, say: Say) -> list[Synced]:
    """Send what the sink lacks of a run that is not training; idempotent. UserError if the sink is unreachable or
    refuses an item, or no stage has begun."""
    begun = [name for name in recipe.stages.names if _settle(folder, recipe, name)]
    if not begun:
        raise UserError(f"{folder.path}: no stage has begun, so there is nothing to send")
    sender = Sender(folder, recipe, sink, say=say)
    try:
        try:
            return sender.send_once()
        finally:
            sender.release()
    except Exception as error:
        reason = without_credentials(" ".join((str(error) or type(error).__name__).split()))[:LONGEST_REASON]
        raise UserError(f"{sink.place} does not take {folder.path}: {reason}") from error


def _settle(folder: RunFolder, recipe: Recipe, stage: StageName) -> bool:
    """Complete the facts of a killed stage, or of one from an old version; False if the stage is not this run's own."""
    file = folder.stage(stage) / METRICS_FILE
    if not (file.is_file() and is_inside(file, folder=folder.path)):
        return False
    facts = load_facts(folder.stage(stage)) or begin_attempt(folder, recipe, stage, params={}, tags={})
    times = [int(row.time * 1000) for row in iter_metrics(file)]
    if facts.status == "RUNNING":
        facts = replace(facts, status="FINISHED" if folder.peek(stage).state == "done" else "KILLED")
    begun_ms, ended_ms = min([facts.begun_ms or now_ms(), *times[:1]]), facts.ended_ms or max(times, default=None)
    replace(facts, begun_ms=begun_ms, ended_ms=ended_ms).save(folder.stage(stage) / MLFLOW_FACTS_FILE)
    return True
