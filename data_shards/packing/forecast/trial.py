"""Foresee a packing: plan it, pack a few random images in memory, and extrapolate. Takes the plan, and 2 seconds."""

from __future__ import annotations

import io
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from shardvit.data_shards.errors import UnreadableImage
from shardvit.data_shards.packing.forecast.cost import PackCost, SplitCost, StoreRequests, Trial
from shardvit.data_shards.packing.image import prepare_image
from shardvit.data_shards.packing.plan_file import shards_per_part
from shardvit.data_shards.packing.request import PackRequest
from shardvit.data_shards.packing.shard_plan import INDEX_BYTES, TAR_END_BYTES, PackPlan, make_plan, tar_bytes
from shardvit.data_shards.packing.sources.base import Source
from shardvit.data_shards.packing.work import unpacked_path
from shardvit.data_shards.sets.statistics import image_statistics
from shardvit.data_shards.shards.location import is_local
from shardvit.data_shards.shards.webdataset_parts import tar_writer
from shardvit.data_shards.store.upload import count_requests

_MOST_IMAGES, _MOST_SECONDS = 64, 2.0
_ROW_BYTES = 60  # of the table of statistics
_LOOKS = StoreRequests(list=4, get=4)  # whether a folder of a store is a packed set


def try_images(plan: PackPlan, request: PackRequest) -> Trial:
    """Measure CPU time and bytes of random images, the first of them twice, since it pays for the imports."""
    draw = np.random.default_rng(request.seed)
    numbers = draw.choice(plan.num_images, min(_MOST_IMAGES, plan.num_images), replace=False).tolist()
    begun, unreadable = time.monotonic(), 0
    seconds: list[float] = []
    sizes: list[tuple[int, int]] = []  # bytes at the source, and in the tar
    for number, (shard, position) in enumerate(plan.locate([numbers[0], *numbers])):
        start, before = time.thread_time(), int(shard.images.num_bytes[position])
        with tar_writer(io.BytesIO()) as writer:
            try:
                image = prepare_image(
                    shard.images.read(position),
                    resize=request.resize,
                    limit=request.pixel_limit,
                    channels=request.channels or 0,
                )
                image_statistics(image.pixels, image.data)
                extension, label = shard.label_member(position)
                writer.write({"__key__": shard.key(position), image.extension: image.data, extension: label})
                sizes.append((before, len(image.data)))
            except (UnreadableImage, OSError):
                unreadable += number > 0
        if number:
            seconds.append(time.thread_time() - start)
        if time.monotonic() - begun > _MOST_SECONDS and seconds:
            break
    before, after = tar_bytes(np.array([(0, 0), *sizes], np.int64)).sum(axis=0).tolist()
    error = float(np.std(seconds, ddof=1) / len(seconds) ** 0.5) if len(seconds) > 1 else float(np.mean(seconds))
    return Trial(len(seconds), float(np.mean(seconds)), error, after / before, unreadable)


def forecast(
    source: Source,
    request: PackRequest,
    out: str,
    *,
    workers: int,
    bytes_per_second: float | None = None,
    prices: Mapping[str, float] | None = None,
) -> PackCost:
    """Plan the packing of a listed source, try some images, and reckon. UserError as in packing; writes nothing."""
    plan = make_plan(source, replace(request, name=request.name or "x"))
    remote_bytes, requests = 0, StoreRequests()
    kept = unpacked_path(out)  # what listing has decompressed, or copied out of tables
    scratch = {str(kept): sum(path.stat().st_size for path in kept.rglob("*") if path.is_file())}
    is_compressed, is_remote = False, {}
    for images in (each.files for each in source.splits.values()):
        if id(images) in is_remote:
            continue
        is_remote[id(images)] = np.array([not is_local(each.location) for each in images.containers])
        for number, container in enumerate(images.containers):
            if container.kind == "folder" and is_remote[id(images)][number]:
                names = [images.names[row] for row in np.flatnonzero(images.container == number).tolist()]
                requests += _LOOKS + StoreRequests(list=_listings(names))
            if container.compressed and not Path(container.location).exists():
                is_compressed, rows = True, images.container == number
                scratch[container.location] = int((images.offsets[rows] + images.sizes[rows]).max(initial=0))
    for shard in plan.shards:
        files = shard.images.files
        taken = is_remote[id(files)][files.container[shard.images.rows]]
        # Every image is read once more before the shards are written.
        passes = 1 + (request.duplicates == "drop") + (request.exclusion is not None and shard.split == "train")
        remote_bytes += passes * int(shard.images.num_bytes[taken].sum())
        requests += StoreRequests(get=passes * int(taken.sum()))
    trial = Trial(0) if is_compressed else try_images(plan, request)
    growth = trial.growth
    tars = {s.file: int(growth * tar_bytes(s.images.num_bytes).sum()) + TAR_END_BYTES for s in plan.shards}
    splits = tuple(
        SplitCost(
            split,
            sum(map(len, shards)),
            len(shards),
            sum(tars[shard.file] + len(shard) * INDEX_BYTES for shard in shards),
            max(tars[shard.file] for shard in shards),
        )
        for split, shards in plan.splits.items()
    )
    if not is_local(out):
        requests += _requests_of_writing(plan, [*tars.values()], tables=1 + (request.duplicates == "drop"))
        scratch[out] = workers * max(tars.values())
    return PackCost(
        source=source.spec,
        classes=len(plan.classes),
        splits=splits,
        source_bytes=sum(int(shard.images.num_bytes.sum()) for shard in plan.shards),
        remote_bytes=remote_bytes,
        requests=requests,
        destination="disk" if is_local(out) else "store",
        scratch_bytes=sum(scratch.values()),
        trial=trial,
        workers=workers,
        bytes_per_second=bytes_per_second,
        prices=prices or {},
    )


def _listings(names: Sequence[str]) -> int:
    """Count the pages of 1,000 names that listing folders takes, with those above them."""
    files = Counter(name.rpartition("/")[0] for name in names)
    for folder in [*files]:
        while folder:
            folder = folder.rpartition("/")[0]
            files[folder] += 0
    return sum(max(1, -(-count // 1000)) for count in files.values())


def _requests_of_writing(plan: PackPlan, tar_bytes: Sequence[int], *, tables: int) -> StoreRequests:
    """Count what `make_shard` and `finish` ask of a store; each upload is confirmed by a HEAD."""
    sizes, splits = [len(shard) for shard in plan.shards], len(plan.splits)
    parts = -(-len(sizes) // shards_per_part(sizes))
    uploads = sum(map(count_requests, tar_bytes))
    rows = sum(count_requests(_ROW_BYTES * sum(map(len, shards))) for shards in plan.splits.values())
    return StoreRequests(
        list=6 + len(sizes),  # what is looked for and is not there, records for one; unfinished uploads
        get=16 + 7 * splits + (11 + 2 * tables) * len(sizes) + (2 + tables) * parts,
        put=7 + 2 * splits + rows + 3 * len(sizes) + uploads + tables * parts,
    )
