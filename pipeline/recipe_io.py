"""YAML and `key=value` overrides -> `Recipe`; `Recipe` -> YAML; and what differs between two of them.

Everything is merged first and validated once. A recipe may begin with `extends: OTHER`, another recipe beside it or
one that ships with shardvit, whose keys it then changes; setting a stage to null removes it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from data_shards.errors import UserError
from data_shards.store.location import scrubbed
from pipeline.recipe import Recipe

SHIPPED = Path(__file__).parent / "recipes"

# Keys that may differ when a run is taken up again: they decide how it is carried out and reported, not what is learnt.
FREE_KEYS = (
    "experiment",
    "processes",
    "data.workers",
    "data.worker_kind",
    "data.max_corrupt_share",
    "data.cache.folder",
    "data.cache.limit",
    "engine.collective_timeout_seconds",
    "engine.zero_stage",
    "engine.max_micro_batch_size",
    "engine.activation_checkpointing",
    "engine.hang_seconds",
    "engine.slow_rank",
    "engine.slow_rank_factor",
    "engine.saving",
)
FREE_STAGE_KEYS = (
    *("log_every", "eval_every"),
    *("save_every", "save_every_minutes", "keep_checkpoints", "keep_every", "keep_best"),
)


def load_recipe(source: str, *, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        source: path of a YAML file, or the name of a recipe that ships with shardvit ("digits").
        overrides: dotted assignments such as "stages.finetune.optimizer.lr=0.01"; values are YAML.

    Raises:
        UserError: one sentence that names the file and the key.
    """
    path = _find(source, beside=Path())
    tree = _read(path)
    for override in overrides:
        _assign(tree, override)
    return _validate(tree, origin=str(path) + (" with the overrides" if overrides else ""))


def parse_recipe(path: Path) -> Recipe:
    """Read a resolved recipe that `dump_recipe` wrote into a run folder."""
    return _validate(_read(path), origin=str(path))


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML, every default written out."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def flatten(recipe: Recipe) -> dict[str, str]:
    """Dotted keys and values as text, the resolved recipe's leaves: MLflow parameters."""
    return {key: str(value) for key, value in _leaves(recipe.model_dump(mode="json")).items()}


def differences(old: Recipe, new: Recipe) -> dict[str, str]:
    """Keys that matter to the result and differ, each with "old -> new"."""
    before, after = without_free_keys(flatten(old)), without_free_keys(flatten(new))
    return {
        key: f"{before.get(key, '(absent)')} -> {after.get(key, '(absent)')}"
        for key in [*before, *(key for key in after if key not in before)]
        if before.get(key) != after.get(key)
    }


def without_free_keys(leaves: Mapping[str, str]) -> dict[str, str]:
    """The flattened recipe without the keys that may differ between two attempts at a run."""
    return {key: value for key, value in leaves.items() if not _is_free(key)}


def _is_free(key: str) -> bool:
    parts = key.split(".")
    return key in FREE_KEYS or (parts[0] == "stages" and parts[-1] in FREE_STAGE_KEYS)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            leaves.update(_leaves(value, f"{prefix}{key}."))
        else:
            leaves[prefix + key] = value
    return leaves


def _find(source: str, *, beside: Path) -> Path:
    shipped = sorted(path.stem for path in SHIPPED.glob("*.yaml"))
    for candidate in (beside / source, beside / f"{source}.yaml", SHIPPED / f"{source}.yaml"):
        if candidate.is_file():
            return candidate
    raise UserError(f"there is no recipe {source}: give the path of a YAML file, or one of {', '.join(shipped)}")


def _read(path: Path, *, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    if path.resolve() in seen:
        raise UserError(f"{path}: 'extends' leads back to the recipe itself")
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path} holds no recipe: it must be a mapping of keys such as name, model and stages")
    parent = tree.pop("extends", None)
    if parent is None:
        return tree
    return _merge(_read(_find(str(parent), beside=path.parent), seen=(*seen, path.resolve())), tree)


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _assign(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(
            f"{override!r} is no override: write it as key=value, for instance stages.pretrain.image_size=32"
        )
    *parents, leaf = key.split(".")
    node = tree
    for parent in parents:
        child = node.get(parent)
        if child is not None and not isinstance(child, dict):
            raise UserError(f"override {key}: {parent!r} is a value, not a group of keys")
        node[parent] = node = dict(child or {})  # a copy: places that share a YAML alias share one dict
    try:
        node[leaf] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(scrubbed(f"override {key}: {text!r} is not valid YAML")) from error


def _validate(tree: dict[str, Any], *, origin: str) -> Recipe:
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        problems = [_problem(detail) for detail in error.errors(include_url=False)]
        raise UserError(scrubbed(f"{origin}: " + "; ".join(problems))) from error


def _problem(detail: Any) -> str:
    location = [str(part) for part in detail["loc"]]
    key = ".".join(location)
    match detail["type"]:
        case "extra_forbidden":
            close = difflib.get_close_matches(location[-1], _fields_at(location[:-1]), n=1)
            return f"unknown key {key}" + (f", did you mean {close[0]}?" if close else "")
        case "missing":
            return f"key {key} is missing"
        case "value_error":
            message = str(detail["ctx"]["error"])
            return f"{key}: {message}" if key else message
        case _:
            return f"{key}: {detail['msg'][:1].lower()}{detail['msg'][1:]} (it is {detail['input']!r})"


def _fields_at(location: Sequence[str]) -> list[str]:
    """The keys that the recipe knows below a dotted place."""
    group: type[BaseModel] | None = Recipe
    for part in (part for part in location if not part.isdigit()):  # a place in a list
        field = group.model_fields.get(part) if group else None
        kinds = [] if field is None else [field.annotation, *get_args(field.annotation)]
        group = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
    return list(group.model_fields) if group else []
