"""`shardvit import` and `shardvit export`: convert weights from and to other projects' formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.text import printable
from shardvit.launch.flags import Force, WhichWeights, demand_target, flag_mistake
from shardvit.model.vocabulary import ExportFormat, Gelu, Interpolation, LossKind, check_ending

if TYPE_CHECKING:
    from shardvit.model.config import ModelConfig
    from shardvit.model.saved.model_folder import SavedModelMeta

_ENDINGS: dict[ExportFormat, str] = {
    "npz": ".npz",
    "big_vision": "-big_vision.npz",  # differs from npz's default name
    "timm": "-timm",
    "transformers": "-transformers",
    "torchvision": ".pth",
    "onnx": ".onnx",
    "torch_export": ".pt2",
}


@Parameter(name="*")
@dataclass(frozen=True)
class ImportOptions:
    """Flags that describe a file's model (keys of the recipe's `model`) or change it."""

    variant: Annotated[str | None, Parameter(help='What FILE is, such as "B/16".')] = None
    width: Annotated[int | None, Parameter(help="Size of a token; with the next four, in place of --variant.")] = None
    depth: Annotated[int | None, Parameter(help="Alone: the file has so few blocks on purpose.")] = None
    heads: Annotated[int | None, Parameter(help="Attention heads, which weights alone do not tell.")] = None
    mlp_dim: int | None = None
    patch_size: int | None = None
    gelu: Annotated[Gelu | None, Parameter(help="Default: the format's.")] = None
    layer_norm_eps: Annotated[float | None, Parameter(help="Default: the format's.")] = None
    interpolation: Annotated[Interpolation | None, Parameter(help="Of position embeddings; default: the format's.")] = (
        None
    )
    position: Annotated[
        Literal["sincos_2d", "none"] | None, Parameter(help="Of a model whose file has no position embeddings.")
    ] = None
    image_size: Annotated[
        int | None, Parameter(help="Resolution in pixels to interpolate the position embeddings to.")
    ] = None
    num_classes: Annotated[
        int | None, Parameter(help="Another number of classes: the head is replaced by a linear layer of zeros.")
    ] = None
    class_names: Annotated[
        str | None,
        Parameter(help="File with the classes' names, one a line, or imagenet-1k, or imagenet-21k (Google's order)."),
    ] = None
    loss: Annotated[
        LossKind | None,
        Parameter(
            help="That its head was trained with; default: as its record says, sigmoid for 21,843, 18,291 and"
            " 29,593 classes (Google's on ImageNet-21k and JFT), else softmax."
        ),
    ] = None

    def config(self) -> ModelConfig | None:
        """The model, if its sizes were given; None: take the file's. UserError if they make no model."""
        from shardvit.model.config import ModelConfig

        given = self._given()
        if not given.keys() - {"depth", "gelu", "layer_norm_eps", "interpolation", "position"}:
            return None
        return self._checked(lambda: ModelConfig(**given))

    def changed(self, found: ModelConfig) -> ModelConfig:
        """The file's model with the given values replaced; UserError if they make no model."""
        given = self._given()
        if (depth := given.pop("depth", None)) is not None and (found.kind != "vit" or found.sizes.depth != depth):
            blocks = f"{found.sizes.depth} blocks" if found.kind == "vit" else "no Transformer blocks"
            raise UserError(f"--depth {depth}: the file has {blocks}: leave it out, or give all sizes")
        return self._checked(lambda: type(found)(**found.model_dump(exclude_unset=True) | given))

    def _given(self) -> dict[str, Any]:
        others = ("image_size", "num_classes", "class_names", "loss")
        return {name: value for name, value in vars(self).items() if value is not None and name not in others}

    def _checked(self, make: Callable[[], ModelConfig]) -> ModelConfig:
        from pydantic import ValidationError

        try:
            return make()
        except ValidationError as error:
            raise flag_mistake(error) from None


