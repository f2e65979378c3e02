"""A stage continues with the data that it began with: what has changed is named, what was merely copied continues."""

import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shardvit.data_shards.checking import identity
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.reading.opening import open_shards
from shardvit.data_shards.sets.keeping import replace_manifest
from shardvit.data_shards.shards.manifest import read_manifest
from shardvit.data_shards.shards.shard_set import ShardSet
from shardvit.data_shards.shards.tar_index import read_index
from shardvit.data_shards.store.folders import LocalFolder
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.stage import stage_data
from shardvit.pipeline.stage.data_record import check_data, has_record, keep_data, kept_manifests
from shardvit.pipeline.stage.stage_data import open_data
from shardvit.pipeline.transfer.settings import open_few_shot
from tests.data_shards.written import write_manifest
from tests.small_recipe import small_recipe, small_stage


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of one size without compression, so that any two of them are equally long."""
    root = tmp_path_factory.mktemp("packed")
    draw = np.random.default_rng(0)
    for number in range(40):
        folder = root / "images" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (6, 6, 3), dtype=np.uint8)).save(folder / f"{number}.bmp")
    pack(str(root / "images"), root / "set", samples_per_shard=8, holdout=0.2, report=lambda line: None)
    return root / "set"


class Run:
    """A stage, and its data in a folder that a test may do with as it likes."""

    def __init__(self, root: Path, packed: Path) -> None:
        self.shards = root / "data"
        self.folder = RunFolder(runs_root=root / "runs", name="r")
        self.folder.path.mkdir(parents=True)
        shutil.copytree(packed, self.shards)

    def attempt(self, train: object = None, *, eval_set: object = None, **more: object) -> tuple[str, ...]:
        """Begin the stage, or continue with it; what was said."""
        sets = {"train": train or f"{self.shards}/train", "eval": eval_set or f"{self.shards}/val", **more}
        recipe = Recipe.model_validate(small_recipe(pretrain_=small_stage(global_batch_size=8, **sets)))
        kept = kept_manifests(self.folder, stages=["pretrain"])
        self.said: list[str] = []
        data = open_data(recipe, stage="pretrain", report=self.said.append, manifests=kept)
        self.few_shot = open_few_shot(recipe, stage="pretrain", report=self.said.append, manifests=data.manifests)
        self.images, self.held_out = data.train.num_samples, data.eval.num_samples
        record = check_data(self.folder, stage="pretrain", data=data)
        keep_data(self.folder, record, stage="pretrain")
        self.folder.update("pretrain", state="running", data_digest=record.digest)
        return record.notes

    @property
    def file(self) -> Path:
        return self.folder.stage("pretrain") / "data.json"

    def shard(self, number: int, *, split: str = "train") -> Path:
        return read_manifest(self.shards / split).shard_paths[number]

    def forget_times(self) -> None:
        """As if the files' times had been these when the stage began: those of inodes cannot be set back."""
        content = json.loads(self.file.read_text())
        for one in content["sets"].values():
            one["stamps"] = ["" for _ in one["stamps"]]
        self.file.write_text(json.dumps(content))


@pytest.fixture
def run(tmp_path: Path, packed: Path) -> Run:
    return Run(tmp_path, packed)


