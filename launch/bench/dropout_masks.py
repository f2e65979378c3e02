"""What dropout's masks cost a training step: drawn by sample (`dropout_masks: sample`), by process, and no dropout.

Run `python -m launch.bench.dropout_masks`; records/dropout_masks.txt has what it printed. One process, plain torch,
float32: forward and backward pass on random pixels, with the three kinds in turns within each round, so that a shared
machine slows all three alike. Reported per model: median CPU seconds of a step, and the median over rounds of the ratio
to the step by process. Rates are the paper's dropout 0.1, and stochastic depth 0.1 beside it. Optimizer and data are
left out, so the shares of a whole step are smaller. A GPU was not measured.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch

from launch.bench.measure import median_ratio
from model.build import build_model
from model.config import ModelConfig
from model.dropout import words_of
from model.init import initialise
from model.regularisation import Regularisation
from pipeline.stage.dropout_masks import sample_words

_CLASSES = 10
_MODELS = {  # name: width, heads, depth (a few blocks of the variant: a step's parts grow alike), images
    "ViT-S width": (384, 6, 3, 8),
    "ViT-B width": (768, 12, 2, 4),
}
_SIZE, _PATCH = 224, 16

Kind = Literal["none", "process", "sample"]


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description="What dropout's masks cost.")
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)  # CPU time counts threads that wait for one another
    print(f"Python {platform.python_version()}, torch {torch.__version__}, 1 thread")
    print(f"{_SIZE} px, patches of {_PATCH}; forward and backward, CPU seconds of a step, {rounds} rounds\n")
    print(f"{'':34}  none     process  sample   none/process  sample/process")
    for name, (width, heads, depth, images) in _MODELS.items():
        for rates in ((0.1, 0.0), (0.1, 0.1)):
            spent: dict[Kind, list[float]] = {"none": [], "process": [], "sample": []}
            config = ModelConfig(width=width, heads=heads, depth=depth, patch_size=_PATCH)
            steps = {kind: _step(kind, config, rates=rates, images=images) for kind in spent}
            for number in range(-1, rounds):
                for kind, costs in spent.items():
                    before = time.process_time()
                    steps[kind](number + 1)
                    if number >= 0:  # the first warms up
                        costs.append(time.process_time() - before)
            medians = "  ".join(f"{statistics.median(costs):7.3f}" for costs in spent.values())
            ratios = [median_ratio(spent[kind], spent["process"]) for kind in ("none", "sample")]
            label = f"{name}, dropout {rates[0]}, depth {rates[1]}"
            print(f"{label:34}{medians}      {ratios[0]:8.3f}        {ratios[1]:8.3f}", flush=True)


def _step(kind: Kind, config: ModelConfig, *, rates: tuple[float, float], images: int) -> Callable[[int], None]:
    by = Regularisation(*rates, masks=kind) if kind != "none" else Regularisation()
    model = build_model(config, image_size=_SIZE, num_classes=_CLASSES, head="linear", regularisation=by).train()
    initialise(model, seed=0)
    torch.nn.init.normal_(model.get_submodule("head").weight, std=0.1)  # pyright: ignore[reportArgumentType]
    pixels = torch.randn(images, 3, _SIZE, _SIZE)

    def step(number: int) -> None:
        shared = words_of(model)
        if shared is not None:
            words = sample_words(0, step=number, sites=shared.sites, places=np.arange(images))
            shared.give(torch.from_numpy(words), step_word=number + 1)
        model(pixels).square().sum().backward()
        model.zero_grad()

    return step


if __name__ == "__main__":
    main()
