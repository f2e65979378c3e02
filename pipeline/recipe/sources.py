"""Read a recipe's files, those it extends and its fine-tuning set into one tree of keys.

    SHIPPED/NAME.yaml, SHIPPED/FAMILY/NAME.yaml    a recipe, found as NAME
    SHIPPED/FAMILY/_SHARED.yaml                    keys shared by a family: not a recipe, only extended
    SHIPPED/finetune/SET.yaml                      a fine-tuning set: the stages added by `finetune: SET`

`extends` names one recipe, or a list merged in order, from the same folder or shipped; null leaves a stage out. The
recipe's own keys win over `finetune: SET`; `finetune: null` leaves out swap_head and finetune. Resolved recipes have
neither key.
"""

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.safe_paths import is_inside
from shardvit.data_shards.text import one_line
from shardvit.model.config import ModelConfig
from shardvit.model.saved.model_folder import CONFIG_FILE, SavedModelMeta, read_meta
from shardvit.pipeline.own_code.by_path import absolute
from shardvit.pipeline.recipe.yaml_text import read_yaml_file

SHIPPED = Path(__file__).resolve().parents[1] / "recipes"
SETS = "finetune"  # the folder, and the key
_MOST_FILES = 64  # per recipe: lists of lists multiply
_MOST_NAMED = 200

Tree = dict[str, Any]
Given = Path | Tree  # a recipe's file, or its keys, as a script gives them: relative to the working folder


@dataclass(frozen=True)
class RecipeSource:
    """A recipe as written; `files`: its sources, most general first."""

    tree: Tree
    files: tuple[Path, ...]


@cache
def shipped_recipes() -> dict[str, Path]:
    """List shipped recipes by name: those for a laptop first, then by family."""
    paths = [*SHIPPED.glob("*.yaml"), *SHIPPED.glob("*/*.yaml")]
    ours = [path for path in paths if not path.stem.startswith("_") and path.parent.name != SETS]
    order = sorted(ours, key=lambda path: (path.parent != SHIPPED, path.parent, path.stem.startswith("r"), path.stem))
    return {path.stem: path for path in order}  # within a family: Transformers, hybrids, ResNets


@cache
def finetune_sets() -> dict[str, Path]:
    """List shipped fine-tuning sets by the value of `finetune`, such as "cifar10" or "big_vision/cifar10"."""
    folder = SHIPPED / SETS
    paths = sorted(folder.rglob("*.yaml"), key=lambda path: (len(path.parts), path))
    return {
        path.relative_to(folder).with_suffix("").as_posix(): path for path in paths if not path.stem.startswith("_")
    }


def find_recipe(source: str, *, beside: Path, said_by: str = "") -> Path:
    """Find a recipe by path or name, or raise UserError; `said_by`: the file that extends it."""
    shipped = shipped_recipes()
    for candidate in (beside / source, beside / f"{source}.yaml", shipped.get(source), SHIPPED / f"{source}.yaml"):
        if candidate is not None and os.path.isfile(candidate):  # Path.is_file raises for names that no disk can hold
            return candidate
    path, of = beside / source, f"{said_by}, extends: " if said_by else ""
    what = one_line(source if len(source) <= _MOST_NAMED else f"{source[:_MOST_NAMED]}...")
    if os.path.isdir(path):
        inside = next((path / name for name in ("recipe.yaml", f"{path.name}.yaml") if (path / name).is_file()), None)
        such_as = f", such as {inside}" if inside else ""
        raise UserError(f"{of}{what} is a folder, not a recipe: give a YAML file{such_as}")
    if os.path.exists(path):
        raise UserError(f"{of}{what} is no file: give the path of a YAML file")
    near = _like(source, beside=beside, shipped=list(shipped))
    names = f"one of the {len(shipped)} names that `shardvit recipes` lists"
    advice = f", did you mean {near}?" if near else f": give the path of a YAML file, or {names}"
    raise UserError(f"{of}there is no recipe {what}{advice}")


def place_of(given: Given) -> tuple[Path, str]:
    """Return a recipe's folder, and its name in messages."""
    return (given.parent, str(given)) if isinstance(given, Path) else (Path(), "the recipe")


