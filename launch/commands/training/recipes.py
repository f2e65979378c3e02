"""`shardvit recipes`: list the shipped recipes, or print one with all its files merged.

Reads some dozens of small files: half a second, no torch. A recipe's cost and result come from its header; a test
compares the time with `shardvit plan`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from shardvit.data_shards.errors import UserError
from shardvit.launch.flags import DataFile, switch
from shardvit.launch.local.env import paths_file

if TYPE_CHECKING:
    from shardvit.pipeline.recipe.schema import Recipe

_PAGE_WIDTH = 150
_FAMILIES = {  # folders, in the order of the page
    "paper": "The ViT paper (arXiv 2010.11929)",
    "augreg": "How to train your ViT? (AugReg, arXiv 2106.10270)",
    "plain": "Better plain ViT baselines for ImageNet-1k (arXiv 2205.01580)",
    "scaling": "Scaling Vision Transformers (arXiv 2106.04560)",
    "deit": "DeiT (arXiv 2012.12877)",
    "deit3": "DeiT III: Revenge of the ViT (arXiv 2204.07118)",
    "distill": "A good teacher is patient and consistent (arXiv 2106.05237)",
    "timm": "timm: ResNet strikes back (arXiv 2110.00476)",
    "mae": "Masked autoencoders (MAE, arXiv 2111.06377)",
    "recipes": "Small runs, to see everything at work on a laptop",
}


def recipes(
    name: str | None = None,
    /,
    *overrides: str,
    data: DataFile = None,
    all_keys: Annotated[bool, switch("Of one recipe: every key, not only those that differ from defaults.")] = False,
) -> int:
    """List shipped recipes with data, cost and published result; or print one, resolved.

    NAME is one of them or a YAML file; OVERRIDES are changes to it, key=value,
    as for `shardvit run`. The output is itself a recipe; one that extends no
    other is printed with its comments.

    Some examples:
        shardvit recipes
        shardvit recipes vit_l16_in21k
        shardvit recipes vit_l16_in21k finetune=cifar10 > mine.yaml
    """
    if name is None:
        if data is not None or all_keys:
            raise UserError("--data and --all-keys are for one recipe: name it")
        print(listing(), end="")
        return 0
    from shardvit.pipeline.recipe.io import dump_recipe, load_recipe
    from shardvit.pipeline.recipe.sources import find_recipe, read_header, read_source

    recipe = load_recipe(name, overrides=overrides, paths=paths_file(data))
    path = find_recipe(name, beside=Path())
    files = read_source(path).files
    if len(files) == 1 and not overrides and data is None and not all_keys:
        print(path.read_text(encoding="utf-8"), end="")
        return 0
    header = read_header(files, name=path.stem)
    print(f"{header.text()}{dump_recipe(recipe, keys='all' if all_keys else 'changed')}", end="")
    return 0


def listing() -> str:
    """Tabulate all shipped recipes by family, then list the fine-tuning sets."""
    from shardvit.data_shards.text import table
    from shardvit.pipeline.recipe.io import load_recipe
    from shardvit.pipeline.recipe.sources import finetune_sets, read_header, read_source, shipped_recipes

    rows: dict[str, list[list[str]]] = {family: [] for family in _FAMILIES}
    for name, path in shipped_recipes().items():
        recipe, header = load_recipe(name), read_header(read_source(path).files, name=name)
        cost = re.split(r" \(| that | for ", header.entry("time"))[0]
        if header.hardware and header.gpu_hours is not None:
            count, gpu = header.hardware
            cost = f"{header.gpu_hours:,.0f} GPU-hours ({count:,} x {gpu.upper()})"
        rows[path.parent.name].append([name, _model(recipe), _data(recipe), cost, header.headline])
    head = ["name", "model", "data", "cost", "result"]
    parts = [
        f"{_FAMILIES[family]}\n\n{table([head, *each], heading='ruled', width=_PAGE_WIDTH)}\n"
        for family, each in rows.items()
        if each
    ]
    sets = table([["", f"finetune={each}"] for each in finetune_sets()])
    return "\n".join([*parts, f"Fine-tuning sets, for any of them:\n{sets}\n"])


def _model(recipe: Recipe) -> str:
    model = recipe.model
    if model.variant:
        return model.variant
    return f"width {model.sizes.width}, depth {model.sizes.depth}"


def _data(recipe: Recipe) -> str:
    stages = map(recipe.train_stage, recipe.stages.trained)
    sets = (each.data or ", ".join(Path(one.shards).parent.name for one in each.train or ()) for each in stages)
    return " -> ".join(dict.fromkeys(sets))
