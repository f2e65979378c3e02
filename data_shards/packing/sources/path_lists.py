"""Splits as lists of "PATH NUMBER", a line each: VTAB-1k's form (Zhai et al., 2019), one folder for each task.

train800val200.txt names the 1,000 training images, train800.txt and val200.txt its two parts for choosing settings,
test.txt the test images; paths are relative to the lists' folder. TASK/ gives train (train800val200.txt) and val
(test.txt); TASK/train800.txt with --val TASK/val200.txt gives the parts. Costs one `stat` an image.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data_shards.errors import UserError
from data_shards.packing.sources.base import ABSENT, FileImages, ImageSet, Source, SplitName
from data_shards.packing.sources.label_list import MOST_CLASS_NUMBERS, clean_path, read_lines

TRAIN, TEST = "train800val200.txt", "test.txt"


def path_lists_source(train: Path, val: Path | None, *, spec: Path) -> Source:
    """Read one or two lists in one folder.

    Raises UserError, naming list and line, for a line that is not as published, a path that leads outside of the
    folder, is not there or comes twice, and a list that names no image.
    """
    lists: dict[SplitName, Path] = {"train": train} if val is None else {"train": train, "val": val}
    root = train.parent
    seen: dict[str, tuple[Path, int]] = {}
    splits: dict[SplitName, ImageSet] = {}
    num_classes = 0
    for split, file in lists.items():
        if file.parent.resolve() != root.resolve():
            raise UserError(f"{file}: both lists should lie in one folder, to which their paths are relative: {root}")
        paths: list[str] = []
        labels: list[int] = []
        lines: list[int] = []
        for line, text in read_lines(file):
            path, _, number = text.strip().rpartition(" ")
            if not path or not (number.isascii() and number.isdigit()) or len(number) > 9:
                raise UserError(f"{file}, line {line}: a path and the number of a class are expected; correct it")
            if int(number) >= MOST_CLASS_NUMBERS:
                raise UserError(f"{file}, line {line}: {number} would make more than {MOST_CLASS_NUMBERS:,} classes")
            try:
                paths.append(clean_path(path.strip(), root=root))
            except ValueError as error:
                raise UserError(f"{file}, line {line}: {error}; correct that line") from None
            before, at = seen.setdefault(paths[-1], (file, line))
            if (before, at) != (file, line):
                raise UserError(f"{file}, line {line}: this image is in {before.name}, line {at}, already; remove one")
            labels.append(int(number))
            lines.append(line)
        if not paths:
            raise UserError(f"{file}: it names no image; write 'PATH NUMBER' on each line")
        images = FileImages(root=root, files=paths, labels=np.array(labels, dtype=np.int64))
        absent = np.flatnonzero(images.num_bytes == ABSENT)
        if len(absent):
            more = f" ({len(absent) - 1:,} more are missing)" if len(absent) > 1 else ""
            raise UserError(f"{file}, line {lines[int(absent[0])]}: {paths[int(absent[0])]} is not in {root}{more}")
        splits[split] = images
        num_classes = max(num_classes, max(labels) + 1)
    what = ", ".join(f"{file.name} is {each}" for each, file in lists.items())
    return Source(
        spec=str(spec.resolve()),
        classes=tuple(map(str, range(num_classes))),
        splits=splits,
        notes=(f"{spec}: recognised as lists of images: {what}",),
        empty_classes="report",
    )
