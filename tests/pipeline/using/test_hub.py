"""Weights by name, from a hub on loopback through the real client: timm's ViTs, the cache, refusals, files by URL."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from huggingface_hub import constants
from timm.models import save_for_hf

from shardvit.data_shards.errors import UserError
from shardvit.launch.cli import app
from shardvit.model.formats.detect import read_external
from shardvit.model.saved.model_folder import build_from_saved, read_meta
from shardvit.pipeline.using.find_model import find_model, find_record
from shardvit.pipeline.using.hub import local_weights, name_of
from tests.hub import TOKEN, Hub, find_hub, serving

MODEL = "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"
SHALLOW: dict[str, Any] = {"depth": 2, "num_classes": 11}
# name on the hub -> arguments that keep it cheap: two blocks of full width, on 3 x 3 patches
SUPPORTED = {
    "vit_base_patch16_224.augreg_in21k": 48,
    "vit_base_patch32_224.augreg_in1k": 96,
    "vit_tiny_patch16_224.augreg_in21k_ft_in1k": 48,
    "vit_small_patch32_224.augreg_in21k": 96,
    "vit_large_patch16_224.augreg_in21k": 48,
    "vit_huge_patch14_224.orig_in21k": 42,
    "deit_small_patch16_224.fb_in1k": 48,
    "deit3_small_patch16_224.fb_in1k": 48,
    "vit_base_patch16_224_miil.in21k": 48,
    "vit_base_patch16_siglip_224.webli": 48,
    "vit_so400m_patch14_siglip_gap_224.webli": 42,
    "vit_medium_patch16_gap_240.sw_in12k": 48,
    "vit_small_patch14_dinov2.lvd142m": 42,
    "vit_base_patch8_224.dino": 24,
    "vit_medium_patch16_reg4_gap_256.sbb_in12k_ft_in1k": 48,
    "deit_tiny_distilled_patch16_224.fb_in1k": 48,
    "vit_small_patch16_dinov3.lvd1689m": 48,
}
REFUSED = {
    "vit_large_patch14_clip_224.openai": (42, "pre_norm"),
    "vit_base_patch16_clip_quickgelu_224.openai": (48, "pre_norm"),
    "vit_relpos_small_patch16_224.sw_in1k": (48, "VisionTransformerRelPos"),
    "vit_srelpos_small_patch16_224.sw_in1k": (48, "VisionTransformerRelPos"),
    "vit_tiny_r_s16_p8_224.augreg_in21k": (32, "HybridEmbed"),
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as found:
        find_hub(found, tmp_path, monkeypatch)
        yield found


def command(*arguments: object) -> int:
    return app(list(map(str, arguments)), exit_on_error=False, print_error=False, result_action="return_value")


def timms(name: str, image_size: int) -> torch.nn.Module:
    """timm's model with random weights, none of them zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = timm.create_model(name, img_size=image_size, **SHALLOW)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
    return model.eval()


def published(hub: Hub, folder: Path, *, name: str = MODEL, size: int = 48, **changes: Any) -> torch.nn.Module:
    """Save as timm's push_to_hf_hub does, and put it on the hub."""
    model = timms(name.rpartition("/")[2], size)
    save_for_hf(model, str(folder), safe_serialization=True)
    (folder / "pytorch_model.bin").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    hub.add_folder(name, folder)
    return model


@pytest.mark.parametrize("name", SUPPORTED)
def test_timms_models_give_timms_logits(name: str, hub: Hub, tmp_path: Path) -> None:
    theirs = published(hub, tmp_path / "theirs", name=f"timm/{name}", size=SUPPORTED[name])
    assert command("import", f"hf-hub:timm/{name}", tmp_path / "ours") == 0
    meta, ours = build_from_saved(tmp_path / "ours")
    images = torch.randn(2, 3, meta.image_size, meta.image_size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(images), theirs(images), rtol=0, atol=1e-5)
    expected = timm.data.resolve_model_data_config(theirs)
    assert (meta.mean, meta.std, meta.num_classes) == (expected["mean"], expected["std"], 11)
    assert meta.eval_crop_share == expected["crop_pct"]


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_we_do_not_build_are_refused_by_what_differs(name: str, hub: Hub, tmp_path: Path) -> None:
    size, reason = REFUSED[name]
    published(hub, tmp_path / "theirs", name=f"timm/{name}", size=size)
    with pytest.raises(UserError, match=reason):
        command("import", f"hf-hub:timm/{name}", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_what_config_json_says_arrives(hub: Hub, tmp_path: Path) -> None:
    names = [f"class {number}" for number in range(11)]
    published(hub, tmp_path / "theirs", label_names=names)
    assert command("import", f"hf-hub:{MODEL}@main", tmp_path / "ours") == 0
    assert list(read_meta(tmp_path / "ours").class_names) == names


def test_transformers_config_is_read_too(hub: Hub, tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=8
    )
    theirs = ViTForImageClassification(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    hub.add_folder("someone/vit", tmp_path / "theirs")
    found = find_model(Path("hf-hub:someone/vit"))
    from shardvit.model.saved.model_folder import build_described

    ours = build_described(found.meta).eval()
    ours.load_state_dict(found.state)
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images).logits, rtol=0, atol=1e-5)


