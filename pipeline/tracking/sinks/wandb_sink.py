"""Send to Weights & Biases by its own client: a run per stage (and one for the pipeline), grouped under the run's name.

W&B's history only grows and its client confirms nothing. So after a session that did not end in order, rows and
pictures go on from the last number that the server's summary has; offline, the session's folder under RUN/wandb is
removed and all of it written again. A rollback leaves both rows of a repeated step, of which the later counts, as in
MLflow.
"""

import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.safe_paths import is_inside
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.runs.logs import MetricRow
from shardvit.pipeline.runs.pictures import KeptPicture
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.tracking.facts import RunFacts, RunState, load_facts, without_credentials
from shardvit.pipeline.tracking.sinks.sink import RunKind, Sink, typed_params, values_of

_ROW, _PICTURE = "shardvit/row", "shardvit/picture"  # numbers of what was logged, from 1 on
_LINE = "shardvit/line"  # of the row in metrics.jsonl: a rollback repeats lines
_SESSION, _BASE = "session", "rows rolled back"  # keys of RunState.sent
_INIT_SECONDS = 30
_LONGEST_PROJECT = 128

WandbMode = Literal["online", "offline", "disabled"]
_MODES: dict[str, WandbMode] = {
    **{"online": "online", "run": "online", "shared": "online", "offline": "offline", "dryrun": "offline"},
    "disabled": "disabled",
}


def wandb_mode() -> WandbMode:
    """Return the user's WANDB_MODE; UserError if it is none of W&B's."""
    mode = os.environ.get("WANDB_MODE") or "online"
    if mode not in _MODES:
        raise UserError(f"WANDB_MODE is {mode!r}: set it to online, offline or disabled")
    return _MODES[mode]


@dataclass
class _Opened:
    """A W&B run: the client's object while it is open."""

    known: RunState
    kind: RunKind
    name: str
    begun_ms: int | None
    run: Any = None
    url: str | None = None
    rows: int | None = None  # sent so far, those of earlier attempts included; None: not known yet
    pictures: int = 0
    exit_code: int = 1


