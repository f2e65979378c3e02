"""Compare our data path with common loaders, on the user's photographs.

    python -m shardvit.launch.bench.data FOLDER_OR_TAR [--images 4000] [--rounds 3] [--record FILE] [--quick]

    python -m shardvit.launch.bench.data FOLDER_OR_TAR --threads 1,2,4,8,16 --from local,http,s3 (see `data_scaling`)

Measures, on the CPU: the training transform alone (one core) against stock torchvision, OpenCV and libjpeg-turbo;
loaders with two workers, each in a fresh process, in rounds; time to resume in 1,000 shards; our memory over several
epochs. Skips peers that fail or are not installed: `pip install nvidia-dali-cuda130 grain mosaicml-streaming litdata
opencv-python-headless` on top of this environment. On a loaded machine trust the ratios of CPU time alone, which are
taken within a round. Costs about 8 minutes on two cores (2 with --quick) and 2.5 GB of temporary files. Does not
measure disks or networks; --from http and s3 does, on loopback.
"""

import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from importlib import metadata, util
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from cyclopts import App, Parameter

from shardvit.data_shards.errors import UserError
from shardvit.launch.bench.data_methods import (
    BATCH_IMAGES,
    METHODS,
    OURS,
    OURS_PROCESSES,
    OURS_RESIZED,
    PLACES,
    STOCK,
    WORKERS,
    Work,
)
from shardvit.launch.bench.data_results import LoaderRound, Results, find_targets, report_lines
from shardvit.launch.bench.measure import Told, child_environment, processor, run_told

Part = Literal["transform", "loaders", "resume", "memory"]

_QUICK_METHODS = (
    STOCK,
    "dali-uint8",
    "webdataset-fast",
    "webdataset-opencv",
    "grain-fast",
    OURS,
    OURS_PROCESSES,
    OURS_RESIZED,
)
_QUICK_IMAGES, _QUICK_ROUNDS = 1000, 1
_LEAST_IMAGES = 8 * BATCH_IMAGES  # one batch per shard; webdataset's workers need whole shards
_RESUME_POSITIONS, _RESUME_EPOCHS = 3, 10
_MEMORY_EPOCHS = 3
_TIMEOUT_SECONDS = 300.0
_PACKAGES = (
    *("torch", "torchvision", "timm", "webdataset", "pillow", "simplejpeg", "nvidia-nvimgcodec-cu13"),
    *("opencv-python-headless", "nvidia-dali-cuda130", "grain", "mosaicml-streaming", "litdata"),
)

app = App(name="python -m shardvit.launch.bench.data", help_format="plaintext", version_flags=[])


