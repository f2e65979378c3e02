"""Read some of each image's tokens, where a gradient flows back.

By index, not `gather`: on a GPU torch's deterministic algorithms turn a gather's gradient into an index of 8 bytes for
each value of n K D, three times over, and sort it (a gigabyte for 256 images at 144 tokens of 1,024); this one's has
n K numbers. As no token is read twice, each place has one addend, and all ways give the same bits.
"""

import torch
from torch import Tensor


def chosen_tokens(tokens: Tensor, numbers: Tensor) -> Tensor:
    """Tokens [n, T, D] -> those of `numbers` [n, K], int64, none twice: [n, K, D]."""
    return tokens[torch.arange(len(tokens), device=tokens.device)[:, None], numbers]
