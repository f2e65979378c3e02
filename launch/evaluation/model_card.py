"""Write the folder that `shardvit push` sends: timm's config.json and safetensors, and README.md, the model card.

The card says what the run's records say: data, recipe, results, versions. Locations lose credentials, local ones their
folders too; tracking, hosts and the user are left out. Executes nothing of the run; costs a copy of the weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.shards.location import PIPE, is_local, redacted
from shardvit.data_shards.text import one_line, show_duration
from shardvit.model.saved.model_folder import save_model, timm_norm_layer, timm_objection
from shardvit.pipeline.recipe.io import parse_recipe
from shardvit.pipeline.recipe.vocabulary import METRICS, METRICS_FILE, RECIPE_FILE, StageName
from shardvit.pipeline.runs.logs import iter_metrics
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.runs.written_by import written_by
from shardvit.pipeline.tracking.facts import DatasetInput, RunFacts, load_facts
from shardvit.pipeline.transfer.results import ModelOrigin, model_origin
from shardvit.pipeline.using.find_model import FoundModel
from shardvit.pipeline.using.hub import card_header, without_tokens

CARD_FILE = "README.md"
_NOT_SHOWN = ("tracking", "engine", "processes", "hosts", "name")
_USE = """```python
import timm

model = timm.create_model("hf-hub:{name}", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
```

```
shardvit predict hf-hub:{name} photo.jpg
```"""


def demand_timm(found: FoundModel) -> None:
    """Raise UserError unless timm builds this model from config.json with the same logits."""
    why = timm_objection(found.meta)
    if why is None and (norm_layer := timm_norm_layer(found.meta.model)):
        why = f"its LayerNorm epsilon can only be given in code ({norm_layer})"
    if why is not None:
        raise UserError(
            f"{found.origin}: timm could not load it from the hub, because {why}: `shardvit export` lists other formats"
        )


def write_for_hub(found: FoundModel, folder: Path, *, name: str, license: str) -> None:
    """Write the model `found` as OWNER/NAME on the hub shows it. UserError as `demand_timm`; OSError."""
    demand_timm(found)
    save_model(folder, found.state, meta=found.meta)
    (folder / CARD_FILE).write_text(model_card(found, name=name, license=license), encoding="utf-8")


def model_card(found: FoundModel, *, name: str, license: str) -> str:
    """Return the card: YAML for the hub, then Markdown."""
    meta, origin = found.meta, model_origin(found.origin)
    run, stage = origin.run, origin.stage
    facts = load_facts(run.stage(stage)) if run is not None and stage is not None else None
    results = _results(origin) if run is not None and stage is not None else {}
    sizes = meta.model.sizes
    what = meta.model.variant and f"ViT-{meta.model.variant}"
    what = what or f"ViT of width {sizes.width}, {sizes.depth} blocks, patches of {sizes.patch_size} px"
    average = "" if meta.ema_decay is None else f" The weights are their moving average (decay {meta.ema_decay:g})."
    held_out = next((each.name for each in facts.datasets if each.context == "eval"), "") if facts else ""
    parts = [
        card_header(name, license=license, data=held_out, top1=results.get("val/top1")),
        f"# {name.partition('/')[2]}\n\n{what} for images of {meta.image_size} px, {meta.num_classes:,} classes, "
        f"trained with shardvit.{average} Pixels are prepared by the evaluation protocol `{meta.eval_protocol}`.",
        _USE.format(name=name),
        *_about_run(run, stage, facts=facts, results=results),
        _made_by(facts),
    ]
    return without_tokens("\n\n".join(filter(None, parts))) + "\n"


def _about_run(
    run: RunFolder | None, stage: StageName | None, *, facts: RunFacts | None, results: Mapping[str, float]
) -> list[str]:
    if run is None or stage is None:
        return []
    parts: list[str] = []
    if results:
        rows = [("metric", "value"), ("---", "---:"), *((f"`{key}`", f"{value:.6g}") for key, value in results.items())]
        parts.append(f"## Results on held-out images, after {stage}\n\n{_table(rows)}")
    if facts is not None and facts.datasets:
        rows = [("use", "data", "images", "classes", "digest"), ("---",) * 5, *map(_data_row, facts.datasets)]
        parts.append(f"## Data\n\n{_table(rows)}")
    recipe = parse_recipe(run.path / RECIPE_FILE)
    import yaml

    tree = recipe.model_dump(mode="json", exclude_defaults=True)
    shown = yaml.safe_dump(_public({key: tree[key] for key in tree if key not in _NOT_SHOWN}), sort_keys=False)
    record = run.record(stage)
    took = f"; {show_duration(record.seconds)}" if record.seconds else ""
    seen = f"The last stage, {stage}, saw {record.images_seen:,} images{took}.\n\n"
    parts.append(f"## Recipe\n\n{seen}```yaml\n{shown.replace('```', '')}```")
    return parts


def _results(origin: ModelOrigin) -> dict[str, float]:
    """Held-out metrics of these weights: of the stage's result, or of the checkpoint's step."""
    assert origin.run is not None
    assert origin.stage is not None
    if origin.step is None:
        values = dict(origin.run.record(origin.stage).results)
    else:
        file = origin.run.stage(origin.stage) / METRICS_FILE
        found = [row.metrics for row in iter_metrics(file) if row.step == origin.step] if file.is_file() else []
        values = {key: value for metrics in found for key, value in metrics.items()}
    order = [name for name in METRICS if name in values]
    keys = [*order, *sorted(values.keys() - {*order})]
    return {one_line(key): values[key] for key in keys if key.startswith("val")}


def _data_row(data: DatasetInput) -> tuple[str, ...]:
    images, classes = ("" if count is None else f"{count:,}" for count in (data.images, data.classes))
    source = "" if is_local(data.source) else f" ({redacted(data.source)})"
    return data.context, f"{data.name}{source}", images, classes, f"`{data.digest[:16]}`"


def _made_by(facts: RunFacts | None) -> str:
    now = written_by()
    versions = ", ".join(f"{name} {now[name]}" for name in ("shardvit", "timm", "torch"))
    commit = facts.tags.get("mlflow.source.git.commit") if facts is not None else None
    changed = facts is not None and facts.tags.get("shardvit.git.dirty") == "true"
    of = f" Trained by shardvit's commit `{one_line(commit)}`{' with changes' if changed else ''}." if commit else ""
    return f"## Made by\n\nWritten by {versions}.{of}"


def _table(rows: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(one_line(cell).replace('|', '/') for cell in row)} |" for row in rows)


def _public(value: Any) -> Any:
    """Redact every text of a tree: credentials, commands, and the folders of local paths that lead to a home."""
    match value:
        case str() if value.startswith(PIPE) or not is_local(value):
            return redacted(value)
        case str():
            return re.sub(r"^(?:file:(?://)?)?[/~].*/(?=[^/])", ".../", value)
        case dict():
            return {key: _public(each) for key, each in value.items()}
        case list():
            return [_public(each) for each in value]
        case _:
            return value
