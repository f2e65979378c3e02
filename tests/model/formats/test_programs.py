"""`model.formats.programs`: any batch size gets the model's logits, the record comes back, nothing is unpickled."""

import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from shardvit.model.config import ModelConfig
from shardvit.model.formats import programs
from shardvit.model.formats.programs import open_onnx, read_torch_export, write_onnx, write_torch_export
from shardvit.model.saved import atomic as replacing
from shardvit.model.saved.model_folder import SavedModelMeta, build_described
from tests.model.comparing import randomise

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

WEIGHTS_CONFIG = "data/weights/model_weights_config.json"
SIZES = {"width": 32, "depth": 1, "heads": 4, "patch_size": 4}
MODELS = {
    "cls, mlp": (ModelConfig(**SIZES | {"depth": 2}), 16, "mlp"),
    "gap, erf, sincos": (
        ModelConfig(**SIZES, pool="gap", gelu="erf", layer_norm_eps=1e-12, position="sincos_2d"),
        16,
        "linear",
    ),
    "map, layer scale, 2-D at every layer": (
        ModelConfig(**SIZES, pool="map", layer_scale=0.5, position="learned_2d", position_at="every_layer"),
        16,
        "linear",
    ),
    "shared by every layer": (ModelConfig(**SIZES | {"depth": 2}, position_at="every_layer_shared"), 16, "linear"),
    "relative": (ModelConfig(**SIZES, position="relative"), 16, "linear"),
    "registers, mixed, SwiGLU": (
        ModelConfig(**SIZES, registers=2, rope="mixed", mlp="swiglu_norm", norm="rms", qk_norm="per_head"),
        16,
        "linear",
    ),
    "DINOv3": (ModelConfig(**SIZES, registers=2, rope="dinov3", pool="gap", class_token="kept"), 16, "linear"),
    "hybrid": (ModelConfig(**{**SIZES, "patch_size": 8}, resnet_layers=(1, 2)), 16, "linear"),
    "resnet": (ModelConfig(resnet_layers=(1, 1)), 32, "linear"),
}
Small = tuple[SavedModelMeta, torch.nn.Module, bytes]
Exported = tuple[SavedModelMeta, torch.nn.Module, Path]


def randomised(name: str) -> tuple[SavedModelMeta, torch.nn.Module]:
    """A model of this kind with every parameter drawn, the head and the norms' scales too."""
    config, image_size, head = MODELS[name]
    meta = SavedModelMeta(
        model=config,
        image_size=image_size,
        num_classes=7,
        class_names=tuple(f"class {i} \N{LATIN SMALL LETTER E WITH ACUTE}" for i in range(7)),
        head=head,
        mean=(0.4, 0.5, 0.6),
        eval_protocol="timm",
        eval_crop_share=0.8,
    )
    return meta, randomise(build_described(meta)).eval()


def gives_its_logits(program: Callable[[torch.Tensor], torch.Tensor], model: torch.nn.Module, size: int) -> bool:
    generator = torch.Generator().manual_seed(2)
    for batch in (1, 3, 5):
        images = torch.rand(batch, 3, size, size, generator=generator) * 2 - 1
        with torch.no_grad():
            expected = model(images)
            assert expected.std() > 0.01
            assert (program(images) - expected).abs().max() <= 1e-5 * expected.abs().max()
    return True


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """A model, and the bytes of its ONNX file."""
    meta, model = randomised("cls, mlp")
    path = tmp_path_factory.mktemp("exported") / "model.onnx"
    write_onnx(path, model, meta=meta)
    return meta, model, path.read_bytes()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    meta, model = randomised("cls, mlp")
    path = tmp_path_factory.mktemp("exported") / "model.pt2"
    write_torch_export(path, model, meta=meta)
    return meta, model, path


