"""What is done to somebody's recipe, records and checkpoints."""

import hashlib
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import yaml

from tests.launch.security.on_shards import tar_of_others
from tests.launch.security.somebody import STEP, Attack, World


def tagged_recipe(world: World) -> None:
    for path in (world.recipe, world.run / "recipe.yaml"):
        path.write_text(f"{path.read_text()}\nmore: !!python/object/apply:os.mkdir ['{world.canary}']\n")


def tagged_parent(world: World) -> None:
    world.new("parent.yaml").write_text(f"seed: !!python/object/new:os.mkdir ['{world.canary}']\n")
    for path in (world.recipe, world.run / "recipe.yaml"):
        path.write_text(f"extends: {world.top / 'parent.yaml'}\n{path.read_text()}")


def pipe(world: World) -> None:
    world.change_recipe(train=world.pipe, duration="1 epochs")
    world.forget_length()


def pipe_to_evaluate(world: World) -> None:
    world.change_recipe(eval=world.pipe)
    world.forget_length()


def pipe_behind_a_tar(world: World) -> None:
    tar = next((world.top / "shards/val").glob("*.tar"))
    world.change_recipe(train={"shards": f"{{{tar},{world.pipe}}}", "classes": str(names_of(world))})
    world.forget_length()


def pipe_in_braces(world: World) -> None:
    world.change_recipe(train={"shards": f"{{{world.pipe},x}}"})
    world.forget_length()


def scheme_of_programs(world: World) -> None:
    world.change_recipe(train="dask://127.0.0.1:1/x.tar")
    world.forget_length()


def classes_of_a_command(world: World) -> None:
    tar_of_others(world)
    world.change_recipe(train={"shards": str(world.shards), "classes": world.pipe})


def model_of_a_command(world: World) -> None:
    for path in (world.recipe, world.run / "recipe.yaml"):
        tree = yaml.safe_load(path.read_text())
        finetune = tree["stages"].pop("pretrain")
        tree["stages"] = {"swap_head": {"model": world.pipe}, "finetune": finetune}
        path.write_text(yaml.safe_dump(tree))
    shutil.rmtree(world.stage)


def names_of(world: World) -> Path:
    path = world.new("names.txt")
    path.write_text("3\n8\n")
    return path


def own_code(world: World) -> None:
    """All that a recipe can name of its author's, in a file that is run if it is imported."""
    file = world.new("mine.py")
    file.write_text(f"import os\nos.mkdir({str(world.canary)!r})\n\ndef mine(*given):\n    pass\n")
    code = f"{file}:mine"
    world.change_recipe(
        loss={"custom": code},
        augment={"custom": code},
        metrics=[code],
        task=code,
        callbacks=[code],
        optimizer={"custom": code, "lr": 0.1},
    )
    shutil.rmtree(world.stage / "pictures", ignore_errors=True)


def own_model(world: World) -> None:
    """The run was trained with a model of its author's: a file that is there, of the recorded text."""
    file = world.new("mine.py")
    file.write_text(f"import os\nos.mkdir({str(world.canary)!r})\n\ndef mine(**given):\n    pass\n")
    theirs = {"custom": f"{file}@{hashlib.sha256(file.read_bytes()).hexdigest()}:mine"}
    path = world.run / "recipe.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"model": theirs}))
    world.finish()
    config = world.stage / "model/config.json"
    for record, below in ((world.stage / "stage.json", ()), (config, ("shardvit",))):
        tree = json.loads(record.read_text())
        described = tree[below[0]] if below else tree["model"]
        described["model"] = theirs
        record.write_text(json.dumps(tree))


def commands_in_the_records(world: World) -> None:
    """JSON that libraries which revive objects would obey, and commands for names."""
    revived = {"py/reduce": [{"py/function": "os.mkdir"}, {"py/tuple": [str(world.canary)]}]}
    path = world.stage / "stage.json"
    record = json.loads(path.read_text())
    record["model"] |= {"class_names": [world.pipe, "$(touch x)\x1b]0;"]}
    path.write_text(json.dumps({**record, "inputs": {"training images": world.pipe}}))
    (world.stage / "mlflow.json").write_text(json.dumps({"key": revived, "run_id": world.pipe, "attempt": 1}))
    (world.run / "slurm").mkdir()
    (world.run / "slurm/jobs.json").write_text(
        json.dumps({"time": 0, "processes": 1, "limit_seconds": 1, "max_restarts": 0, "jobs": {}, "total_steps": {}})
    )


def evaluation_of_objects(world: World) -> None:
    """Beside it a picture that is no picture, and events that name commands."""
    kept = world.stage / "evaluations/val" / STEP
    kept.mkdir(parents=True)
    (kept / "evaluation.json").write_text(json.dumps({"format": 1, "classes": [world.pipe], "set_name": world.pipe}))
    np.savez(kept / "arrays.npz", confusion=np.array([[world.ran]], dtype=object))
    picture = world.stage / "pictures/batch"
    picture.mkdir(parents=True)
    for ending in ("png", "svg"):
        (picture / f"{STEP}.{ending}").write_bytes(pickle.dumps(world.ran))
    words = {"title": world.pipe, "caption": "$(touch x)\x1b]0;", "alt": "", "group": "data", "step": 2}
    (picture / f"{STEP}.json").write_text(json.dumps(words))
    event = {"time": 0, "step": 2, "images_seen": 2, "kind": "note", "text": f"\x1b]0;{world.pipe}"}
    (world.stage / "events.jsonl").write_text(json.dumps(event) + "\n")


def command_as_state(world: World) -> None:
    revived = {"py/reduce": [{"py/function": "os.mkdir"}, {"py/tuple": [str(world.canary)]}]}
    world.seal({"identity": revived, "state": revived})


SHARDS = {
    0: ["ddp.pt"],
    1: ["deepspeed/mp_rank_00_model_states.pt", "deepspeed/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"],
    2: ["deepspeed/mp_rank_00_model_states.pt", "deepspeed/zero_pp_rank_0_mp_rank_00_optim_states.pt"],
    3: ["deepspeed/zero_pp_rank_0_mp_rank_00_model_states.pt", "deepspeed/zero_pp_rank_0_mp_rank_00_optim_states.pt"],
}


def engine_shards(stage: int) -> Attack:
    def attack(world: World) -> None:
        files = {name: {"module": {}, "optimizer_state_dict": world.ran} for name in SHARDS[stage]}
        world.save_engine(files, zero_stage=stage)

    attack.__name__ = f"zero_{stage}"
    return attack


def raw_pickle_as_shard(world: World) -> None:
    engine_shards(0)(world)
    (world.checkpoint / SHARDS[0][0]).write_bytes(pickle.dumps(world.ran, protocol=2))
    world.seal()


def accelerate(world: World) -> None:
    world.save_engine({"accelerate.pt": {"model": {}, "optimizer": world.ran}}, backend="accelerate")
