"""Arms of the CIFAR-10 bench: each is a recipe that can be run, and none is the shipped one under another name."""

import sys

import pytest

from shardvit.launch.bench.cifar10 import ARMS, CHOICES, Result, keep, measure, read_results, report
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
    assert first[:5] == ["plain", "0.9000", "-", "1", "450,000"]
    assert second == ["hybrid", "0.8100", "0.0100", "2", "600,000", "50.0", "the", "recipe"]


BURN = "import time\nwhile time.process_time() < 0.5: pass"


def test_a_run_costs_the_cpu_time_of_its_processes_and_keeps_its_output(tmp_path):
    child = f"import subprocess, sys; print('said', flush=True); subprocess.run([sys.executable, '-c', {BURN!r}])"
    measured = measure([sys.executable, "-c", child], name="hybrid-0", out=tmp_path)
    assert measured is not None and measured[0] * 60 >= 0.5
    assert (tmp_path / "hybrid-0.log").read_text().startswith("said")


def test_a_run_that_fails_is_told_and_one_with_a_result_is_kept(tmp_path):
    with pytest.raises(RuntimeError, match=r"(?s)exit 3.*reason"):
        measure([sys.executable, "-c", "print('reason'); exit(3)"], name="hybrid-0", out=tmp_path)
    keep(Result(0.8, cpu_minutes=1, wall_minutes=1, images=1), name="hybrid-0", out=tmp_path)
    assert measure(["no such program"], name="hybrid-0", out=tmp_path) is None