def swap_images(tar: Path, one: int, other: int) -> None:
    """Exchange two images; size and time of the tar stay."""
    before = tar.stat()
    content, index = bytearray(tar.read_bytes()), read_index(tar.with_suffix(".idx"))
    first, second = (slice(int(o), int(o) + int(index.image_size[0])) for o in index.image_offset[[one, other]])
    assert len(set(index.image_size.tolist())) == 1 and content[first] != content[second]
    content[first], content[second] = content[second], content[first]
    tar.write_bytes(content)
    os.utime(tar, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (tar.stat().st_size, tar.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("noticed_by", ["time of the inode", "samples"])
def test_two_images_swapped_in_a_tar_that_keeps_size_and_time(
    run: Run, monkeypatch: pytest.MonkeyPatch, split: str, noticed_by: str
):
    run.attempt()
    swap_images(run.shard(1 if split == "train" else 0, split=split), 2, 5)
    if noticed_by == "samples":
        run.forget_times()
    else:
        monkeypatch.setattr(identity, "MOST_SAMPLES", 0)
        forget_samples(run)
    name = {"train": r"training images: .*train-000001\.tar", "val": r"held-out images: .*val-000000\.tar"}[split]
    for _ in range(2):  # what was refused is refused again
        with pytest.raises(UserError, match=rf"pretrain was begun with other data .*{name} .*--restart pretrain"):
            run.attempt()
    swap_images(run.shard(1 if split == "train" else 0, split=split), 2, 5)
    run.attempt()  # brought back


def forget_samples(run: Run) -> None:
    content = json.loads(run.file.read_text())
    for one in content["sets"].values():
        one["spots"] = {}
    run.file.write_text(json.dumps(content))
    run.folder.update("pretrain", data_digest="")


def test_a_touch_a_copy_and_a_move_go_on(run: Run, tmp_path: Path):
    run.attempt()
    digest = run.folder.record("pretrain").data_digest
    for number in (0, 2):
        os.utime(run.shard(number), (1, 1))
    assert run.attempt() == ()
    shutil.copytree(run.shards, tmp_path / "copy")
    for path in (tmp_path / "copy").rglob("*.tar"):
        os.utime(path, (5, 5))
    shutil.rmtree(run.shards)
    run.shards = tmp_path / "copy"
    assert run.attempt() == ()
    assert run.folder.record("pretrain").data_digest == digest
    stamps = json.loads(run.file.read_text())["sets"]["training images"]["stamps"]
    assert all(stamp.startswith("5000000000 ") for stamp in stamps)  # the next attempt reads nothing again


def edit(folder: Path, change: Callable[[list[dict[str, object]]], None]) -> None:
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    change(content["shards"])
    content["num_samples"] = sum(shard["num_samples"] for shard in content["shards"])
    path.write_text(json.dumps(content))


def test_other_shards_their_order_their_number_and_other_classes_are_named(run: Run, packed: Path):
    run.attempt()

    def refused(message: str) -> None:
        with pytest.raises(UserError, match=rf"training images: .*{message}"):
            run.attempt()
        shutil.rmtree(run.shards)
        shutil.copytree(packed, run.shards)
        run.attempt()

    edit(run.shards / "train", lambda shards: shards.reverse())
    refused(r"another order \(.*train-00000\d\.tar")
    edit(run.shards / "train", lambda shards: shards.pop())
    refused(r"3 shards, not 4; .*train-000003\.tar is gone")
    edit(run.shards / "train", lambda shards: shards[2].update(sha256="0" * 64))
    refused(r"train-000002\.tar .*SHA-256")
    tar = run.shard(3)
    with tar.open("ab") as file:
        file.write(bytes(10_240))
    edit(run.shards / "train", lambda shards: shards[3].update(num_bytes=tar.stat().st_size))
    refused(r"train-000003\.tar has [\d,]+ bytes, not [\d,]+")
    for split in ("train", "val"):
        text = (run.shards / split / "manifest.json").read_text().replace("class1", "klasse1")
        (run.shards / split / "manifest.json").write_text(text)
    refused("its classes differ")


@pytest.mark.parametrize("portion", [{}, {"part": "rest", "hold_out": 0.25}])
def test_a_run_goes_on_with_the_manifest_that_it_began_with(run: Run, portion: dict[str, object]):
    train = [{"shards": f"{run.shards}/train", **portion}]
    run.attempt(train)
    digest, images, folder = (
        json.loads(run.file.read_text())["manifests"][f"{run.shards}/train"],
        run.images,
        run.shards,
    )
    manifest = read_manifest(folder / "train")
    assert digest == manifest.digest
    fewer = replace(manifest, shards=manifest.shards[:-1])  # as if the others had been appended
    write_manifest(fewer)
    with pytest.raises(UserError, match="shards, not"):
        run.attempt(train)
    write_manifest(manifest, file=f"manifest-{manifest.digest}.json")
    assert run.attempt(train) == () and run.images == images
    assert len(run.said) == 1 and digest in run.said[0]
    assert run.attempt(train) == () and run.images == images  # the record still names it
    run.file.unlink()
    run.folder.update("pretrain", state="new", data_digest="")
    run.attempt(train)  # a new run takes what there is
    assert not run.said and run.images < images


def test_both_parts_of_a_set_that_is_appended_to_meanwhile_are_of_one_manifest(
    run: Run, monkeypatch: pytest.MonkeyPatch
):
    place, manifest = f"{run.shards}/train", read_manifest(run.shards / "train")
    write_manifest(fewer := replace(manifest, shards=manifest.shards[:-1]))

    def append(*args: Any, **options: Any) -> ShardSet:
        opened = open_shards(*args, **options)
        replace_manifest(LocalFolder(run.shards / "train"), manifest)
        return opened

    monkeypatch.setattr(stage_data, "open_shards", append)
    parts = [{"shards": place, "part": part, "hold_out": 0.25} for part in ("rest", "held_out")]
    run.attempt(parts[:1], eval_set=parts[1])
    assert run.images + run.held_out == fewer.num_samples < manifest.num_samples


def test_few_shot_sets_stay_those_that_the_run_began_with(run: Run, packed: Path, tmp_path: Path):
    shutil.copytree(packed, other := tmp_path / "other")
    few_shot = [{"name": "other", "train": f"{other}/train", "eval": f"{other}/val", "shots": 1}]
    run.attempt(few_shot=few_shot)
    digests = [each.digest for each in (run.few_shot[0].train, run.few_shot[0].eval)]
    for split in ("train", "val"):
        manifest = read_manifest(other / split)
        more = replace(manifest, classes=(*manifest.classes, "new"), shards=manifest.shards[:1])
        replace_manifest(LocalFolder(other / split), more)
    for _ in range(2):
        run.attempt(few_shot=few_shot)
        assert [each.digest for each in (run.few_shot[0].train, run.few_shot[0].eval)] == digests
        assert len(run.said) == 2
    (other / "val" / f"manifest-{digests[1]}.json").unlink()
    with pytest.raises(UserError, match=r"few_shot\.0 .*classes .*try again when that is done"):
        run.attempt(few_shot=few_shot)
    assert "is not there" in run.said[-1]
    run.file.unlink()
    run.folder.update("pretrain", state="new", data_digest="")
    run.attempt(few_shot=few_shot)
    assert run.few_shot[0].train.num_classes == 3 and not run.said


@pytest.mark.parametrize("digest", ["../../x", 3, "0" * 31, None])
def test_a_record_names_no_other_file(run: Run, digest: object):
    run.attempt()
    content = json.loads(run.file.read_text())
    content["manifests"] = {f"{run.shards}/train": digest}
    run.file.write_text(json.dumps(content))
    assert kept_manifests(run.folder, stages=["pretrain"]) == {}
    run.attempt()
    content["manifests"] = [digest]
    run.file.write_text(json.dumps(content))
    assert kept_manifests(run.folder, stages=["pretrain"]) == {}


def test_each_set_of_a_mixture_counts(run: Run, packed: Path, tmp_path: Path):
    shutil.copytree(packed / "train", tmp_path / "second")
    mixture = [str(run.shards / "train"), str(tmp_path / "second")]
    run.attempt(mixture)
    run.attempt(mixture)
    swap_images(read_manifest(tmp_path / "second").shard_paths[3], 0, 1)
    with pytest.raises(UserError, match=r"second/.*000003\.tar "):
        run.attempt(mixture)


def test_tars_without_a_manifest(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tar = run.shard(2)
    for path in run.shards.rglob("*.json"):
        path.unlink()
    run.attempt()

    os.utime(tar, (1, 1))
    assert run.attempt() == ()
    swap_images(tar, 1, 2)
    with pytest.raises(UserError, match=r"train-000002\.tar has"):
        run.attempt()
    swap_images(tar, 1, 2)
    run.attempt()
    swap_images(tar, 1, 2)
    os.utime(tar, (2, 2))  # it is indexed again
    with pytest.raises(UserError, match=r"train-000002\.tar has"):
        run.attempt()
    swap_images(tar, 1, 2)
    members: list[tuple[str, bytes]] = []
    with tarfile.open(tar) as old:
        for member in old:
            stream = old.extractfile(member)
            assert stream is not None
            members.append((member.name, stream.read()))
    with tarfile.open(tar, "w") as new:
        for name, content in members[2:] + members[:2]:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            new.addfile(info, io.BytesIO(content))
    with pytest.raises(UserError, match=r"train-000002\.tar has other samples, or in another order"):
        run.attempt()


def test_a_run_from_before_gets_a_record_and_goes_on(run: Run):
    run.folder.update("pretrain", state="running")
    content = json.loads((run.folder.stage("pretrain") / "stage.json").read_text())
    del content["data_digest"]
    (run.folder.stage("pretrain") / "stage.json").write_text(json.dumps(content))
    assert not has_record(run.folder, stage="pretrain")
    run.attempt()
    assert has_record(run.folder, stage="pretrain")
    swap_images(run.shard(0), 0, 1)
    with pytest.raises(UserError, match=r"000000\.tar"):
        run.attempt()


@pytest.mark.parametrize("damage", ["gone", "{", "[" * 3000, "[]", '{"version": 1, "sets": 3}', "altered"])
def test_a_record_that_is_lost_or_altered_does_not_stop_the_same_data_nor_let_others_pass(run: Run, damage: str):
    run.attempt()
    whole = run.file.read_text()
    match damage:
        case "gone":
            run.file.unlink()
        case "altered":
            content = json.loads(whole)
            content["sets"]["training images"]["num_bytes"][0] += 1
            run.file.write_text(json.dumps(content))
        case _:
            run.file.write_text(damage)
    broken = run.file.read_bytes() if run.file.exists() else None
    run.attempt()
    assert json.loads(run.file.read_text()) == json.loads(whole)
    if broken is None:
        run.file.unlink()
    else:
        run.file.write_bytes(broken)
    swap_images(run.shard(0), 0, 1)
    with pytest.raises(UserError, match="gone or altered"):
        run.attempt()


def test_more_suspects_than_are_read_at_a_time_are_read_attempt_by_attempt(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(identity, "MOST_SUSPECT_BYTES", run.shard(0).stat().st_size)
    monkeypatch.setattr(identity, "MOST_SAMPLES", 0)
    run.attempt()
    for number in range(3):
        os.utime(run.shard(number), (1, 1))
    swap_images(run.shard(2), 0, 1)
    assert len(run.attempt()) == 1 and len(run.attempt()) == 1  # which say that not all was compared
    with pytest.raises(UserError, match=r"000002\.tar"):
        run.attempt()


def test_one_that_was_damaged_then_and_is_whole_now_goes_on(run: Run):
    tar = run.shard(1)
    whole = tar.read_bytes()
    content = bytearray(whole)
    content[int(read_index(tar.with_suffix(".idx")).label_offset[3])] = ord("x")  # a label that cannot be read
    tar.write_bytes(content)
    run.attempt()
    tar.write_bytes(whole)
    run.attempt()


def test_a_manifest_without_digests_is_known_by_names_sizes_and_samples(run: Run):
    manifest = read_manifest(run.shards / "train")
    shards = tuple(type(shard)(shard.file, shard.num_samples, shard.num_bytes, "") for shard in manifest.shards)
    write_manifest(type(manifest)(**{**vars(manifest), "shards": shards}))
    run.attempt()
    os.utime(run.shard(0), (1, 1))
    run.attempt()
    swap_images(run.shard(0), 0, 1)
    with pytest.raises(UserError, match=r"000000\.tar has other samples: 2 of the 8"):
        run.attempt()
