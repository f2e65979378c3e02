"""`model.formats.torch_export`: the program and the weights in it give the model's logits; nothing is unpickled."""

import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from model.formats.torch_export import read_torch_export, read_torch_export_meta, write_torch_export
from model.saved.model_folder import SavedModelMeta, build_described
from tests.model.formats.program_models import MODELS, described, randomised

WEIGHTS_CONFIG = "data/weights/model_weights_config.json"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[SavedModelMeta, torch.nn.Module, Path]:
    meta = described(*MODELS["cls, mlp"])
    model = randomised(meta)
    path = tmp_path_factory.mktemp("exported") / "model.pt2"
    write_torch_export(path, model, meta=meta)
    return meta, model, path


def rewritten(path: Path, out: Path, change: Callable[[str, bytes], bytes | None]) -> Path:
    """A copy with the entries, named from inside their folder, as `change` gives them; None leaves one out."""
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(out, "w") as copy:
        for name in archive.namelist():
            content = change(name.partition("/")[2], archive.read(name))
            if content is not None:
                copy.writestr(name, content)
    return out


@pytest.mark.parametrize("name", MODELS)
def test_program_and_weights_give_the_same_logits(tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    meta = described(*MODELS[name])
    model = randomised(meta)
    path = tmp_path / "model.pt2"
    write_torch_export(path, model, meta=meta)
    assert capfd.readouterr() == ("", "")
    assert [each.name for each in tmp_path.iterdir()] == ["model.pt2"]
    extra = {"shardvit.json": ""}
    program = torch.export.load(path, extra_files=extra).module()
    assert SavedModelMeta.model_validate_json(extra["shardvit.json"]) == read_torch_export_meta(path) == meta
    read_meta, state = read_torch_export(path)
    assert read_meta == meta
    rebuilt = build_described(meta)
    rebuilt.load_state_dict(state)
    generator = torch.Generator().manual_seed(2)
    for batch in (1, 3, 5):
        images = torch.rand(batch, 3, meta.image_size, meta.image_size, generator=generator) * 2 - 1
        with torch.no_grad():
            expected = model(images)
            assert expected.std() > 0.01
            assert (program(images) - expected).abs().max() <= 1e-5 * expected.abs().max()
            assert torch.equal(rebuilt.eval()(images), expected)


def test_pickles_in_the_file_are_not_executed(
    tmp_path: Path, exported: tuple[SavedModelMeta, torch.nn.Module, Path]
) -> None:
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


def test_weights_that_are_not_the_records_are_refused(
    tmp_path: Path, exported: tuple[SavedModelMeta, torch.nn.Module, Path]
) -> None:
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


def test_other_files_are_refused_in_words(
    tmp_path: Path, exported: tuple[SavedModelMeta, torch.nn.Module, Path]
) -> None:
    _, model, path = exported
    other = tmp_path / "other.pt2"
    whole = path.read_bytes()
    for content in (b"", b"no archive", whole[: len(whole) // 2]):
        other.write_bytes(content)
        for read in (read_torch_export, read_torch_export_meta):
            with pytest.raises(ValueError, match=r"other\.pt2 cannot be read as an export of shardvit"):
                read(other)
    zipfile.ZipFile(other, "w").close()
    with pytest.raises(ValueError, match=r"other\.pt2 has no record of shardvit"):
        read_torch_export_meta(other)
    program = torch.export.export(model, (torch.zeros(2, 3, 16, 16),))
    torch.export.save(program, other)
    with pytest.raises(ValueError, match=r"other\.pt2 has no record of shardvit"):
        read_torch_export(other)
    with pytest.raises(ValueError, match=r"nowhere\.pt2 cannot be read"):
        read_torch_export(tmp_path / "nowhere.pt2")


def test_a_flipped_byte_is_noticed_or_harmless(
    tmp_path: Path, exported: tuple[SavedModelMeta, torch.nn.Module, Path]
) -> None:
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


def test_mistakes_of_the_caller(tmp_path: Path, exported: tuple[SavedModelMeta, torch.nn.Module, Path]) -> None:
    meta, *_ = exported
    with pytest.raises(AssertionError, match="dropout"):
        write_torch_export(tmp_path / "model.pt2", build_described(meta), meta=meta)
    assert not any(tmp_path.iterdir())
