"""Which GPU a process takes, and what the engines are told of it."""

import os

import pytest
import torch

from pipeline.ranks import group as ranks
from pipeline.ranks.place import Place
from pipeline.ranks.rendezvous import join_group


@pytest.mark.parametrize(
    ("place", "gpu"), [(Place(local_rank=3), 3), (Place(local_rank=3, gpu=0), 0)], ids=["sees all", "sees its own"]
)
def test_the_gpu_of_a_process_is_its_local_rank_or_the_one_that_it_sees(
    place: Place, gpu: int, monkeypatch: pytest.MonkeyPatch
):
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(
        ranks,
        "join_group",
        lambda place, backend, timeout_seconds: join_group(place, backend="gloo", timeout_seconds=30),
    )
    group = ranks.Ranks(place, timeout_seconds=30)
    group.leave()
    assert chosen == [gpu] and os.environ["LOCAL_RANK"] == str(gpu)


def test_on_a_cpu_processes_of_a_machine_are_told_apart(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ranks.Ranks(Place(local_rank=1, gpu=0), timeout_seconds=30).leave()
    assert os.environ["LOCAL_RANK"] == "1"
