"""`shardvit pack`: the command line of `data_shards.packing`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from data_shards.errors import UserError
from data_shards.text import printable
from data_shards.vocabulary import USUAL_MOST_PIXELS
from launch.flags import MaxImagePixels, pixel_limit, size_bytes
from launch.local.output import go_on


def pack(
    source: str,
    out: Path,
    /,
    *,
    name: Annotated[str | None, Parameter(help="The data set's name, in file names too; default: OUT's.")] = None,
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
    val: Annotated[
        Path | None,
        Parameter(
            help="Published held-out images, if they do not lie beside SOURCE: ILSVRC2012_img_val.tar, a folder, or "
            "VTAB's val200.txt."
        ),
    ] = None,
    val_labels: Annotated[
        Path | None,
        Parameter(
            help="Their classes: LOC_val_solution.csv, ILSVRC2012_devkit_t12.tar.gz, or a list of 'FILE CLASS' lines."
        ),
    ] = None,
    superclasses: Annotated[
        bool, Parameter(negative="", help="CIFAR-100's 20 superclasses instead of its 100 classes.")
    ] = False,
    classes: Annotated[
        str | None, Parameter(help="Only these classes, comma separated; they get labels 0, 1, ...")
    ] = None,
    keep_classes: Annotated[
        bool, Parameter(negative="", help="Accept class names that differ only in case or spaces, and a single class.")
    ] = False,
    holdout: Annotated[float | None, Parameter(help="Share of each class kept apart as the split 'val'.")] = None,
    holdout_images: Annotated[
        int | None, Parameter(help="Number of images kept apart as 'val' instead, whatever their classes.")
    ] = None,
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
    exclude_matches_of: Annotated[
        list[str] | None,
        Parameter(
            negative="",
            consume_multiple=True,
            help="Other shards, such as test sets: leave images out of the training split that are also there, and "
            "list them. `shardvit check --help` says what counts as the same image and what is missed; images that "
            "only may be the same stay, and are listed in unsure.jsonl.",
        ),
    ] = None,
    verify: Annotated[
        bool,
        Parameter(negative="", help="If OUT is packed already: compare all bytes, not just times."),
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

    SOURCE is a folder of class folders (or train/, val/ and test/ of them), a
    tar of such folders, any folder with --labels, a folder with the four IDX
    files of MNIST or Fashion-MNIST, "fashion-mnist" for the ones that Debian
    installs, or "digits" for scikit-learn's digits. Also an archive of
    ImageNet, CIFAR, Pets, Flowers or VTAB as published, or the folder that
    holds its files under their published names. OUT gets a folder for each split.

    All images are decoded once: one that cannot be read ends the command,
    which then names all such images. Killed or stopped at any moment, the same
    command resumes after the finished shards; the result is the same to the byte.

    Some examples:
        shardvit pack photos/ shards/photos --holdout 0.1

        shardvit pack photos/ shards/photos --labels photos.csv --holdout-list val.txt

        shardvit pack imagenet/ shards/imagenet --shard-size 256MB --skip-unreadable

        shardvit pack imagenet/ shards/imagenet-320 --resize-short 320 --quality 90

        shardvit pack digits shards/digits --classes 0,1,2,3,4,5,6 --holdout 0.2

        shardvit pack ILSVRC2012_img_train.tar out --val ILSVRC2012_img_val.tar --val-labels LOC_val_solution.csv

        shardvit pack winter21_whole.tar.gz shards/imagenet21k --holdout-images 51200

        shardvit pack cifar-10-python.tar.gz shards/cifar10

        shardvit pack in21k/ shards/in21k --exclude-matches-of shards/imagenet/val shards/cifar10/val

    Tars are read in place. A .tar.gz is decompressed once, beside OUT, and that
    copy is removed at the end.

    photos.csv begins with the line "path,label"; a line is "a/1.jpg,cat", or
    "a/2.jpg,cat|dog" where images have several labels. JSONL has the same as
    {"path": "a/2.jpg", "label": ["cat", "dog"]}. Paths are relative to SOURCE,
    or absolute ones inside it.
    """
    from data_shards.packing.image import DEFAULT_QUALITY, Resize
    from data_shards.packing.pack import pack as pack_images
    from data_shards.packing.request import Exclusion, HoldoutCount
    from data_shards.packing.sources.label_list import LabelList
    from data_shards.packing.sources.recognise import Published
    from data_shards.reading.opening import open_all_splits
    from data_shards.shards.location import is_local
    from data_shards.store.cache import CacheConfig
    from data_shards.store.store import Store
    from launch.pages.duplicates_page import write_duplicates

    go_on()

    def say(line: str) -> None:
        print(printable(line))

    if exclude_matches_of is not None and not exclude_matches_of:
        raise UserError("--exclude-matches-of: it is followed by no shards; name the sets whose images are left out")
    if holdout is not None and holdout_images is not None:
        raise UserError("--holdout, --holdout-images: give one of them, not both")
    if labels is None and (path_column, label_column, class_names) != (None, None, None):
        raise UserError(
            "--path-column, --label-column, --class-names: they describe the file of --labels; give that too"
        )
    if resize_short is None and quality is not None:
        raise UserError("--quality: only reduced images are encoded again; give --resize-short too")
    exclusion = None
    if exclude_matches_of:
        # as the user typed them, so commands run
        store = Store(None if all(map(is_local, exclude_matches_of)) else CacheConfig(), commands="run")
        sets = tuple(open_all_splits(exclude_matches_of, store=store, report=say))
        exclusion = Exclusion(sets, store, write_duplicates)
    pack_images(
        source,
        out,
        name=name,
        labels=None
        if labels is None
        else LabelList(labels, path_column or "path", label_column or "label", class_names),
        classes=[each.strip() for each in classes.split(",")] if classes else None,
        doubtful_classes="keep" if keep_classes else "refuse",
        published=Published(val, val_labels, "coarse" if superclasses else "fine"),
        holdout=holdout if holdout_images is None else HoldoutCount(holdout_images),
        holdout_list=holdout_list,
        reread="all" if verify else "changed",
        samples_per_shard=samples_per_shard,
        shard_size_bytes=size_bytes("--shard-size", shard_size),
        resize=None if resize_short is None else Resize(resize_short, DEFAULT_QUALITY if quality is None else quality),
        pixel_limit=pixel_limit(max_image_pixels),
        unreadable="skip" if skip_unreadable else "refuse",
        duplicates="drop" if drop_duplicates else "keep",
        seed=seed,
        exclusion=exclusion,
        report=say,
    )
    return 0
