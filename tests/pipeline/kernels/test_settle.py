"""TF32 follows the recipe's key, for products and convolutions alike, and no reader of either switch is confused."""

import contextlib
from typing import Any

import pytest
import torch

from pipeline.kernels.settle import fp32_products


@pytest.mark.parametrize(("kind", "allowed"), [("ieee", False), ("tf32", True)])
def test_products_and_convolutions_follow_the_key_and_go_back(kind: Any, allowed: bool) -> None:
    def switches() -> tuple[bool, bool]:
        return bool(torch.backends.cuda.matmul.allow_tf32), torch.backends.cudnn.allow_tf32

    before = switches()
    assert before == (False, True)  # torch's own defaults, which differ
    with contextlib.suppress(KeyError), fp32_products(kind):
        assert switches() == (allowed, allowed)
        assert (torch.backends.cuda.matmul.fp32_precision == "tf32") == allowed
        assert (torch.backends.cudnn.conv.fp32_precision == "tf32") == allowed
        assert torch.get_float32_matmul_precision() == ("high" if allowed else "highest")
        assert torch.backends.mkldnn.matmul.fp32_precision == "none"  # CPUs stay as they are
        raise KeyError
    assert switches() == before