def read_source(given: Given) -> RecipeSource:
    """Read a recipe and all it extends; `finetune` stays a key."""
    files: list[Path] = []
    return RecipeSource(_read(given, seen=(), files=files), tuple(files))


def read_resolved(path: Path) -> Tree:
    """Read a run's resolved recipe; UserError if it is not a regular file in that folder, or extends another."""
    if path.exists() and not (path.is_file() and is_inside(path, folder=path.parent)):
        raise UserError(f"{path} is not a regular file in the run's folder: put the run's own recipe there")
    tree, parents = _own_keys(path)
    if parents:
        raise UserError(f"{path} extends {one_line(parents[0])}, but a run's recipe must be complete by itself")
    return tree


def read_parents(given: Given) -> tuple[list[str], Tree]:
    """Read the names of the recipes that one extends and their merged keys; both may be empty."""
    (beside, said_by), names, tree = place_of(given), _own_keys(given)[1], Tree()
    for name in names:
        tree = merge(tree, read_source(find_recipe(name, beside=beside, said_by=said_by)).tree)
    return names, tree


def with_finetune(tree: Tree, *, beside: Path, model: Any, said_by: str) -> Tree:
    """Merge the fine-tuning set of `finetune` below the tree's own keys; UserError if there is none of that name.
    Cuts its image_size to whole patches, like Google's unpadded convolution (384 px: 27 patches of 14, 6 px unused)."""
    if SETS not in tree:
        return tree
    tree = dict(tree)
    name, stages = tree.pop(SETS), tree.get("stages")
    if not isinstance(stages, Mapping | None):
        return tree  # validation says so
    if name is None:
        return tree | {"stages": {key: each for key, each in (stages or {}).items() if key not in ("swap_head", SETS)}}
    below = read_source(_find_set(name, beside=beside, said_by=said_by)).tree
    finetune = (below.get("stages") or {}).get("finetune")
    if isinstance(finetune, dict) and isinstance(size := finetune.get("image_size"), int):
        finetune["image_size"] = max(size - size % _patch_size(model), 1)
    return merge(below, tree)


def record_elsewhere(folder: Path) -> SavedModelMeta:
    """Read the model record in the folder swap_head.model; UserError if it is not a shardvit model."""
    advice = f"make a model of it with `shardvit import {folder} FOLDER` and name that folder"
    if folder.is_file():
        raise UserError(f"stages.swap_head.model: {folder} is a file: {advice}")
    try:
        return read_meta(folder)
    except ValueError as error:
        more = f"; if it is another program's: {advice}" if (folder / CONFIG_FILE).is_file() else ""
        raise UserError(f"stages.swap_head.model: {error}{more}") from None


def model_of(tree: Tree) -> Any:
    """Get a recipe's `model`, by default that of the folder swap_head.model. UserError as `record_elsewhere`."""
    stages = tree.get("stages")
    swap_head = stages.get("swap_head") if isinstance(stages, dict) else None
    folder = swap_head.get("model") if isinstance(swap_head, dict) else None
    if tree.get("model") is not None or not isinstance(folder, str):
        return tree.get("model")
    return record_elsewhere(Path(folder)).model.model_dump(mode="json", exclude_defaults=True)


def merge(base: Tree, changes: Tree) -> Tree:
    """Merge groups of keys into a new tree; replace everything else."""
    merged = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def _find_set(name: Any, *, beside: Path, said_by: str) -> Path:
    sets = finetune_sets()
    if not isinstance(name, str):
        raise UserError(
            f"{said_by}: finetune is the name of a fine-tuning set, such as {next(iter(sets))}: the stage's own keys "
            "are stages.finetune"
        )
    if name in sets:
        return sets[name]
    for candidate in (beside / name, beside / f"{name}.yaml"):
        if os.path.isfile(candidate):
            return candidate
    close = difflib.get_close_matches(name, sets, n=1)
    what = one_line(name[:_MOST_NAMED]) + (f", did you mean {close[0]}? Else" if close else ":")
    raise UserError(
        f"{said_by}: there is no fine-tuning set {what} give the path of a YAML file, or one of {', '.join(sets)}"
    )


def _patch_size(model: Any) -> int:
    """Unit of image sizes in pixels; 1 if the model is invalid, which validation reports."""
    with suppress(ValidationError, ValueError, AssertionError):
        config = ModelConfig.model_validate(model)
        return config.sizes.patch_size if config.kind == "vit" else 32
    return 1


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