@app.default
def bench(
    source: Path,
    /,
    *,
    images: Annotated[int, Parameter(help="Samples in the sets: the photographs, repeated.")] = 4000,
    rounds: Annotated[int, Parameter(help="In which every method has its turn.")] = 3,
    methods: Annotated[
        str | None, Parameter(help=f"Loaders, comma separated: {', '.join(METHODS)}. Default: all.")
    ] = None,
    parts: Annotated[str | None, Parameter(help=f"Comma separated: {', '.join(get_args(Part))}. Default: all.")] = None,
    threads: Annotated[
        str | None, Parameter(help="Instead of all that: numbers of decoding threads, such as 1,2,4,8,16.")
    ] = None,
    beyond_cores: Annotated[bool, Parameter(help="Run more threads than there are cores, too.", negative=())] = False,
    places: Annotated[
        str | None,
        Parameter(name="--from", help="local (threads), http, s3: readers of a loopback store, one pass a --threads."),
    ] = None,
    quick: Annotated[bool, Parameter(help="One round of eight loaders on 1,000 images.", negative=())] = False,
    record: Annotated[Path | None, Parameter(help="Write FILE (JSON), and the report beside it as .txt.")] = None,
) -> Results | list[str]:
    """Measure our data path and its peers on a folder or tar of JPEGs."""
    from shardvit.launch.bench.data_prepare import prepare, read_photographs

    if threads is not None or places is not None:
        from shardvit.launch.bench.data_scaling import scale

        return scale(
            source,
            images=images,
            rounds=rounds,
            threads=_numbers(threads),
            beyond_cores=beyond_cores,
            places=_chosen(places, known=PLACES, flag="--from", default=("local",)),
            record=record,
        )
    if quick:
        images, rounds = _QUICK_IMAGES, _QUICK_ROUNDS
    wanted_parts = _chosen(parts, known=get_args(Part), flag="--parts", default=get_args(Part))
    wanted = _chosen(methods, known=METHODS, flag="--methods", default=_QUICK_METHODS if quick else tuple(METHODS))
    if images < _LEAST_IMAGES or rounds < 1:
        raise UserError(f"--images {images} --rounds {rounds}: at least {_LEAST_IMAGES} images and 1 round are needed")
    start = time.monotonic()
    photographs = read_photographs(source)
    results = Results(setting=_setting(photographs, images=images, rounds=rounds))
    with ExitStack() as stack:
        work = Work(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shardvit-bench-"))))
        print(f"preparing {images:,} images from {len(photographs.contents):,}", flush=True)
        prepare(photographs, work, images=images)
        for part in wanted_parts:
            match part:
                case "transform":
                    from shardvit.launch.bench.data_ours import measure_transform

                    print("the transform alone", flush=True)
                    found = measure_transform(photographs.contents, rounds=2 * rounds)
                    results.transform_ms, results.psnr = found[:2]
                    results.skipped |= found[2]
                case "loaders":
                    _loaders(results, wanted, work=work, images=images, rounds=rounds)
                case "resume":
                    _resume(results, work=work, rounds=rounds)
                case "memory":
                    _memory(results, work=work)
                case _:
                    raise ValueError(part)
    results.setting["minutes"] = round((time.monotonic() - start) / 60, 1)
    lines = report_lines(results)
    print("\n" + "\n".join(lines))
    if record is not None:
        content = {**asdict(results), "targets": [asdict(target) for target in find_targets(results)]}
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        record.with_suffix(".txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return results


def _loaders(results: Results, wanted: tuple[str, ...], *, work: Work, images: int, rounds: int) -> None:
    for name in wanted:
        missing = [package for package in METHODS[name].needs if not _is_installed(package)]
        if missing:
            _skip(results, name, reason=f"{', '.join(missing)} is not installed")
    prepared: set[str] = set()
    for name in wanted:
        format_writer = METHODS[name].prepare
        if name not in results.skipped and format_writer and format_writer not in prepared:
            told = _child("prepare", work=work, method=name)
            if told.failure:
                _skip(results, name, reason=told.failure)
            else:
                prepared.add(format_writer)
    steps = images // BATCH_IMAGES
    warm_up, batches = max(1, steps // 10), steps // 2  # ends before the set does: no worker runs dry
    for round_number in range(rounds):
        turns = [name for name in wanted if name not in results.skipped]
        shift = round_number * len(turns) // rounds  # so that no method always follows the same one
        for name in turns[shift:] + turns[:shift]:
            told = _child("loader", work=work, method=name, warm_up=warm_up, batches=batches)
            if told.failure:
                results.loaders.pop(name, None)
                _skip(results, name, reason=told.failure)
                continue
            one = _loader_round(told, images=batches * BATCH_IMAGES)
            results.loaders.setdefault(name, []).append(one)
            print(
                f"round {round_number + 1} {name}: {one.cpu_ms:.2f} CPU ms/image, {one.images_per_second:.0f} images/s",
                flush=True,
            )
    results.loaders = {name: results.loaders[name] for name in wanted if name in results.loaders}


def _loader_round(told: Told, *, images: int) -> LoaderRound:
    go, end = told.marks["go"], told.marks["end"]
    return LoaderRound(
        cpu_ms=1000 * (end["cpu_seconds"] - go["cpu_seconds"]) / images,
        images_per_second=images / (end["seconds"] - go["seconds"]),
        first_seconds=told.marks["first"]["seconds"],
        peak_pss_mib=told.peak.pss_mib,
        processes=told.peak.processes,
    )


def _resume(results: Results, *, work: Work, rounds: int) -> None:
    from shardvit.launch.bench.data_ours import steps_of_epoch

    epoch_steps = steps_of_epoch(work.many)
    anywhere = random.Random(3)
    steps = [0, *sorted(anywhere.randrange(_RESUME_EPOCHS * epoch_steps) for _ in range(_RESUME_POSITIONS))]
    found: dict[int, list[tuple[float, float]]] = {step: [] for step in steps}
    for _ in range(rounds):
        for step in steps:
            marks = _demand(_child("resume", work=work, step=step)).marks
            first = marks["end"]["seconds"]
            found[step].append((first, first - marks["ready"]["seconds"]))
            print(f"resume at step {step:,}: {first:.2f} s", flush=True)
    for step, times in found.items():
        first, after_imports = (statistics.median(column) for column in zip(*times, strict=True))
        results.resume.append({"step": step, "first_seconds": first, "after_imports_seconds": after_imports})


def _memory(results: Results, *, work: Work) -> None:
    print(f"memory over {_MEMORY_EPOCHS} epochs", flush=True)
    told = _demand(_child("memory", work=work, epochs=_MEMORY_EPOCHS))
    results.memory_mib = [values["pss_mib"] for mark, values in told.marks.items() if mark.startswith("tenth")]


def _child(task: str, *, work: Work, **request: Any) -> Told:
    """Run a task of `data_child` in a fresh process, without a GPU or a launcher's variables."""
    work.temporary.mkdir(parents=True, exist_ok=True)
    return run_told(
        lambda descriptor: [
            *(sys.executable, "-m", "shardvit.launch.bench.data_child"),
            json.dumps({"task": task, "descriptor": descriptor, "work": str(work.root), **request}),
        ],
        env=child_environment(temporary=work.temporary),  # some peers leave files behind
        timeout_seconds=_TIMEOUT_SECONDS,
    )


def _demand(told: Told) -> Told:
    if told.failure:
        raise RuntimeError(f"our own data path failed: {told.failure}")
    return told


def _skip(results: Results, name: str, *, reason: str) -> None:
    results.skipped[name] = reason
    print(f"skipped: {name}: {reason}", flush=True)


def _is_installed(package: str) -> bool:
    try:
        return util.find_spec(package) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def _chosen(text: str | None, *, known: Any, flag: str, default: tuple[str, ...]) -> tuple[str, ...]:
    if text is None:
        return default
    names = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UserError(f"{flag} {unknown[0]}: there is no such name; choose from {', '.join(known)}")
    return names


def _numbers(threads: str | None) -> tuple[int, ...] | None:
    if threads is None:
        return None
    try:
        numbers = tuple(sorted({int(each) for each in threads.split(",")}))
    except ValueError:
        numbers = (0,)
    if numbers[0] < 1:
        raise UserError(f"--threads {threads}: give whole numbers of 1 or more, such as 1,2,4")
    return numbers


def _setting(photographs: Any, *, images: int, rounds: int) -> dict[str, Any]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": versions,
        "load average at the start": round(os.getloadavg()[0], 2),
        "photographs": f"{len(photographs.contents)} of {photographs.mean_bytes / 1000:.0f} kB and "
        f"{photographs.mean_megapixels:.2f} megapixels on average; {photographs.left_out} others left out",
        "images": images,
        "rounds": rounds,
        "workers": WORKERS,
        "batch": BATCH_IMAGES,
    }


if __name__ == "__main__":
    try:
        app(exit_on_error=True, result_action="return_value")
    except UserError as error:
        sys.exit(f"bench: {error}")
