"""Models of other numbers of channels: timm's own logits, its rule for weights of three, and what formats hold."""

import pytest
import timm
import torch
from pydantic import ValidationError
from timm.models import adapt_input_conv

from shardvit.model.config import ModelConfig
from shardvit.model.counting.flops import account
from shardvit.model.formats.detect import import_file
from shardvit.model.formats.export import export_model
from shardvit.model.formats.first_convolution import channels_objection, with_channels
from shardvit.model.init import initialise
from shardvit.model.saved.model_folder import SavedModelMeta
from shardvit.model.vit import build_model

SIZES = {"width": 32, "depth": 2, "heads": 2, "patch_size": 4}
KINDS = {
    "vit": (SIZES, "patch_embed.proj.weight"),
    "hybrid": (SIZES | {"resnet_layers": [1], "patch_size": 8}, "patch_embed.backbone.stem.conv.weight"),
    "resnet": ({"resnet_layers": [1, 1]}, "stem.conv.weight"),
}


def built(kind: str, channels: int) -> tuple[ModelConfig, torch.nn.Module]:
    config = ModelConfig.model_validate(KINDS[kind][0] | {"channels": channels})
    model = build_model(config, image_size=16, num_classes=3, head="linear")
    initialise(model, seed=1)
    torch.nn.init.normal_(model.get_submodule("head").weight)
    return config, model.eval()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("channels", [1, 2, 3, 5, 16])
def test_weights_of_three_channels_go_to_any_number_by_timms_rule(kind: str, channels: int):
    config, model = built(kind, 3)
    name = KINDS[kind][1]
    state = with_channels(model.state_dict(), config=config, channels=channels)
    assert torch.equal(state[name], adapt_input_conv(channels, model.state_dict()[name]))
    ours = built(kind, channels)[1]
    ours.load_state_dict(state)
    if kind != "resnet" and channels > 1:  # equal channels give the same: with standardised weights, only nearly
        grey = torch.rand(2, 1, 16, 16)
        if kind == "vit" and channels % 3 == 0:
            assert torch.allclose(ours(grey.expand(-1, channels, -1, -1)), model(grey.expand(-1, 3, -1, -1)), atol=1e-5)
    if channels not in (3,):
        other = ModelConfig.model_validate(KINDS[kind][0] | {"channels": channels})
        assert channels_objection(other, channels=channels + 1)
        assert channels_objection(other, channels=channels) is None


@pytest.mark.parametrize("channels", [1, 5])
def test_timm_has_the_same_logits_and_each_format_gives_the_model_back(channels: int, tmp_path):
    config, model = built("vit", channels)
    mean, std = tuple(0.1 * c for c in range(channels)), tuple(1.0 + c for c in range(channels))
    meta = SavedModelMeta(
        model=config, image_size=16, num_classes=3, class_names=("a", "b", "c"), head="linear", mean=mean, std=std
    )
    images = torch.randn(3, channels, 16, 16)
    logits = model(images)
    for form, ending in (("npz", ".npz"), ("timm", ""), ("transformers", ""), ("torch_export", ".pt2")):
        export_model(meta, model.state_dict(), to=form, out=(out := tmp_path / f"{form}{ending}"))
        found, state = import_file(out)
        assert (found.model.channels, found.mean, found.std) == (channels, mean, std), form
        again = build_model(found.model, image_size=16, num_classes=3, head="linear").eval()
        again.load_state_dict(state)
        assert (again(images) - logits).abs().max() < 1e-5, form
    theirs = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    assert theirs.patch_embed.proj.in_channels == channels
    assert (theirs(images) - logits).abs().max() < 1e-5
    with pytest.raises(ValueError, match="torchvision"):
        export_model(meta, model.state_dict(), to="torchvision", out=tmp_path / "x.pth")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("channels", [1, 7])
def test_parameters_and_operations_count_the_channels(kind: str, channels: int):
    config, model = built(kind, channels)
    found = account(config, image_size=16, num_classes=3, head="linear")
    assert found.parameters == sum(each.numel() for each in model.parameters())
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, channels, 16, 16))
    three = account(config.model_copy(update={"channels": 3}), image_size=16, num_classes=3, head="linear")
    with torch.utils.flop_counter.FlopCounterMode(display=False) as usual:
        built(kind, 3)[1](torch.zeros(1, 3, 16, 16))
    difference = counter.get_total_flops() - usual.get_total_flops()
    assert found.forward_flops - three.forward_flops == difference


def test_three_channels_are_not_mentioned_and_impossible_ones_are_refused():
    assert "channels" not in ModelConfig(variant="S/16", channels=3).model_dump()
    assert ModelConfig(variant="S/16", channels=4).model_dump()["channels"] == 4
    for channels in (0, 17):
        with pytest.raises(ValidationError):
            ModelConfig(variant="S/16", channels=channels)
    with pytest.raises(ValidationError, match="mean"):
        SavedModelMeta(
            model=ModelConfig(**SIZES, channels=5), image_size=16, num_classes=1, class_names=("a",), head="linear"
        )