def _read(given: Given, *, seen: tuple[Path, ...], files: list[Path]) -> Tree:
    (beside, name), file = place_of(given), [given.resolve()] if isinstance(given, Path) else []
    if seen and file[0] in seen:
        raise UserError(f"{name}: 'extends' leads back to the recipe itself")
    if len(files) == _MOST_FILES:
        raise UserError(f"{name}: with what it extends, the recipe consists of more than {_MOST_FILES} files")
    tree, parents = _own_keys(given)
    base: Tree = {}
    for parent in parents:
        found = find_recipe(parent, beside=beside, said_by=name)
        base = merge(base, _read(found, seen=(*seen, *file), files=files))
    files += file
    return merge(base, tree)


def _own_keys(given: Given) -> tuple[Tree, list[str]]:
    tree, name = read_yaml_file(given) if isinstance(given, Path) else dict(given), place_of(given)[1]
    if not isinstance(tree, dict):
        empty = "it is empty, and " if tree is None else "it "
        raise UserError(f"{name} holds no recipe: {empty}must be a mapping of keys such as name, model and stages")
    parents = tree.pop("extends", None) or []
    parents = parents if isinstance(parents, list) else [parents]
    if not all(isinstance(parent, str) for parent in parents):
        raise UserError(f"{name}: extends must be the name of another recipe, or a list of names")
    return absolute(tree, folder=place_of(given)[0]), parents


KEYS = ("command", "hardware", "time", "result", "source", "chosen")
"""chosen: our choices for what is unpublished."""

_GPUS = re.compile(r"(\d[\d,]*) x ([A-Za-z0-9]+)")
_GPU_HOURS = re.compile(r"(\d[\d,.]*) GPU-hours")


@dataclass(frozen=True)
class RecipeHeader:
    """The comment at the top of a recipe file: its purpose and published numbers.

        # One sentence or two.
        #
        #   command   shardvit run NAME train=SHARDS eval=SHARDS
        #   hardware  64 x H200
        #   time      23:26 h, 1,500 GPU-hours

    A family shares the header of the extended file; NAME stands for the recipe. `entries`: key -> lines.
    """

    description: str
    entries: Mapping[str, tuple[str, ...]]

    def entry(self, key: str) -> str:
        """Join the lines of a key; "" if it is missing."""
        return " ".join(self.entries.get(key, ()))

    @property
    def hardware(self) -> tuple[int, str] | None:
        """Number and kind of GPUs for `shardvit plan`; None: no GPU needed."""
        match = _GPUS.match(self.entry("hardware"))
        return (int(match[1].replace(",", "")), match[2].lower()) if match else None

    @property
    def gpu_hours(self) -> float | None:
        match = _GPU_HOURS.search(self.entry("time"))
        return float(match[1].replace(",", "")) if match else None

    @property
    def headline(self) -> str:
        """The result up to its first comma or semicolon outside parentheses."""
        return re.split(r"[,;] (?![^(]*\))", self.entry("result"))[0]

    def text(self) -> str:
        lines = [*self.description.splitlines(), ""]
        for key in KEYS:
            for number, line in enumerate(self.entries.get(key, ())):
                lines.append(f"  {'' if number else key:9} {line}")
        return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def read_header(files: Sequence[Path], *, name: str) -> RecipeHeader:
    """Read the header of a recipe: the last description and, per key, the last entry of `files`, most general first."""
    description, entries = "", dict[str, tuple[str, ...]]()
    for path in files:
        comment = re.match(r"(#.*\n)*", path.read_text(encoding="utf-8"))
        words, *parts = re.split(rf"^#   ({'|'.join(KEYS)})(?= +\S)", comment[0] if comment else "", flags=re.M)
        description = "\n".join(_lines(words))
        entries |= {
            key: _lines(re.sub(r"\bNAME\b", name, text)) for key, text in zip(parts[::2], parts[1::2], strict=True)
        }
    return RecipeHeader(description, {key: entries[key] for key in KEYS if key in entries})


def _lines(comment: str) -> tuple[str, ...]:
    return tuple(text for line in comment.splitlines() if (text := line.removeprefix("#").strip()))
