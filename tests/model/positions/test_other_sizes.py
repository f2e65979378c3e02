"""A model that takes images of other sizes: logits against the model rebuilt for the size, and against timm's."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer

from shardvit.model.config import ModelConfig
from shardvit.model.positions.interpolation import interpolate_pos_embed, on_grid, resize_state
from shardvit.model.self_supervised.masked_patch import build_masked_patch
from shardvit.model.vit import build_model, takes_other_sizes, timm_arguments

OWN, OTHERS = 28, (8, 16, 20, 28)
KINDS = [
    {"position": position, "position_at": at, "pool": pool, "class_token_position": row, "interpolation": kernel}
    for position, at, (pool, row), kernel in itertools.product(
        ("learned_1d", "learned_2d", "sincos_2d", "none"),
        ("stem", "every_layer"),
        (("cls", "learned"), ("cls", "none"), ("gap", "learned")),
        ("google", "timm"),
    )
    if position.startswith("learned") or (at, row, kernel) == ("stem", "learned", "google")
]


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    draw = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=draw)
    return model.eval()


def config_of(**keys: Any) -> ModelConfig:
    return ModelConfig.model_validate({"width": 16, "depth": 2, "heads": 2, "patch_size": 4} | keys)


@pytest.mark.parametrize("keys", KINDS, ids=lambda keys: "-".join(keys.values()))
def test_logits_and_gradients_are_those_of_the_model_rebuilt_for_the_size(keys: dict[str, str]) -> None:
    config = config_of(**keys)
    model = randomised(build_model(config, image_size=OWN, num_classes=3, head="linear"))
    takes_other_sizes(model, interpolation=config.interpolation)
    for size in OTHERS:
        rebuilt = build_model(config, image_size=size, num_classes=3, head="linear").eval()
        images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(size))
        # The rebuilt model's state as a function of ours, so that its gradients come back to our parameters.
        ours = {name: each for name, each in model.state_dict(keep_vars=True).items()}
        state = resize_state(ours, config=config, from_image_size=OWN, to_image_size=size)
        expected = torch.func.functional_call(rebuilt, state, images)
        found = model(images)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert size != OWN or torch.equal(found, expected)
        weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
        parameters = list(model.parameters())
        for mine, theirs in zip(
            torch.autograd.grad((found * weights).sum(), parameters),
            torch.autograd.grad((expected * weights).sum(), parameters),
            strict=True,
        ):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("row", ["learned", "none"])
def test_logits_are_those_of_timms_model_with_a_dynamic_size(row: str) -> None:
    config = config_of(class_token_position=row, interpolation="timm")
    model = randomised(build_model(config, image_size=OWN, num_classes=3, head="linear"))
    takes_other_sizes(model, interpolation="timm")
    arguments = timm_arguments(config, image_size=OWN)
    norm = partial(torch.nn.LayerNorm, eps=config.layer_norm_eps)
    theirs = VisionTransformer(**arguments, num_classes=3, norm_layer=norm, dynamic_img_size=True).eval()  # pyright: ignore
    theirs.load_state_dict(model.state_dict())
    for size in OTHERS:
        images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(size))
        torch.testing.assert_close(model(images), theirs(images), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("old", "new"), [(7, 4), (4, 7), (14, 8), (3, 1), (1, 3)])
def test_products_are_the_interpolations(old: int, new: int) -> None:
    embedding = torch.randn(1, 2 + old**2, 8)
    for kernel in ("google", "timm"):
        expected = interpolate_pos_embed(
            embedding, new_grid=(new, new), old_grid=(old, old), num_prefix_tokens=2, kernel=kernel
        )
        found = on_grid(embedding, patches=new**2, num_prefix_tokens=2, kernel=kernel)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(found[:, :2], embedding[:, :2])
    timms = resample_abs_pos_embed(embedding, new_size=[new, new], old_size=[old, old], num_prefix_tokens=2)
    torch.testing.assert_close(found, timms, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("position", ["learned_1d", "learned_2d", "sincos_2d"])
def test_masked_patches_are_predicted_at_other_sizes(position: str) -> None:
    config = config_of(position=position)
    model = randomised(build_masked_patch(config, image_size=OWN))
    takes_other_sizes(model, interpolation="google")
    rebuilt = build_masked_patch(config, image_size=16).eval()
    rebuilt.load_state_dict(resize_state(model.state_dict(), config=config, from_image_size=OWN, to_image_size=16))
    images, source, corrupted = torch.randn(2, 3, 16, 16), torch.full((2, 16), 16), torch.arange(8).expand(2, -1)
    expected = rebuilt(images, source, corrupted)
    torch.testing.assert_close(model(images, source, corrupted), expected, rtol=1e-5, atol=1e-5)


def test_other_sizes_are_refused_unless_asked_for_and_with_relative_positions() -> None:
    plain = build_model(config_of(), image_size=OWN, num_classes=3, head="linear")
    with pytest.raises(AssertionError):
        plain(torch.zeros(1, 3, 16, 16))
    relative = build_model(config_of(position="relative"), image_size=OWN, num_classes=3, head="linear")
    with pytest.raises(ValueError, match="relative"):
        takes_other_sizes(relative, interpolation="google")
