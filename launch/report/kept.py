"""The pictures and tables that a run has kept, as sections of its page, and the paper's figures of several runs.

Files are read one by one, 30 MB at the most each. Draws nothing of one run: `pipeline.drawing` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from data_shards.text import one_line
from launch.report.blocks import PageBlock, PageCell, PageImage, PagePicture, PageSection, PageTable
from pipeline.pictures.picture import KeptPicture, PictureGroup, kept_pictures, rendered
from pipeline.report.history import RunHistory, StageHistory

MOST_ROWS = 1200  # of a table on the page
_GROUPS: dict[PictureGroup, str] = {
    "data": "What the model saw",
    "evaluation": "What it gets right and wrong",
    "model": "What it has learned",
    "paper": "The paper's figures",
}
_ORDER = (  # of pictures in a group; others come after these
    *("training_batch", "augmentation", "evaluation_grid", "worst_mistakes", "confusion_matrix", "confused_pairs"),
    *("class_scores", "per_class", "reliability", "masked_patches", "attention_rollout", "attention_distance"),
    *("embedding_filters", "position_similarity"),
)
_MOST_FILE_BYTES = 30_000_000
_LONG_TABLE = 25  # rows: folded


def picture_sections(history: RunHistory, *, notes: list[str]) -> list[PageSection]:
    """A section for each group of pictures; what cannot be read is added to `notes`."""
    kept = {stage.name: _kept(stage, notes=notes) for stage in history.stages}
    several = sum(bool(each) for each in kept.values()) > 1
    sections: list[PageSection] = []
    for group, title in _GROUPS.items():
        blocks: list[PageBlock] = []
        for stage, pictures in kept.items():
            of_group: dict[str, list[KeptPicture]] = {}
            for picture in pictures:
                if picture.picture.group == group:
                    of_group.setdefault(picture.picture.name, []).append(picture)
            for steps in sorted(of_group.values(), key=lambda each: _place(each[0].picture.name)):
                block = _picture_block(steps, prefix=f"{stage}: " if several else "", notes=notes)
                if block is not None:
                    blocks.append(block)
        sections.append(PageSection(title, blocks))
    return sections


def _place(name: str) -> int:
    return next((place for place, known in enumerate(_ORDER) if name.startswith(known)), len(_ORDER))


def pictures_beside(histories: Sequence[RunHistory], *, names: Sequence[str], notes: list[str]) -> list[PageSection]:
    """The evaluation's and the paper's pictures of each run, those of one kind under one another."""
    by_kind: dict[tuple[str, str], list[PageBlock]] = {}
    for name, history in zip(names, histories, strict=True):
        for stage in history.stages:
            newest: dict[str, KeptPicture] = {
                each.picture.name: each for each in _kept(stage, notes=notes) if each.table is None
            }
            for picture in newest.values():
                if picture.picture.group in ("evaluation", "paper"):
                    block = _picture_block([picture], prefix=f"{name}, {stage.name}: ", notes=notes)
                    if block is not None:
                        by_kind.setdefault((picture.picture.group, picture.picture.name), []).append(block)
    groups: list[str] = list(_GROUPS)
    order = sorted(by_kind, key=lambda key: (groups.index(key[0]), _place(key[1]), key[1]))
    return [PageSection("Pictures", [block for key in order for block in by_kind[key]])]


def figures_across(histories: Sequence[RunHistory], *, notes: list[str]) -> list[PageBlock]:
    """Few-shot accuracy over size, transfer over cost, and Table 8, as far as they have been measured."""
    from pipeline.figures.across_runs import few_shot_over_size, transfer_over_cost
    from pipeline.figures.measured import table8_rows

    blocks: list[PageBlock] = []
    for draw in (few_shot_over_size, transfer_over_cost):
        try:
            found = draw(histories)
        except Exception as error:  # noqa: BLE001 - a picture is never worth the page
            notes.append(one_line(f"{draw.__name__} failed: {type(error).__name__}: {error}")[:300])
            continue
        if found is not None:
            words, (png, svg) = found.picture, rendered(found.figure)
            blocks.append(PagePicture(words.title, words.caption, words.alt, [PageImage(png, svg)]))
            blocks.append(_columns(found.table, title=f"{words.title}: the numbers", caption="", folded=True))
    for root in {history.folder.runs_root: None for history in histories}:
        table8 = table8_rows(root)
        if table8 is not None:
            caption = f"Position embeddings, by shardvit table8 in {root}, beside the paper's Table 8."
            blocks.append(_columns(table8, title="Position embeddings (Table 8)", caption=caption, folded=False))
    return blocks


def _columns(columns: Mapping[str, Sequence[object]], *, title: str, caption: str, folded: bool) -> PageTable:
    rows = [[_cell(cell) for cell in row] for row in zip(*columns.values(), strict=True)]
    more = f" The first {MOST_ROWS:,} of {len(rows):,} rows." if len(rows) > MOST_ROWS else ""
    return PageTable(tuple(columns), rows[:MOST_ROWS], title, f"{caption}{more}", folded=folded)


def _kept(stage: StageHistory, *, notes: list[str]) -> list[KeptPicture]:
    try:
        return kept_pictures(stage.folder)
    except (OSError, ValueError, RecursionError) as error:
        notes.append(one_line(f"the pictures of {stage.folder} cannot be read ({error})"))
        return []


def _picture_block(steps: Sequence[KeptPicture], *, prefix: str, notes: list[str]) -> PageBlock | None:
    newest = steps[-1]
    words = newest.picture
    if newest.table is not None:
        length = len(next(iter(newest.table.values()), ()))
        return _columns(
            newest.table, title=f"{prefix}{words.title}", caption=words.caption, folded=length > _LONG_TABLE
        )
    images: list[PageImage] = []
    for kept in steps:
        try:
            png = _content(kept.png)
            if png is not None:
                images.append(PageImage(png, _content(kept.svg), kept.step))
        except OSError as error:
            notes.append(one_line(f"{kept.png} cannot be read ({error.strerror})"))
    if not images:
        return None
    return PagePicture(f"{prefix}{words.title}", words.caption, words.alt, images)


def _content(path: Path | None) -> bytes | None:
    if path is None or not path.is_file() or path.stat().st_size > _MOST_FILE_BYTES:
        return None
    return path.read_bytes()


def _cell(value: object) -> PageCell:
    if value is None or isinstance(value, str | int | float):
        return str(value) if isinstance(value, bool) else value
    return str(value)
