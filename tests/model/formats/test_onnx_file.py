"""`model.formats.onnx_file`: onnxruntime gives torch's logits for every batch size, and the record comes back."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from model.formats import onnx_file
from model.formats.onnx_file import open_onnx, write_onnx
from model.saved import atomic as replacing
from model.saved.model_folder import SavedModelMeta, build_described
from tests.model.formats.program_models import MODELS, described, randomised

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")


Small = tuple[SavedModelMeta, torch.nn.Module, bytes]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """A model, and its export's bytes."""
    meta = described(*MODELS["cls, mlp"])
    model = randomised(meta)
    path = tmp_path_factory.mktemp("exported") / "model.onnx"
    write_onnx(path, model, meta=meta)
    return meta, model, path.read_bytes()


@pytest.mark.parametrize("name", MODELS)
def test_onnxruntime_gives_the_same_logits(tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    meta = described(*MODELS[name])
    model = randomised(meta)
    write_onnx(tmp_path / "model.onnx", model, meta=meta)
    assert capfd.readouterr() == ("", "")
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    program = open_onnx(tmp_path / "model.onnx")
    assert program.meta == meta
    generator = torch.Generator().manual_seed(2)
    for batch in (1, 3, 5):
        images = torch.rand(batch, 3, meta.image_size, meta.image_size, generator=generator) * 2 - 1
        with torch.no_grad():
            expected = model(images)
        found = program(images)
        assert expected.std() > 0.01
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_the_file_is_for_others_too(small: Small) -> None:
    """Names and shapes of the ends, standard operators alone, and the record as plain JSON."""
    loaded = onnx.load_from_string(small[2])
    onnx.checker.check_model(loaded, full_check=True)
    assert {node.domain for node in loaded.graph.node} == {""}
    assert not loaded.functions
    ends = {}
    for end in (*loaded.graph.input, *loaded.graph.output):
        kind = end.type.tensor_type
        assert kind.elem_type == onnx.TensorProto.FLOAT
        ends[end.name] = [dim.dim_value or "any" for dim in kind.shape.dim]
    assert ends == {"images": ["any", 3, 16, 16], "logits": ["any", 7]}
    (property_,) = [each for each in loaded.metadata_props if each.key == "shardvit"]
    assert json.loads(property_.value)["mean"] == [0.4, 0.5, 0.6]


def test_weights_too_large_for_the_file_lie_beside_it(
    tmp_path: Path, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta, model, _ = small
    monkeypatch.setattr("torch.onnx._internal.exporter._onnx_program._LARGE_MODEL_THRESHOLD", 10_000)
    path = tmp_path / "model.onnx"
    path.write_text("an earlier one")
    write_onnx(path, model, meta=meta)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    images = torch.rand(3, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(open_onnx(path)(images), model(images), rtol=1e-5, atol=1e-5)
    (tmp_path / "model.onnx.data").unlink()
    with pytest.raises(ValueError, match=r"model\.onnx cannot be read as ONNX: .*model\.onnx\.data"):
        open_onnx(path)


def test_a_failing_write_leaves_the_earlier_file(tmp_path: Path, small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    meta, model, _ = small
    path = tmp_path / "model.onnx"
    path.write_text("an earlier one")

    def full_disk(*_args: object, **_kwargs: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(replacing.os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_onnx(path, model, meta=meta)
    assert path.read_text() == "an earlier one"
    assert [each.name for each in tmp_path.iterdir()] == ["model.onnx"]


def test_mistakes_are_one_sentence(tmp_path: Path, small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    meta, model, whole = small
    with pytest.raises(AssertionError, match="dropout"):
        write_onnx(tmp_path / "model.onnx", build_described(meta), meta=meta)
    path = tmp_path / "model.onnx"
    for content in (b"", whole[: len(whole) // 2], b"\xff\x00 no protobuf"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"model\.onnx cannot be read as ONNX"):
            open_onnx(path)
    stranger = onnx.load_from_string(whole)
    del stranger.metadata_props[:]
    onnx.save(stranger, path)
    with pytest.raises(ValueError, match=r"model\.onnx has no record of shardvit"):
        open_onnx(path)
    stranger.metadata_props.add(
        key="shardvit", value=json.dumps({**json.loads(meta.model_dump_json()), "head": "tail"})
    )
    onnx.save(stranger, path)
    with pytest.raises(ValueError, match=r"model\.onnx: its record of shardvit is broken \(head: Input should be"):
        open_onnx(path)
    monkeypatch.setattr(onnx_file, "find_spec", lambda name: None)
    for call in (lambda: write_onnx(path, model, meta=meta), lambda: open_onnx(path)):
        with pytest.raises(ValueError, match=r"ONNX needs onnx.*`pip install onnx.*with its extra onnx"):
            call()


def test_images_of_another_size_are_refused(small: Small) -> None:
    """The graph has the size in it: nothing is resized in silence."""
    session = onnxruntime.InferenceSession(small[2], providers=["CPUExecutionProvider"])
    with pytest.raises(Exception, match="Got: 20 Expected: 16"):
        session.run(None, {"images": np.zeros((1, 3, 20, 20), np.float32)})
