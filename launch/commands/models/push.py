"""`shardvit push`: publish a model on the Hugging Face hub, with its card."""

import re
import tempfile
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.text import one_line, printable, show_bytes
from shardvit.launch.flags import Force, WhichWeights, demand_target, switch
from shardvit.launch.local.output import say_model

_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")


def push(
    model: Path,
    name: Annotated[str, Parameter(help="OWNER/NAME on the hub; made if it is not there.")],
    /,
    *,
    license: Annotated[
        str | None, Parameter(help="The model's licence as the hub writes it: apache-2.0, cc-by-nc-4.0, other, ...")
    ] = None,
    private: Annotated[bool, switch("Make a new repository private.")] = False,
    dry_run: Annotated[bool, switch("Only write the folder that would be sent.", "--dry-run")] = False,
    output: Annotated[Path | None, Parameter(help="That folder with --dry-run; default: NAME, here.")] = None,
    weights: WhichWeights = None,
    force: Force = False,
) -> int:
    """Publish a model on the Hugging Face hub, as one commit.

    MODEL is a run's folder (its last trained stage), a stage's, a checkpoint, or
    what `shardvit import` reads. Sends model.safetensors, config.json and
    README.md, the model card: how to use it, held-out results, data, recipe and
    versions, from the run's own records, without credentials and local folders.
    Then timm.create_model("hf-hub:OWNER/NAME", pretrained=True) and
    `shardvit predict hf-hub:OWNER/NAME` load it. Models that timm cannot build
    are refused. Log in with `hf auth login` or HF_TOKEN; HF_ENDPOINT names
    another hub.

    Some examples:
        shardvit push runs/digits me/vit-digits --license apache-2.0 --dry-run
        shardvit push runs/vit_b16/pretrain me/vit-b16 --license cc-by-4.0 --private
    """
    if not _NAME.fullmatch(name):
        raise UserError(f"push: {one_line(name)} is no OWNER/NAME of a repository on the hub")
    if license is None or not _LICENSE.fullmatch(license):
        raise UserError("--license: say how others may use the model, such as apache-2.0, cc-by-nc-4.0 or other")
    if output is not None and not dry_run:
        raise UserError("--output: it is for --dry-run: leave it out, or give both")
    target = output or Path(name.partition("/")[2])
    if dry_run:
        demand_target(target, flag="--output", force=force)

    from shardvit.launch.evaluation.model_card import write_for_hub
    from shardvit.pipeline.using.find_model import find_model
    from shardvit.pipeline.using.hub import local_weights, upload

    found = find_model(place := local_weights(model), weights=weights)
    say_model(place, origin=found.origin, notes=found.notes)
    with tempfile.TemporaryDirectory(prefix="shardvit-push-") as temporary:
        folder = target if dry_run else Path(temporary) / "model"
        try:
            write_for_hub(found, folder, name=name, license=license)
        except OSError as error:
            raise UserError(f"{folder} cannot be written: {error}") from None
        for file in sorted(folder.iterdir()):
            print(f"{file.name}: {show_bytes(file.stat().st_size)}")
        if dry_run:
            print(printable(f"{folder} would be sent to hf-hub:{name}"))
        else:
            print(upload(folder, name, private=private, message="Model and card, by shardvit push"), flush=True)
    return 0
