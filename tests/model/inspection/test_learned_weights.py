"""`model.inspection` against scikit-learn's PCA and cosine similarity."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.metrics.pairwise import cosine_similarity

from model.config import ModelConfig
from model.inspection import first_filters, patch_positions, position_similarity
from model.resnet import standardise
from model.vit import build_model
from tests.model.comparing import randomise

SIZES: dict[str, Any] = {"width": 32, "depth": 3, "heads": 4, "mlp_dim": 48, "patch_size": 4}


def test_principal_components_are_those_of_scikit_learn() -> None:
    model = randomise(build_model(ModelConfig(**SIZES), image_size=16, num_classes=5, head="linear"))
    found = first_filters(model)
    pca = PCA(n_components=28).fit(model.patch_embed.proj.weight.detach().flatten(1).double().numpy())
    assert found.kind == "components" and found.filters.shape == (28, 3, 4, 4)
    np.testing.assert_allclose(found.shares, pca.explained_variance_ratio_, rtol=1e-9)
    for ours, theirs in zip(found.filters.flatten(1).numpy(), pca.components_, strict=True):
        sign = np.sign(ours @ theirs)
        np.testing.assert_allclose(ours, sign * theirs, atol=1e-5)
        assert ours[np.abs(ours).argmax()] > 0


def test_there_are_no_more_components_than_filters() -> None:
    model = randomise(build_model(ModelConfig(**(SIZES | {"width": 8})), image_size=16, num_classes=5, head="linear"))
    assert len(first_filters(model).filters) == 8


def test_filters_that_are_all_zero_have_finite_components() -> None:
    model = build_model(ModelConfig(**SIZES), image_size=16, num_classes=5, head="linear")
    torch.nn.init.zeros_(model.patch_embed.proj.weight)
    found = first_filters(model)
    assert found.filters.isfinite().all() and set(found.shares) == {0.0}


@pytest.mark.parametrize("sizes", [{"resnet_layers": (1,)}, {**SIZES, "resnet_layers": (1,), "patch_size": 8}])
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
    model = randomise(build_model(ModelConfig(**(SIZES | keys)), image_size=16, num_classes=5, head="linear")).eval()
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
    model = build_model(ModelConfig(**SIZES, position=kind), image_size=16, num_classes=5, head="linear")
    assert patch_positions(model) is None