def import_model(
    file: Path,
    out: Path,
    /,
    *,
    options: ImportOptions = ImportOptions(),
    force: Force = False,
) -> int:
    """Import weights from another project's format as a model of shardvit.

    FILE is Google's npz (vision_transformer or big_vision), a folder or state
    dict of timm or transformers, a state dict of torchvision, or anything that
    `shardvit export` wrote, except ONNX; or hf-hub:OWNER/NAME[@REVISION], or a
    URL of such a file. OUT is the new folder; use it in a recipe as
    stages.swap_head.model, or with `shardvit predict`.

    Details of the original training (form of GELU, epsilons, normalisation,
    interpolation) are stored with the weights and applied from then on.

    Some examples:
        shardvit import ViT-B_16.npz models/vit-b16
        shardvit import hf-hub:timm/vit_base_patch16_224.augreg_in21k models/b16-21k
        shardvit import ViT-B_16.npz models/vit-b16-384 --image-size 384 --num-classes 10
        shardvit import ViT-B_16-imagenet.npz models/b16 --class-names imagenet-1k
    """
    from shardvit.model.formats.detect import read_external
    from shardvit.model.formats.export import save_for_others
    from shardvit.model.formats.external_model import UserHints, adapt
    from shardvit.pipeline.using.hub import local_weights

    demand_target(out, flag="OUT", force=force)
    config, num_classes = options.config(), options.num_classes
    names = None if options.class_names is None else _class_names(options.class_names)
    file = local_weights(file)
    with _mistakes(out):
        hints = UserHints(depth=options.depth, position=options.position, loss=options.loss)
        foreign = read_external(file, config=config, hints=hints)
        if config is None:
            foreign = replace(foreign, config=options.changed(foreign.config))
        if names is not None and num_classes is None and foreign.num_classes not in (0, len(names)):
            raise UserError(
                f"--class-names: {len(names):,} names, but {file} has {foreign.num_classes:,} classes: give as many, "
                f"or --num-classes {len(names)} to replace its head by zeros"
            )
        changes = {"image_size": options.image_size, "num_classes": num_classes, "loss": options.loss}
        meta, state = adapt(foreign, class_names=names, **changes)
        save_for_others(out, state, meta=meta)
    new_head = f"the head is new, for {meta.num_classes:,} classes and all zeros: fine-tune it"
    for note in (*foreign.notes, *([new_head] if meta.num_classes != foreign.num_classes else [])):
        print(f"note: {printable(note)}")
    print(printable(f"{out}: {foreign.format}; {_summary(meta)}"))
    return 0


def export_model(
    model: Path,
    /,
    *,
    to: Annotated[
        ExportFormat,
        Parameter(name="--format", help="npz: vision_transformer's names; big_vision: big_vision's."),
    ],
    out: Annotated[
        Path | None,
        Parameter(
            name=["--output", "--out"],
            help="File or folder to write; default: the model's name and the format's ending, here.",
        ),
    ] = None,
    weights: WhichWeights = None,
    force: Force = False,
) -> int:
    """Write a model in another project's format.

    MODEL is a run's folder (its last trained stage), a stage's, one of its
    checkpoints RUN/STAGE/checkpoints/step-... (sharded ones are merged), a
    model's folder, or what `shardvit import` reads, hf-hub:OWNER/NAME included.

    timm and transformers are folders that `timm.create_model("local-dir:OUT",
    pretrained=True)` and `AutoModelForImageClassification.from_pretrained` load;
    both also load STAGE/model directly. `shardvit run --dry-run` says which
    formats can hold the model. ONNX and torch.export take any batch size, and
    pixels that are already normalised. npz and torchvision files come with a
    small FILE.json for what they cannot hold.

    Some examples:
        shardvit export runs/digits --format onnx
        shardvit export runs/imagenet21k/pretrain/checkpoints/step-00010000 --format npz --output vit-b16.npz
    """
    target = out or Path(f"{_name_of(model)}{_ENDINGS[to]}")
    try:
        check_ending(target, to=to)
    except ValueError as error:
        raise UserError(f"--output {error}") from None
    demand_target(target, flag="--output", force=force)

    from shardvit.model.formats.export import export_model as write
    from shardvit.pipeline.using.find_model import find_model, refuse_own_model

    refuse_own_model(model, command="export")
    found = find_model(model, weights=weights)
    with _mistakes(target):
        notes = write(found.meta, found.state, to=to, out=target)
    for note in (*found.notes, *notes):
        print(f"note: {printable(note)}")
    print(printable(f"{target}: {found.origin} as {to}: {_summary(found.meta)}"))
    return 0


@contextmanager
def _mistakes(target: Path) -> Iterator[None]:
    """Turn errors in the weights or the output path into one sentence for the user."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from None
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error}") from None


def _name_of(model: Path) -> str:
    """The name of the run with its stage or checkpoint, or of a file without its ending."""
    from shardvit.pipeline.recipe.vocabulary import ALL_STAGES
    from shardvit.pipeline.using.hub import is_elsewhere, name_of

    if is_elsewhere(model):
        return name_of(model)
    path = model.resolve()
    parts = [path.name if path.is_dir() else path.stem]
    while parts[0] in ("model", "checkpoints", *ALL_STAGES) or parts[0].startswith("step-"):
        path = path.parent
        parts.insert(0, path.name)
    return "-".join(part for part in parts if part not in ("model", "checkpoints"))


def _class_names(text: str) -> tuple[str, ...]:
    if text in ("imagenet-1k", "imagenet-21k"):
        from timm.data import ImageNetInfo

        info = ImageNetInfo("imagenet-21k-goog" if text == "imagenet-21k" else text)
        return tuple(info.index_to_description(index) for index in range(info.num_classes()))
    try:
        names = Path(text).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--class-names: {text} cannot be read: {error}") from None
    if not all(name.strip() for name in names):
        raise UserError(f"--class-names: {text} has an empty line: give one name a line")
    return tuple(name.strip() for name in names)


def _summary(meta: SavedModelMeta) -> str:
    from shardvit.model.counting.flops import account

    parts = account(meta.model, image_size=meta.image_size, num_classes=meta.num_classes, head=meta.class_head)
    return f"{meta.image_size} px, {meta.num_classes} classes; {parts.describe()}"
