"""A checkpoint does not go on in another order of the samples without saying so."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_shards.errors import UserError
from pipeline.checkpoint.identity import check_identity, checkpoint_identity
from pipeline.recipe.io import load_recipe


def identity(processes: int, *, lanes: str = "auto") -> dict[str, object]:
    overrides = [f"data.lanes={lanes}", "stages.pretrain.global_batch_size=32768"]
    return checkpoint_identity(load_recipe("digits", overrides=overrides), stage="pretrain", processes=processes)


@pytest.mark.parametrize(("before", "now"), [(1024, 128), (128, 1024), (8, 257)])
def test_auto_lanes_do_not_cross_256_processes(before: int, now: int):
    if 32768 % max(before, now):
        now = 512
    with pytest.raises(UserError, match=r"data\.lanes"):
        check_identity(identity(before), identity(now), folder=Path("step-8"))


@pytest.mark.parametrize(("before", "now", "lanes"), [(1024, 2048, "auto"), (1, 256, "auto"), (8, 1024, "4096")])
def test_on_one_side_or_with_lanes_of_ones_own_any_number_goes_on(before: int, now: int, lanes: str):
    check_identity(identity(before, lanes=lanes), identity(now, lanes=lanes), folder=Path("step-8"))
    assert ("lanes" in identity(now, lanes=lanes)) == (lanes == "auto" and now > 256)
