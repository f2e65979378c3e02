"""`stages.STAGE.init: WEIGHTS`: what is loaded answers as the library that wrote it, or is refused before a run."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from pydantic import ValidationError
from timm.models import save_for_hf
from torch import nn
from torchvision.models.vision_transformer import VisionTransformer
from transformers import ViTConfig, ViTForImageClassification

from shardvit.data_shards.errors import UserError
from shardvit.model.config import DecoderConfig, ModelConfig
from shardvit.model.formats.export import export_model
from shardvit.model.init import initialise
from shardvit.model.own.allowed import ALLOWED
from shardvit.model.positions.embedding import sincos_2d
from shardvit.model.positions.interpolation import resize_state
from shardvit.model.saved.model_folder import SavedModelMeta, save_model
from shardvit.model.vocabulary import PIXELS
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.stage.initial_model import StageStart
from shardvit.pipeline.training.stages import build_stage_model
from shardvit.pipeline.using.start_weights import check_weights, load_weights
from tests.model.comparing import SMALL_TOKENS, randomise, relative_difference
from tests.model.formats.small_model import NAMES, described, images, logits, random_model
from tests.small_recipe import small_recipe, small_stage

SIZES = {"width": 48, "depth": 2, "heads": 4, "mlp_dim": 96, "patch_size": 4}
ERF = {**SIZES, "gelu": "erf"}


def recipe(model: dict[str, Any], source: Path | str, *, stage: str = "pretrain", **keys: Any) -> Recipe:
    head = {"head": "linear"} if stage == "pretrain" else {}
    start = {"start": "scratch"} if stage == "finetune" else {}
    config = small_stage(**{"image_size": 24, "init": str(source), **head, **start, **keys})
    return Recipe.model_validate(small_recipe(model=model, **{f"{stage}_": config}))


def started(recipe: Recipe, folder: Path, *, outputs: tuple[str, ...] = NAMES) -> tuple[nn.Module, StageStart]:
    (stage,) = recipe.stages.trained
    check_weights(recipe, stage=stage)
    model = build_stage_model(recipe, recipe.train_stage(stage), num_classes=len(outputs))
    initialise(model, seed=3)
    run = RunFolder(runs_root=folder / "runs", name="r")
    return model.eval(), load_weights(recipe, stage=stage, run=run, model=model, outputs=outputs)


def of_timm(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"img_size": 24, "patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 4, "mlp_ratio": 2.0}
    theirs = timm.create_model("vit_base_patch16_224", num_classes=5, **sizes)
    save_for_hf(randomise(theirs, token_scale=SMALL_TOKENS), folder, model_args=sizes, safe_serialization=True)
    return theirs, {**ERF, "interpolation": "timm"}


def of_transformers(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    config = ViTConfig(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        image_size=24,
        patch_size=4,
        num_labels=5,
    )
    theirs = randomise(ViTForImageClassification(config), token_scale=SMALL_TOKENS)
    theirs.save_pretrained(folder)
    return theirs, {**ERF, "interpolation": "timm", "layer_norm_eps": 1e-12}


def of_torchvision(file: Path) -> tuple[nn.Module, dict[str, Any]]:
    theirs = VisionTransformer(24, 4, 2, 4, 48, 96, num_classes=5)
    torch.save(randomise(theirs, token_scale=SMALL_TOKENS).state_dict(), file)
    return theirs, ERF


def of_google(file: Path) -> tuple[nn.Module, dict[str, Any]]:
    meta = described(ModelConfig(**SIZES))
    theirs = random_model(meta)
    export_model(meta, theirs.state_dict(), to="npz", out=file)
    file.with_name(f"{file.name}.json").unlink(missing_ok=True)  # as Google's
    return theirs, SIZES


@pytest.mark.parametrize(
    ("make", "name"), [(of_timm, "t"), (of_transformers, "h"), (of_torchvision, "v.pth"), (of_google, "g.npz")]
)
@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_the_first_answers_are_those_of_the_library_that_wrote_it(tmp_path: Path, make: Any, name: str, stage: str):
    theirs, keys = make(tmp_path / name)
    model, start = started(recipe(keys, tmp_path / name, stage=stage), tmp_path)
    assert relative_difference(logits(model, images()), logits(theirs.eval(), images())) < 1e-6
    loaded, left, made = start.notes[-3:]
    assert "loaded" in loaded and "head of 5 classes" in loaded
    assert left.endswith("left nothing") and made.endswith("made nothing")


@pytest.fixture
def ours(tmp_path: Path) -> tuple[Path, nn.Module, SavedModelMeta]:
    meta = described(ModelConfig(**SIZES), mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    model = random_model(meta)
    save_model(tmp_path / "ours", model.state_dict(), meta=meta)
    return tmp_path / "ours", model, meta


def test_positions_are_interpolated_and_pixels_are_those_of_the_weights(ours: Any, tmp_path: Path):
    path, theirs, meta = ours
    model, start = started(recipe(SIZES, path, image_size=32), tmp_path)
    expected = resize_state(theirs.state_dict(), config=meta.model, from_image_size=24, to_image_size=32)
    assert all(torch.equal(each, expected[name]) for name, each in model.state_dict().items())
    assert (start.normalisation.mean, start.normalisation.std) == (meta.mean, meta.std)
    assert "from 24 to 32 px" in start.notes[-3]
    again = started(recipe(SIZES, path), tmp_path)[1]
    assert start.weights == again.weights != "random"


@pytest.mark.parametrize(
    ("outputs", "keys", "why"),
    [
        (NAMES[:3], {}, "it has 5 classes, and the stage 3"),
        (NAMES[::-1], {}, "another order"),
        (NAMES, {"head": "mlp"}, "linear, and the stage's is mlp"),
    ],
)
def test_another_head_is_the_stages_own(ours: Any, tmp_path: Path, outputs: Any, keys: Any, why: str):
    path, theirs, _ = ours
    asked = recipe(SIZES, path, **keys)
    model, start = started(asked, tmp_path, outputs=outputs)
    fresh = build_stage_model(asked, asked.train_stage("pretrain"), num_classes=len(outputs))
    initialise(fresh, seed=3)
    for name, each in model.state_dict().items():
        of = fresh if name.startswith("head.") else theirs
        assert torch.equal(each, of.state_dict()[name]), name
    assert why in start.notes[-2] and "(head)" in start.notes[-2] and "(head)" in start.notes[-1]


def test_a_head_without_names_is_kept_by_its_number(ours: Any, tmp_path: Path):
    model, _ = started(recipe(SIZES, ours[0]), tmp_path, outputs=tuple("01234"))
    assert torch.equal(model.get_parameter("head.weight"), ours[1].get_parameter("head.weight"))


def test_a_trunk_without_a_head_gets_the_stages_own(tmp_path: Path):
    theirs, model = of_timm(tmp_path / "whole")
    state = {name: each for name, each in theirs.state_dict().items() if not name.startswith("head.")}
    torch.save(state, tmp_path / "trunk.pth")
    built, start = started(recipe(model, tmp_path / "trunk.pth"), tmp_path)
    assert all(torch.equal(each, built.state_dict()[name]) for name, each in state.items())
    assert not built.get_parameter("head.weight").any() and any("has no head" in note for note in start.notes)


def test_an_earlier_stage_is_not_trained_for_nothing_and_secrets_are_not_kept(tmp_path: Path):
    stages = {"pretrain_": small_stage(), "finetune_": small_stage(start="scratch", init="weights.npz")}
    with pytest.raises(ValidationError, match=r"finetune\.init .* pretrain"):
        Recipe.model_validate(small_recipe(model=SIZES, **stages))
    with pytest.raises(ValidationError, match="password") as raised:
        recipe(SIZES, "https://me:secret@host/w.npz")
    assert "secret" not in str(raised.value.errors(include_input=False))


def test_masked_patch_takes_the_trunk_alone(ours: Any, tmp_path: Path):
    model, start = started(recipe(SIZES, ours[0], stage="masked_patch"), tmp_path, outputs=tuple(map(str, range(512))))
    part = "blocks.1.mlp.fc1.weight"
    assert torch.equal(model.get_parameter(part), ours[1].get_parameter(part))
    assert not model.get_parameter("head.weight").any()
    assert "trunk alone" in start.notes[-2] and "mask_token" in start.notes[-1]


def test_a_masked_autoencoder_takes_and_gives_the_trunk_alone(ours: Any, tmp_path: Path):
    decoder, part = {"width": 16, "depth": 1, "heads": 2}, "blocks.1.mlp.fc1.weight"
    given = recipe(SIZES, ours[0], stage="masked_autoencoder", decoder=decoder)
    model, start = started(given, tmp_path, outputs=PIXELS)
    assert torch.equal(model.get_parameter(part), ours[1].get_parameter(part))
    assert "trunk alone" in start.notes[-2] and "(decoder)" in start.notes[-1]
    meta = SavedModelMeta(
        model=ModelConfig(**SIZES),
        image_size=24,
        num_classes=1,
        class_names=PIXELS,
        head="masked_autoencoder",
        decoder=DecoderConfig(**decoder),
    )
    save_model(tmp_path / "mae", model.state_dict(), meta=meta)
    tuned, _ = started(recipe(SIZES, tmp_path / "mae", stage="finetune"), tmp_path)
    assert torch.equal(tuned.get_parameter(part), ours[1].get_parameter(part))
    assert torch.equal(tuned.get_parameter("pos_embed")[0, 1:], sincos_2d(6, 48, law="mae"))
    again, _ = started(recipe(SIZES, tmp_path / "mae", stage="masked_autoencoder"), tmp_path, outputs=PIXELS)
    assert torch.equal(again.get_parameter(part), ours[1].get_parameter(part))  # beside a decoder of the usual sizes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"depth": 3}, r"depth 2 \(not 3\)"),
        ({"heads": 2}, r"heads 4 \(not 2\)"),
        ({"gelu": "erf"}, r"gelu tanh \(not erf\)"),
        ({"pool": "gap"}, r"pool cls \(not gap\)"),
        ({"layer_norm_eps": 1e-5}, r"layer_norm_eps 1e-06 \(not 1e-05\)"),
        ({"interpolation": "timm"}, r"interpolation google \(not timm\)"),
    ],
)
def test_another_model_is_refused_from_its_record_alone(ours: Any, changes: dict[str, Any], said: str):
    (ours[0] / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=rf"stages\.pretrain\.init: .* set {said}"):
        check_weights(recipe({**SIZES, **changes}, ours[0]), stage="pretrain")


def test_semantics_of_a_file_without_record_are_not_overridden_by_the_recipe(tmp_path: Path):
    of_torchvision(tmp_path / "v.pth")
    with pytest.raises(UserError, match=r"gelu erf \(not tanh\)"):
        check_weights(recipe({**SIZES, "gelu": "tanh"}, tmp_path / "v.pth"), stage="pretrain")
    with pytest.raises(UserError, match=r"stages\.pretrain\.init"):
        check_weights(recipe({**ERF, "depth": 3}, tmp_path / "v.pth"), stage="pretrain")
    with pytest.raises(UserError, match=r"stages\.pretrain\.init: .*nowhere is not there"):
        check_weights(recipe(ERF, tmp_path / "nowhere"), stage="pretrain")


def test_an_own_model_takes_only_its_own_weights(ours: Any):
    own = {"custom": f"mine.py@{'0' * 64}:build"}
    asked = recipe(SIZES, ours[0])
    asked = asked.model_copy(update={"model": ModelConfig.model_validate(own)})
    with pytest.raises(UserError, match=r"stages\.pretrain\.init: an own model starts from"):
        check_weights(asked, stage="pretrain")


def test_names_of_styles_stay_and_a_slip_is_told(tmp_path: Path):
    for style in ("google", "timm", "big_vision"):
        config = recipe(SIZES, style).train_stage("pretrain")
        assert (config.init_style, config.init_weights) == (style, None)
    config = recipe(SIZES, "./gogle").train_stage("pretrain")
    assert (config.init_style, config.init_weights) == ("google", "./gogle")
    with pytest.raises(ValidationError, match="did you mean google"):
        recipe(SIZES, "gogle")


def test_a_resume_reads_the_record_and_not_the_weights(ours: Any, tmp_path: Path):
    asked = recipe(SIZES, ours[0])
    run = RunFolder(runs_root=tmp_path / "runs", name="r")
    run.stage("pretrain").mkdir(parents=True)
    run.update(
        "pretrain",
        state="running",
        last_saved_step=2,
        inputs={"weights": "abc"},
        model=ours[2].model_dump(mode="json", exclude_none=True),
    )
    (ours[0] / "model.safetensors").unlink()
    (ours[0] / "config.json").unlink()
    model = build_stage_model(asked, asked.train_stage("pretrain"), num_classes=5)
    start = load_weights(asked, stage="pretrain", run=run, model=model, outputs=NAMES)
    assert (start.weights, start.normalisation.mean, start.notes) == ("abc", ours[2].mean, ())


def test_an_own_model_starts_from_a_run_of_the_same_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def build(image_size: int, num_classes: int) -> nn.Module:
        model = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        model.add_module("head", nn.Linear(8, num_classes))
        return model

    monkeypatch.setitem(ALLOWED, "0" * 64, lambda name: build)
    config = ModelConfig.model_validate({"custom": f"mine.py@{'0' * 64}:build"})
    meta, theirs = described(config), randomise(build(24, 5)).eval()
    save_model(tmp_path / "own", theirs.state_dict(), meta=meta)
    asked = recipe(SIZES, tmp_path / "own", image_size=32).model_copy(update={"model": config})
    for outputs in (NAMES, NAMES[:2]):
        model = build(32, len(outputs)).eval()
        run = RunFolder(runs_root=tmp_path / "runs", name="r")
        start = load_weights(asked, stage="pretrain", run=run, model=model, outputs=outputs)
        assert torch.equal(model.get_parameter("0.weight"), theirs.get_parameter("0.weight"))
        kept = torch.equal(model.state_dict()["head.bias"], theirs.state_dict()["head.bias"][: len(outputs)])
        assert kept == (outputs == NAMES) == start.notes[-2].endswith("left nothing")
