"""Write TensorBoard's event files: RUN/tensorboard (recipe and results, as its hparams) and RUN/STAGE/tensorboard.

TensorBoard keeps scalars as float32, and has no files or models. Each session writes a file of its own, which begins
where the curve goes on: with SessionLog.START, which makes readers forget what earlier files have from that step on.
So the rows of the last step sent, and pictures from it on, are sent again, and a kill or a rollback doubles nothing.
"""

import hashlib
import itertools
import os
import platform
import time
import uuid
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shardvit.data_shards.safe_paths import require_inside
from shardvit.pipeline.runs.logs import MetricRow
from shardvit.pipeline.runs.pictures import KeptPicture
from shardvit.pipeline.tracking.facts import RunFacts, RunState, without_credentials
from shardvit.pipeline.tracking.sinks.sink import RunKind, Sink, typed_params, values_of

TENSORBOARD_FOLDER = "tensorboard"  # of the run and of each stage
_EVENTS = "events.out.tfevents.*"
_NUMBERS = itertools.count()  # of this process's files


class TensorboardSink(Sink):
    """`sink.Sink` for the event files in a run's folder."""

    name, title = "tensorboard", "TensorBoard"

    def __init__(self, run: Path) -> None:
        self.place, self._run = f"{run}/.../{TENSORBOARD_FOLDER}", run
        self._known: dict[str, tuple[RunState, RunKind]] = {}
        self._files: dict[str, Any] = {}  # of this session, by run
        self._tb = SimpleNamespace()

    def connect(self) -> None:
        self.release()
        self._tb = _import_tensorboard()

    def open(self, known: RunState, *, kind: RunKind, name: str, parent_id: str | None, begun_ms: int | None) -> str:
        folder = known.file.parent / TENSORBOARD_FOLDER
        if folder.is_symlink() or folder.exists():
            require_inside(folder, folder=self._run)
        folder.mkdir(exist_ok=True)
        is_lost = (known.sent_rows or known.sent) and not any(folder.glob(_EVENTS))
        run_id = uuid.uuid4().hex if is_lost or known.run_id is None else known.run_id
        self._known[run_id] = known, kind
        return run_id

    def resume(self, run_id: str, known: RunState, *, kept: int | None, steps: Sequence[int]) -> None:
        super().resume(run_id, known, kept=kept, steps=steps)
        if not any(self._folder(run_id).glob(_EVENTS)):
            return
        held = steps[: known.sent_rows]
        begin = held[-1] if held else 0
        known.sent_rows = bisect_left(held, begin)
        known.sent = {
            key: mark for key, mark in known.sent.items() if held and not (mark == "sent" and _step_of(key) >= begin)
        }
        self._forget_from(run_id, step=begin)

    def answers(self, run_id: str) -> bool:
        return os.access(self._folder(run_id), os.W_OK)

    def params(self, run_id: str, facts: RunFacts) -> None:
        known, kind = self._known[run_id]
        if kind == "pipeline":
            return self._rewrite(run_id, facts)
        text = without_credentials(facts.description)
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        if known.sent.get("text") != digest:
            self._summary(run_id, self._tb.text_pb("description", text), step=0, at=time.time())
            known.sent["text"] = digest
            self._flush(run_id)
        return None

    def metrics(self, run_id: str, rows: Sequence[MetricRow]) -> list[str]:
        for row in rows:
            values = [self._tb.Summary.Value(tag=name, simple_value=value) for name, value in values_of(row).items()]
            self._summary(run_id, self._tb.Summary(value=values), step=row.step, at=row.time)
        self._flush(run_id)
        return []

    def picture(self, run_id: str, picture: KeptPicture, *, is_newest: bool) -> None:
        from PIL import Image

        words, at = picture.picture, picture.words.stat().st_mtime
        tag, plugin = f"{words.group}/{words.name}", self._tb.SummaryMetadata.PluginData(plugin_name="images")
        text = self._tb.SummaryMetadata(summary_description=words.caption, plugin_data=plugin)
        if picture.table is not None:
            summary = self._tb.text_pb(tag, _markdown(picture.table), description=words.caption)
        else:
            assert picture.png is not None
            with Image.open(picture.png) as image:
                size = {"width": image.width, "height": image.height, "colorspace": len(image.getbands())}
            shown = self._tb.Summary.Image(**size, encoded_image_string=picture.png.read_bytes())
            summary = self._tb.Summary(value=[self._tb.Summary.Value(tag=tag, image=shown, metadata=text)])
        self._summary(run_id, summary, step=picture.step, at=at)
        self._flush(run_id)

    def close(self, run_id: str, facts: RunFacts) -> None:
        if self._known[run_id][1] == "pipeline":
            self._rewrite(run_id, facts)
        elif facts.status != "RUNNING" and run_id in self._files:
            self._files.pop(run_id).close()

    def release(self) -> None:
        while self._files:
            with suppress(OSError):
                self._files.popitem()[1].close()

    def _folder(self, run_id: str) -> Path:
        return self._known[run_id][0].file.parent / TENSORBOARD_FOLDER

    def _rewrite(self, run_id: str, facts: RunFacts) -> None:
        """Write the pipeline's file anew, since TensorBoard shows the first hparams that a folder has."""
        before, now = list(self._folder(run_id).glob(_EVENTS)), time.time()
        begun, ended = ((each or now * 1000) / 1000 for each in (facts.begun_ms, facts.ended_ms))
        self._forget_from(run_id, step=0)
        parts = [
            self._tb.text_pb("description", without_credentials(facts.description)),
            self._tb.hparams_pb(typed_params(facts), trial_id=run_id, start_time_secs=begun),
            *(
                self._tb.Summary(value=[self._tb.Summary.Value(tag=key, simple_value=one)])
                for key, (one, _) in facts.results.items()
            ),
        ]
        if facts.status != "RUNNING":  # as TensorBoard's session_end_pb, which needs TensorFlow
            status = "STATUS_SUCCESS" if facts.status == "FINISHED" else "STATUS_FAILURE"
            end = self._tb.SessionEndInfo(status=self._tb.Status.Value(status), end_time_secs=ended)
            shown = self._tb.hparams.create_summary_metadata(self._tb.HParamsPluginData(session_end_info=end))
            tag, nothing = self._tb.hparams.SESSION_END_INFO_TAG, self._tb.hparams.NULL_TENSOR
            parts.append(self._tb.Summary(value=[self._tb.Summary.Value(tag=tag, metadata=shown, tensor=nothing)]))
        for part in parts:
            self._summary(run_id, part, step=0, at=ended)
        self._files.pop(run_id).close()
        for old in before:
            old.unlink(missing_ok=True)

    def _forget_from(self, run_id: str, *, step: int) -> None:
        start = self._tb.SessionLog(status=self._tb.SessionLog.START)
        self._write(run_id, self._tb.Event(step=step, session_log=start), at=time.time())

    def _summary(self, run_id: str, summary: Any, *, step: int, at: float) -> None:
        self._write(run_id, self._tb.Event(step=step, summary=summary), at=at)

    def _write(self, run_id: str, event: Any, *, at: float) -> None:
        if run_id not in self._files:
            # TensorBoard reads files in the order of their names.
            name = f"{_EVENTS[:-1]}{time.time():017.6f}.{platform.node()}.{os.getpid()}.{next(_NUMBERS)}"
            self._files[run_id] = self._tb.RecordWriter((self._folder(run_id) / name).open("xb"))
            self._write(run_id, self._tb.Event(file_version="brain.Event:2"), at=time.time())
        event.wall_time = at
        self._files[run_id].write(event.SerializeToString())

    def _flush(self, run_id: str) -> None:
        if run_id in self._files:
            self._files[run_id].flush()


def _import_tensorboard() -> SimpleNamespace:
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb
    from tensorboard.plugins.text.summary_v2 import text_pb
    from tensorboard.summary.writer.record_writer import RecordWriter

    messages = {**vars(event_pb2), **vars(summary_pb2), **vars(api_pb2), **vars(plugin_data_pb2)}
    named = ("Event", "SessionLog", "Summary", "SummaryMetadata", "HParamsPluginData", "SessionEndInfo", "Status")
    return SimpleNamespace(
        **{name: messages[name] for name in named},
        **{"hparams": metadata, "hparams_pb": hparams_pb, "text_pb": text_pb, "RecordWriter": RecordWriter},
    )


def _step_of(key: str) -> int:
    """Return the step of `KeptPicture.key`."""
    step = key.rpartition(" ")[2]
    return int(step) if step.isdecimal() else 0


def _markdown(table: Any) -> str:
    """Show columns as a table."""
    from tabulate import tabulate

    return tabulate({str(name): [str(cell) for cell in cells] for name, cells in table.items()}, "keys", "pipe")
