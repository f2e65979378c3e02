"""`shardvit check`: the command line of `data_shards.checking`."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from shardvit.data_shards.durable import replace_lines
from shardvit.data_shards.errors import UserError
from shardvit.launch.evaluation.semantic_check import SEMANTIC_FILE, SemanticOptions
from shardvit.launch.flags import (
    EngineOptions,
    Force,
    JsonFlag,
    ShardsOptions,
    demand_counts,
    demand_target,
    pixel_limit,
    switch,
)
from shardvit.launch.local.output import tell

if TYPE_CHECKING:
    from shardvit.data_shards.checking.scan import CheckOptions

_LINES_FILE = "matches.jsonl"
_OUTPUT_HELP = "What --against, --features list, with pictures; --statistics."


@Parameter(name="*")
@dataclass(frozen=True)
class Thoroughness:
    """Flags for what to check."""

    decode: Annotated[bool, switch("Decode every image in full: finds truncated ones.")] = False
    statistics: Annotated[bool, switch("With --decode: write statistics.parquet beside each manifest.")] = False
    digests: Annotated[bool, Parameter(help="Compare SHA-256 with the manifest's.")] = True
    world_size: Annotated[int | None, Parameter(help="Say how the shards suit this many training processes.")] = None
    lanes: Annotated[int | None, Parameter(help="data.lanes of that training; default: near 256.")] = None
    gpus_per_node: Annotated[int | None, Parameter(help="Processes a machine, for --world-size; default: 8.")] = None

    def options(self, max_image_pixels: int) -> CheckOptions:
        from shardvit.data_shards.checking.scan import CheckOptions

        demand_counts(world_size=self.world_size, lanes=self.lanes, gpus_per_node=self.gpus_per_node)
        if self.world_size is None and (self.lanes, self.gpus_per_node) != (None, None):
            raise UserError("--lanes, --gpus-per-node: they say how --world-size processes would read; give that too")
        if self.statistics and not self.decode:
            raise UserError("--statistics: they are of decoded images; give --decode too")
        per_node = self.gpus_per_node or CheckOptions.processes_per_node
        limit = pixel_limit(max_image_pixels)
        return CheckOptions(self.decode, self.statistics, self.digests, limit, self.world_size, self.lanes, per_node)


def check(
    shards: str,
    /,
    *,
    thoroughness: Thoroughness = Thoroughness(),
    options: ShardsOptions = ShardsOptions(),  # noqa: B008 - frozen
    engine: EngineOptions = EngineOptions(),  # noqa: B008
    against: Annotated[
        list[str] | None,
        Parameter(negative="", consume_multiple=True, help="Find images also in these shards, such as test sets."),
    ] = None,
    report: Annotated[str | None, Parameter(name=["--output", "--report"], help=_OUTPUT_HELP)] = None,
    as_json_text: JsonFlag = False,
    force: Force = False,
    semantic: SemanticOptions = SemanticOptions(),  # noqa: B008 - frozen
) -> int:
    """Check shards for damage, duplicates and wrong labels, and how they suit a number of GPUs.

    SHARDS is what a recipe names: a packed folder, the folder with its train/
    and val/ (checks each, and whether they share images), a folder of tars made
    by other tools, a pattern such as "data/x-{000..127}.tar", or a URL. Reads
    all bytes; only --statistics writes into it. Exit code 1 if there is a problem.

    --against finds copies that were re-encoded, resized, squeezed, mirrored,
    turned grey, given a border, cropped to the centre square or to 70 % of each
    side, or several of these; doubtful pairs are unsure, and no problems. Missed:
    rotated, upside down, tinted, in a collage; docs/corpus.md has all of it.

    Some examples:
        shardvit check shards/photos
        shardvit check shards/photos --decode --world-size 64
        shardvit check shards/in21k --against shards/cifar10/val --output seen
        shardvit check shards/photos --features runs/photos --output alike
        shardvit check "laion/{00000..00099}.tar" --label json:label --json
    """
    from shardvit.data_shards.checking.check import check as check_shards
    from shardvit.data_shards.checking.check import match_findings
    from shardvit.data_shards.checking.near_duplicates.fingerprint import kept_places
    from shardvit.data_shards.checking.page import as_json, as_text
    from shardvit.data_shards.store.store import RetryPolicy, Store
    from shardvit.launch.pages.duplicates_page import MATCHES_PAGE, write_duplicates

    chosen = thoroughness.options(options.max_image_pixels)
    cache = options.cache_of(shards, *(against or ()))
    semantic.check()
    if against is not None and not against:
        raise UserError("--against: it is followed by no shards; name the sets to compare with")
    is_listed = bool(against or semantic.features)
    if report and not (is_listed or chosen.statistics):
        raise UserError("--output: it is for what --against or --features finds; give one too")
    pages = _made_folder(report, force=force) if report and is_listed else None
    retry = RetryPolicy(give_up_seconds=60.0)  # the user is waiting
    store = Store(cache, retry=retry, commands="run")  # SHARDS as typed; a manifest cannot name commands
    with engine.open(shards, *kept_places(against)) as opened:
        result = check_shards(
            options.spec(shards),
            options=chosen,
            store=store,
            engine=opened,
            against=against or (),
            statistics_to=report,
            report=tell,
        )
    alike = semantic.matches(options.spec(shards), store=store, limit=chosen.pixel_limit)
    findings = [each for split, found in alike for each in match_findings(found, split=split)]
    result = replace(result, findings=(*result.findings, *findings))
    print(json.dumps(as_json(result), indent=1) if as_json_text else as_text(result), flush=True)
    if pages is not None:
        semantic_ones = [found for _, found in alike]
        for file, listed in ((_LINES_FILE, result.matches if against else ()), (SEMANTIC_FILE, semantic_ones)):
            if listed:
                replace_lines(pages / file, (one.line(match) for one in listed for match in one.matches))
        write_duplicates(pages / MATCHES_PAGE, [*result.matches, *semantic_ones], chosen.pixel_limit)
    return result.exit_code


def _made_folder(output: str, *, force: bool) -> Path:
    from shardvit.data_shards.shards.location import is_local, local_path, redacted
    from shardvit.launch.pages.duplicates_page import MATCHES_PAGE, TITLE

    if not is_local(output):
        raise UserError(f"--output: {redacted(output)} is a URL, where no page is written; name a folder")
    folder = local_path(output)
    demand_target(folder, flag="--output", force=force, mark=f"<title>{TITLE}</title>", file=MATCHES_PAGE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output: {folder} cannot be made a folder ({error.strerror}); give another") from None
    return folder
