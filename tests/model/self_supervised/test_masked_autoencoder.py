"""The masked autoencoder's laws; the original's arithmetic is in tests/oracles/test_mae.py."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardvit.model.config import DecoderConfig, ModelConfig
from shardvit.model.formats.detect import import_file
from shardvit.model.init import initialise
from shardvit.model.positions.embedding import sincos_2d
from shardvit.model.saved.model_folder import SavedModelMeta, build_from_saved, save_model, timm_objection
from shardvit.model.self_supervised.masked_autoencoder import (
    MaskedAutoencoderVit,
    build_masked_autoencoder,
    classifier_of,
    patches_of,
)
from shardvit.model.vit import build_model, checkpoint_blocks
from shardvit.model.vocabulary import PIXELS
from tests.model.comparing import randomise

SIZES: dict[str, Any] = {"width": 32, "depth": 3, "heads": 2, "patch_size": 4}
DECODER = DecoderConfig(width=16, depth=2, heads=2)
IMAGE_SIZE, PATCHES, KEPT = 16, 16, 4

CONFIGS = {
    "cls": ModelConfig(**SIZES),
    "pooled": ModelConfig(**SIZES, pool="gap", class_token="kept", final_norm="pooled", gelu="erf"),
    "later": ModelConfig(**SIZES, registers=2, qk_norm="per_head", mlp="swiglu", norm="rms", layer_scale=0.1),
    "gap": ModelConfig(**SIZES, pool="gap"),
    "map": ModelConfig(**SIZES, pool="map"),
    "class_token_without": ModelConfig(**SIZES, class_token_position="none"),
    "sincos": ModelConfig(**SIZES, position="sincos_2d"),
    "hybrid": ModelConfig(**SIZES, resnet_layers=(1,)),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def built(config: ModelConfig) -> MaskedAutoencoderVit:
    model = randomise(build_masked_autoencoder(config, image_size=IMAGE_SIZE, decoder=DECODER)).eval()
    assert isinstance(model, MaskedAutoencoderVit)
    return model


def images(count: int) -> Tensor:
    return torch.randn(count, 3, IMAGE_SIZE, IMAGE_SIZE, generator=torch.Generator().manual_seed(2))


def drawn(count: int) -> tuple[Tensor, Tensor]:
    order = torch.rand(count, PATCHES, generator=torch.Generator().manual_seed(3)).argsort(dim=1)
    return order[:, :KEPT], order[:, KEPT:]


@every_config
def test_every_parameter_gets_a_gradient_and_checkpointing_gives_the_same(config: ModelConfig):
    gradients = []
    for every in (0, 1):
        model = built(config).train()
        checkpoint_blocks(model, every=every)
        found = model(images(2), *drawn(2))
        assert found.shape == (2, PATCHES - KEPT, 48)
        found.square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
        assert [name for name, gradient in gradients[-1].items() if gradient is None or not gradient.any()] == []
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-6, atol=1e-7)


def test_hidden_pixels_are_not_seen_and_visible_ones_are():
    model = built(CONFIGS["cls"])
    (kept, hidden), shown = drawn(1), images(1)
    changed = shown.clone()
    for at in hidden[0].tolist():
        changed[..., at // 4 * 4 : at // 4 * 4 + 4, at % 4 * 4 : at % 4 * 4 + 4] = 7.0
    assert torch.equal(model(changed, kept, hidden), model(shown, kept, hidden))
    at = int(kept[0, 0])
    changed[..., at // 4 * 4, at % 4 * 4] += 1.0
    assert not torch.equal(model(changed, kept, hidden), model(shown, kept, hidden))


def test_neither_the_drawn_order_nor_the_batch_matters():
    model, (kept, hidden) = built(CONFIGS["gap"]), drawn(3)
    found = model(images(3), kept, hidden)
    alone = torch.cat([model(images(3)[i : i + 1], kept[i : i + 1], hidden[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)
    turned = model(images(3), kept.flip(1), hidden.flip(1)).flip(1)
    torch.testing.assert_close(found, turned, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pool", ["cls", "gap", "pooled", "later"])
def test_features_of_whole_images_are_a_plain_models(pool: str):
    config = CONFIGS[pool]
    model = built(config)
    plain = build_model(config, image_size=IMAGE_SIZE, num_classes=2, head="linear").eval()
    state = plain.state_dict()
    state |= {name: it for name, it in model.state_dict().items() if name in state}
    table = model.position.tables[0].get_buffer("table")
    plain.load_state_dict(state | {"pos_embed": table[-state["pos_embed"].shape[1] :][None]})
    plain.norm = model.norm  # where the mean comes before it, the encoder's tokens are normed all the same
    tokens = plain.forward_features(images(2))
    expected = tokens[:, 0] if config.pool == "cls" else tokens[:, plain.num_prefix_tokens :].mean(dim=1)
    torch.testing.assert_close(model(images(2)), expected, rtol=1e-5, atol=1e-5)


def test_patches_are_cut_row_by_row_with_channels_last():
    image = torch.arange(3 * 6 * 6).reshape(1, 3, 6, 6)
    found = patches_of(image, patch_size=2)
    assert found.shape == (1, 9, 12)
    for at in range(9):
        top, left = at // 3 * 2, at % 3 * 2
        wanted = [image[0, channel, top + y, left + x].item() for y in (0, 1) for x in (0, 1) for channel in range(3)]
        assert found[0, at].tolist() == wanted


def test_positions_are_sine_waves_of_column_then_row():
    """MAE's `util/pos_embed.py`, in plain Python: wave i of a quarter has the frequency 10000^(-i / quarter)."""
    table, quarter = sincos_2d(5, 24, law="mae"), 6
    for at in range(25):
        row, column = divmod(at, 5)
        for wave in range(quarter):
            rate = 10_000 ** (-wave / quarter)
            parts = [math.sin(column * rate), math.cos(column * rate), math.sin(row * rate), math.cos(row * rate)]
            assert table[at, wave::quarter].tolist() == pytest.approx(parts, abs=1e-6)