class WandbSink(Sink):
    """`sink.Sink` for W&B's server (WANDB_BASE_URL) or, with WANDB_MODE=offline, files for `wandb sync`."""

    name, title, takes = "wandb", "W&B", frozenset({"files"})

    def __init__(self, folder: RunFolder, recipe: Recipe, *, experiment: str) -> None:
        config, environ = recipe.tracking.wandb, os.environ
        self._folder, self._wants_stats, self._mode = folder, recipe.tracking.system_metrics, wandb_mode()
        project = environ.get("WANDB_PROJECT") or config.project or experiment
        self._project = re.sub(r"[\\/#?%:\x00-\x1f]", "-", project)[:_LONGEST_PROJECT]
        self._entity = environ.get("WANDB_ENTITY") or config.entity
        server = without_credentials(environ.get("WANDB_BASE_URL") or "wandb")
        self.place = "/".join(filter(None, ("offline" if self._mode == "offline" else server, self._entity, project)))
        self._files = Path(environ.get("WANDB_DIR") or folder.path)
        self._opened: dict[str, _Opened] = {}

    def connect(self) -> None:
        if Path.cwd().is_relative_to(self._folder.path.absolute()):
            raise UserError(
                f"{self._folder.path}: start from outside of it, as W&B reads settings in the folder it is in"
            )
        self.release()
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb  # noqa: F401

    def open(self, known: RunState, *, kind: RunKind, name: str, parent_id: str | None, begun_ms: int | None) -> str:
        if not re.fullmatch("[0-9a-f]{32}", known.key):  # it is the id in W&B, whose own are shorter
            known.key = uuid.uuid4().hex
        run_id = f"{self.place}/{known.key}"
        opened = self._opened[run_id] = _Opened(known, kind, name, begun_ms)
        before = json.loads(known.sent.pop(_SESSION)) if known.run_id == run_id and _SESSION in known.sent else None
        if self._mode == "offline":
            if before is not None:  # the last session did not end in order
                for folder in self._folders(known):
                    if folder.name not in before["folders"]:
                        shutil.rmtree(folder, ignore_errors=True)
                known.attempt, known.sent_rows, known.sent = (before[key] for key in ("attempt", "sent_rows", "sent"))
            opened.rows = known.sent_rows + int(known.sent.get(_BASE, 0))
            opened.pictures = len(_pictures(known))
        elif before is not None:
            base, pictures = int(known.sent.get(_BASE, 0)), _pictures(known)
            self._run(run_id)
            known.sent_rows = min(known.sent_rows, max(0, (opened.rows or 0) - base))
            arrived = {**dict.fromkeys(pictures[: opened.pictures], "sent"), **({_BASE: str(base)} if base else {})}
            known.sent = {**before["sent"], **arrived, _SESSION: known.sent[_SESSION]}
        return run_id

    def resume(self, run_id: str, known: RunState, *, kept: int | None, steps: Sequence[int]) -> None:
        self._run(run_id)
        rows, before = self._opened[run_id].rows or 0, int(known.sent.get(_BASE, 0))
        known.sent_rows = max(0, rows - before)
        if kept is not None and known.sent_rows > kept:
            known.sent[_BASE], known.sent_rows = str(rows - kept), kept

    def address(self, run_id: str) -> str | None:
        if self._mode == "offline":
            return f"offline: `wandb sync {self._files}/wandb/offline-run-*` uploads it"
        return self._opened[run_id].url

    def answers(self, run_id: str) -> bool:
        return self._opened[run_id].run is not None

    def params(self, run_id: str, facts: RunFacts) -> None:
        run = self._run(run_id)
        data = {f"data.{one.context}": f"{one.name} {one.digest}" for one in facts.datasets}
        tags = {name: without_credentials(text) for name, text in facts.tags.items()}
        run.config.update({**typed_params(facts), **data, **tags}, allow_val_change=True)
        run.notes = without_credentials(facts.description)
        run.summary.update({name: value for name, (value, _) in facts.results.items()})

    def metrics(self, run_id: str, rows: Sequence[MetricRow]) -> list[str]:
        self._run(run_id)
        opened = self._opened[run_id]
        for row in rows:
            opened.rows = (opened.rows or 0) + 1
            # Names that begin with "_" are W&B's own.
            values = {name.lstrip("_") or "unnamed": value for name, value in values_of(row).items()}
            numbers = {_ROW: opened.rows, _LINE: opened.rows - int(opened.known.sent.get(_BASE, 0))}
            self._log(opened, {**values, **numbers, "step": row.step, "_timestamp": row.time})
        return []

    def picture(self, run_id: str, picture: KeptPicture, *, is_newest: bool) -> None:
        self._run(run_id)
        import wandb

        opened, words = self._opened[run_id], picture.picture
        if picture.table is not None:
            rows: list[Any] = [list(cells) for cells in zip(*picture.table.values(), strict=True)]
            shown: Any = wandb.Table(columns=list(picture.table), data=rows, allow_mixed_types=True)
        else:
            shown = wandb.Image(str(picture.png), caption=f"{words.title}. {words.caption}")
        opened.pictures += 1
        place = {"step": picture.step, _PICTURE: opened.pictures, "_timestamp": picture.words.stat().st_mtime}
        self._log(opened, {f"{words.group}/{words.name}": shown, **place})

    def _log(self, opened: _Opened, values: dict[str, Any]) -> None:
        """Add to W&B's history. Online its client knows how long that is."""
        number = None if self._mode == "online" else (opened.rows or 0) + opened.pictures - 1
        opened.run.log(values, step=number, commit=True)

    def file(self, run_id: str, path: Path) -> None:
        run = self._run(run_id)
        copied = shutil.copyfile(path, Path(run.dir) / path.name)  # else W&B links to it, also in a run that is moved
        run.save(copied, base_path=run.dir, policy="now")

    def close(self, run_id: str, facts: RunFacts) -> None:
        self._run(run_id)  # which is running again by that
        self._opened[run_id].exit_code = 0 if facts.status == "FINISHED" else 1
        if facts.status != "RUNNING":
            self._finish(run_id)

    def release(self) -> None:
        for run_id, opened in self._opened.items():
            self._finish(run_id)
            with suppress(OSError):  # the run folder is gone
                opened.known.save()

    def _folders(self, known: RunState) -> list[Path]:
        return sorted((self._files / "wandb").glob(f"offline-run-*-{known.key}"))

    def _finish(self, run_id: str) -> None:
        """End a run and wait until the client has written and sent all of it."""
        opened = self._opened[run_id]
        if opened.run is not None:
            run, opened.run = opened.run, None
            run.finish(exit_code=opened.exit_code)
            opened.known.sent.pop(_SESSION, None)

    def _run(self, run_id: str) -> Any:
        """Return the client's run; continues or creates it."""
        opened = self._opened[run_id]
        if opened.run is not None:
            return opened.run
        import wandb

        key, files = opened.known.key, self._files / "wandb"
        for each in (files, *files.glob("*")):  # a stranger's link must not lead W&B's files elsewhere
            if not is_inside(each, folder=self._files):
                raise UserError(f"{each} is a link out of {self._files}: remove it")
        while any(files.glob(f"*-{time.strftime('%Y%m%d_%H%M%S')}-{key}")):  # W&B would overwrite its files
            time.sleep(0.1)
        known = opened.known
        before = {"attempt": known.attempt, "sent_rows": known.sent_rows, "sent": dict(known.sent)}
        known.sent[_SESSION] = json.dumps({**before, "folders": [each.name for each in self._folders(known)]})
        known.save()
        facts = load_facts(known.file.parent)
        wishes = {
            "silent": True,
            "console": "off",
            "disable_code": True,
            "disable_git": True,  # its address may hold a password
            "init_timeout": _INIT_SECONDS,
            "x_disable_meta": True,
            "x_disable_stats": not (self._wants_stats and facts and facts.status == "RUNNING"),
            "x_save_requirements": False,
            "x_start_time": None if opened.begun_ms is None else opened.begun_ms / 1000,
            "x_stats_pid": os.getppid(),
            "x_transaction_log_flush_interval": 1.0,
        }
        run: Any = wandb.init(
            id=key,
            resume="allow",
            reinit="create_new",
            mode="offline" if self._mode == "offline" else "online",
            project=self._project,
            entity=self._entity,
            name=opened.name,
            group=self._folder.name,
            job_type=opened.kind,
            tags=[self._folder.sweep.name] if self._folder.sweep else None,
            dir=str(self._files),
            settings=wandb.Settings(
                **{name: one for name, one in wishes.items() if name in wandb.Settings.model_fields}
            ),
        )
        run.define_metric("shardvit/*", hidden=True)
        run.define_metric("*", step_metric="step")
        opened.run, opened.url = run, run.url
        if opened.rows is None:
            opened.rows, opened.pictures = (int(run.summary.get(each) or 0) for each in (_ROW, _PICTURE))
        return run


def _pictures(known: RunState) -> list[str]:
    """List the pictures and tables sent, in order."""
    return [key for key, mark in known.sent.items() if mark == "sent"]
