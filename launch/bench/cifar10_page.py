"""Keep what a run of recipe `cifar10` or `cifar10_long` was and found: the files of docs/results/NAME/.

Run `shardvit report RUN`, then `python -m shardvit.launch.bench.cifar10_page RUN SHARDS docs/results/NAME`. Copies the
last stage's weights, the run's output (RUN.log) and, without this machine's folders, the report; writes each stage's
metrics as CSV, and SHA256SUMS of weights and shards, for `sha256sum --check` beside `shards/cifar10/`. The page,
docs/results/cifar10.md, is written by hand.
"""

import argparse
import hashlib
import shutil
from pathlib import Path

from shardvit.launch.api.loaded_run import load_run

_STAGES = ("pretrain", "finetune")


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("shards", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    write(options.run, shards=options.shards, folder=options.folder)


def write(run: Path, *, shards: Path, folder: Path) -> None:
    """Fill `folder` anew."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run / _STAGES[-1] / "model", folder / "model")
    page = (run / "report.html").read_text(encoding="utf-8")
    (folder / "report.html").write_text(page.replace(str(run.resolve()), f"runs/{folder.name}"), encoding="utf-8")
    shutil.copy(run / "recipe.yaml", folder)
    shutil.copy(run.with_name(f"{run.name}.log"), folder / "log.txt")
    for stage in _STAGES:
        load_run(run).metrics(stage).to_csv(folder / f"{stage}.csv", index=False)
    files = {f"model/{file.name}": file for file in sorted((folder / "model").iterdir())}
    files |= {f"shards/cifar10/{file.relative_to(shards)}": file for file in sorted(shards.glob("*/*.tar"))}
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {name}" for name, file in files.items()]
    (folder / "SHA256SUMS").write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
