"""Write the page of `show --statistics`, from the tables of a set's splits alone. Takes seconds, mostly drawing."""

from shardvit.data_shards.reading.opening import splits_below
from shardvit.data_shards.sets.statistics_summary import SetStatistics, summarise
from shardvit.data_shards.store.store import Store
from shardvit.data_shards.text import show_bytes
from shardvit.launch.pages.blocks import PageSection, PageTable
from shardvit.launch.pages.shards_page import MOST_CLASSES, Shown
from shardvit.pipeline.pictures.set_figures import statistics_figures


def show_statistics(location: str, *, store: Store) -> Shown:
    """Show the statistics of a split, or of the splits in a folder. UserError if a table is missing or damaged."""
    splits = {} if location.endswith(".parquet") else splits_below(location, store=store)
    seen = {split: summarise(each) for split, each in (splits or {"": location}).items()}
    first = next(iter(seen.values()))
    facts = [(f"{each.images:,}", f"images{', ' if split else ''}{split}") for split, each in seen.items()]
    facts += [(f"{len(first.classes):,}", "classes"), (show_bytes(sum(each.bytes for each in seen.values())), "in all")]
    made = Shown(title=f"{first.name}: statistics of all images", lead=first.location, facts=tuple(facts))
    for split, each in seen.items():
        _add(made, each, title=split or each.split, prefix=f"{split}_" if split in ("train", "val", "test") else "")
    return made


def _add(made: Shown, seen: SetStatistics, *, title: str, prefix: str) -> None:
    blocks = made.pictures(statistics_figures(seen), prefix=prefix)
    counts = seen.images_of_class.tolist()
    order = sorted(range(len(counts)), key=lambda number: (-counts[number], number))[:MOST_CLASSES]
    filled = [count for count in counts if count]
    imbalance = f", the largest {max(filled) / min(filled):,.3g} times the smallest with any" if filled else ""
    rows = [(image.what, image.key, image.shard, image.width, image.height, image.bytes) for image in seen.extremes]
    columns = ("", "Image", "Shard", "Width", "Height", "Bytes")
    blocks.append(PageTable(columns, rows, title="The most extreme images", folded=True))
    classes = [(seen.classes[number], counts[number]) for number in order]
    blocks.append(PageTable(("Class", "Images"), classes, title="Classes, the largest first", folded=True))
    intro = (
        f"{seen.images:,} images of {len(counts):,} classes{imbalance}. {seen.duplicates:,} are copies, byte for "
        f"byte, of earlier ones; {seen.unreadable:,} could not be read."
    )
    made.sections.append(PageSection(title, blocks, intro=intro))
