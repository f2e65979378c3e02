"""YAML and `key=value` overrides -> `Recipe`; `Recipe` -> YAML; and the differences between two recipes.

Everything is merged first and validated once. `extends: OTHER` names a recipe in the same folder, or one that ships
with shardvit, whose keys this one changes; a stage set to null is removed.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ValidationError

from data_shards.errors import UserError
from data_shards.store.location import scrubbed
from data_shards.text import one_line
from pipeline.recipe.mistakes import mistakes, truths
from pipeline.recipe.schema import Recipe
from pipeline.recipe.yaml_text import read_yaml, read_yaml_file

SHIPPED = Path(__file__).parents[1] / "recipes"

# Keys that may differ when a run is resumed: they decide how it is carried out and reported, not what is learnt.
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
    """Read the YAML file `source`, or the shipped recipe of that name ("digits"). Of `overrides`, such as
    "stages.finetune.optimizer.lr=0.01", values are YAML; the same key twice is refused.

    Raises:
        UserError: naming the file and the key.
    """
    path = _find(source, beside=Path())
    tree = _read(path)
    keys: list[str] = []
    for override in overrides:
        keys.append(_assign(tree, override, before=keys))
    return _validate(tree, origin=str(path), overridden=keys)


def parse_recipe(path: Path) -> Recipe:
    """Read the resolved recipe that `dump_recipe` wrote into a run folder."""
    return _validate(_read(path), origin=str(path))


def dump_recipe(recipe: Recipe, *, keys: Literal["all", "changed"] = "all") -> str:
    """The resolved recipe as YAML, with every default ("all") or none ("changed")."""
    tree = recipe.model_dump(mode="json", exclude_defaults=keys == "changed")
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def flatten(recipe: Recipe, *, keys: Literal["all", "changed"] = "all") -> dict[str, str]:
    """The resolved recipe as dotted keys and text values (MLflow parameters); `keys` as in `dump_recipe`."""
    tree = recipe.model_dump(mode="json", exclude_defaults=keys == "changed")
    return {key: str(value) for key, value in _leaves(tree).items()}


def differences(old: Recipe, new: Recipe) -> dict[str, str]:
    """The differing keys that affect the result, each with "old -> new"."""
    before, after = without_free_keys(flatten(old)), without_free_keys(flatten(new))
    return {
        key: f"{before.get(key, '(absent)')} -> {after.get(key, '(absent)')}"
        for key in [*before, *(key for key in after if key not in before)]
        if before.get(key) != after.get(key)
    }


def without_free_keys(leaves: Mapping[str, str]) -> dict[str, str]:
    """The flattened recipe without the keys that may differ when a run is resumed."""
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


_MOST_SAID = 5
_MOST_NAMED = 200


def _find(source: str, *, beside: Path, said_by: str = "") -> Path:
    shipped = sorted(path.stem for path in SHIPPED.glob("*.yaml"))
    for candidate in (beside / source, beside / f"{source}.yaml", SHIPPED / f"{source}.yaml"):
        if os.path.isfile(candidate):  # pathlib's raises for names that no disk can hold
            return candidate
    path, of = beside / source, f"{said_by}, extends: " if said_by else ""
    what = one_line(source if len(source) <= _MOST_NAMED else f"{source[:_MOST_NAMED]}...")
    if os.path.isdir(path):
        inside = next((path / name for name in ("recipe.yaml", f"{path.name}.yaml") if (path / name).is_file()), None)
        raise UserError(
            f"{of}{what} is a folder, not a recipe: give a YAML file" + (f", such as {inside}" if inside else "")
        )
    if os.path.exists(path):
        raise UserError(f"{of}{what} is no file: give the path of a YAML file")
    near = _like(source, beside=beside, shipped=shipped)
    raise UserError(
        f"{of}there is no recipe {what}"
        + (f", did you mean {near}?" if near else f": give the path of a YAML file, or one of {', '.join(shipped)}")
    )


def _like(source: str, *, beside: Path, shipped: Sequence[str]) -> str | None:
    folder, name = os.path.split(source)
    names = {each.casefold(): each for each in shipped}
    with suppress(OSError, ValueError):
        for each in sorted(os.listdir(beside / folder)):
            stem, suffix = os.path.splitext(each)
            if suffix in (".yaml", ".yml"):
                names[stem.casefold()] = os.path.join(folder, each)
    stem = name.removesuffix(".yaml").removesuffix(".yml")
    close = difflib.get_close_matches(stem.casefold(), names, n=1)
    return names[close[0]] if close else None


def _read(path: Path, *, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    if path.resolve() in seen:
        raise UserError(f"{path}: 'extends' leads back to the recipe itself")
    tree = read_yaml_file(path)
    if not isinstance(tree, dict):
        raise UserError(
            f"{path} holds no recipe: it {'is empty, and ' if tree is None else ''}must be a mapping of keys such as "
            "name, model and stages"
        )
    parent = tree.pop("extends", None)
    if parent is None:
        return tree
    if not isinstance(parent, str):
        raise UserError(f"{path}: extends must be the name of one other recipe")
    return _merge(_read(_find(parent, beside=path.parent, said_by=str(path)), seen=(*seen, path.resolve())), tree)


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _assign(tree: dict[str, Any], override: str, *, before: Sequence[str]) -> str:
    """Change one key and return it; `before`: keys set by earlier overrides."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(
            f"{override!r} is no override: write it as key=value, for instance stages.pretrain.image_size=32"
        )
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
        node[parent] = node = dict(child or {})  # a copy: places that share a YAML alias share one dict
    node[leaf] = read_yaml(text, source=f"override {one_line(override)}")
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
        if any(f"{mistake.key}.".startswith(f"{key}.") for key in overridden):
            place = "in the overrides"
        elif any(not mistake.key or f"{key}.".startswith(f"{mistake.key}.") for key in overridden):
            place = f"{origin} with the overrides"
        else:
            place = origin
        by_place.setdefault(place, []).append(mistake.text)
    raise UserError(scrubbed("; ".join(f"{place}: {_some(texts)}" for place, texts in by_place.items())))


def _some(texts: Sequence[str]) -> str:
    more = f"; and {len(texts) - _MOST_SAID} more" if len(texts) > _MOST_SAID else ""
    return "; ".join(texts[:_MOST_SAID]) + more
