"""A set that images are appended to: it has all of both, what was there stays as it was, and nothing is half there."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from shardvit.data_shards.checking.check import check
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.packing import pack as packing
from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.reading.opening import open_shards
from shardvit.data_shards.sets.statistics_summary import summarise
from shardvit.data_shards.shards.manifest import read_manifest
from shardvit.data_shards.shards.shard_set import ShardsSpec
from shardvit.data_shards.store import folders
from shardvit.data_shards.store.folders import LocalFolder
from shardvit.data_shards.store.ranges import list_url, read_whole
from tests.data_shards.http_server import FaultServer
from tests.data_shards.packing.folders import by_index, write_folder

OPTIONS: dict[str, Any] = {"samples_per_shard": 5}


def quiet(source: Path | str, out: Path | str, **options: Any) -> list[str]:
    lines: list[str] = []
    pack(str(source), out, report=lines.append, **OPTIONS, **options)  # type: ignore[arg-type]
    return lines


def append(source: Path | str, out: Path | str, **options: Any) -> list[str]:
    return quiet(source, out, existing="append", **options)


class Sources:
    def __init__(self, root: Path) -> None:
        self.owner = write_folder(root / "one", {"bee": 12, "dog": 9})
        self.owner |= write_folder(root / "two", {"ant": 7, "dog": 8})
        self.one, self.two, self.set = root / "one", root / "two", root / "set"
        quiet(self.one, self.set, holdout=0.25)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    return Sources(tmp_path_factory.mktemp("live"))


@pytest.fixture
def out(sources: Sources, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sources.set, tmp_path / "set"))


def named(out: Path, *splits: str) -> dict[bytes, str]:
    """Each image's class; AssertionError if one is there twice."""
    found: dict[bytes, str] = {}
    keys: set[str] = set()
    for split in splits or ("train", "val"):
        manifest = read_manifest(out / split)
        for key, image, label in by_index(manifest):
            assert image not in found and key not in keys
            found[image] = manifest.classes[label]
            keys.add(key)
    return found


