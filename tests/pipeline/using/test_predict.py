"""`pipeline.using.predict`: it says what evaluation computes, from every format, whatever else is in the folder."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.images.transforms import EvalTransform
from shardvit.data_shards.loading.assemble import Access
from shardvit.data_shards.loading.loader import EvalBatches, eval_batches
from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.packing.sources.folder import image_files
from shardvit.data_shards.reading.opening import open_shards
from shardvit.data_shards.shards.shard_set import ShardsSpec
from shardvit.data_shards.vocabulary import Normalisation
from shardvit.model.config import ModelConfig
from shardvit.model.formats.export import ExportFormat, export_model
from shardvit.model.saved.model_folder import SavedModelMeta, build_described, build_from_saved, save_model
from shardvit.model.self_supervised.masked_patch import build_masked_patch
from shardvit.pipeline.evaluation.evaluate_file import _task
from shardvit.pipeline.evaluation.truth import Truth
from shardvit.pipeline.stage.pixels import model_input
from shardvit.pipeline.transfer.features import FeatureStore
from shardvit.pipeline.using import predict as predict_module
from shardvit.pipeline.using.predict import Predictor, open_predictor, predict_images

CLASSES = ("barn", "city", "dog", "elk", "fox, red", "goat")
CPU = torch.device("cpu")


def meta_of(**changes: object) -> SavedModelMeta:
    model = ModelConfig(width=32, depth=2, heads=2, mlp_dim=128, patch_size=8)  # as every format says it
    usual = {"model": model, "image_size": 32, "num_classes": 6, "class_names": CLASSES, "head": "linear"}
    return SavedModelMeta.model_validate({**usual, **changes})


def save_random(folder: Path, meta: SavedModelMeta, *, seed: int = 0) -> torch.nn.Module:
    model = build_described(meta)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            around = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(around + 0.2 * torch.randn(parameter.shape, generator=generator))
    save_model(folder, model.state_dict(), meta=meta)
    return model.eval()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten crops of two photographs, none of them square, as JPEG and PNG, in two folders; and a text."""
    root = tmp_path_factory.mktemp("photos")
    draw = np.random.default_rng(0)
    for number, (name, photo) in enumerate(zip(("china", "flower"), load_sample_images().images, strict=True)):
        (root / name).mkdir()
        for part in range(5):
            top, left = draw.integers(0, 200), draw.integers(0, 300)
            height, width = draw.integers(40, 200, 2)
            crop = Image.fromarray(photo[top : top + height, left : left + width])
            crop.save(root / name / (f"{part}.png" if (number + part) % 3 == 0 else f"{part}.jpg"))
    (root / "notes.txt").write_text("no image")
    return root


@pytest.mark.parametrize(
    "meta",
    [
        meta_of(),
        meta_of(eval_protocol="big_vision", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
        meta_of(eval_protocol="timm", eval_crop_share=0.7, mean=(0.2, 0.3, 0.4)),
    ],
    ids=["vit", "big_vision", "timm"],
)
def test_predictions_are_what_evaluation_computes(tmp_path: Path, photos: Path, meta: SavedModelMeta) -> None:
    """The same images through shards, the loader and `model_input`, in the order of their bytes."""
    save_random(tmp_path / "model", meta)
    images = tmp_path / "images"
    for folder in ("china", "flower"):
        (images / folder).mkdir(parents=True)
        for path in (photos / folder).iterdir():
            (images / folder / path.name).write_bytes(path.read_bytes())
    pack(str(images), tmp_path / "shards", report=lambda _: None)
    shards = open_shards(ShardsSpec(str(tmp_path / "shards/train")))
    batches = EvalBatches(
        Access(shards),
        transform=EvalTransform(meta.image_size, protocol=meta.eval_protocol, crop_share=meta.eval_crop_share),
        rank=0,
        world_size=1,
        batch_size=4,
    )
    _, model = build_from_saved(tmp_path / "model")
    expected = []
    for batch in eval_batches(batches, workers=0):
        pixels = model_input(batch, device=CPU, dtype=torch.float32, normalisation=Normalisation(meta.mean, meta.std))
        with torch.no_grad():
            expected += model.eval()(pixels)[batch.counted].softmax(dim=1).tolist()

    predictor = open_predictor(tmp_path / "model", device="cpu")
    found = []
    for each in predict_images(predictor, image_files([images]), top=6, batch_images=3):
        assert each.fault is None
        row = [0.0] * 6
        for share in each.classes:
            assert share.name == CLASSES[share.index]
            row[share.index] = share.probability
        assert [share.probability for share in each.classes] == sorted(row, reverse=True)
        found.append(row)
    assert len(found) == 10
    assert np.ptp(np.array(found), axis=0).max() > 0.01  # the images are not all the same to it
    np.testing.assert_allclose(sorted(found), sorted(expected), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("to", "name"), [("onnx", "model.onnx"), ("npz", "model.npz")])
def test_a_file_of_another_format_gives_the_same_top_5(
    tmp_path: Path, photos: Path, to: ExportFormat, name: str
) -> None:
    """tests/model/formats has the other formats."""
    meta = meta_of(eval_protocol="big_vision", mean=(0.4, 0.5, 0.6))
    model = save_random(tmp_path / "model", meta)
    export_model(meta, model.state_dict(), to=to, out=tmp_path / name)
    predictor = open_predictor(tmp_path / name)
    assert predictor.meta == meta
    files = image_files([photos])
    expected = list(predict_images(open_predictor(tmp_path / "model"), files, top=5, batch_images=4))
    found = list(predict_images(predictor, files, top=5, batch_images=4))
    assert [each.image for each in found] == files
    for one, other in zip(found, expected, strict=True):
        assert [share.index for share in one.classes] == [share.index for share in other.classes]
        assert [share.name for share in one.classes] == [share.name for share in other.classes]
        assert [share.probability for share in one.classes] == pytest.approx(
            [share.probability for share in other.classes], rel=1e-5
        )


def test_timm_says_the_same(tmp_path: Path, photos: Path) -> None:
    """An oracle that shares no code: timm's loader, transform and model on a folder of ours."""
    import timm

    meta = meta_of(eval_protocol="timm", eval_crop_share=0.9)
    save_random(tmp_path / "model", meta)
    theirs = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(theirs))
    predictions = predict_images(open_predictor(tmp_path / "model"), image_files([photos]), top=6, batch_images=4)
    for prediction in predictions:
        with torch.no_grad(), Image.open(prediction.image) as image:
            expected = theirs(transform(image.convert("RGB"))[None]).softmax(dim=1)[0]
        for share in prediction.classes:  # Pillow resizes with other roundings than torch
            assert share.probability == pytest.approx(float(expected[share.index]), abs=0.01)