@pytest.mark.parametrize("name", MODELS)
def test_programs_give_the_models_logits(tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    meta, model = randomised(name)
    write_onnx(tmp_path / "model.onnx", model, meta=meta)
    write_torch_export(tmp_path / "model.pt2", model, meta=meta)
    assert capfd.readouterr() == ("", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.pt2"]
    program = open_onnx(tmp_path / "model.onnx")
    assert program.meta == meta and gives_its_logits(program, model, meta.image_size)
    extra = {"shardvit.json": ""}
    exported = torch.export.load(tmp_path / "model.pt2", extra_files=extra).module()
    assert gives_its_logits(exported, model, meta.image_size)
    read, state = read_torch_export(tmp_path / "model.pt2")
    assert SavedModelMeta.model_validate_json(extra["shardvit.json"]) == read == meta
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


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
    assert not any(tmp_path.iterdir())
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
    with pytest.raises(ValueError, match=r"model\.onnx: its record of shardvit is broken \(head.*: Input should be"):
        open_onnx(path)
    monkeypatch.setattr(programs, "find_spec", lambda name: None)
    for call in (lambda: write_onnx(path, model, meta=meta), lambda: open_onnx(path)):
        with pytest.raises(ValueError, match=r"ONNX needs onnx.*`pip install onnx.*with its extra onnx"):
            call()


def test_images_of_another_size_are_refused(small: Small) -> None:
    """The graph has the size in it: nothing is resized in silence."""
    session = onnxruntime.InferenceSession(small[2], providers=["CPUExecutionProvider"])
    with pytest.raises(Exception, match="Got: 20 Expected: 16"):
        session.run(None, {"images": np.zeros((1, 3, 20, 20), np.float32)})


def rewritten(path: Path, out: Path, change: Callable[[str, bytes], bytes | None]) -> Path:
    """A copy with the entries, named from inside their folder, as `change` gives them; None leaves one out."""
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(out, "w") as copy:
        for name in archive.namelist():
            content = change(name.partition("/")[2], archive.read(name))
            if content is not None:
                copy.writestr(name, content)
    return out


def test_pickles_in_the_file_are_not_executed(tmp_path: Path, exported: Exported) -> None:
    """torch.export.load unpickles the sample inputs and what the file says is pickled; we do not."""
    meta, _, path = exported
    trace = tmp_path / "executed"
    payload = pickle.dumps(_Touch(trace))

    def in_samples(name: str, content: bytes) -> bytes:
        return payload if name.startswith("data/sample_inputs/") else content

    assert read_torch_export(rewritten(path, tmp_path / "a.pt2", in_samples))[0] == meta

    def in_weights(name: str, content: bytes) -> bytes:
        if name == WEIGHTS_CONFIG:
            return content.replace(b'"use_pickle": false', b'"use_pickle": true')
        return payload if name.startswith("data/weights/") else content

    with pytest.raises(ValueError, match=r"b\.pt2 cannot be read as an export of shardvit: a weight is pickled"):
        read_torch_export(rewritten(path, tmp_path / "b.pt2", in_weights))
    assert not trace.exists()
    pickle.loads(payload)  # the payload would have worked
    assert trace.exists()


class _Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def test_weights_that_are_not_the_records_are_refused(tmp_path: Path, exported: Exported) -> None:
    meta, _, path = exported

    def changed_config(change: Callable[[dict], object]) -> Path:
        def apply(name: str, content: bytes) -> bytes:
            if name != WEIGHTS_CONFIG:
                return content
            config = json.loads(content)
            change(config["config"])
            return json.dumps(config).encode()

        return rewritten(path, tmp_path / "model.pt2", apply)

    with pytest.raises(ValueError, match=r"weight 'cls_token' is missing"):
        read_torch_export(changed_config(lambda config: config.pop("cls_token")))
    with pytest.raises(ValueError, match=r"weight 'aaa' is not one of its model"):
        read_torch_export(changed_config(lambda config: config.update(aaa=config["cls_token"])))
    with pytest.raises(ValueError, match=r"weight_\d+ has the shape \(1, 1, 32\) instead of \(1, 17, 32\)"):
        read_torch_export(changed_config(lambda config: config.update(pos_embed=config["cls_token"])))
    # sizes that do not fit the bytes
    with pytest.raises(ValueError, match=r"cannot be read as an export of shardvit: .*out of bounds"):
        read_torch_export(
            changed_config(lambda config: config["pos_embed"].update(path_name=config["cls_token"]["path_name"]))
        )

    def of_another_model(name: str, content: bytes) -> bytes:
        return content.replace(b'"depth":2', b'"depth":3') if name == "extra/shardvit.json" else content

    with pytest.raises(ValueError, match=r"weight 'blocks\.2\.attn\.proj\.bias' is missing"):
        read_torch_export(rewritten(path, tmp_path / "model.pt2", of_another_model))
    assert meta.model.depth == 2


def test_other_files_are_refused_in_words(tmp_path: Path, exported: Exported) -> None:
    _, model, path = exported
    other = tmp_path / "other.pt2"
    whole = path.read_bytes()
    for content in (b"", b"no archive", whole[: len(whole) // 2]):
        other.write_bytes(content)
        with pytest.raises(ValueError, match=r"other\.pt2 cannot be read as an export of shardvit"):
            read_torch_export(other)
    zipfile.ZipFile(other, "w").close()
    with pytest.raises(ValueError, match=r"other\.pt2 has no record of shardvit"):
        read_torch_export(other)
    program = torch.export.export(model, (torch.zeros(2, 3, 16, 16),))
    torch.export.save(program, other)
    with pytest.raises(ValueError, match=r"other\.pt2 has no record of shardvit"):
        read_torch_export(other)
    with pytest.raises(ValueError, match=r"nowhere\.pt2 cannot be read"):
        read_torch_export(tmp_path / "nowhere.pt2")


def test_a_flipped_byte_is_noticed_or_harmless(tmp_path: Path, exported: Exported) -> None:
    """Each entry has a checksum: the weights come back as they were, or the file is refused in words."""
    _, model, path = exported
    whole, expected = path.read_bytes(), model.state_dict()
    other = tmp_path / "other.pt2"
    refused = 0
    for position in range(0, len(whole), len(whole) // 40):
        other.write_bytes(whole[:position] + bytes([whole[position] ^ 0x55]) + whole[position + 1 :])
        try:
            _, state = read_torch_export(other)
        except ValueError:
            refused += 1
        else:
            assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert refused >= 10
