"""`shardvit plan`: a page that people can read, JSON, what is assumed where shards are missing, and mistakes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.shards.manifest import Manifest, Shard
from shardvit.data_shards.store.download import StoreError
from shardvit.data_shards.store.store import Store
from shardvit.data_shards.text import show_bytes
from shardvit.launch.commands.training.plan import plan
from shardvit.launch.plan import gathering as planning
from shardvit.launch.plan.gathering import make_plan
from shardvit.launch.plan.plan_options import PlanOptions
from shardvit.launch.plan.plan_page import RecipeForecast, as_json, as_page
from shardvit.launch.plan.shards import GIVE_UP_SECONDS
from shardvit.pipeline.recipe.schema import Recipe
from tests.data_shards.written import write_manifest

STAGE: dict[str, Any] = {"optimizer": {"name": "adamw", "lr": 0.001}, "global_batch_size": 1024}


def tree(**changes: Any) -> dict[str, Any]:
    """A recipe of three stages on shards that are not there."""
    pretrain = {"train": "big/train", "eval": "big/val", "image_size": 224, "duration": "90 epochs"}
    finetune = {"train": "small/train", "eval": "small/val", "image_size": 384, "duration": "20000 steps"}
    return {
        "name": "three",
        "model": {"variant": "L/16"},
        "data": {"workers": 12},
        "stages": {"pretrain": STAGE | pretrain, "swap_head": {}, "finetune": STAGE | finetune},
    } | changes


def recipe(**changes: Any) -> Recipe:
    return Recipe.model_validate(tree(**changes))


def planned(recipe: Recipe, *, driver: Path = planning.DRIVER, **flags: Any) -> RecipeForecast:
    return make_plan(recipe, PlanOptions(**flags), driver=driver)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working folder, on a machine without a GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(planning, "num_gpus", lambda: 0)


@pytest.fixture
def shards(tmp_path: Path) -> None:
    """Both data sets as manifests: the tars are empty files of the size that the manifest says."""
    for name, images, classes in (("big", 14_000, 7), ("small", 2_000, 3)):
        for split in ("train", "val"):
            folder = tmp_path / name / split
            folder.mkdir(parents=True)
            files = [f"{number}.tar" for number in range(images // 1000)]
            for file in files:
                with (folder / file).open("wb") as tar:
                    tar.truncate(110_000_000)  # a hole: it takes no room
            write_manifest(
                Manifest(
                    name=name,
                    split=split,
                    classes=tuple(f"c{number}" for number in range(classes)),
                    shards=tuple(Shard(file, 1000, 110_000_000, f"{split}{file}") for file in files),
                    source="test",
                    root=folder,
                )
            )


COMPLETE: dict[str, Any] = {
    "gpus": 64,
    "gpu": "h200",
    "images": "pretrain=14197122,finetune=1281167",
    "classes": "1000",
}


def test_the_page_of_three_stages_fits_on_a_screen_and_says_it_in_words():
    page = as_page(planned(recipe(), **COMPLETE))
    lines = page.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 120
    assert lines[0] == "Plan of three on 64 x H200 SXM, 8 nodes of 8: DeepSpeed ZeRO 1, bf16"
    for word in ("images/s of one GPU", "GPU-hours", "wall clock", "checkpoints", "cores to decode", "swap_head"):
        assert word in page
    assert "MFU, model FLOPs utilisation:" in page and "ZeRO: what the GPUs share out" in page
    assert "anchor L/16 at 224 px; anchor L/16 at 384 px" in page
    assert "(NVIDIA H200 data sheet), of which 4% are kept free" in page
    assert "64 x 1 x 16" in page
    # A number in each stage's column, with words behind: the columns are aligned.
    [header] = [line for line in lines if re.fullmatch(r" +pretrain +finetune", line)]
    rows = [line for line in lines if re.match(r"(parameters|global batch|steps|MFU|GPU-hours) ", line)]
    assert len(rows) == 5
    for row in rows:
        assert row[header.index("finetune") + len("finetune") :].startswith("  ")
    for zero_stage in ("ZeRO 0", "ZeRO 1 *", "ZeRO 2", "ZeRO 3"):
        assert sum(line.startswith(zero_stage) for line in lines) == 2


def test_a_frozen_part_that_the_model_lacks_is_refused():
    optimizer = STAGE["optimizer"] | {"frozen": ["patch_embeding"]}
    stages = tree()["stages"] | {"finetune": tree()["stages"]["finetune"] | {"optimizer": optimizer}}
    recipe = Recipe.model_validate(tree(stages=stages))
    with pytest.raises(UserError, match=r"stages\.finetune\.optimizer\.frozen: .*patch_embedding"):
        make_plan(recipe, PlanOptions())


def test_images_alone_are_enough_to_count_decoding():
    """Before packing, with no worker to decode for GPUs that want thousands of images a second each."""
    flags = {"gpus": 8, "gpu": "h200", "images": "1281167", "classes": "1000"}
    page = as_page(planned(recipe(data={"workers": 0}), **flags))
    assert "No warnings" not in page and "data.workers is 0: set data.workers=" in page
    assert re.search(r"cores to decode +[0-9.]+", page) and "which is assumed" in page
    assert "No warnings" in as_page(planned(recipe(), **flags))


def test_a_plan_starts_no_command(tmp_path: Path):
    pretrain = {**tree()["stages"]["pretrain"], "train": f"pipe:touch {tmp_path / 'started'}; cat x.tar"}
    made = planned(recipe(stages={"pretrain": pretrain}), gpus=8, gpu="h200")
    assert not (tmp_path / "started").exists() and any("is a command" in text for text in made.warnings)


def test_warnings_come_first_and_those_that_stop_a_run_before_all_others():
    made = planned(recipe(data={"lanes": 256}), gpus=512, gpu="h200", classes="1000", images="1e6")
    page = as_page(made).splitlines()
    assert page[2].startswith("! pretrain: 512 processes cannot share data.lanes 256 evenly")
    assert all(f"! {text[:60]}" in "\n".join(page) for text in made.warnings) and len(made.warnings) > 2
    last_warning = max(number for number, line in enumerate(page) if line.startswith("! "))
    assert last_warning < next(number for number, line in enumerate(page) if line.startswith("image size"))
    assert "No warnings." in as_page(planned(recipe(), gpus=1, gpu="h200", images="1e6", classes="1000"))


def test_json_has_the_pages_numbers():
    made = planned(recipe(), **COMPLETE)
    found = json.loads(json.dumps(as_json(made)))
    assert found["gpus"] == 64 and found["gpu"]["key"] == "h200"
    pretrain = found["stages"]["pretrain"]
    assert pretrain["total_images"] == pretrain["plan"]["total_steps"] * 1024
    assert "warmup_steps" in pretrain["plan"] and "seed" not in pretrain["plan"]
    assert pretrain["cost"]["parameters"] == made.stages[0].cost.parameters
    assert (
        pretrain["memory"]["zero_3"]["peak_bytes"]["checkpointed"] < pretrain["memory"]["zero_0"]["peak_bytes"]["all"]
    )
    hours = [stage["time"]["hours"] for stage in found["stages"].values()]
    assert found["hours"] == pytest.approx(sum(hours))
    assert found["gpu_hours"] == pytest.approx(64 * sum(hours))
    assert found["warnings"] == list(made.warnings)
    saving = pretrain["saving"]
    assert saving["node_bytes"] > saving["process_bytes"] and 0 <= saving["stall_seconds"] < saving["copy_seconds"]
    stall = f"{1000 * saving['stall_seconds']:.3g} of {1000 * saving['copy_seconds']:.3g}"
    page = as_page(made)
    assert re.search(rf"host memory, saving +{show_bytes(saving['process_bytes'])} ", page)
    assert re.search(rf"\.\.\. of a node +{show_bytes(saving['node_bytes'])} ", page)
    assert re.search(rf"stall of a save +{stall} ", page)
    blocking = as_page(planned(recipe(engine={"saving": "blocking"}), **COMPLETE))
    assert "host memory, saving" not in blocking and "stall of a save" not in blocking


def test_shards_that_are_there_say_images_classes_and_bytes(shards: None):
    made = planned(recipe(data={"lanes": 8, "workers": 12}), gpus=8, gpu="h200")
    pretrain, finetune = made.stages
    assert (pretrain.shards.num_images, pretrain.shards.num_classes, pretrain.shards.num_shards) == (14_000, 7, 14)
    assert finetune.shards.num_images == 2_000
    assert pretrain.reading and pretrain.time and pretrain.reading.bytes_per_second
    assert pretrain.reading.bytes_per_second == pytest.approx(110_000 * pretrain.time.images_per_second)
    assert any("14 shards for 8 processes (1.8 each)" in text for text in made.warnings)
    assert not any("without its shards" in text for text in made.warnings)
    other = planned(recipe(), gpus=8, gpu="h200", images="finetune=5000", classes="finetune=9").stages
    assert [each.shards.num_images for each in other] == [14_000, 5_000]
    assert [each.shards.num_classes for each in other] == [7, 9]


def test_before_packing_it_says_what_it_assumed_and_what_to_give():
    made = planned(recipe(), gpus=8, gpu="h200")
    pretrain, finetune = (text for text in made.warnings if "planned without its shards" in text)
    assert "how many steps 90 epochs are cannot be counted: give --images N" in pretrain
    assert "1,000 classes are assumed: give --classes N" in pretrain and "big/train" in pretrain
    assert "cannot be counted" not in finetune and "--classes" in finetune
    first, second = made.stages
    assert first.time and second.time and first.time.hours is None and second.time.hours
    assert made.hours is None and "In all" not in as_page(made)
    assert "without its shards" not in "".join(planned(recipe(), **COMPLETE).warnings)


def test_a_bucket_is_not_asked_for_what_the_flags_say_and_given_up_soon(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    def unreachable(self: Store, url: str) -> int | None:
        asked.append(url)
        raise StoreError(f"{url} does not answer")

    monkeypatch.setattr(Store, "size", unreachable)
    far = {
        "pretrain": STAGE | {"train": "s3://b/train", "eval": "s3://b/val", "image_size": 224, "duration": "2 epochs"}
    }
    planned(recipe(stages=far), gpu="h200", images="1000000", classes="10")
    assert asked == []
    made = planned(recipe(stages=far), gpu="h200", images="1000000")
    assert len(asked) == 1 and "(s3://b/train/manifest.json does not answer)" in "".join(made.warnings)
    assert GIVE_UP_SECONDS <= 60


def test_without_a_gpu_it_says_so_and_counts_the_rest():
    made = planned(recipe(), images="1000000", classes="1000")
    assert made.machine.gpus == 1 and made.machine.gpu is None
    assert made.warnings[0].startswith("this machine has no GPU, so whether it fits, and how long it takes, is not")
    assert "--gpu h200" in made.warnings[0]
    page = as_page(made)
    assert "GPU-hours" not in page and "MFU  " not in page and "ZeRO 3" in page and "parameters" in page
    timed = planned(recipe(), images="1000000", classes="1000", images_per_second=20.0)
    first, second = timed.stages
    assert first.time and second.time
    assert first.time.images_per_second == 20
    ratio = first.cost.training_flops / second.cost.training_flops
    assert second.time.images_per_second == pytest.approx(20 * ratio)
    assert "kept together" in as_page(timed)
    two = planned(recipe(), gpus=2, images="1000000", classes="1000", images_per_second=20.0)
    assert "kept together" not in as_page(two) and "wait for one another is not counted" in two.warnings[0]


def test_the_recipes_processes_or_the_machines_gpus_are_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert planned(recipe(processes=4), gpu="a100").machine.gpus == 4
    monkeypatch.setattr(planning, "num_gpus", lambda: 2)
    card = tmp_path / "driver" / "0000:01:00.0"
    card.mkdir(parents=True)
    (card / "information").write_text("Model: \t\t NVIDIA L40S\nIRQ: 42\n")
    machine = planned(recipe(), driver=tmp_path / "driver").machine
    assert machine.gpus == 2 and machine.gpu and machine.gpu.key == "l40s"
    (card / "information").write_text("Model: Quadro K620\n")
    made = planned(recipe(), driver=tmp_path / "driver")
    assert made.machine.gpu is None and "this machine's GPU is not in the table" in made.warnings[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpu": "h20"}, "--gpu: h20 is not in the table"),
        ({"gpus": 0}, "--gpus: it is 0"),
        ({"gpus_per_node": 0}, "--gpus-per-node: it is 0"),
        ({"mfu": 1.5, "gpu": "h200"}, "--mfu: it is 1.5; give a share"),
        ({"mfu": 0.5}, "give --gpu too"),
        ({"node_gbps": 100.0}, "give --gpu too"),
        ({"mfu": 0.5, "images_per_second": 10.0, "gpu": "h200"}, "leave one out"),
        ({"images_per_second": -1.0}, "--images-per-second: it is -1"),
        ({"images": "many"}, "'many' is no number"),
        ({"images": "swap_head=5"}, "swap_head is no training stage of the recipe; it has pretrain, finetune"),
        ({"classes": "0"}, "--classes: it is 0"),
    ],
)
def test_mistakes_are_one_sentence(arguments: dict[str, Any], message: str):
    with pytest.raises(UserError) as caught:
        planned(recipe(), **arguments)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_other_kinds_of_recipes_have_a_page():
    small = {"width": 64, "depth": 2, "heads": 2, "patch_size": 4}
    masked = STAGE | {"train": "a", "eval": "b", "image_size": 32, "duration": "10 steps"}
    page = as_page(planned(recipe(model=small, stages={"masked_patch": masked}), gpus=2, gpu="t4"))
    assert "masked_patch: MB on one GPU" in page and "classes are assumed" not in page
    ddp = recipe(engine={"backend": "accelerate"})
    page = as_page(planned(ddp, gpus=8, gpu="a100", **{k: COMPLETE[k] for k in ("images", "classes")}))
    assert "accelerate (DDP), bf16" in page and "DDP  " in page and "ZeRO 3" not in page
    resnet = tree(model={"variant": "R50x1"})
    assert "a guess for convolutions" in as_page(planned(Recipe.model_validate(resnet), **COMPLETE))


def test_the_command_prints_the_page_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "three.yaml").write_text(yaml.safe_dump(tree()), encoding="utf-8")
    arguments = PlanOptions(gpus=8, gpu="h100", images="1e6", classes="10")
    assert plan("three.yaml", "engine.zero_stage=3", options=arguments) == 0
    assert capsys.readouterr().out.startswith("Plan of three on 8 x H100 SXM: DeepSpeed ZeRO 3, bf16\n")
    assert plan("three.yaml", as_json_text=True, options=arguments) == 0
    assert json.loads(capsys.readouterr().out)["engine"]["zero_stage"] == 1