@every_config
def test_the_classifier_has_the_trunk_a_zero_head_and_no_decoder(config: ModelConfig):
    model = built(config)
    classifier = classifier_of(model, config=config, image_size=IMAGE_SIZE, num_classes=7, seed=4)
    found, before = classifier.state_dict(), model.state_dict()
    own = {name for name in before if name.startswith("decoder.")}
    own |= {"norm.weight", "norm.bias"} if config.final_norm == "pooled" else set()
    assert all(torch.equal(found[name], it) for name, it in before.items() if name not in own)
    made = {name.partition(".")[0] for name in set(found) - set(before)}
    more = {"attn_pool"} if config.pool == "map" else {"fc_norm"} if config.final_norm == "pooled" else set[str]()
    assert made == {"head"} | more | ({"pos_embed"} if config.position == "learned_1d" else set())
    assert found["head.weight"].shape == (7, 32) and not found["head.weight"].any() and not found["head.bias"].any()
    if config.position == "learned_1d":
        assert torch.equal(found["pos_embed"][0, -PATCHES:], sincos_2d(4, 32, law="mae"))
        assert not found["pos_embed"][0, :-PATCHES].any() and classifier.get_parameter("pos_embed").requires_grad


def test_the_initial_values_are_the_originals():
    """facebookresearch/mae: Xavier on linear layers, q, k and v as one, the patch embedding flattened; tokens 0.02."""
    model = build_masked_autoencoder(
        ModelConfig(width=192, depth=1, heads=2, patch_size=8), image_size=16, decoder=DecoderConfig(width=128, depth=1)
    )
    initialise(model, seed=5, style="mae")
    state = model.state_dict()
    for name, fans in {
        "patch_embed.proj.weight": (192, 192),
        "blocks.0.attn.qkv.weight": (192, 3 * 192),
        "blocks.0.mlp.fc1.weight": (192, 768),
        "decoder.embed.weight": (192, 128),
        "decoder.blocks.0.attn.qkv.weight": (128, 3 * 128),
        "decoder.predict.weight": (128, 192),
    }.items():
        bound = math.sqrt(6 / sum(fans))
        assert state[name].abs().max() <= bound
        assert state[name].std() == pytest.approx(bound / math.sqrt(3), rel=0.03), name
    for name in ("cls_token", "decoder.mask_token"):
        assert state[name].std() == pytest.approx(0.02, rel=0.2)
    biases = [name for name in state if name.endswith("bias") and name != "patch_embed.proj.bias"]
    assert not any(state[name].any() for name in biases)


@pytest.mark.parametrize("name", ["cls", "map", "sincos"])
def test_it_is_saved_and_built_again(tmp_path: Path, name: str):
    model = built(CONFIGS[name])
    meta = SavedModelMeta(
        model=CONFIGS[name],
        image_size=IMAGE_SIZE,
        num_classes=1,
        class_names=PIXELS,
        head="masked_autoencoder",
        decoder=DECODER,
    )
    save_model(tmp_path / "model", model.state_dict(), meta=meta)
    again_meta, again = build_from_saved(tmp_path / "model")
    assert again_meta == meta and timm_objection(meta)
    assert torch.equal(again.eval()(images(2), *drawn(2)), model(images(2), *drawn(2)))
    if name != "map":  # whose pooling a file cannot give
        imported, state = import_file(tmp_path / "model", num_classes=7)
        classifier = classifier_of(model, config=meta.model, image_size=IMAGE_SIZE, num_classes=7, seed=0).state_dict()
        assert imported.head == "linear" and state.keys() == classifier.keys()
        assert all(torch.equal(state[name], it) for name, it in classifier.items())
    with pytest.raises(ValueError, match="decoder"):
        save_model(tmp_path / "other", model.state_dict(), meta=meta.model_copy(update={"decoder": DecoderConfig()}))


@pytest.mark.parametrize(
    ("config", "image_size", "message"),
    [
        (ModelConfig(variant="R50x1"), 224, "patches to leave out"),
        (CONFIGS["cls"], 4, "at least two patches"),
        (ModelConfig(**SIZES, position="relative"), 16, "learned_1d or sincos_2d"),
        (ModelConfig(**SIZES, position_at="every_layer"), 16, "learned_1d or sincos_2d"),
        (ModelConfig(**SIZES, position="none", rope="axial"), 16, "learned_1d or sincos_2d"),
        (ModelConfig(**SIZES, rope="axial"), 16, "no rope"),
    ],
)
def test_what_cannot_leave_out_patches_is_refused(config: ModelConfig, image_size: int, message: str):
    with pytest.raises(ValueError, match=message):
        build_masked_autoencoder(config, image_size=image_size, decoder=DECODER)
