"""`shardvit check`: the command line of `data_shards.checking`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from data_shards.errors import UserError
from data_shards.text import printable
from launch.flags import JsonFlag, ShardsOptions, demand_counts, pixel_limit, switch
from launch.target import Force, demand_target


def check(
    shards: str,
    /,
    *,
    decode: Annotated[bool, switch("Decode every image in full: finds truncated ones.")] = False,
    digests: Annotated[bool, Parameter(help="Compare SHA-256 with the manifest's.")] = True,
    world_size: Annotated[int | None, Parameter(help="Say how the shards suit this many training processes.")] = None,
    lanes: Annotated[int | None, Parameter(help="data.lanes of that training; default: near 256.")] = None,
    gpus_per_node: Annotated[int | None, Parameter(help="Processes a machine, for --world-size; default: 8.")] = None,
    options: ShardsOptions = ShardsOptions(),  # noqa: B008 - frozen
    against: Annotated[
        list[str] | None,
        Parameter(
            negative="",
            consume_multiple=True,
            help="Find images also in these shards, such as test sets.",
        ),
    ] = None,
    report: Annotated[
        Path | None,
        Parameter(
            name=["--output", "--report"],
            help="For --against: matches.jsonl, and pictures in matches.html.",
        ),
    ] = None,
    as_json_text: JsonFlag = False,
    force: Force = False,
) -> int:
    """Check shards for damage, duplicates and wrong labels, and how they suit a number of GPUs.

    SHARDS is what a recipe names: a packed folder, the folder with its train/
    and val/ (each is checked, and whether images are in both), a folder of tars
    made by other tools, a pattern such as "data/x-{000..127}.tar", or a URL.
    All bytes are read and nothing is changed. Exit code 1 if there is a problem.

    --against finds the same picture encoded again, resized, squeezed, mirrored,
    in grey, with a border, cropped to the centre square or to 70 % of each side
    anywhere, or several of these. Pairs that only may be the same are listed as
    unsure: they are not counted as problems, nor left out by `shardvit pack`.
    Missed: copies that are rotated, upside down, cropped to less, tinted or of
    much changed brightness, with text or logos on more than a 64th of the area
    (some are unsure), and parts of a collage. Of images below 16 pixels a side or
    without contrast only equal pixels are found.

    Some examples:
        shardvit check shards/photos
        shardvit check shards/photos --decode --world-size 64
        shardvit check shards/in21k --against shards/cifar10/val --output seen
        shardvit check "laion/{00000..00099}.tar" --label json:label --json
    """
    import json

    from data_shards.checking.check import CheckOptions
    from data_shards.checking.check import check as check_shards
    from data_shards.checking.near_duplicates.match_lines import write_lines
    from data_shards.checking.page import as_json, as_text
    from data_shards.store.store import RetryPolicy, Store
    from launch.pages.duplicates_page import MATCHES_PAGE, TITLE, write_duplicates

    demand_counts(world_size=world_size, lanes=lanes, gpus_per_node=gpus_per_node)
    if world_size is None and (lanes, gpus_per_node) != (None, None):
        raise UserError("--lanes, --gpus-per-node: they say how --world-size processes would read; give that too")
    cache = options.cache_of(shards, *(against or ()))
    if against is not None and not against:
        raise UserError("--against: it is followed by no shards; name the sets to compare with")
    if report is not None and not against:
        raise UserError("--output: it is for what --against finds; give that too")
    limit = pixel_limit(options.max_image_pixels)
    if report is not None:  # before hours of reading
        demand_target(report, flag="--output", force=force, mark=f"<title>{TITLE}</title>", file=MATCHES_PAGE)
        try:
            report.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--output: {report} cannot be made a folder ({error.strerror}); give another") from None
    result = check_shards(
        options.spec(shards),
        options=CheckOptions(
            decode=decode,
            digests=digests,
            pixel_limit=limit,
            world_size=world_size,
            lanes=lanes,
            processes_per_node=gpus_per_node or CheckOptions.processes_per_node,
        ),
        store=Store(
            cache,
            retry=RetryPolicy(give_up_seconds=60.0),  # the user is waiting
            commands="run",  # SHARDS as the user typed it; a manifest cannot name commands
        ),
        against=against or (),
        report=lambda line: print(printable(line), file=sys.stderr, flush=True),
    )
    print(json.dumps(as_json(result), indent=1) if as_json_text else as_text(result), flush=True)
    if report is not None:
        write_lines(report, result.matches)
        write_duplicates(report / MATCHES_PAGE, result.matches, limit)
    return result.exit_code
