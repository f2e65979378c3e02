"""Own code by path: what is loaded, what its digest stands for, and whose traceback an error shows."""

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardvit.data_shards.errors import OwnCodeFailed, UserError
from shardvit.data_shards.loading.workers import iterate
from shardvit.data_shards.vocabulary import WorkerKind
from shardvit.pipeline.own_code.by_path import load_own, own_digests, own_traceback
from shardvit.pipeline.stage.batches import OwnAugment
from tests.small_recipe import small_stage

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def written(folder: Path, text: str, name: str = "mine.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_file_is_a_module_of_its_own_and_no_folder_is_searched(tmp_path: Path):
    """So two files of one name are two modules, and a neighbour called numpy.py is not found."""
    (tmp_path / "other").mkdir()
    written(tmp_path, "raise SystemExit", name="numpy.py")
    before, codes = list(sys.path), []
    for folder in (tmp_path, tmp_path / "other"):
        codes.append(written(folder, f"import numpy\n\ndef mine():\n    return {folder.name!r}, numpy.float64(1)\n"))
    assert [load_own(f"{code}:mine")()[0] for code in codes] == [tmp_path.name, "other"]
    assert load_own(f"{codes[0]}:mine") is load_own(f"{codes[0]}:mine")
    assert sys.path == before and "mine" not in sys.modules


@pytest.mark.parametrize("name", ["other", "seven"])
def test_what_is_not_there_is_a_sentence(tmp_path: Path, name: str):
    file = written(tmp_path, "seven = 7\n")
    with pytest.raises(UserError, match=rf"mine\.py.*{name}"):
        load_own(f"{file}:{name}")
    with pytest.raises(UserError, match=r"nowhere\.py"):
        load_own(f"{tmp_path / 'nowhere.py'}:{name}")


def test_a_digest_stands_for_each_file_once_whatever_it_is_named_for(tmp_path: Path):
    one, two = written(tmp_path, "1\n", "one.py"), written(tmp_path, "2\n", "two.py")
    stage = small_stage(
        loss={"custom": f"{one}:a"}, metrics=[f"{one}:b", f"{two}:c", "top5"], augment={"custom": f"{two}:d"}
    )
    found = own_digests(stage)
    assert [*found] == [f"own code {one}", f"own code {two}"]
    written(tmp_path, "3\n", "two.py")
    again = own_digests(stage)
    assert again[f"own code {one}"] == found[f"own code {one}"] and again != found
    assert own_digests(small_stage()) == {}


BROKEN = "def mine(image, generator):\n    return inner()\n\ndef inner():\n    raise LookupError('lost')\n"


def test_an_error_begins_where_it_is_the_users(tmp_path: Path):
    file = written(tmp_path, BROKEN)
    with pytest.raises(LookupError) as caught:
        load_own(f"{file}:mine")(None, None)
    lines = own_traceback(caught.value).splitlines()
    assert [line.split(" in ")[1] for line in lines if "File" in line] == ["mine", "inner"]
    assert lines[-1] == "LookupError: lost" and __file__ not in "".join(lines)
    assert __file__ in own_traceback(_caught())  # of nobody's own code: all of it


def _caught() -> ValueError:
    try:
        raise ValueError("of ours")
    except ValueError as error:
        return error


class Items:
    """A data set that augments an image."""

    def __init__(self, code: str) -> None:
        self.augment = OwnAugment(code)

    def __getitem__(self, number: int) -> Any:
        return self.augment(np.zeros((2, 2, 3), np.uint8), np.random.default_rng(number))

    def describe(self, shard: int, *, row: int) -> str:
        return ""


@pytest.mark.parametrize(("workers", "kind"), [(0, "thread"), (1, "thread"), (1, "process")])
def test_an_error_of_an_augmentation_is_the_users_whoever_runs_it(tmp_path: Path, workers: int, kind: WorkerKind):
    items: Any = Items(f"{written(tmp_path, BROKEN)}:mine")
    with pytest.raises(OwnCodeFailed, match=r"^LookupError: lost$") as caught:
        next(iter(iterate(items, numbers=range(1), workers=workers, kind=kind)))
    lines = own_traceback(pickle.loads(pickle.dumps(caught.value))).splitlines()
    assert [line.split(" in ")[1] for line in lines if "File" in line] == ["mine", "inner"]


@pytest.mark.parametrize("gives", ["image[:1]", "image.astype('float32')", "image.tolist()"])
def test_an_augmentation_gives_an_image_of_the_same_size(tmp_path: Path, gives: str):
    items = Items(f"{written(tmp_path, f'def mine(image, generator):{chr(10)}    return {gives}{chr(10)}')}:mine")
    with pytest.raises(UserError, match=r"augment\.custom .*mine: it gives .*, not a uint8 array \[2, 2, 3\]"):
        items[0]
