"""Say how far a packing is, from its plan and records, whatever makes its shards: processes, Ray, SLURM's tasks."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.plan_file import PackJob, load_job
from shardvit.data_shards.packing.shard_writer import record_file
from shardvit.data_shards.shards.location import is_local, join, local_path
from shardvit.data_shards.store.ranges import list_url
from shardvit.data_shards.text import counted, show_duration
from shardvit.launch.slurm.commands import Queued, Slurm
from shardvit.launch.slurm.packing_jobs import is_packed, packing_of
from shardvit.launch.slurm.records import read_submission

_WINDOW_SECONDS = 1800.0  # of the images/s


class PackingWatcher:
    """A packing in OUT, or of a folder of its jobs; `of` is None if there is none."""

    def __init__(self, folder: Path, *, slurm: Slurm) -> None:
        submitted = packing_of(folder)
        self._jobs, self.out = submitted or (None, str(folder.absolute()))
        self.is_one = submitted is not None or is_packed(self.out) or load_job(self.out) is not None
        self._slurm = slurm

    def look(self) -> dict[str, Any]:
        """Return what is known: `state`, shards and images, made and in all, speed, time left, jobs by name."""
        tree: dict[str, Any] = {"out": self.out, "state": "packed"}
        if not is_packed(self.out):
            job = load_job(self.out)
            tree |= {"state": "not planned"} if job is None else {"state": "packing", **_progress(job, now=time.time())}
        if self._jobs and (submission := read_submission(self._jobs / "slurm")):
            queue: dict[str, Queued] = {}
            with suppress(UserError):  # no SLURM here
                queue = self._slurm.queue(submission.jobs.values())
            jobs = submission.jobs.items()
            tree["jobs"] = {name: [job, queue[job].state if job in queue else ""] for name, job in jobs}
        return tree


def _progress(job: PackJob, *, now: float) -> dict[str, Any]:
    images = {record_file(job.file(number)).rpartition("/")[2]: size for number, size in enumerate(job.plan.sizes)}
    made = {name: at for name, at in _records(job).items() if name in images}
    done, total = sum(images[name] for name in made), sum(images.values())
    since = max(now - _WINDOW_SECONDS, min(made.values(), default=now))
    speed = sum(images[name] for name, at in made.items() if at > since) / max(now - since, 1.0)
    left = (total - done) / speed if speed else None
    counts = {"shards": len(made), "of_shards": len(images), "images": done, "of_images": total}
    return {**counts, "images_per_second": speed, "left_seconds": left}


def _records(job: PackJob) -> dict[str, float]:
    """When each record was written; a listing will do for a look."""
    if not is_local(job.work.location):
        return {name: 0.0 for name, *_ in list_url(join(job.work.location, "records"))}
    folder = local_path(job.work.location) / "records"
    return {each.name: each.stat().st_mtime for each in folder.glob("*.json")}


def as_text(tree: dict[str, Any]) -> str:
    """Format a look as lines."""
    line = f"{tree['out']}: {tree['state']}"
    if tree["state"] == "packing":
        shards, images = counted(tree["of_shards"], "shard"), counted(tree["of_images"], "image")
        line += f": {tree['shards']:,} of {shards}, {tree['images']:,} of {images}"
    if tree.get("left_seconds") is not None:
        line += f", {tree['images_per_second']:,.0f} images/s, {show_duration(tree['left_seconds'])} left"
    jobs = (f"  {name}: job {job} {state}".rstrip() for name, (job, state) in tree.get("jobs", {}).items())
    return "\n".join([line, *jobs])