def test_only_config_and_weights_are_brought_and_then_served_offline(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published(hub, tmp_path / "theirs")
    more = {"README.md": b"x", "modeling.py": b"x", "pytorch_model.bin": b"x", "other/model.safetensors": b"x"}
    hub.repositories[f"models/{MODEL}"].commit(more)
    folder = local_weights(f"hf-hub:{MODEL}")
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) == ["config.json", "model.safetensors"]
    hub.requests.clear()
    assert local_weights(f"hf-hub:{MODEL}") == folder
    assert not any("resolve" in path for _, path, _ in hub.requests)

    hub.down = True
    assert local_weights(f"hf-hub:{MODEL}") == folder
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert local_weights(f"hf-hub:{MODEL}") == folder
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        local_weights("hf-hub:timm/another")


def test_a_cache_that_is_not_whole_is_not_served(hub: Hub, tmp_path: Path) -> None:
    published(hub, tmp_path / "theirs")
    folder = local_weights(f"hf-hub:{MODEL}")
    weights = folder / "model.safetensors"
    weights.resolve().unlink()
    weights.unlink()
    hub.down = True
    with pytest.raises(UserError, match="not whole in the cache"):
        local_weights(f"hf-hub:{MODEL}")


def test_a_new_commit_is_brought_and_an_old_one_can_be_named(hub: Hub, tmp_path: Path) -> None:
    published(hub, tmp_path / "theirs")
    repository = hub.repositories[f"models/{MODEL}"]
    old = repository.refs["main"]
    before = local_weights(f"hf-hub:{MODEL}")
    repository.commit({"config.json": repository.files["config.json"] + b" "})
    assert local_weights(f"hf-hub:{MODEL}") != before
    assert local_weights(f"hf-hub:{MODEL}@{old}") == before


def test_weights_of_torch_are_brought_where_there_are_no_safetensors(hub: Hub, tmp_path: Path) -> None:
    theirs = published(hub, tmp_path / "theirs")
    torch.save(theirs.state_dict(), tmp_path / "weights.bin")
    config = (tmp_path / "theirs" / "config.json").read_bytes()
    hub.add("a/torch", {"config.json": config, "pytorch_model.bin": (tmp_path / "weights.bin").read_bytes()})
    found = read_external(local_weights("hf-hub:a/torch"))
    torch.testing.assert_close(found.state["norm.weight"], theirs.state_dict()["norm.weight"])


def test_a_pickle_on_the_hub_is_not_executed(hub: Hub, tmp_path: Path) -> None:
    mark = tmp_path / "executed"

    class Malice:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
            return os.mkdir, (str(mark),)

    published(hub, tmp_path / "theirs")
    torch.save({"norm.weight": Malice()}, tmp_path / "weights.bin")
    config = (tmp_path / "theirs" / "config.json").read_bytes()
    code = {"modeling.py": f"import os; os.mkdir({str(mark)!r})".encode(), "setup.py": b""}
    hub.add("a/b", {"config.json": config, "pytorch_model.bin": (tmp_path / "weights.bin").read_bytes()} | code)
    with pytest.raises(UserError, match="could run code"):
        command("import", "hf-hub:a/b", tmp_path / "ours")
    assert not mark.exists()


@pytest.mark.parametrize(
    ("source", "access", "reason"),
    [
        ("hf-hub:timm/typo", "public", "check the name"),
        ("hf-hub:timm", "public", "OWNER/NAME"),
        ("hf-hub:a/b@../../x", "public", "OWNER/NAME@REVISION"),
        ("hf-hub:a/b@gone", "public", "branch, a tag or a commit"),
        ("hf-hub:a/b", "private", "log in"),
        ("hf-hub:a/b", "gated", "ask for access"),
        ("hf-hub:a/b", "public", "no weights"),
    ],
)
def test_what_cannot_be_brought_is_one_sentence_with_a_remedy(source: str, access: str, reason: str, hub: Hub) -> None:
    hub.add("a/b", {"config.json": b"{}"}, access=access)
    with pytest.raises(UserError, match=reason) as raised:
        local_weights(source)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("from_file", [True, False])
