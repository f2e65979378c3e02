"""A stage's pictures, tables and model to its MLflow run, once each, and the run's page to the parent; called beside
training, and by `shardvit sync`.

    images/...              PNG by key and step: the grid of images with its slider
    figures/NAME.svg        the newest of each
    tables/NAME/step-....json
    the model               after the last stage, see `logged_model`

What was sent is in STAGE/mlflow_sent.json, of the page in RUN/mlflow_sent.json; what a kill left unnoted is found among
the run's artifacts. What could not be sent waits for the next call, or for `shardvit sync`.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_shards.durable import replace_text
from data_shards.safe_paths import is_inside, read_inside
from data_shards.text import one_line, parse_json
from pipeline.recipe.schema import Recipe
from pipeline.recipe.vocabulary import MLFLOW_FILE, MLFLOW_SENT_FILE, PAGE_FILE, StageName
from pipeline.runs.pictures import KeptPicture, kept_pictures, newest_pictures
from pipeline.runs.run_folder import RunFolder
from pipeline.tracking.client import client_of, store_uri
from pipeline.tracking.logged_model import due_model, log_result_model
from pipeline.tracking.settings import home_of
from pipeline.tracking.tracking_state import load_run_state
from pipeline.tracking.tracking_thread import without_credentials

_WAIT_SECONDS = 20.0
_POLL_SECONDS = 0.5
_LONGEST_REASON = 300


@dataclass
class SentThings:
    """What of a stage is in one MLflow run, apart from what `RunState` counts."""

    file: Path
    run_id: str
    marks: dict[str, str] = field(default_factory=dict)

    def note(self, name: str, mark: str) -> None:
        """Remember it on disk. Raises OSError."""
        self.marks[name] = mark
        text = json.dumps({"run_id": self.run_id, "marks": self.marks})
        replace_text(self.file, text + "\n", sync="none", writers="several")


@dataclass
class PublishedStage:
    """What was sent; `problem`: why the rest was not."""

    pictures: int = 0
    tables: int = 0
    model: str = ""  # its id, and its version if it was registered
    problem: str = ""


def publish_stage(
    folder: RunFolder,
    recipe: Recipe,
    stage: StageName,
    say: Callable[[str], None],
    *,
    tracking_uri: str | None = None,
    wait_seconds: float = _WAIT_SECONDS,
) -> PublishedStage:
    """Send what the stage's run lacks of its pictures, tables and model. `tracking_uri` None: the environment's, or the
    database beside the runs. `wait_seconds`: for the stage's run, which rank 0's thread makes."""
    if (recipe.tracking.mode == "offline" and tracking_uri is None) or not unpublished(folder, recipe, stage):
        return PublishedStage()
    if not wait_seconds and load_run_state(folder.stage(stage) / MLFLOW_FILE).run_id is None:
        return PublishedStage()  # the next call sends it
    sent = PublishedStage()
    try:
        _publish(folder, recipe, stage, sent, tracking_uri=tracking_uri, wait_seconds=wait_seconds)
    except Exception as error:  # noqa: BLE001  (whatever it was, it waits for the next time)
        sent.problem = without_credentials(one_line(f"{type(error).__name__}: {error}"))[:_LONGEST_REASON]
        say(f"MLflow: {stage}: pictures and model wait for `shardvit sync {folder.path}` ({sent.problem})")
    return sent


def unpublished(folder: RunFolder, recipe: Recipe, stage: StageName) -> bool:
    """Whether there is something that was not sent to the run that the stage has."""
    run_id = load_run_state(folder.stage(stage) / MLFLOW_FILE).run_id
    marks = {} if run_id is None else _load(folder.stage(stage), run_id=run_id).marks
    due = due_model(recipe, folder, stage=stage)
    pictures = kept_pictures(folder.stage(stage))
    return any(_name(each) not in marks for each in pictures) or (due is not None and marks.get("model") != due)


def _publish(
    folder: RunFolder,
    recipe: Recipe,
    stage: StageName,
    sent: PublishedStage,
    *,
    tracking_uri: str | None,
    wait_seconds: float,
) -> None:
    run_id = _wait_for_run(folder.stage(stage) / MLFLOW_FILE, wait_seconds=wait_seconds)
    home, uri = home_of(folder), _uri_of(folder, tracking_uri)
    client = client_of(uri, home=home)
    things = _load(folder.stage(stage), run_id=run_id)
    kept = [each for each in kept_pictures(folder.stage(stage)) if _name(each) not in things.marks]
    there = {file.path for name in ("images", "tables") for file in _artifacts(client, run_id, name)} if kept else set()
    newest = {_name(each) for each in newest_pictures(kept)}
    for each in kept:
        if each.table is not None:
            _send_table(client, run_id, each, there=there)
            sent.tables += 1
        else:
            _send_image(client, run_id, each, there=there)
            if each.svg is not None and _name(each) in newest:
                client.log_text(run_id, each.svg.read_text(encoding="utf-8"), f"figures/{each.picture.name}.svg")
            sent.pictures += 1
        things.note(_name(each), "sent")
    due = due_model(recipe, folder, stage=stage)
    if due is not None and things.marks.get("model") != due:
        parent = load_run_state(folder.path / MLFLOW_FILE).run_id
        logged = log_result_model(
            client, uri=uri, run_id=run_id, parent_id=parent, folder=folder, recipe=recipe, stage=stage
        )
        things.note("model", due)
        sent.model = logged.model_id + (f", version {logged.version}" if logged.version else "")


def publish_page(folder: RunFolder, recipe: Recipe, *, tracking_uri: str | None = None) -> bool:
    """Send the run's page to the pipeline's MLflow run if that lacks it as it is; whether it was sent. Raises whatever
    MLflow does. `tracking_uri` as for `publish_stage`."""
    page, run_id = folder.path / PAGE_FILE, load_run_state(folder.path / MLFLOW_FILE).run_id
    is_offline = recipe.tracking.mode == "offline" and tracking_uri is None
    if run_id is None or is_offline or not is_inside(page, folder=folder.path) or not page.is_file():
        return False
    things, mark = _load(folder.path, run_id=run_id), str(page.stat().st_mtime_ns)
    if things.marks.get(PAGE_FILE) == mark:
        return False
    client_of(_uri_of(folder, tracking_uri), home=home_of(folder)).log_artifact(run_id, str(page))
    things.note(PAGE_FILE, mark)
    return True


def _uri_of(folder: RunFolder, tracking_uri: str | None) -> str:
    return store_uri(tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or None, home=home_of(folder))


def _wait_for_run(file: Path, *, wait_seconds: float) -> str:
    end = time.monotonic() + wait_seconds
    while (run_id := load_run_state(file).run_id) is None:
        if time.monotonic() > end:
            raise LookupError("the stage has no run in MLflow yet")
        time.sleep(_POLL_SECONDS)
    return run_id


def _load(place: Path, *, run_id: str) -> SentThings:
    file = place / MLFLOW_SENT_FILE
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        record = parse_json(read_inside(file, folder=file.parent))
        if record["run_id"] == run_id:
            return SentThings(file, run_id, {str(name): str(mark) for name, mark in record["marks"].items()})
    return SentThings(file, run_id)


def _name(each: KeptPicture) -> str:
    return f"{each.picture.name} {each.step}"


def _artifacts(client: Any, run_id: str, folder: str) -> list[Any]:
    found = client.list_artifacts(run_id, folder)
    return [file for each in found for file in (client.list_artifacts(run_id, each.path) if each.is_dir else [each])]


def _send_image(client: Any, run_id: str, each: KeptPicture, *, there: set[str]) -> None:
    from PIL import Image

    assert each.png is not None
    key = f"{each.picture.group}/{each.picture.name}"
    # MLflow's own name for it, up to the time; its signs have changed between versions.
    begin = rf"images/{each.picture.group}[#~]{each.picture.name}[+%]step[+%]{each.step}[+%]"
    if any(re.match(begin, path) and path.endswith(".png") for path in there):
        return
    with Image.open(each.png) as image:
        image.load()
        milliseconds = int(each.words.stat().st_mtime * 1000)
        client.log_image(run_id, image, key=key, step=each.step, timestamp=milliseconds, synchronous=True)


def _send_table(client: Any, run_id: str, each: KeptPicture, *, there: set[str]) -> None:
    assert each.table is not None
    path = f"tables/{each.picture.name}/{each.words.name}"
    if path not in there:  # MLflow would add the rows to those that are there
        client.log_table(run_id, {name: list(values) for name, values in each.table.items()}, path)
