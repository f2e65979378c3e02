"""webdataset's own functions, without torch where nothing else wants it."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardvit.data_shards.shards.webdataset_parts import expand_urls, split_name


@settings(deadline=None)  # the first call imports torch
@given(st.text("aB./_", max_size=12))
def test_names_are_split_as_webdataset_does_but_for_hidden_files(name: str):
    from webdataset.tariterators import base_plus_ext

    expected = base_plus_ext(name)
    split = split_name(name)
    if split is not None:
        assert split == (expected[0], expected[1].lower())
    elif expected[0]:
        assert name.startswith("__") or "/." in name  # for webdataset "d/.x" is the part "x" of a sample "d/"


def test_patterns_take_names_from_the_environment_but_not_in_a_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WDS_BUCKET", "b")
    assert expand_urls("s3://${BUCKET}/{0..1}.tar") == ["s3://b/0.tar", "s3://b/1.tar"]
    assert expand_urls("pipe:cat ${BUCKET}/{0..1}.tar") == ["pipe:cat ${BUCKET}/0.tar", "pipe:cat ${BUCKET}/1.tar"]
    with pytest.raises(KeyError, match="WDS_ABSENT"):
        expand_urls("s3://${ABSENT}/{0..1}.tar")


@pytest.mark.parametrize("first", ["", "import torch; "])
def test_torch_is_not_imported_but_used_where_it_is(first: str):
    code = (
        f"{first}import io, sys; from shardvit.data_shards.shards.webdataset_parts import *;"
        "print(split_name('a/b.JPG'), expand_urls('{0..1}'), tar_writer(io.BytesIO()).__module__.partition('.')[0],"
        "'torch' in sys.modules); import webdataset, torch.utils.data;"
        "assert issubclass(webdataset.WebDataset, torch.utils.data.IterableDataset); split_name('a.b');"
    )
    done = subprocess.check_output([sys.executable, "-c", code], text=True)
    expected = "webdataset True" if first else "webdataset_without_torch False"
    assert done.strip() == f"('a/b', 'jpg') ['0', '1'] {expected}"
