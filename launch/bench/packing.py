"""Time packing a folder of photographs on this machine, beside writers of other libraries.

Run `python -m shardvit.launch.bench.packing PHOTOS --peers PYTHON --before CLONE`: PHOTOS is a folder or a plain tar,
PYTHON has webdataset, mosaicml-streaming and ray[data] (what it lacks is left out), CLONE is an earlier checkout to
compare with. Each method is a process of its own and gets the same 2,600 files, in turns; all but `bytes alone` decode
every image, as `shardvit pack` does. Output in records/packing.txt. Ten minutes on 2 cores.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from shardvit.data_shards.working_folder import import_folder
from shardvit.launch.bench.data_prepare import read_photographs
from shardvit.launch.bench.measure import setting, tree_cpu_seconds, tree_memory

_PHOTOGRAPHS, _CLASSES = 2600, 26
_SAMPLE_SECONDS = 0.1
_PEERS = {
    "webdataset ShardWriter": "webdataset",
    "webdataset ShardWriter, bytes alone": "webdataset-bytes",
    "Mosaic MDSWriter": "mosaic",
    "Ray Data write_webdataset": "ray",
}


@dataclass(frozen=True)
class Packed:
    """One process, from start to exit."""

    seconds: float
    cpu_seconds: float
    pss_mib: float
    failure: str


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description="Packing on one machine, in CPU seconds and memory.")
    parser.add_argument("photographs", type=Path, help="folder or plain tar of JPEGs")
    parser.add_argument("--peers", type=Path, help="Python that has the other libraries")
    parser.add_argument("--before", type=Path, help="an earlier clone of shardvit")
    parser.add_argument("--rounds", type=int, default=3, help="turns (%(default)s)")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardvit-packing-") as work:
        photos = write_photographs(chosen.photographs, Path(work) / "photos")
        methods = commands(photos, peers=chosen.peers, before=chosen.before)
        found: dict[str, list[Packed]] = {name: [] for name in methods}
        for number in range(chosen.rounds):
            for at, (name, (command, env)) in enumerate(methods.items()):
                out = Path(work) / f"{at}-{number}"
                found[name].append(run([word.replace("OUT", str(out)) for word in command], env))
                subprocess.run(["rm", "-rf", str(out)], check=True)
    print(setting("pillow", "simplejpeg"))
    print(f"{_PHOTOGRAPHS:,} photographs, {chosen.rounds} turns; load before the end {os.getloadavg()[0]:.1f}\n")
    print(f"{'':<38}{'CPU s, median':>14}{'least':>7}{'wall s, least':>15}{'PSS MiB':>9}")
    for name, turns in found.items():
        if failure := turns[-1].failure:
            print(f"{name:<38}  {failure}")
            continue
        cpu = [each.cpu_seconds for each in turns]
        wall, memory = min(each.seconds for each in turns), max(each.pss_mib for each in turns)
        print(f"{name:<38}{statistics.median(cpu):>14.1f}{min(cpu):>7.1f}{wall:>15.1f}{memory:>9.0f}")


def write_photographs(source: Path, folder: Path) -> Path:
    """Write the photographs, repeated in turns, as class folders."""
    contents = read_photographs(source).contents
    for number in range(_PHOTOGRAPHS):
        path = folder / f"class{number % _CLASSES:02d}" / f"{number:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents[number % len(contents)])
    return folder


def commands(
    photos: Path, *, peers: Path | None, before: Path | None
) -> dict[str, tuple[Sequence[str], Mapping[str, str]]]:
    """Each method's command, in which OUT stands for the folder to write, and its environment."""
    found: dict[str, tuple[Sequence[str], Mapping[str, str]]] = {}
    clones = {"shardvit pack": Path(import_folder())} | ({"shardvit pack, before": before} if before else {})
    for name, clone in clones.items():
        env = {**os.environ, "PYTHONPATH": str(clone), "PYTHONSAFEPATH": "1"}
        found[name] = [sys.executable, "-m", "shardvit.launch.cli", "pack", str(photos), "OUT"], env
    if peers is not None:
        script = Path(__file__).with_name("packing_peers.py")
        for name, method in _PEERS.items():
            found[name] = [str(peers), str(script), method, str(photos), "OUT"], os.environ
    return found


def run(command: Sequence[str], env: Mapping[str, str]) -> Packed:
    """Run one process; CPU time and peak memory of its tree."""
    start = time.monotonic()
    cpu_seconds = pss_mib = 0.0
    with tempfile.TemporaryFile(mode="w+") as output:
        process = subprocess.Popen(command, env=dict(env), stdout=output, stderr=subprocess.STDOUT)
        tree = psutil.Process(process.pid)
        while process.poll() is None:
            try:
                cpu_seconds = max(cpu_seconds, tree_cpu_seconds(tree))
                pss_mib = max(pss_mib, tree_memory(tree).pss_mib)
            except psutil.Error:  # it has just ended
                break
            time.sleep(_SAMPLE_SECONDS)
        failed = process.wait()
        output.seek(0)
        last = (output.read().strip().splitlines() or [""])[-1]
    return Packed(time.monotonic() - start, cpu_seconds, pss_mib, last[:200] if failed else "")


if __name__ == "__main__":
    main()