def test_damaged_images_are_named_and_the_others_predicted(tmp_path: Path, photos: Path) -> None:
    save_random(tmp_path / "model", meta_of())
    files = image_files([photos])
    predictor = open_predictor(tmp_path / "model")
    expected = list(predict_images(predictor, files, top=2, batch_images=16))
    (tmp_path / "cut.jpg").write_bytes((photos / "china/1.jpg").read_bytes()[:-200])
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "empty.jpg").write_bytes(b"")
    gone = tmp_path / "gone.jpg"
    bad = [tmp_path / "cut.jpg", tmp_path / "text.png", tmp_path / "empty.jpg", gone, tmp_path]
    mixed = [bad[0], bad[1], *files[:3], bad[2], *files[3:], bad[3], bad[4]]
    for batch_images in (1, 2, 16):  # with batches that have none, some and only damaged ones
        found = list(predict_images(predictor, mixed, top=2, batch_images=batch_images))
        assert [each.image for each in found] == mixed
        assert [each.image for each in found if each.fault] == bad
        assert all(not each.classes for each in found if each.fault)
        for one, other in zip([each for each in found if not each.fault], expected, strict=True):
            assert one.image == other.image
            for mine, theirs in zip(one.classes, other.classes, strict=True):
                assert mine.index == theirs.index
                assert mine.probability == pytest.approx(theirs.probability, rel=1e-5)
    faults = {each.image: each.fault for each in found}
    assert "not a readable image" in str(faults[bad[1]])
    assert faults[gone] == "cannot be read (No such file or directory)"


