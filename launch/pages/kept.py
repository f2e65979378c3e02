"""Put a run's saved pictures and tables on its page, one file at a time; draw the paper's figures across runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from shardvit.data_shards.text import one_line
from shardvit.launch.pages.blocks import PageBlock, PageCell, PageImage, PagePicture, PageSection, PageTable
from shardvit.launch.pages.facts import set_label
from shardvit.pipeline.pictures.style import rendered
from shardvit.pipeline.runs.pictures import KeptPicture, Picture, PictureGroup, kept_pictures, newest_pictures
from shardvit.pipeline.runs.read import Run, RunStage

MOST_ROWS = 1200  # shown of a table
_GROUPS: tuple[PictureGroup, ...] = ("evaluation", "data", "model", "paper")
_ORDER = (  # within a group; others follow
    *("training_batch", "augmentation", "evaluation_grid", "worst_mistakes", "confusion_matrix", "confused_pairs"),
    *(
        "class_scores",
        "per_class",
        "reliability",
        "masked_patches",
        "reconstructions",
        "attention_rollout",
        "attention_distance",
    ),
    *("embedding_filters", "position_similarity"),
)
_MOST_FILE_BYTES = 30_000_000
LONG_TABLE = 25  # rows above which a table is collapsed


def stage_pictures(history: Run, stage: RunStage, *, notes: list[str]) -> list[PageSection]:
    """Make a section for each held-out set, the stage's own first, and one for other pictures; adds to `notes`."""
    pictures = _kept(stage, notes=notes)
    names = {each.picture.name for each in pictures}
    label, rest = set_label(history, stage.name), f"What the model saw and learned, {stage.name}"
    own = f"Held-out set {label}, {stage.name}"
    folds: dict[str, dict[str, list[KeptPicture]]] = {own: {}}
    for each in sorted(pictures, key=lambda each: (each.picture.group != "evaluation", _place(each.picture))):
        kind, _, of_set = each.picture.name.partition("__")
        if kind == "class_scores" and f"per_class{each.picture.name.removeprefix(kind)}" in names:
            continue  # the table of classes has the same content
        other = f"Held-out set {each.picture.title.rpartition(', set ')[2]}, {stage.name}"
        fold = rest if each.picture.group != "evaluation" else other if of_set else own
        folds.setdefault(fold, {}).setdefault(each.picture.name, []).append(each)
    sections: list[PageSection] = []
    for title, fold in folds.items():
        of = f"{label}, {stage.name}" if title == own else stage.name
        blocks = [_picture_block(steps, of=of, notes=notes) for steps in fold.values()]
        state = "open" if title in (own, rest) else "closed"
        sections.append(PageSection(title, [block for block in blocks if block is not None], state=state))
    return [section for section in sections if section.blocks]


def _place(picture: Picture) -> tuple[int, int]:
    known = next((place for place, known in enumerate(_ORDER) if picture.name.startswith(known)), len(_ORDER))
    return _GROUPS.index(picture.group), known


def pictures_beside(runs: Mapping[str, Run], *, notes: list[str]) -> PageSection:
    """Show each run's evaluation and paper pictures, grouped by kind."""
    found: list[tuple[tuple[int, int], str, PageBlock]] = []
    for name, history in runs.items():
        for stage in history.stages:
            for kept in newest_pictures([each for each in _kept(stage, notes=notes) if each.table is None]):
                if kept.picture.group in ("evaluation", "paper"):
                    block = _picture_block([kept], of=f"{name}, {stage.name}", notes=notes)
                    found += [(_place(kept.picture), kept.picture.name, block)] if block is not None else []
    return PageSection("Pictures", [block for *_, block in sorted(found, key=lambda each: each[:2])], state="closed")


def figures_across(runs: Mapping[str, Run], *, notes: list[str]) -> list[PageBlock]:
    """Draw few-shot accuracy over size and transfer over cost, if measured."""
    from shardvit.pipeline.pictures.paper.across_runs import few_shot_over_size, transfer_over_cost

    blocks: list[PageBlock] = []
    for draw in (few_shot_over_size, transfer_over_cost):
        try:
            found = list(draw(runs))
        except Exception as error:  # noqa: BLE001 - a picture is never worth the page
            notes.append(one_line(f"{draw.__name__} failed: {type(error).__name__}: {error}")[:300])
            continue
        for words, content in found:
            if isinstance(content, Mapping):
                blocks.append(_columns(content, title=words.title, caption=words.caption, folded=True))
            else:
                image = PageImage(*rendered(content))
                blocks.append(PagePicture(words.title, words.caption, words.alt, [image]))
    return blocks


def _columns(
    columns: Mapping[str, Sequence[object]], *, title: str, caption: str, folded: bool, of: str = ""
) -> PageTable:
    rows = [[_cell(cell) for cell in row] for row in zip(*columns.values(), strict=True)]
    more = f" The first {MOST_ROWS:,} of {len(rows):,} rows." if len(rows) > MOST_ROWS else ""
    return PageTable(tuple(columns), rows[:MOST_ROWS], title, f"{caption}{more}", folded=folded, of=of)


def _kept(stage: RunStage, *, notes: list[str]) -> list[KeptPicture]:
    try:
        return kept_pictures(stage.folder)
    except (OSError, ValueError, RecursionError) as error:
        notes.append(one_line(f"the pictures of {stage.folder} cannot be read ({error})"))
        return []


def _picture_block(steps: Sequence[KeptPicture], *, of: str, notes: list[str]) -> PageBlock | None:
    words, table = steps[-1].picture, steps[-1].table
    if table is not None:
        length = len(next(iter(table.values()), ()))
        return _columns(table, title=words.title, caption=words.caption, folded=length > LONG_TABLE, of=of)
    images: list[PageImage] = []
    for kept in steps:
        try:
            png = _content(kept.png)
            if png is not None:
                images.append(PageImage(png, _content(kept.svg), kept.step))
        except OSError as error:
            notes.append(one_line(f"{kept.png} cannot be read ({error.strerror})"))
    return PagePicture(words.title, words.caption, words.alt, images, of) if images else None


def _content(path: Path | None) -> bytes | None:
    if path is None or not path.is_file() or path.stat().st_size > _MOST_FILE_BYTES:
        return None
    return path.read_bytes()


def _cell(value: object) -> PageCell:
    if value is None:
        return None
    return value if isinstance(value, str | int | float) and not isinstance(value, bool) else str(value)
