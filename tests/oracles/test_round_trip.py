"""One model through every format in turn; at each stop the other library's own class computes the logits.

npz -> ours -> timm -> transformers -> torchvision -> ours -> npz (either code base's names), and back to the bit.
"""

from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import timm
import torch
import torchvision
from torch import nn
from transformers import AutoModelForImageClassification, TimmWrapperForImageClassification, ViTForImageClassification

from shardvit.model.formats.detect import import_file
from shardvit.model.formats.export import export_model
from tests.model.comparing import relative_difference
from tests.model.formats.small_model import described, images, logits, random_model, rebuilt
from tests.oracles.conftest import Measured

TOLERANCE = 1e-5


@pytest.mark.parametrize("google", ["npz", "big_vision"])
def test_the_same_logits_at_every_stop(
    tmp_path: Path, google: Literal["npz", "big_vision"], measured: Measured
) -> None:
    meta = described()
    model = random_model(meta)
    pixels = images()
    expected = logits(model, pixels)
    stop = partial(measured, "round trip of formats", "the model it began with")
    export_model(meta, model.state_dict(), to=google, out=tmp_path / "first.npz")
    found, state = import_file(tmp_path / "first.npz")
    assert found == meta
    stop("1. npz to ours", logits(rebuilt(found, state), pixels), expected)

    export_model(found, state, to="timm", out=tmp_path / "timm")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    stop("2. to timm, its own class", logits(theirs, pixels), expected)
    wrapped = AutoModelForImageClassification.from_pretrained(tmp_path / "timm").eval()
    assert isinstance(wrapped, TimmWrapperForImageClassification)
    stop("2. to timm, its own class", logits(wrapped, pixels), expected)
    assert wrapped.config.id2label == dict(enumerate(meta.class_names))

    export_model(*import_file(tmp_path / "timm"), to="transformers", out=tmp_path / "transformers")
    native = AutoModelForImageClassification.from_pretrained(tmp_path / "transformers").eval()
    assert isinstance(native, ViTForImageClassification)
    stop("3. to transformers, its own class", logits(native, pixels), expected)

    export_model(*import_file(tmp_path / "transformers"), to="torchvision", out=tmp_path / "vision.pth")
    vision = torchvision.models.VisionTransformer(
        image_size=24,
        patch_size=4,
        num_layers=4,
        num_heads=4,
        hidden_dim=48,
        mlp_dim=80,
        num_classes=5,
        norm_layer=partial(nn.LayerNorm, eps=1e-6),
    ).eval()
    vision.load_state_dict(torch.load(tmp_path / "vision.pth", weights_only=True), strict=True)
    assert relative_difference(logits(vision, pixels), expected) > 10 * TOLERANCE  # its class has GELU in the erf form
    for name in [name for name, module in vision.named_modules() if isinstance(module, nn.GELU)]:
        vision.set_submodule(name, nn.GELU(approximate="tanh"))
    stop("4. to torchvision, its own class", logits(vision, pixels), expected)

    last, state = import_file(tmp_path / "vision.pth")
    stop("5. to ours", logits(rebuilt(last, state), pixels), expected)
    export_model(last, state, to=google, out=tmp_path / "last.npz")
    again, state = import_file(tmp_path / "last.npz")
    assert again == meta  # class names, pixels, GELU, epsilon and kernel of interpolation travelled along
    stop("6. to npz", logits(rebuilt(again, state), pixels), expected)
    with np.load(tmp_path / "first.npz") as first, np.load(tmp_path / "last.npz") as last_arrays:
        assert set(first) == set(last_arrays)
        for name in first:
            np.testing.assert_array_equal(first[name], last_arrays[name])