def test_only_some_images_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more than two batches are decoded beyond what was handed out, and nothing continues once nobody asks."""
    lock, decoded = threading.Lock(), 0

    def square(image: Path, transform: EvalTransform, limit: object) -> np.ndarray:
        nonlocal decoded
        with lock:
            decoded += 1
        return np.zeros((32, 32, 3), np.uint8)

    def endless() -> Iterator[Path]:
        while True:
            yield Path("image.jpg")

    monkeypatch.setattr(predict_module, "_square", square)
    predictor = Predictor(meta_of(), lambda images: torch.zeros(len(images), 6), device=CPU, origin="")
    predictions = predict_images(predictor, endless(), top=1, batch_images=4)
    for handed_out in range(1, 200):
        next(predictions)
        assert decoded <= handed_out + 2 * 4
    before = threading.active_count()
    predictions.close()
    assert threading.active_count() < before


def test_the_sigmoid_loss_gives_each_class_its_own_probability(tmp_path: Path, photos: Path) -> None:
    answers = []
    for loss in ("softmax", "sigmoid"):
        save_random(tmp_path / loss, meta_of(loss=loss))
        predictor = open_predictor(tmp_path / loss, device="cpu")
        answers.append(next(predict_images(predictor, image_files([photos]), top=6, batch_images=1)).classes)
    softmax, sigmoid = answers
    assert [each.name for each in softmax] == [each.name for each in sigmoid]
    assert sum(each.probability for each in softmax) == pytest.approx(1)
    odds = [each.probability / (1 - each.probability) for each in sigmoid]  # exp(logit)
    assert [each / sum(odds) for each in odds] == pytest.approx([each.probability for each in softmax], rel=1e-4)
    assert sum(each.probability for each in sigmoid) != pytest.approx(1, abs=0.01)


def test_equally_probable_classes_come_in_their_order() -> None:
    predictor = Predictor(meta_of(), lambda images: torch.zeros(len(images), 6), device=CPU, origin="")
    rows = [np.zeros((32, 32, 3), np.uint8)]
    (classes,) = predict_module._most_probable(predictor, rows, top=9)
    assert [share.index for share in classes] == list(range(6))
    assert [share.probability for share in classes] == pytest.approx([1 / 6] * 6)


def test_weights_that_give_no_numbers_are_refused(tmp_path: Path, photos: Path) -> None:
    meta = meta_of()
    model = save_random(tmp_path / "model", meta)
    state = model.state_dict()
    state["head.bias"] = torch.full((6,), torch.nan)
    save_model(tmp_path / "model", state, meta=meta)
    with pytest.raises(UserError, match=r"model: the model gives logits that are not finite"):
        list(predict_images(open_predictor(tmp_path / "model"), image_files([photos]), top=1, batch_images=4))


def test_a_model_without_classes_is_refused(tmp_path: Path) -> None:
    meta = meta_of(head="masked_patch", num_classes=512, class_names=tuple(map(str, range(512))))
    model = build_masked_patch(meta.model, image_size=32)
    save_model(tmp_path / "model", model.state_dict(), meta=meta)
    with pytest.raises(UserError, match="model was trained to fill in masked patches and knows no classes"):
        open_predictor(tmp_path / "model")


def test_wrong_models_and_devices_are_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"broken")
    (tmp_path / "broken.pt2").write_bytes(b"broken")
    for name in ("broken.onnx", "broken.pt2"):
        with pytest.raises(UserError, match=name):
            open_predictor(tmp_path / name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    save_random(tmp_path / "model", meta_of())
    with pytest.raises(UserError, match="--device cuda: torch sees no CUDA device here"):
        open_predictor(tmp_path / "model", device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match=r"--device cuda: .*broken\.onnx is ONNX, which runs on the CPU"):
        open_predictor(tmp_path / "broken.onnx", device="cuda")


def test_folders_are_walked_in_order(photos: Path) -> None:
    found = image_files([photos / "flower", photos / "china/1.jpg", photos])
    flower = sorted(path for path in photos.rglob("*.*") if path.parent.name == "flower")
    china = sorted(path for path in photos.rglob("*.*") if path.parent.name == "china")
    assert found == [*flower, photos / "china/1.jpg", *china, *flower]
    assert image_files([photos / "notes.txt"]) == [photos / "notes.txt"]  # its content will tell


def test_float32_is_ieees_on_a_gpu_too(tmp_path: Path) -> None:
    """A hybrid's and a ResNet's convolutions as well, which torch leaves to TF32 unless told otherwise."""
    found: list[tuple[bool, bool]] = []

    class Noting(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            found.append((bool(torch.backends.cuda.matmul.allow_tf32), torch.backends.cudnn.allow_tf32))
            return images.mean(dim=(2, 3))

    predictor = Predictor(meta_of(), Noting(), device=torch.device("cpu"), origin="a test")
    truth = Truth(("a", "b", "c"), None, (0, 1, 2), "single", "shards")
    images = torch.zeros(2, 3, 8, 8)
    for forward in (
        predictor,
        _task(predictor, truth).engine.predict,
        FeatureStore(predictor, folder=tmp_path)._forward,
    ):
        forward(images)
    assert found == [(False, False)] * 3
    assert torch.backends.cudnn.allow_tf32  # torch's own default, for whoever calls us


@pytest.mark.gpu
def test_a_gpu_says_the_same(tmp_path: Path, photos: Path) -> None:
    save_random(tmp_path / "model", meta_of())
    files = image_files([photos])
    on_cpu = predict_images(open_predictor(tmp_path / "model", device="cpu"), files, top=6, batch_images=4)
    on_gpu = predict_images(open_predictor(tmp_path / "model", device="cuda"), files, top=6, batch_images=4)
    for one, other in zip(on_cpu, on_gpu, strict=True):
        shares = {share.index: share.probability for share in other.classes}
        assert all(share.probability == pytest.approx(shares[share.index], abs=1e-4) for share in one.classes)