def content(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def test_it_has_all_of_both_and_what_was_there_stays(sources: Sources, out: Path):
    before, tars = {split: open_shards(str(out / split)) for split in ("train", "val")}, content(out)
    lines = append(sources.two, out, holdout=0.25)
    assert named(out) == sources.owner
    assert any("1 new class" in line and "ant" in line for line in lines)
    after = content(out)
    assert all(after[name] == tars[name] for name in tars if name.endswith((".tar", ".idx")))
    for split, old in before.items():
        new = open_shards(str(out / split))
        assert new.classes == ("bee", "dog", "ant") and new.num_samples > old.num_samples
        assert [each.name for each in new.shards][: len(old.shards)] == [each.name for each in old.shards]
        again = open_shards(ShardsSpec(str(out / split), digest=old.digest), report=lambda line: None)
        assert (again.digest, again.classes, again.num_samples) == (old.digest, old.classes, old.num_samples)
    result = check(ShardsSpec(str(out)), report=lambda line: None)
    assert result.exit_code == 0, result.findings
    assert not list(out.parent.glob(".*")) and not (out / ".packing").exists()


def test_a_source_without_val_leaves_vals_samples_but_gives_it_the_classes(sources: Sources, out: Path):
    held_out = named(out, "val")
    append(sources.two, out)
    assert named(out, "val") == held_out and read_manifest(out / "val").classes == ("bee", "dog", "ant")
    assert named(out) == sources.owner


def test_again_and_again(sources: Sources, out: Path):
    append(sources.two, out)
    after = content(out)
    for command in (lambda: append(sources.two, out), lambda: quiet(sources.one, out, holdout=0.25)):
        assert any("was packed before" in line for line in command())
        assert content(out) == after
    assert any("was packed before" in line for line in append(sources.one, out, holdout=0.25))
    with pytest.raises(UserError, match="another request"):
        quiet(sources.one, out, holdout=0.5)
    more = write_folder(sources.one.parent / "three", {"dog": 6})
    append(sources.one.parent / "three", out)
    assert named(out) == sources.owner | more
    assert (
        read_manifest(out / "train").shards[-1].file
        == f"set-train-{len(read_manifest(out / 'train').shards) - 1:06d}.tar"
    )


def test_only_what_the_set_does_not_have(sources: Sources, out: Path, tmp_path: Path):
    shutil.copytree(sources.one, tmp_path / "both")
    shutil.copytree(sources.two, tmp_path / "both", dirs_exist_ok=True)
    for path in sources.one.glob("dog/*"):
        shutil.copy(path, tmp_path / "both" / "dog" / f"again {path.name}")
    lines = append(tmp_path / "both", out, duplicates="drop")
    assert named(out) == sources.owner
    assert any("duplicates" in line for line in lines)


def test_nothing_new_changes_nothing(sources: Sources, out: Path, tmp_path: Path):
    shutil.copytree(sources.one, tmp_path / "copy")
    before = content(out)
    lines = append(tmp_path / "copy", out, duplicates="drop")
    assert content(out) == before and any("21 images left out" in line for line in lines)
    assert not list(out.parent.glob(".*"))


def test_a_part_that_has_nothing_new_is_left_out(sources: Sources, out: Path, tmp_path: Path):
    before = named(out)
    more = write_folder(tmp_path / "more" / "train", {"bee": 3, "dog": 3})
    shutil.copytree(sources.one, tmp_path / "more" / "val")
    append(tmp_path / "more", out, duplicates="drop")
    assert named(out) == before | more


def test_lists_are_where_the_report_says(sources: Sources, out: Path, tmp_path: Path):
    write_folder(tmp_path / "more", {"bee": 3})
    shutil.copy(tmp_path / "more/bee/im. 0.png", tmp_path / "more/bee/copy.png")
    (line,) = [line for line in append(tmp_path / "more", out, doubtful_classes="keep") if "duplicates.jsonl" in line]
    assert Path(line.rpartition("see ")[2]).read_text().count("copy.png") == 1


def test_copies_are_told_where_they_are_kept(sources: Sources, out: Path, tmp_path: Path):
    shutil.copytree(sources.one, tmp_path / "copy")
    lines = append(tmp_path / "copy", out)
    assert any("21 of them" in line and "--drop-duplicates" in line for line in lines)


def test_in_steps_as_a_batch_system_takes_them(sources: Sources, out: Path, tmp_path: Path):
    whole = Path(shutil.copytree(out, tmp_path / "whole" / "set"))
    append(sources.two, whole)
    for step in (
        {"step": "plan"},
        {"step": "shards", "task": 1, "of": 2},
        {"step": "shards", "of": 2},
        {"step": "finish"},
    ):
        append(sources.two, out, **step)
    assert content(out) == content(whole)
    assert any("was packed before" in line for line in append(sources.two, out, step="plan"))


def test_what_was_planned_before_another_was_appended_is_planned_again(sources: Sources, out: Path, tmp_path: Path):
    append(sources.two, out, step="plan")
    append(sources.two, out, step="shards")
    shutil.move(out.parent / ".set.packing", tmp_path / "aside")
    more = write_folder(sources.one.parent / "five", {"dog": 5})
    append(sources.one.parent / "five", out)
    shutil.move(tmp_path / "aside", out.parent / ".set.packing")
    with pytest.raises(UserError, match="appended since"):
        append(sources.two, out, step="finish")
    append(sources.two, out)
    assert named(out) == sources.owner | more


def test_statistics_are_those_of_all(sources: Sources, out: Path):
    append(sources.two, out)
    manifest = read_manifest(out / "train")
    rows = pq.read_table(out / "train" / "statistics.parquet").to_pylist()
    assert [row["key"] for row in rows] == [key for key, _, _ in by_index(manifest)]
    assert [row["labels"] for row in rows] == [[label] for _, _, label in by_index(manifest)]
    sizes = [shard.num_samples for shard in manifest.shards]
    assert [(row["shard"], row["row"]) for row in rows] == [
        (at, row) for at, size in enumerate(sizes) for row in range(size)
    ]


def test_unreadable_images_of_all_packings_are_counted_once(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for source in (sources.one, sources.two):
        shutil.copytree(source, tmp_path / source.name)
        (tmp_path / source.name / "dog" / "broken.png").write_bytes(b"no image")
    quiet(tmp_path / "one", tmp_path / "set", unreadable="skip")
    real = folders.LocalFolder.write

    def write(self: folders.LocalFolder, name: str, data: bytes) -> None:
        if name == "pack.json":  # the table is written already
            raise KeyboardInterrupt
        real(self, name, data)

    with monkeypatch.context() as patch:
        patch.setattr(folders.LocalFolder, "write", write)
        with pytest.raises(KeyboardInterrupt):
            append(tmp_path / "two", tmp_path / "set", unreadable="skip")
    append(tmp_path / "two", tmp_path / "set", unreadable="skip")
    assert summarise(str(tmp_path / "set" / "train")).unreadable == 2


@pytest.mark.parametrize("damage", ["nothing", "no set", "another kind", "name"])
def test_what_cannot_be_appended_to_is_refused(sources: Sources, out: Path, tmp_path: Path, damage: str):
    before = content(out)
    if damage == "nothing":
        with pytest.raises(UserError, match="append"):
            append(sources.two, tmp_path / "none")
        assert not (tmp_path / "none").exists()
    elif damage == "no set":
        (tmp_path / "x").mkdir()
        (tmp_path / "x" / "y").write_text("z")
        with pytest.raises(UserError, match="append"):
            append(sources.two, tmp_path / "x")
    elif damage == "name":
        with pytest.raises(UserError, match="name"):
            append(sources.two, out, name="other")
    assert content(out) == before


def test_killed_anywhere_the_same_command_goes_on(
    sources: Sources, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """At each write or put, before and after it; meanwhile whoever reads has the set of before, or all of it."""
    whole = Path(shutil.copytree(out, tmp_path / "whole" / "set"))
    append(sources.two, whole, holdout=0.25)
    old, new = open_shards(str(out / "train")).digest, open_shards(str(whole / "train")).digest

    class Killed(BaseException):
        pass

    def dying(real: Callable[..., None], at: int, when: str) -> Callable[..., None]:
        def wrapped(*args: Any) -> None:
            nonlocal count
            count += 1
            if count > at:
                if when == "after" and count == at + 1:
                    real(*args)
                raise Killed
            real(*args)

        return wrapped

    at, ended = 0, False
    while not ended:
        for when in ("before", "after"):
            place = Path(shutil.copytree(sources.set, tmp_path / f"{at}-{when}" / "set"))
            count = 0
            with monkeypatch.context() as patch:
                for name in ("write", "put"):
                    patch.setattr(folders.LocalFolder, name, dying(getattr(folders.LocalFolder, name), at, when))
                try:
                    append(sources.two, place, holdout=0.25)
                    ended = True
                except Killed:
                    pass
            assert open_shards(str(place / "train")).digest in (old, new)
            assert open_shards(str(place / "val")).num_samples > 0
            append(sources.two, place, holdout=0.25)
            assert content(place) == content(whole), (at, when)
        at += 1
    assert at > 5


def test_another_source_after_a_kill_does_not_lose_what_was_complete(
    sources: Sources, out: Path, monkeypatch: pytest.MonkeyPatch
):
    """Killed after the last manifest, before anything else is tidied up."""
    real = folders.LocalFolder.write

    def write(self: folders.LocalFolder, name: str, data: bytes) -> None:
        real(self, name, data)
        if self.path.name == "train" and name == "manifest.json":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(folders.LocalFolder, "write", write)
        with pytest.raises(KeyboardInterrupt):
            append(sources.two, out)
    more = write_folder(sources.one.parent / "four", {"dog": 5})
    append(sources.one.parent / "four", out)
    assert named(out) == sources.owner | more


def test_in_a_bucket(sources: Sources, out: Path, s3: FaultServer):
    quiet(sources.one, "s3://shards/set", holdout=0.25)
    old = open_shards("s3://shards/set/train")
    append(sources.two, "s3://shards/set", holdout=0.25)
    append(sources.two, out, holdout=0.25)
    for split in ("train", "val"):
        assert open_shards(f"s3://shards/set/{split}").digest == open_shards(str(out / split)).digest
    assert open_shards(f"s3://shards/set/train/manifest-{old.digest}.json").digest == old.digest
    assert any("was packed before" in line for line in append(sources.two, "s3://shards/set", holdout=0.25))


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[Path | str], Path]:
    """Bring a set of a bucket here."""

    def copy(out: Path | str) -> Path:
        if isinstance(out, Path):
            return out
        folder = LocalFolder(tmp_path / "copied")
        for name, *_ in list_url(out):
            folder.write(name, read_whole(f"{out}/{name}"))
        return folder.path

    return copy


@pytest.mark.parametrize("place", ["here", "in a bucket"])
def test_what_is_appended_while_another_lists_its_source_stays(
    sources: Sources,
    out: Path,
    tmp_path: Path,
    s3: FaultServer,
    copied: Callable[[Path | str], Path],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
):
    """The other one opened the set before this one was done."""
    target = out if place == "here" else "s3://shards/set"
    if place != "here":
        quiet(sources.one, target, holdout=0.25)
    more = write_folder(tmp_path / "late", {"dog": 5})
    real = packing.make_plan

    def listed(*args: Any, **options: Any) -> object:
        monkeypatch.setattr(packing, "make_plan", real)
        append(sources.two, target, holdout=0.25)
        return real(*args, **options)

    monkeypatch.setattr(packing, "make_plan", listed)
    with pytest.raises(UserError, match="same command again"):
        append(tmp_path / "late", target)
    assert named(copied(target)) == sources.owner
    append(tmp_path / "late", target)
    assert named(copied(target)) == sources.owner | more


def test_of_two_at_once_in_a_bucket_the_second_is_refused(
    sources: Sources, s3: FaultServer, copied: Callable[[Path | str], Path], monkeypatch: pytest.MonkeyPatch
):
    """Before the first one's plan is written; and repeating what was packed takes nothing away from it."""
    target = "s3://shards/set"
    quiet(sources.one, target, holdout=0.25)
    real = packing.write_table

    def meanwhile(*args: Any, **options: Any) -> object:
        monkeypatch.setattr(packing, "write_table", real)
        with pytest.raises(UserError, match=r"another request .*seed.*wait"):
            append(sources.two, target, seed=1)
        assert any("was packed before" in line for line in quiet(sources.one, target, holdout=0.25))
        with pytest.raises(UserError, match=r"another request .*seed.*wait"):
            append(sources.two, target, seed=1)
        return real(*args, **options)

    monkeypatch.setattr(packing, "write_table", meanwhile)
    append(sources.two, target)
    assert named(copied(target)) == sources.owner
    assert not [name for name, *_ in list_url(target) if name.startswith(".packing")]
