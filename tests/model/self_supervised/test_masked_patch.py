"""Masked patch prediction: the corrupted forward pass against plain torch, the targets against exact fractions."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from shardvit.model.config import ModelConfig, Regularisation
from shardvit.model.init import initialise
from shardvit.model.saved.model_folder import SavedModelMeta, build_from_saved, load_model, save_model
from shardvit.model.self_supervised.masked_patch import (
    MaskedPatchVit,
    build_masked_patch,
    classifier_of,
    colour_classes,
    corrupt,
)
from shardvit.model.vit import build_model, checkpoint_blocks
from shardvit.model.vocabulary import COLOURS
from tests.model.comparing import randomise

SIZES: dict[str, Any] = {"width": 32, "depth": 3, "heads": 2, "patch_size": 4}
IMAGE_SIZE = 16
PATCHES, MASK = 16, 16

CONFIGS = {
    "cls": ModelConfig(**SIZES),
    "gap": ModelConfig(**SIZES, pool="gap"),
    "map": ModelConfig(**SIZES, pool="map"),
    "learned_2d": ModelConfig(**SIZES, position="learned_2d"),
    "every_layer": ModelConfig(**SIZES, position_at="every_layer"),
    "class_token_without": ModelConfig(**SIZES, class_token_position="none"),
    "later": ModelConfig(**SIZES, pool="gap", class_token="kept", registers=2, rope="axial", mlp="swiglu"),
    "shared": ModelConfig(**SIZES, position_at="every_layer_shared", pool="gap"),
    "relative": ModelConfig(**SIZES, position="relative"),
    "sincos": ModelConfig(**SIZES, position="sincos_2d", pool="map"),
    "none": ModelConfig(**SIZES, position="none"),
    "hybrid": ModelConfig(**SIZES, resnet_layers=(1,)),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def masked(config: ModelConfig) -> MaskedPatchVit:
    model = randomise(build_masked_patch(config, image_size=IMAGE_SIZE)).eval()
    assert isinstance(model, MaskedPatchVit)
    return model


def images(count: int) -> Tensor:
    return torch.randn(count, 3, IMAGE_SIZE, IMAGE_SIZE, generator=torch.Generator().manual_seed(2))


def plan(count: int) -> tuple[Tensor, Tensor]:
    """Some patches masked, some replaced by others, some kept; and which are predicted, in no order."""
    draw = np.random.default_rng(3)
    source = np.tile(np.arange(PATCHES), (count, 1))
    corrupted = np.stack([draw.permutation(PATCHES)[: PATCHES // 2] for _ in range(count)])
    for row in range(count):
        source[row, corrupted[row, :5]] = MASK
        source[row, corrupted[row, 5:7]] = draw.integers(0, PATCHES, 2)
    return torch.from_numpy(source), torch.from_numpy(corrupted)


@every_config
def test_the_forward_pass_is_a_plain_models_with_embeddings_exchanged(config: ModelConfig):
    """A plain model of the same weights, whose patch embedding is followed by loops over patches."""
    model = masked(config)
    unpooled = config.model_copy(update={"pool": "gap"}) if config.pool == "map" else config
    plain = build_model(unpooled, image_size=IMAGE_SIZE, num_classes=512, head="linear").eval()
    plain.load_state_dict({name: it for name, it in model.state_dict().items() if name != "mask_token"})
    source, corrupted = plan(3)

    def exchange(_module: nn.Module, _arguments: tuple[Tensor], output: Tensor) -> Tensor:
        return torch.stack(
            [
                torch.stack([model.mask_token[0, 0] if s == MASK else output[row, s] for s in source[row].tolist()])
                for row in range(3)
            ]
        )

    plain.patch_embed.register_forward_hook(exchange)  # pyright: ignore[reportCallIssue]
    tokens = plain.forward_features(images(3))  # pyright: ignore[reportCallIssue]
    patches = tokens[:, -PATCHES:]
    expected = torch.stack(
        [torch.stack([plain.head(patches[row, at]) for at in corrupted[row].tolist()]) for row in range(3)]  # pyright: ignore[reportCallIssue]
    )
    found = model(images(3), source, corrupted)
    assert found.shape == (3, PATCHES // 2, len(COLOURS))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@every_config
def test_every_parameter_gets_a_gradient_and_checkpointing_gives_the_same(config: ModelConfig):
    source, corrupted = plan(2)
    gradients = []
    for every in (0, 1):
        model = masked(config).train()
        checkpoint_blocks(model, every=every)
        model(images(2), source, corrupted).square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
        assert [name for name, gradient in gradients[-1].items() if gradient is None or not gradient.any()] == []
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-6, atol=1e-7)


def test_corrupting_is_exact_and_has_the_gradient_of_an_indexed_read():
    embeddings, mask_token = torch.randn(3, PATCHES, 8), torch.randn(1, 1, 8)
    source, _ = plan(3)
    weights = torch.randn(3, PATCHES, 8)
    found, expected = [], []
    for result, how in ((found, "ours"), (expected, "indexed")):
        e, m = embeddings.clone().requires_grad_(), mask_token.clone().requires_grad_()
        if how == "ours":
            output = corrupt(e, source=source, mask_token=m)
        else:
            output = torch.cat([e, m.expand(3, 1, 8)], dim=1)[torch.arange(3)[:, None], source]
        (output * weights).sum().backward()
        result += [output.detach(), e.grad, m.grad]
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_what_is_masked_is_not_seen():
    model = masked(CONFIGS["cls"])
    source, corrupted = plan(1)
    hidden = [at for at in range(PATCHES) if source[0, at] == MASK and at not in source[0].tolist()]
    shown = images(1)
    changed = shown.clone()
    for at in hidden:
        top, left = at // 4 * 4, at % 4 * 4
        changed[..., top : top + 4, left : left + 4] = 7.0
    assert len(hidden) >= 3
    assert torch.equal(model(changed, source, corrupted), model(shown, source, corrupted))
    open_patch = next(at for at in range(PATCHES) if source[0, at] == at)
    changed[..., open_patch // 4 * 4, open_patch % 4 * 4] += 1.0
    assert not torch.equal(model(changed, source, corrupted), model(shown, source, corrupted))


def test_an_image_does_not_depend_on_its_batch():
    model = masked(CONFIGS["gap"])
    source, corrupted = plan(4)
    alone = torch.cat([model(images(4)[i : i + 1], source[i : i + 1], corrupted[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(model(images(4), source, corrupted), alone, rtol=1e-5, atol=1e-5)


def test_it_begins_at_the_loss_of_a_guess_and_with_the_trunk_of_a_classifier():
    """Linear head at zero; every other parameter has the values that it has in a classifier of the same seed."""
    model = build_masked_patch(CONFIGS["cls"], image_size=IMAGE_SIZE)
    initialise(model, seed=5)
    source, corrupted = plan(2)
    assert not model(images(2), source, corrupted).any()  # so the loss is ln 512
    assert 0.01 < model.mask_token.detach().std() < 0.03
    classifier = build_model(CONFIGS["cls"], image_size=IMAGE_SIZE, num_classes=3, head="mlp")
    initialise(classifier, seed=5)
    trunk = {name: it for name, it in classifier.state_dict().items() if not name.startswith("head.")}
    ours = model.state_dict()
    assert set(ours) == set(trunk) | {"mask_token", "head.weight", "head.bias"}
    assert all(torch.equal(ours[name], it) for name, it in trunk.items())


@pytest.mark.parametrize("pool", ["cls", "gap", "map"])
def test_the_classifier_has_the_trunk_and_a_zero_head(pool: str):
    model = masked(CONFIGS[pool])
    classifier = classifier_of(model, config=CONFIGS[pool], image_size=IMAGE_SIZE, num_classes=7, seed=4)
    trunk = {name: it for name, it in model.state_dict().items() if not name.startswith(("head.", "mask_token"))}
    found = classifier.state_dict()
    assert all(torch.equal(found[name], it) for name, it in trunk.items())
    assert found["head.weight"].shape == (7, 32) and not found["head.weight"].any() and not found["head.bias"].any()
    fresh = build_model(CONFIGS[pool], image_size=IMAGE_SIZE, num_classes=7, head="linear")
    initialise(fresh, seed=4)
    rest = set(found) - set(trunk) - {"head.weight", "head.bias"}
    assert {name.split(".")[0] for name in rest} == ({"attn_pool"} if pool == "map" else set())
    assert all(torch.equal(found[name], fresh.state_dict()[name]) for name in rest)


@pytest.mark.parametrize("name", ["cls", "map", "every_layer"])
def test_it_is_saved_and_built_again(tmp_path: Path, name: str):
    model = masked(CONFIGS[name])
    meta = SavedModelMeta(
        model=CONFIGS[name], image_size=IMAGE_SIZE, num_classes=512, class_names=COLOURS, head="masked_patch"
    )
    save_model(tmp_path / "model", model.state_dict(), meta=meta)
    meta_again, again = build_from_saved(tmp_path / "model")
    assert meta_again == meta and "mask_token" in load_model(tmp_path / "model")[1]
    source, corrupted = plan(2)
    assert torch.equal(again.eval()(images(2), source, corrupted), model(images(2), source, corrupted))
    with pytest.raises(ValueError, match="mask_token"):
        save_model(tmp_path / "other", model.state_dict(), meta=meta.model_copy(update={"head": "linear"}))


@pytest.mark.parametrize(
    ("config", "image_size", "regularisation", "message"),
    [
        (ModelConfig(variant="R50x1"), 224, Regularisation(), "at least two patches"),
        (CONFIGS["cls"], 4, Regularisation(), "at least two patches"),
        (CONFIGS["cls"], 18, Regularisation(), "take 16 or 20"),
        (CONFIGS["cls"], 16, Regularisation(patch_dropout=0.5), "patch_dropout"),
    ],
)
def test_what_has_no_patches_to_mask_is_refused(
    config: ModelConfig, image_size: int, regularisation: Regularisation, message: str
):
    with pytest.raises(ValueError, match=message):
        build_masked_patch(config, image_size=image_size, regularisation=regularisation)


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 3), st.sampled_from([3, 32, 256]))
def test_the_classes_are_those_of_exact_fractions(seed: int, patch_size: int, grid: int, ceiling: int):
    size = patch_size * grid
    pixels = np.random.default_rng(seed).integers(0, ceiling, (2, size, size, 3), dtype=np.uint8)
    found = colour_classes(torch.from_numpy(pixels), patch_size=patch_size)
    assert found.shape == (2, grid**2) and found.dtype == torch.int64
    for row in range(2):
        for at in range(grid**2):
            top, left = at // grid * patch_size, at % grid * patch_size
            patch = pixels[row, top : top + patch_size, left : left + patch_size].reshape(-1, 3).astype(int)
            means = [Fraction(int(total), 255 * len(patch)) for total in patch.sum(axis=0)]
            red, green, blue = (min(7, 8 * mean // 1) for mean in means)
            assert COLOURS[int(found[row, at])] == f"r{red} g{green} b{blue}"


def test_the_ends_and_edges_of_the_levels():
    """With 255 = 8 x 31.875 a patch of 8 pixels at the sum 255 lies exactly on an edge, which belongs to the upper."""
    assert colour_classes(torch.zeros(1, 4, 4, 3, dtype=torch.uint8), patch_size=4).item() == 0
    assert colour_classes(torch.full((1, 4, 4, 3), 255, dtype=torch.uint8), patch_size=4).item() == 511
    pixels = torch.zeros(1, 4, 4, 3, dtype=torch.uint8)
    pixels[0, 0, :2, 0] = 255  # two of 16: a mean of 1/8
    assert colour_classes(pixels, patch_size=4).item() == 64
    pixels[0, 0, 0, 0] = 254
    assert colour_classes(pixels, patch_size=4).item() == 0


def test_the_norm_of_tokens_becomes_the_norm_of_their_mean() -> None:
    config = ModelConfig(**SIZES, pool="gap", final_norm="pooled")
    masked = randomise(build_masked_patch(config, image_size=16))
    model = classifier_of(masked, config=config, image_size=16, num_classes=3, seed=0)
    assert torch.equal(model.get_parameter("fc_norm.weight"), masked.get_parameter("norm.weight"))
