"""`shardvit figures`: draw the paper's figures of any model that `shardvit predict` takes. Heavy imports are lazy."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.vocabulary import USUAL_MOST_PIXELS
from shardvit.launch.flags import (
    INDEX_FILE,
    Device,
    Force,
    MaxImagePixels,
    TarClasses,
    TarLabel,
    WhichWeights,
    demand_counts,
    demand_target,
    page_mark,
    pixel_limit,
)
from shardvit.pipeline.recipe.vocabulary import ALL_STAGES


def figures(
    model: Path,
    /,
    *images: str,
    output: Annotated[
        Path | None, Parameter(help="Folder for the page, the pictures and their numbers; default: figures/MODEL.")
    ] = None,
    count: Annotated[
        int | None,
        Parameter(help="Images that attention is measured on; default: what takes half a minute, 8 to 128."),
    ] = None,
    weights: WhichWeights = None,
    device: Device = "auto",
    label: TarLabel = None,
    classes: TarClasses = None,
    max_image_pixels: MaxImagePixels = USUAL_MOST_PIXELS,
    force: Force = False,
) -> int:
    """Draw the ViT paper's figures of a model: attention, its reach, filters, positions.

    MODEL is anything that `shardvit predict` takes (except ONNX), or a masked
    patch model. IMAGES are files and folders of images, or shards (a packed
    folder, a folder or pattern of tars, a URL); the default is the held-out
    shards of the model's run.

    Draws attention rollout (the paper's Figure 6), attention of each block and
    head, mean attention distance over depth (Figure 7, right), filters of the
    first layer (Figure 7, left) and similarity of position embeddings (Figure
    7, centre). Writes each as PNG and SVG, all on one page, index.html, and the
    numbers to numbers.npz.

    Some examples:
        shardvit figures runs/digits
        shardvit figures runs/digits/pretrain photos/ --output talk
        shardvit figures vit_b16.npz shards/imagenet/val --count 128
    """
    demand_counts(count=count)
    from shardvit.pipeline.using.hub import is_elsewhere, local_weights, name_of

    output = output or Path("figures") / (name_of(model) if is_elsewhere(model) else _name(model))
    demand_target(output, flag="--output", force=force, mark=page_mark("figures"), file=INDEX_FILE)
    limit = pixel_limit(max_image_pixels)
    if model.suffix == ".onnx":
        raise UserError(
            f"{model}: an ONNX file computes logits alone, without attention: give the model that it was exported from"
        )
    from shardvit.launch.pages.figures_page import Wanted, make_page
    from shardvit.pipeline.using.find_model import refuse_own_model

    refuse_own_model(local_weights(model), command="figures")
    wanted = Wanted(
        local_weights(model), images, weights=weights, device=device, count=count, label=label, classes=classes
    )
    print(make_page(wanted, limit=limit, folder=output))
    return 0


def _name(model: Path) -> str:
    """Name the folder after the model's path: RUN, RUN-STAGE, or a file's name."""
    parts = [part for part in model.absolute().parts if part not in ("model", "checkpoints")]
    name = "-".join(parts[-2:]) if parts[-1] in ALL_STAGES else parts[-1]
    return name.removesuffix(".npz").removesuffix(".pth") or "model"
