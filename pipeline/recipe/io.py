"""Read, write and compare recipes. Reading merges files, overrides and the paths of roles, then validates once."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.shards.location import redact_text
from shardvit.data_shards.text import one_line
from shardvit.pipeline.own_code.by_path import absolute, allow_model, own_digests, pinned, without_places
from shardvit.pipeline.recipe.mistakes import mistakes, truths
from shardvit.pipeline.recipe.roles import with_paths
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.sources import (
    SETS,
    Given,
    Tree,
    find_recipe,
    model_of,
    place_of,
    read_parents,
    read_resolved,
    read_source,
    with_finetune,
)
from shardvit.pipeline.recipe.vocabulary import ALL_STAGES
from shardvit.pipeline.recipe.yaml_text import read_yaml, write_yaml

# May change on resume: they affect execution and reports, not the result.
FREE_KEYS = (
    *("experiment", "processes", "pictures"),
    *(f"tracking.{key}" for key in ("mode", "to", "system_metrics", "log_model", "register_as", "alias")),
    *("tracking.wandb.project", "tracking.wandb.entity"),
    *(f"data.{key}" for key in ("workers", "worker_kind", "max_corrupt_share", "cache.folder", "cache.limit")),
    *(f"engine.{key}" for key in ("zero_stage", "max_micro_batch_size", "activation_checkpointing", "compile")),
    *(f"engine.{key}" for key in ("attention", "offload", "overlap", "bucket_elements", "saving")),
    *(f"engine.{key}" for key in ("collective_timeout_seconds", "hang_seconds")),
    *(f"engine.{key}" for key in ("slow_rank", "slow_rank_factor", "slow_rank_seconds")),
)
FREE_STAGE_KEYS = (
    *("data", "log_every", "eval_every", "eval_overlap", "metrics", "also_eval", "few_shot"),
    *("save_every", "save_every_minutes", "keep_checkpoints", "keep_every", "keep_best"),
)


def load_recipe(
    source: str | Tree,
    *,
    overrides: Sequence[str] = (),
    paths: Path | None = None,
    own_code: Literal["typed", "recorded"] = "typed",
) -> Recipe:
    """Load a YAML file, the shipped recipe of a name ("digits"), or a recipe's keys. UserError names file and key.

    `overrides`: "stages.finetune.optimizer.lr=0.01", with YAML values and no repeated key; "stages." may be omitted,
    `train` and `eval` are the first training stage's, `finetune=SET` chooses the fine-tuning set. `paths`: a file with
    the shards of each role, read only if a stage lacks some. `model` defaults to that of the folder swap_head.model.
    `own_code`: "typed" references get the digest of their file, "recorded" ones (of a run's own ranks) must match it.
    """
    given = _given(source)
    tree, chosen, changes = _with_choice(read_source(given).tree, overrides)
    model = model_of(_overridden(tree, changes)[0])
    beside, said_by = (Path(), f"override {one_line(chosen[0])}") if chosen else place_of(given)
    tree, keys = _overridden(with_finetune(tree, beside=beside, model=model, said_by=said_by), changes)
    if tree.get("model") is None and model is not None:  # the folder's
        tree["model"] = model
    if paths is not None:  # not read for a resolved recipe, so not needed on each host
        tree = with_paths(tree, file=paths)
    if own_code == "typed":
        tree = pinned(tree, origin=place_of(given)[1])
    else:
        own_digests(tree)
    recipe = _validate(tree, origin=place_of(given)[1], overridden=keys)
    allow_model(recipe.model.custom)
    return recipe


def _given(source: str | Tree) -> Given:
    return find_recipe(source, beside=Path()) if isinstance(source, str) else source


def parse_recipe(path: Path) -> Recipe:
    """Read a run folder's resolved recipe; UserError if it is missing or a link."""
    return _validate(read_resolved(path), origin=str(path))


def dump_recipe(recipe: Recipe, *, keys: Literal["all", "changed"] = "all") -> str:
    """Write the resolved recipe as YAML, with defaults ("all") or without ("changed")."""
    return write_yaml(recipe.model_dump(mode="json", exclude_defaults=keys == "changed"))


def flatten(recipe: Recipe, *, keys: Literal["all", "changed"] = "all") -> dict[str, str]:
    """Flatten the resolved recipe to dotted keys and text values (MLflow parameters); `keys` as in `dump_recipe`."""
    tree = recipe.model_dump(mode="json", exclude_defaults=keys == "changed")
    return {key: str(value) for key, value in _leaves(tree).items()}


def differences(old: Recipe, new: Recipe) -> dict[str, str]:
    """List differing keys that affect the result, as "old -> new"."""
    return _changes(without_free_keys(flatten(old)), without_free_keys(flatten(new)))


def difference_to_parent(source: str | Tree, *, overrides: Sequence[str] = ()) -> str:
    """Compare `source` and the overrides with what it extends, or with `source` alone: "parent: NAMES", then a line per
    key; "" if equal. Arguments and errors as `load_recipe`."""
    given = _given(source)
    parents, before = read_parents(given)
    tree = read_source(given).tree
    if not parents:
        parents, before = [source if isinstance(source, str) else place_of(given)[1]], tree
    tree, _, changes = _with_choice(tree, overrides)
    found = _changes(_leaves(before), _leaves(_overridden(tree, changes)[0]))
    lines = [f"parent: {', '.join(parents)}", *(f"{key}: {change}" for key, change in found.items())]
    return "\n".join(lines) + "\n" if found else ""


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    def show(leaves: Mapping[str, Any], key: str) -> str:
        return one_line(str(leaves[key])) if key in leaves else "(absent)"

    keys = [key for key in dict.fromkeys([*old, *new]) if (key in old, old.get(key)) != (key in new, new.get(key))]
    return {key: f"{show(old, key)} -> {show(new, key)}" for key in keys}


def without_free_keys(leaves: Mapping[str, str]) -> dict[str, str]:
    """Drop keys that may change on resume."""
    return {key: without_places(value) for key, value in leaves.items() if not _is_free(key)}


def _is_free(key: str) -> bool:
    parts = key.split(".")
    return key in FREE_KEYS or (parts[0] == "stages" and parts[2:3] != [] and parts[2] in FREE_STAGE_KEYS)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        is_group = isinstance(value, Mapping) and value
        leaves |= _leaves(value, f"{prefix}{key}.") if is_group else {prefix + key: value}
    return leaves


_MOST_SAID = 5


def _with_choice(tree: Tree, overrides: Sequence[str]) -> tuple[Tree, list[str], list[str]]:
    """Apply an override `finetune=SET`: the new tree, that override, and the others."""
    chosen = [each for each in overrides if each.partition("=")[:2] == (SETS, "=")]
    if not chosen:
        return tree, [], list(overrides)
    if len(chosen) > 1:
        raise UserError(f"override {SETS} is given twice: leave one out")
    stages = tree.get("stages")
    if SETS not in tree and isinstance(stages, dict):  # it has no set, but stages of its own
        tree = tree | {"stages": {key: each for key, each in stages.items() if key not in ("swap_head", SETS)}}
    tree = tree | {SETS: read_yaml(chosen[0].partition("=")[2], source=f"override {one_line(chosen[0])}")}
    return tree, chosen, [each for each in overrides if each not in chosen]


def _overridden(tree: Tree, overrides: Sequence[str]) -> tuple[Tree, list[str]]:
    tree, keys = dict(tree), []
    for override in overrides:
        keys.append(_assign(tree, override, before=keys))
    return tree, keys


def _whole_key(key: str, *, tree: Tree) -> str:
    if key in ("train", "eval"):
        stages = tree.get("stages")
        names = [each for each in ALL_STAGES if each != "swap_head" and isinstance(stages, dict) and stages.get(each)]
        return f"stages.{names[0] if names else 'pretrain'}.{key}"
    return f"stages.{key}" if key.partition(".")[0] in ALL_STAGES else key


def _assign(tree: dict[str, Any], override: str, *, before: Sequence[str]) -> str:
    """Change one key in place and return it; `before`: keys of earlier overrides."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"{override!r} is no override: write key=value, for instance stages.pretrain.image_size=32")
    key = _whole_key(key, tree=tree)
    for other in before:
        if f"{other}.".startswith(f"{key}."):
            again = "is given twice" if other == key else f"comes after {other}, and would undo it"
            raise UserError(f"override {one_line(key)} {again}: leave one out")
    *parents, leaf = key.split(".")
    node = tree
    for parent in parents:
        child = node.get(parent)
        if child is not None and not isinstance(child, dict):
            raise UserError(f"override {key}: {parent!r} is a value, not a group of keys")
        node[parent] = node = dict(child or {})  # copy: YAML aliases share one dict
    node[leaf] = absolute({leaf: read_yaml(text, source=f"override {one_line(override)}")}, folder=Path())[leaf]
    return key


def _validate(tree: dict[str, Any], *, origin: str, overridden: Sequence[str] = ()) -> Recipe:
    found = truths(tree, root=Recipe)
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        found = list(dict.fromkeys([*found, *mistakes(error, tree=tree, root=Recipe)]))
    else:
        if not found:
            return recipe
    by_place: dict[str, list[str]] = {}
    for mistake in found:
        place = origin
        if any(f"{mistake.key}.".startswith(f"{key}.") for key in overridden):
            place = "in the overrides"
        elif any(not mistake.key or f"{key}.".startswith(f"{mistake.key}.") for key in overridden):
            place = f"{origin} with the overrides"
        by_place.setdefault(place, []).append(mistake.text)
    raise UserError(redact_text("; ".join(f"{place}: {_some(texts)}" for place, texts in by_place.items())))


def _some(texts: Sequence[str]) -> str:
    more = f"; and {len(texts) - _MOST_SAID} more" if len(texts) > _MOST_SAID else ""
    return "; ".join(texts[:_MOST_SAID]) + more
