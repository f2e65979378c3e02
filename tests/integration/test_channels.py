"""Five channels of floats, and one of 16 bits: from files to shards, a trained model, its predictions and exports."""

import io
import json
import signal
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.sets.statistics_summary import mean_and_std
from shardvit.launch.cli import app
from shardvit.model.formats.detect import import_file
from shardvit.model.saved.model_folder import build_from_saved
from tests.faults.harness import Case

CHANNELS = {"npy": 5, "png": 1}
PRETRAIN = {
    "image_size": 16,
    "global_batch_size": 16,
    "duration": "12 steps",
    "head": "linear",
    "log_every": "1 steps",
    "save_every": "4 steps",
    "optimizer": {"name": "adamw", "lr": 3e-3},
    "augment": {"mixup_alpha": 0.2, "cutmix_alpha": 1.0, "random_erasing": {"probability": 0.5}},
}
FINETUNE = {key: each for key, each in PRETRAIN.items() if key != "head"} | {"image_size": 24, "duration": "4 steps"}


def command(*arguments: object) -> int:
    return app(list(map(str, arguments)), exit_on_error=False, print_error=False, result_action="return_value")


def write(folder: Path, kind: str) -> None:
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[0:20, 0:24]
    for split, count in (("train", 24), ("val", 8)):
        for label in range(2):
            (into := folder / split / f"k{label}").mkdir(parents=True)
            for number in range(count):
                waves = np.stack([np.sin((label + 1) * columns / 3 + rows / 7 + c) for c in range(5)], axis=-1)
                pixels = waves + rng.normal(0, 0.3, waves.shape)
                if kind == "npy":
                    np.save(into / f"{number:02}.npy", (pixels * np.arange(1, 6) + 10).astype(np.float32))
                else:
                    grey = (pixels[..., 0] * 8000 + 30000).clip(0, 65535).astype(np.uint16)
                    Image.fromarray(grey).save(into / f"{number:02}.png")


def recipe(shards: Path, kind: str, *, processes: int = 1, zero: int = 1) -> dict:
    sets = {"train": str(shards / "train"), "eval": str(shards / "val")}
    return {
        "name": kind,
        "processes": processes,
        "pictures": "off",
        "tracking": {"to": []},
        "model": {"width": 32, "depth": 2, "heads": 2, "patch_size": 4, "channels": CHANNELS[kind]},
        "data": {"lanes": 16, "workers": 1, "worker_kind": "process"},
        "engine": {"precision": "fp32", "zero_stage": zero},
        "stages": {"pretrain": sets | PRETRAIN, "swap_head": {}, "finetune": sets | FINETUNE},
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHANNELS)
def test_channels(
    kind: str, tmp_path: Path, preloaded_environment: Mapping[str, str], capsys: pytest.CaptureFixture[str]
):
    channels, shards = CHANNELS[kind], tmp_path / "shards"
    write(tmp_path / "images", kind)
    assert command("pack", tmp_path / "images", shards, "--channels", channels, "--samples-per-shard", 10) == 0
    manifest = json.loads((shards / "train/manifest.json").read_text())
    assert (manifest["channels"], manifest["dtype"]) == (channels, "float32" if kind == "npy" else "uint16")
    assert command("check", shards, "--decode") == 0
    chosen = "3,2,1" if channels > 1 else "1,1,1"
    assert command("show", shards, "--output", tmp_path / "show", "--channels", chosen) == 0
    assert command("show", shards, "--statistics", "--output", tmp_path / "statistics") == 0

    cases = {
        name: Case(tmp_path / name, shards, content=recipe(shards, kind, processes=processes, zero=zero))
        for name, processes, zero in (("whole", 1, 1), ("killed", 1, 1), ("two", 2, 1), ("zero2", 2, 2))
    }
    for name in ("whole", "two", "zero2"):
        ended = cases[name].start(how="run", environment=preloaded_environment).wait()
        assert ended.code == 0, ended.output
    killed = cases["killed"]
    ended = killed.start(how="run", faults=[killed.fault("kill_all", "between_steps", rank=0, step=7)]).wait()
    assert ended.code == -signal.SIGKILL, ended.output
    assert killed.start(how="run", environment=preloaded_environment).wait().code == 0
    whole = cases["whole"].curve()
    assert killed.curve() == whole
    for name in ("two", "zero2"):
        for (_, ours), (_, theirs) in zip(cases[name].curve(), whole, strict=True):
            for metric in ours.keys() & {"train/loss", "val/loss"}:
                assert ours[metric] == pytest.approx(theirs[metric], rel=1e-4), (name, metric)

    run = cases["whole"].run
    meta, model = build_from_saved(run / "finetune/model")
    found = mean_and_std(str(shards / "train"))
    assert found is not None and meta.mean == found.mean and meta.std == found.std and len(meta.mean) == channels
    image = tmp_path / "images/val/k1" / ("00.npy" if kind == "npy" else "00.png")
    capsys.readouterr()
    assert command("predict", run, image, "--json") == 0
    [shown] = json.loads(capsys.readouterr().out)
    pixels = np.load(image) if kind == "npy" else np.asarray(Image.open(image))[..., None].astype(np.float32) / 65535
    square = torch.nn.functional.interpolate(
        torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None], (24, 24), mode="bilinear", antialias=True
    )[0]
    normal = (square - torch.tensor(meta.mean)[:, None, None]) / torch.tensor(meta.std)[:, None, None]
    logits = model.eval()(normal[None].float())
    expected = logits.softmax(dim=1)[0]
    for each in shown["predictions"]:
        assert each["probability"] == pytest.approx(expected[each["index"]].item(), abs=1e-4)

    for form, ending in (
        ("npz", ".npz"),
        ("timm", ""),
        ("transformers", ""),
        ("onnx", ".onnx"),
        ("torch_export", ".pt2"),
    ):
        out = tmp_path / f"{form}{ending}"
        assert command("export", run, "--format", form, "--output", out) == 0
        capsys.readouterr()
        assert command("predict", out, image, "--json") == 0
        [again] = json.loads(capsys.readouterr().out)
        for each in again["predictions"]:
            assert each["probability"] == pytest.approx(expected[each["index"]].item(), abs=1e-4), form
    theirs = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    assert (theirs(normal[None].float()) - logits).abs().max() < 1e-5
    again, _ = import_file(tmp_path / "timm")
    assert again.model.channels == channels
    assert command("eval", run, shards / "val") == 0


def test_a_set_has_the_channels_that_it_was_packed_with(tmp_path: Path):
    write(tmp_path / "images", "npy")
    np.save(odd := io.BytesIO(), np.zeros((4, 4, 3), np.float32))
    (tmp_path / "images/train/k0/00.npy").write_bytes(odd.getvalue())
    pack(str(tmp_path / "images"), str(tmp_path / "out"), channels=5, unreadable="skip", report=lambda line: None)
    manifest = json.loads((tmp_path / "out/train/manifest.json").read_text())
    assert manifest["num_samples"] == 47 and manifest["channels"] == 5
    assert "5" in (tmp_path / "out/unreadable.jsonl").read_text()
