"""Arms of the CIFAR-10 bench: each is a recipe that can be run, and none is the shipped one under another name."""

import pytest

from shardvit.launch.bench.cifar10 import ARMS, CHOICES, Result, keep, read_results, report
from shardvit.pipeline.recipe.io import load_recipe

EVERY = {
    **{f"arm {name}": arm for name, arm in ARMS.items()},
    **{f"choice {name}": arm for name, arm in CHOICES.items()},
}


@pytest.mark.parametrize("name", EVERY)
def test_each_arm_loads_and_differs_from_the_recipe(name):
    recipe = load_recipe(EVERY[name].recipe, overrides=EVERY[name].changes)
    assert (recipe == load_recipe("cifar10")) == (EVERY[name].meaning == "the recipe")


def test_the_table_has_the_mean_over_seeds_of_what_was_kept_the_best_first(tmp_path):
    for seed, top1 in enumerate([0.8, 0.82]):
        keep(Result(top1, cpu_minutes=50, wall_minutes=26, images=600_000), name=f"hybrid-{seed}", out=tmp_path)
    keep(Result(0.9, cpu_minutes=51, wall_minutes=30, images=450_000), name="plain-0", out=tmp_path)
    lines = report(read_results(tmp_path), meanings={"hybrid": "the recipe"})
    first, second = (line.split() for line in lines[-2:])
    assert first[:5] == ["plain", "0.9000", "0.0000", "1", "450,000"]
    assert second == ["hybrid", "0.8100", "0.0100", "2", "600,000", "50.0", "the", "recipe"]
