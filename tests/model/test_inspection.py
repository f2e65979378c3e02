"""`model.inspection`: attention against numpy and the model's outputs; filters and positions against scikit-learn."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.metrics.pairwise import cosine_similarity
from timm.models.vision_transformer import VisionTransformer

from shardvit.model.config import ModelConfig
from shardvit.model.inspection import (
    AttentionDistance,
    Rollout,
    first_filters,
    look_at_attention,
    patch_distances,
    patch_positions,
    position_similarity,
    weights_of_tokens,
)
from shardvit.model.resnet import standardise
from shardvit.model.self_supervised.masked_patch import build_masked_patch
from shardvit.model.vit import build_model
from tests.model.comparing import randomise

SIZES: dict[str, Any] = {"width": 32, "depth": 3, "heads": 4, "mlp_dim": 48, "patch_size": 4}
KINDS: dict[str, dict[str, Any]] = {
    "class token": {},
    "gap": {"pool": "gap"},
    "map": {"pool": "map"},
    "hybrid": {"resnet_layers": (), "patch_size": 8},
    "relative": {"position": "relative"},
    "relative, gap": {"position": "relative", "pool": "gap"},
    "every layer": {"position": "learned_2d", "position_at": "every_layer"},
    "sincos, map": {"position": "sincos_2d", "pool": "map"},
    "layer scale": {"layer_scale": 0.1},
    "registers": {"registers": 3, "qk_norm": "per_head"},
    "registers, map": {"registers": 3, "pool": "map", "mlp": "swiglu"},
    "rope, gap": {"rope": "axial", "pool": "gap", "class_token": "kept", "registers": 2},
    "rope, learned": {"rope": "mixed", "qk_norm": "per_head", "norm": "rms", "position": "none"},
    "distillation token": {"distillation_token": "learned"},
    "dinov3": {"rope": "dinov3", "registers": 2, "pool": "gap", "final_norm": "pooled"},
}
GRID = 4


def _model(kind: str) -> VisionTransformer:
    patch_size = KINDS[kind].get("patch_size", 4)
    config = ModelConfig(**(SIZES | KINDS[kind]))
    model = build_model(config, image_size=GRID * patch_size, num_classes=5, head="linear")
    assert isinstance(model, VisionTransformer)
    return randomise(model).eval()


def _images(model: VisionTransformer, number: int = 3) -> torch.Tensor:
    size = model.patch_embed.img_size[0]
    return torch.randn(number, 3, size, size, generator=torch.Generator().manual_seed(2))


def _seen(model: VisionTransformer, images: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    found: list[torch.Tensor] = []
    tokens = look_at_attention(model, images, see=lambda _, probabilities: found.append(probabilities))
    return found, tokens


@pytest.mark.parametrize("kind", KINDS)
def test_rows_sum_to_one_and_the_model_computes_and_stays_the_same(kind: str) -> None:
    model = _model(kind)
    images = _images(model)
    with torch.no_grad():
        before, features = model(images), model.forward_features(images)
    hooks_before = [dict(module._forward_hooks) for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    found, tokens = _seen(model, images)
    assert len(found) == 3
    for probabilities in found:
        assert probabilities.shape == (3, 4, tokens.shape[1], tokens.shape[1])
        torch.testing.assert_close(probabilities.sum(dim=-1), torch.ones(3, 4, tokens.shape[1]))
        assert probabilities.min() >= 0 and probabilities.std() > 0
    assert torch.equal(tokens, features)
    with torch.no_grad():
        assert torch.equal(model(images), before)
    assert [dict(module._forward_hooks) for module in model.modules()] == hooks_before
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_failure_while_looking_leaves_no_hook() -> None:
    model = _model("class token")

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        look_at_attention(model, _images(model), see=fail)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_in_training_mode_is_refused() -> None:
    model = _model("class token")
    with pytest.raises(ValueError, match="eval"):
        look_at_attention(model.train(), _images(model), see=lambda *_: None)


@pytest.mark.parametrize("kind", ["class token", "relative", "relative, gap"])
def test_probabilities_give_what_the_block_gives(kind: str) -> None:
    """Attention's output computed from them in numpy, with the block's own values and projection."""
    model = _model(kind)
    inputs: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []

    def note(_: object, given: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        inputs.append(given[0])
        outputs.append(out)

    for block in model.blocks:
        block.attn.register_forward_hook(note)
    found, _ = _seen(model, _images(model))
    for block, given, expected, probabilities in zip(model.blocks, inputs, outputs, found, strict=True):
        values = block.attn.qkv(given).detach().numpy()[..., 2 * 32 :].reshape(3, -1, 4, 8).transpose(0, 2, 1, 3)
        mixed = (probabilities.numpy() @ values).transpose(0, 2, 1, 3).reshape(3, -1, 32)
        projected = mixed @ block.attn.proj.weight.detach().numpy().T + block.attn.proj.bias.detach().numpy()
        np.testing.assert_allclose(projected, expected.detach().numpy(), atol=2e-5)


@pytest.mark.parametrize("kind", ["class token", "distillation token", "gap", "map"])
def test_weights_of_tokens_make_what_the_head_sees(kind: str) -> None:
    """With pooling that only mixes, the mixture of normed tokens; with attention pooling, its mean over heads."""
    model = _model(kind)
    _, tokens = _seen(model, _images(model))
    weights = weights_of_tokens(model, tokens)
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(3))
    with torch.no_grad():
        if kind == "map":
            pool = model.attn_pool
            keys = pool.kv(tokens)[..., :32].reshape(3, -1, 4, 8).numpy()
            query = pool.q(pool.latent)[0, 0].reshape(4, 8).numpy()
            logits = np.einsum("hd,bthd->bth", query, keys) * 8**-0.5
            exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
            expected = (exponents / exponents.sum(axis=1, keepdims=True)).mean(axis=-1)
            np.testing.assert_allclose(weights.numpy(), expected, atol=1e-6)
        else:
            pooled = torch.einsum("bt,btd->bd", weights, tokens)
            torch.testing.assert_close(pooled, model.forward_head(tokens, pre_logits=True))


def test_a_masked_patch_model_is_looked_at_through_its_patches() -> None:
    model = randomise(build_masked_patch(ModelConfig(**SIZES), image_size=16)).eval()
    found, tokens = _seen(model, _images(model))
    assert len(found) == 3
    weights = weights_of_tokens(model, tokens)
    assert weights[:, 0].eq(0).all() and weights[:, 1:].eq(1 / 16).all()


@pytest.mark.parametrize("kind", KINDS)
def test_rollout_against_numpy(kind: str) -> None:
    model = _model(kind)
    rollout, images = Rollout(), _images(model)
    tokens = look_at_attention(model, images, see=rollout.add)
    found, _ = _seen(model, images)
    count = tokens.shape[1]
    for row in range(3):
        joint = np.eye(count)
        for probabilities in found:
            mixed = probabilities[row].double().numpy().mean(axis=0) + np.eye(count)
            joint = mixed / mixed.sum(axis=1, keepdims=True) @ joint
        assert rollout.joint is not None
        np.testing.assert_allclose(rollout.joint[row].numpy(), joint, atol=1e-6)
        np.testing.assert_allclose(rollout.joint[row].sum(dim=1).numpy(), 1.0, atol=1e-5)
        expected = weights_of_tokens(model, tokens)[row].double().numpy() @ joint
        map_of_patches = rollout.to_patches(model, tokens)[row]
        assert map_of_patches.shape == (GRID, GRID)
        np.testing.assert_allclose(map_of_patches.flatten().numpy(), expected[count - GRID**2 :], atol=1e-6)


def test_rollout_of_uniform_attention_over_many_blocks_is_uniform_and_of_none_the_identity() -> None:
    uniform, none = Rollout(), Rollout()
    for block in range(60):
        uniform.add(block, torch.full((1, 2, 5, 5), 0.2))
        none.add(block, torch.eye(5).expand(1, 2, 5, 5))
    assert uniform.joint is not None and none.joint is not None
    torch.testing.assert_close(uniform.joint[0], torch.full((5, 5), 0.2))
    torch.testing.assert_close(none.joint[0], torch.eye(5))


def test_distances_of_patches_are_those_of_their_centres() -> None:
    distances = patch_distances(3, patch_size=16)
    assert distances.shape == (9, 9) and distances.diagonal().eq(0).all()
    assert torch.equal(distances, distances.T)
    assert distances[0, 1] == 16 and distances[0, 3] == 16  # a column and a row further
    assert distances[0, 8] == pytest.approx(16 * 8**0.5)


def test_distance_of_uniform_attention_is_the_mean_of_all_pairs_and_of_the_identity_zero() -> None:
    distance = AttentionDistance(4, patch_size=8)
    places = [(row, column) for row in range(4) for column in range(4)]
    pairs = [8 * np.hypot(a[0] - b[0], a[1] - b[1]) for a in places for b in places]
    assert distance.of_uniform_attention == pytest.approx(np.mean(pairs))
    uniform, identity = torch.full((17, 17), 1 / 17), torch.eye(17)
    distance.add(0, torch.stack([uniform, identity]).expand(2, 2, 17, 17))
    assert distance.means()[0].tolist() == pytest.approx([np.mean(pairs), 0.0])


def test_what_goes_to_the_class_token_does_not_shorten_the_distance() -> None:
    distance = AttentionDistance(2, patch_size=1)
    looks_at_class_token = torch.full((5, 5), 0.001)
    looks_at_class_token[:, 0] = 0.996
    distance.add(0, looks_at_class_token.expand(1, 1, 5, 5))
    assert distance.means()[0, 0].item() == pytest.approx(distance.of_uniform_attention)
    only_it = torch.zeros(1, 1, 5, 5)
    only_it[..., 0] = 1.0
    distance.add(1, only_it)
    assert distance.means()[1].isfinite().all()


@pytest.mark.parametrize("kind", ["class token", "gap", "relative"])
def test_distance_against_numpy_in_any_batches(kind: str) -> None:
    model = _model(kind)
    images = _images(model, number=5)
    distance = AttentionDistance(GRID, patch_size=4)
    for part in images.split(2):
        look_at_attention(model, part, see=distance.add)
    assert distance.images == 5
    found, _ = _seen(model, images)
    for block, probabilities in enumerate(found):
        weights = probabilities.double().numpy()[..., -16:, -16:]
        for head in range(4):
            means = []
            for image in range(5):
                for query in range(16):
                    row = weights[image, head, query] / weights[image, head, query].sum()
                    apart = [4 * np.hypot(query // 4 - key // 4, query % 4 - key % 4) for key in range(16)]
                    means.append(np.dot(row, apart))
            assert distance.means()[block, head].item() == pytest.approx(np.mean(means), rel=1e-5)


FILTERED: dict[str, Any] = {"width": 32, "depth": 3, "heads": 4, "mlp_dim": 48, "patch_size": 4}


def test_principal_components_are_those_of_scikit_learn() -> None:
    model = randomise(build_model(ModelConfig(**FILTERED), image_size=16, num_classes=5, head="linear"))
    found = first_filters(model)
    pca = PCA(n_components=28).fit(model.patch_embed.proj.weight.detach().flatten(1).double().numpy())
    assert found.kind == "components" and found.filters.shape == (28, 3, 4, 4)
    np.testing.assert_allclose(found.shares, pca.explained_variance_ratio_, rtol=1e-9)
    for ours, theirs in zip(found.filters.flatten(1).numpy(), pca.components_, strict=True):
        sign = np.sign(ours @ theirs)
        np.testing.assert_allclose(ours, sign * theirs, atol=1e-5)
        assert ours[np.abs(ours).argmax()] > 0


def test_there_are_no_more_components_than_filters() -> None:
    model = randomise(
        build_model(ModelConfig(**(FILTERED | {"width": 8})), image_size=16, num_classes=5, head="linear")
    )
    assert len(first_filters(model).filters) == 8


def test_filters_that_are_all_zero_have_finite_components() -> None:
    model = build_model(ModelConfig(**FILTERED), image_size=16, num_classes=5, head="linear")
    torch.nn.init.zeros_(model.patch_embed.proj.weight)
    found = first_filters(model)
    assert found.filters.isfinite().all() and set(found.shares) == {0.0}


@pytest.mark.parametrize("sizes", [{"resnet_layers": (1,)}, {**FILTERED, "resnet_layers": (1,), "patch_size": 8}])
def test_a_resnet_shows_its_root(sizes: dict[str, Any]) -> None:
    model = randomise(build_model(ModelConfig(**sizes), image_size=32, num_classes=5, head="linear"))
    found = first_filters(model)
    (root,) = [value for name, value in model.state_dict().items() if name.endswith("stem.conv.weight")]
    assert found.kind == "kernels" and found.shares == ()
    assert torch.equal(found.filters, standardise(root)[:28])


@pytest.mark.parametrize(
    ("keys", "tables"),
    [
        ({}, 1),
        ({"class_token_position": "none"}, 1),
        ({"pool": "gap"}, 1),
        ({"position": "learned_2d"}, 1),
        ({"position": "sincos_2d"}, 1),
        ({"position": "sincos_2d", "pool": "map"}, 1),
        ({"position_at": "every_layer"}, 3),
        ({"position_at": "every_layer_shared", "position": "learned_2d", "class_token_position": "none"}, 1),
    ],
)
def test_similarity_of_what_is_added_to_patches(keys: dict[str, Any], tables: int) -> None:
    """What is added is measured: tokens after it, less tokens before."""
    model = randomise(build_model(ModelConfig(**(FILTERED | keys)), image_size=16, num_classes=5, head="linear")).eval()
    positions = patch_positions(model)
    assert positions is not None and positions.shape == (tables, 16, 32)
    before = torch.zeros(1, model.num_prefix_tokens + 16, 32)
    with torch.no_grad():
        if keys.get("position_at"):
            added = model.position.before_block(before, layer=0)
        else:
            added = model._pos_embed(before[:, -16:])
    torch.testing.assert_close(positions[0], added[0, -16:])
    ours = position_similarity(positions)[0].numpy()
    np.testing.assert_allclose(ours, cosine_similarity(added[0, -16:].numpy()), atol=1e-6)


@pytest.mark.parametrize("kind", ["relative", "none"])
def test_no_similarity_where_no_patch_has_a_position_of_its_own(kind: Any) -> None:
    model = build_model(ModelConfig(**FILTERED, position=kind), image_size=16, num_classes=5, head="linear")
    assert patch_positions(model) is None
