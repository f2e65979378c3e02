"""The `shardvit` command. Heavy libraries are imported inside the commands, so that `--help` answers at once."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter

from data_shards.errors import UserError
from data_shards.text import printable
from data_shards.vocabulary import USUAL_MOST_PIXELS
from launch.commands.check import check
from launch.commands.image_limit import MaxImagePixels, pixel_limit
from launch.commands.models import export_model, import_model
from launch.commands.predict import predict
from launch.commands.table8 import table8
from launch.doctor.command import doctor
from launch.output import OutputLost, go_on, guard
from launch.planning.command import plan
from launch.slurm.command_line import cancel, status, submit
from pipeline.vocabulary import EXIT_READER_LEFT, EXIT_STOPPED, EXIT_USER_ERROR

app = App(
    name="shardvit",
    help="Pre-train Vision Transformers from WebDataset shards: pretrain, swap head, finetune.",
    help_epilogue="Exit codes: 0 done, 1 failed, or (check, doctor) problems found, 2 something to change (a "
    "mistake, a full disk), 75 stopped by a signal: run the same command again.",
    version="0.1.0.dev0",
    help_format="plaintext",
    suppress_keyboard_interrupt=False,  # main() says what an interruption means
)


def main() -> None:
    """Entry point of the console script."""
    guard()
    try:
        code = _run_command()
        sys.stdout.flush()
    except OutputLost as error:
        if error.why:
            print(f"shardvit: {error}", file=sys.stderr)
        code = 1 if error.why else EXIT_READER_LEFT
    sys.exit(code)


def _run_command() -> int:
    try:
        return app(exit_on_error=False, print_error=False, result_action="return_value") or 0
    except KeyboardInterrupt:  # between two stages, while packing or exporting: files are renamed when they are whole
        print("\nshardvit: interrupted: nothing is broken, type the same command again", file=sys.stderr)
        return EXIT_STOPPED
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        name = str(error.filename)
        print(f"shardvit: {name[:100]}... ({len(name):,} characters) is too long for a path", file=sys.stderr)
        return EXIT_USER_ERROR
    except (UserError, CycloptsError) as error:
        print(f"shardvit: {error}", file=sys.stderr)
        return EXIT_USER_ERROR


@app.command
def pack(
    source: str,
    out: Path,
    /,
    *,
    labels: Annotated[
        Path | None, Parameter(help="CSV or JSONL file with path and label of each image, instead of class folders.")
    ] = None,
    path_column: Annotated[str | None, Parameter(help="Column or key of the paths in --labels; default: path.")] = None,
    label_column: Annotated[
        str | None, Parameter(help="Column or key of the labels in --labels; default: label.")
    ] = None,
    class_names: Annotated[
        Path | None, Parameter(help="File with the names of class 0, 1, ... of --labels, one a line.")
    ] = None,
    classes: Annotated[
        str | None, Parameter(help="Only these classes, comma separated; they get labels 0, 1, ...")
    ] = None,
    holdout: Annotated[float | None, Parameter(help="Share of each class kept apart as the split 'val'.")] = None,
    holdout_list: Annotated[
        Path | None, Parameter(help="File with the paths of the images kept apart as 'val', one a line.")
    ] = None,
    samples_per_shard: Annotated[int | None, Parameter(help="Images in one tar at most; default: 1000.")] = None,
    shard_size: Annotated[
        str | None, Parameter(help="Size of one tar instead, such as 256MB; exact to within an image.")
    ] = None,
    resize_short: Annotated[
        int | None,
        Parameter(help="Reduce images with a longer short side to this many pixels; default: original bytes."),
    ] = None,
    quality: Annotated[int | None, Parameter(help="JPEG quality of the reduced images; default: 90.")] = None,
    max_image_pixels: MaxImagePixels = USUAL_MOST_PIXELS,
    drop_duplicates: Annotated[
        bool, Parameter(negative="", help="Of images with the same bytes pack only the first, train before val, test.")
    ] = False,
    skip_unreadable: Annotated[
        bool,
        Parameter(
            negative="",
            help="Leave out images that cannot be read or lie beside the class folders, and list them; pass over empty "
            "class folders.",
        ),
    ] = False,
    seed: Annotated[int, Parameter(help="Of the shuffle and of the held-out choice.")] = 0,
) -> int:
    """Pack images into WebDataset shards with a manifest.

    SOURCE is a folder of class folders (or train/, val/ and test/ of them), any
    folder with --labels, a folder with the four IDX files of MNIST or
    Fashion-MNIST, "fashion-mnist" for the ones that Debian installs, or
    "digits" for scikit-learn's digits. OUT gets a folder for each split.

    All images are decoded once: one that cannot be read ends the command,
    which then names all such images. Killed or stopped at any moment, the same
    command goes on with the finished shards; the result is the same to the byte.

    Some examples:
        shardvit pack photos/ shards/photos --holdout 0.1

        shardvit pack photos/ shards/photos --labels photos.csv --holdout-list val.txt

        shardvit pack imagenet/ shards/imagenet --shard-size 256MB --skip-unreadable

        shardvit pack imagenet/ shards/imagenet-320 --resize-short 320 --quality 90

        shardvit pack digits shards/digits --classes 0,1,2,3,4,5,6 --holdout 0.2

    photos.csv begins with the line "path,label"; a line is "a/1.jpg,cat", or
    "a/2.jpg,cat|dog" where images have several labels. JSONL has the same as
    {"path": "a/2.jpg", "label": ["cat", "dog"]}. Paths are relative to SOURCE,
    or absolute ones inside it.
    """
    from data_shards.packing.image import DEFAULT_QUALITY, Resize
    from data_shards.packing.pack import pack as pack_images
    from data_shards.sources import LabelList
    from data_shards.text import parse_bytes

    go_on()
    if labels is None and (path_column, label_column, class_names) != (None, None, None):
        raise UserError(
            "--path-column, --label-column, --class-names: they describe a list of labels; give --labels too"
        )
    if resize_short is None and quality is not None:
        raise UserError("--quality: it is that of reduced images; give --resize-short too")
    try:
        shard_size_bytes = None if shard_size is None else parse_bytes(shard_size)
    except ValueError as error:
        raise UserError(f"--shard-size: {error}") from None
    pack_images(
        source,
        out,
        labels=None
        if labels is None
        else LabelList(labels, path_column or "path", label_column or "label", class_names),
        classes=[name.strip() for name in classes.split(",")] if classes else None,
        holdout=holdout,
        holdout_list=holdout_list,
        samples_per_shard=samples_per_shard,
        shard_size_bytes=shard_size_bytes,
        resize=None if resize_short is None else Resize(resize_short, DEFAULT_QUALITY if quality is None else quality),
        pixel_limit=pixel_limit(max_image_pixels),
        unreadable="skip" if skip_unreadable else "refuse",
        duplicates="drop" if drop_duplicates else "keep",
        seed=seed,
        report=lambda line: print(printable(line)),
    )
    return 0


@app.command
def run(
    recipe: str,
    /,
    *overrides: str,
    stage: Annotated[
        Literal["masked_patch", "pretrain", "swap_head", "finetune"] | None,
        Parameter(help="Only this stage; default: all, in order."),
    ] = None,
    restart: Annotated[
        Literal["masked_patch", "pretrain", "swap_head", "finetune"] | None,
        Parameter(
            help="Begin this stage and those after it again; what is there is moved aside. Leave it out to go on later."
        ),
    ] = None,
    runs: Annotated[Path, Parameter(help="Folder of all runs and of mlflow.db.")] = Path("runs"),
    max_restarts: Annotated[
        int, Parameter(help="How often a stage that failed is started again by itself, over all stages.")
    ] = 0,
    hostfile: Annotated[
        Path | None, Parameter(help="Run on several machines: a file of lines HOST slots=8, as deepspeed's.")
    ] = None,
    include: Annotated[str, Parameter(help="Only these of --hostfile, such as host0@host1:0,1.")] = "",
    exclude: Annotated[str, Parameter(help="Not these of --hostfile, written likewise.")] = "",
    launcher: Annotated[
        Literal["ssh", "pdsh"], Parameter(help="With --hostfile: what reaches the hosts; pdsh must be installed.")
    ] = "ssh",
    master_addr: Annotated[str, Parameter(help="With --hostfile: under which the others find the first host.")] = "",
    master_port: Annotated[int, Parameter(help="With --hostfile: where rank 0 listens; 0: the system chooses.")] = 0,
    dry_run: Annotated[
        bool, Parameter(help="Check everything, print what would be run, start nothing. Shards may be missing yet.")
    ] = False,
    all_keys: Annotated[
        bool, Parameter(negative="", help="With --dry-run: print every key, not only those that differ from defaults.")
    ] = False,
) -> int:
    """Run a recipe's stages here or on several machines: finished ones are skipped, an interrupted one goes on.

    RECIPE is a YAML file or the name of a recipe that ships with shardvit; OVERRIDES are changes to it, key=value.

    Some examples:
        shardvit run digits

        shardvit run my.yaml stages.pretrain.optimizer.lr=3e-4 processes=8

        shardvit run my.yaml --stage finetune --restart finetune

        shardvit run my.yaml --max-restarts 20

        shardvit run my.yaml --hostfile hosts --exclude host3
    """
    from pipeline.recipe.io import load_recipe

    if all_keys and not dry_run:
        raise UserError("--all-keys says what --dry-run prints: give that too")
    loaded = load_recipe(recipe, overrides=overrides)  # a mistake in it is said before anything slow is imported

    from launch.run.pipeline_run import PipelineRun

    if not dry_run:
        go_on()
    fleet = None
    if hostfile is not None:
        from launch.hosts.hostfile import open_fleet

        fleet = open_fleet(
            hostfile,
            include=include,
            exclude=exclude,
            launcher=launcher,
            master_addr=master_addr,
            master_port=master_port,
        )
    elif include or exclude or launcher != "ssh" or master_addr or master_port:
        raise UserError(
            "--include, --exclude, --launcher, --master-addr and --master-port need --hostfile: give it, too"
        )
    opened = PipelineRun.open(
        loaded,
        runs_root=runs,
        restart=restart,
        fleet=fleet,
        shards="if there" if dry_run else "needed",
    )
    return opened.execute(
        only=stage,
        mode="dry-run" if dry_run else "train",
        max_restarts=max_restarts,
        keys="all" if all_keys else "changed",
    )


@app.command
def train(
    *arguments: Annotated[
        str, Parameter(allow_leading_hyphen=True, help="RECIPE [key=value ...] --stage STAGE [--runs FOLDER].")
    ],
) -> int:
    """Run one stage of a recipe on this rank: what every launcher starts (`shardvit run` does it for you).

    Some examples:
        python -m launch.torchrun --nproc-per-node 8 -m launch.train my.yaml --stage pretrain --runs runs key=value

        shardvit train my.yaml --stage swap_head
    """
    from launch.train import main as train_main

    return train_main(arguments)


@app.command
def demo(
    *,
    data: Annotated[Literal["digits", "fashion-mnist"], Parameter(help="Which images.")] = "digits",
    runs: Annotated[Path, Parameter(help="Folder of all runs and of mlflow.db.")] = Path("runs"),
    shards: Annotated[Path, Parameter(help="Where the shards are packed to.")] = Path("shards"),
) -> int:
    """Run the whole pipeline on small real images: pack, pretrain, swap head, finetune, and compare with scratch.

    Some examples:
        shardvit demo

        shardvit demo --data fashion-mnist
    """
    from launch.commands.demo import run_demo

    go_on()
    return run_demo(data, runs_root=runs, shards_root=shards)


app.command(check)
app.command(plan)
app.command(submit)
app.command(status)
app.command(cancel)
app.command(doctor)
app.command(import_model, name="import")
app.command(export_model, name="export")
app.command(predict)
app.command(table8)


if __name__ == "__main__":
    main()