def test_a_token_opens_what_is_private_and_shows_nowhere(
    from_file: bool, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    find_hub(hub, tmp_path, monkeypatch, token="" if from_file else TOKEN)
    if from_file:
        Path(constants.HF_TOKEN_PATH).parent.mkdir(parents=True, exist_ok=True)
        Path(constants.HF_TOKEN_PATH).write_text(TOKEN)
    published(hub, tmp_path / "theirs")
    hub.repositories[f"models/{MODEL}"].access = "private"
    assert command("import", f"hf-hub:{MODEL}", tmp_path / "ours") == 0
    assert any(TOKEN in authorization for _, _, authorization in hub.requests)
    with pytest.raises(UserError) as raised:
        local_weights(f"hf-hub:{TOKEN}/x")
    assert TOKEN not in str(raised.value).replace(f"hf-hub:{TOKEN}/x", "")
    assert TOKEN not in "".join(capfd.readouterr())
    assert TOKEN not in (tmp_path / "ours" / "config.json").read_text()


@pytest.fixture
def npz(hub: Hub) -> str:
    """The URL of a file of weights."""
    content = b"weights of some kind"
    hub.add("a/files", {"x.npz": content, "y-0123abcd.pth": content})
    return f"{hub.url}/a/files/resolve/main/x.npz"


def test_a_file_is_brought_once_and_again_when_it_changes(npz: str, hub: Hub) -> None:
    found = local_weights(Path(npz))  # whose second slash is gone
    assert (found.name, found.read_bytes()) == ("x.npz", b"weights of some kind")
    assert local_weights(npz) == found
    asked = [path for method, path, _ in hub.requests if method == "GET"]
    hub.add("a/files", {"x.npz": b"other weights"})
    assert local_weights(npz).read_bytes() == b"other weights"
    assert len(asked) == len({*asked}) + 3  # two to look, one of them before the only download
    hub.down = True
    assert local_weights(npz).read_bytes() == b"other weights"


def test_a_file_from_nowhere_is_one_sentence_without_the_password(npz: str, hub: Hub) -> None:
    secret = npz.replace("://", "://user:secret@").replace("x.npz", "gone.npz?sig=secret")
    with pytest.raises(UserError, match=r"gone\.npz is not there") as raised:
        local_weights(secret)
    assert "secret" not in str(raised.value)
    assert name_of(Path(secret)) == "gone"
    for url, reason in (
        (f"{hub.url}/a/files/resolve/main/x.exe", r"\.npz"),
        (npz.replace("x.npz", "y-0123abcd.pth"), "digest"),
    ):
        with pytest.raises(UserError, match=reason):
            local_weights(url)


def test_a_digest_in_the_name_is_checked(npz: str, hub: Hub) -> None:
    content = b"weights"
    digest = hashlib.sha256(content).hexdigest()[:8]
    assert any(letter in digest for letter in "abcdef")
    hub.add("a/files", {f"vit-{digest}.pth": content})
    assert local_weights(npz.replace("x.npz", f"vit-{digest}.pth")).read_bytes() == content


def test_googles_npz_by_url_gives_the_same_model_as_the_file(hub: Hub, tmp_path: Path) -> None:
    published(hub, tmp_path / "theirs")
    assert command("import", f"hf-hub:{MODEL}", tmp_path / "ours", "--gelu", "tanh") == 0
    assert command("export", tmp_path / "ours", "--format", "npz", "--output", tmp_path / "x.npz") == 0
    hub.add("a/files", {"x.npz": (tmp_path / "x.npz").read_bytes()})
    url = f"{hub.url}/a/files/resolve/main/x.npz"
    assert command("import", url, tmp_path / "again", "--depth", 2) == 0
    one, other = (build_from_saved(tmp_path / name)[1].state_dict() for name in ("ours", "again"))
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_a_record_is_found_by_name(hub: Hub, tmp_path: Path) -> None:
    published(hub, tmp_path / "theirs")
    assert command("import", f"hf-hub:{MODEL}", tmp_path / "ours") == 0
    hub.add_folder("me/ours", tmp_path / "ours")
    assert find_record(Path("hf-hub:me/ours")) == read_meta(tmp_path / "ours")
