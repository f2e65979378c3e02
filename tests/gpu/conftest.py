"""The device of the acceptance tests, and their process group."""

import os
from collections.abc import Iterator

import pytest
import torch

from shardvit.pipeline.ranks.group import Ranks
from shardvit.pipeline.ranks.place import Place

# Torch reads it once, at a process's first matrix product, which here may be a test's own: `kernels.settle`, which sets
# it for a run, would come too late.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The first CUDA device, or the CPU with `--device cpu`."""
    return torch.device("cpu") if request.config.getoption("--device") == "cpu" else torch.device("cuda", 0)


@pytest.fixture(scope="session")
def ranks(device: torch.device) -> Iterator[Ranks]:
    """A process group of this process alone: NCCL's on a GPU. DeepSpeed does not take to a second one."""
    ranks = Ranks(Place(), timeout_seconds=120)
    yield ranks
    ranks.leave()
