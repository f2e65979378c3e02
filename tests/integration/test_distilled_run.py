"""Runs with a teacher: a kill and a resume change nothing, another number of processes and ZeRO stage only rounding,
another teacher is refused; and the whole pipeline, distilled by features and then by logits."""

import json
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from shardvit.data_shards.reading.opening import open_shards
from shardvit.model.config import ModelConfig
from shardvit.model.saved.model_folder import SavedModelMeta, build_described, load_model, save_model
from shardvit.pipeline.runs.run_folder import weights_digest
from tests.faults.harness import Case, pack_shards, recipe
from tests.model.comparing import randomise

CHANGES = {
    "engine.precision": "fp32",
    "stages.pretrain.duration": "40 steps",
    "stages.pretrain.log_every": "1 steps",
    "stages.pretrain.save_every": "15 steps",
}
KILLED_AT = 26
# The students by the kind of distillation: later blocks, and DeiT's token
MODELS = {
    "soft": {"model.registers": 2, "model.rope": "mixed", "model.mlp": "swiglu_norm"},
    "hard": {
        "model.distillation_token": "learned",
        "stages.pretrain.head": "linear",
        "model.qk_norm": "per_head",
        "model.mlp": "swiglu",
        "model.norm": "rms",
    },
    "feature": {},
}


def write_teacher(folder: Path, *, shards: Path, scale: float = 0.2) -> Path:
    names = open_shards(str(shards / "train")).classes
    config = ModelConfig(width=24, depth=2, heads=2, patch_size=4)
    meta = SavedModelMeta(
        model=config, image_size=8, num_classes=len(names), class_names=names, head="linear", mean=(0.4, 0.4, 0.4)
    )
    save_model(folder, randomise(build_described(meta), scale=scale).state_dict(), meta=meta)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_a_killed_run_ends_as_an_undisturbed_one_and_alone_and_under_another_zero_stage_nearly(
    tmp_path: Path, preloaded_environment: Mapping[str, str], kind: str
):
    shards = pack_shards(tmp_path / "digits")
    teacher = write_teacher(tmp_path / "teacher", shards=shards)
    before = weights_digest(teacher)
    distill = {"teacher": str(teacher), "kind": kind, "share": 0.7}
    changes = {**CHANGES, **MODELS[kind], "stages.pretrain.distill": distill}
    layouts = {"undisturbed": (2, 2), "killed": (2, 2), "alone": (1, 1)}
    cases = {
        name: Case(tmp_path / name, shards, changes={**changes, "processes": processes, "engine.zero_stage": zero})
        for name, (processes, zero) in layouts.items()
    }
    for name in ("undisturbed", "alone"):
        ended = cases[name].start(how="run", environment=preloaded_environment).wait()
        assert ended.code == 0, ended.output
    killed = cases["killed"]
    faults = [killed.fault("kill_all", "between_steps", rank=1, step=KILLED_AT)]
    ended = killed.start(how="run", faults=faults).wait()
    assert ended.code == -signal.SIGKILL and killed.saved()[-1] == 15, ended.output
    if kind == "soft":
        write_teacher(teacher, shards=shards, scale=0.3)
        refused = killed.start(how="run", environment=preloaded_environment).wait()
        assert refused.code == 2 and "other teacher" in refused.output, refused.output
        write_teacher(teacher, shards=shards)
    continued = killed.start(how="run", environment=preloaded_environment).wait()
    assert continued.code == 0 and "resuming from" in continued.output, continued.output
    curve = cases["undisturbed"].curve()
    assert killed.curve() == curve
    assert any("train/teacher_agreement" in row for _, row in curve) == (kind != "feature")
    assert killed.record()["model_digest"] == cases["undisturbed"].record()["model_digest"]
    alone = cases["alone"].curve()
    assert [step for step, _ in alone] == [step for step, _ in curve]
    for (_, ours), (_, theirs) in zip(alone, curve, strict=True):
        for metric in ours.keys() & {"train/loss", "val/loss"}:
            assert ours[metric] == pytest.approx(theirs[metric], rel=1e-4), metric
    assert weights_digest(teacher) == before == weights_digest(teacher)


@pytest.mark.slow
def test_the_whole_pipeline_learns_from_a_teacher_with_few_shots_on_the_way(
    tmp_path: Path, preloaded_environment: Mapping[str, str]
):
    shards = pack_shards(tmp_path / "digits")
    teacher = write_teacher(tmp_path / "teacher", shards=shards)
    content = recipe(shards, {**CHANGES, "processes": 1, "stages.pretrain.duration": "16 steps"})
    few_shot = {"name": "digits", "train": str(shards / "train"), "eval": str(shards / "val"), "shots": [2]}
    pretrain = content["stages"]["pretrain"]
    finetune = {key: each for key, each in pretrain.items() if key != "dropout"} | {"duration": "8 steps"}
    pretrain |= {"distill": {"teacher": str(teacher), "kind": "feature", "share": 1.0}, "few_shot": [few_shot]}
    finetune |= {"distill": {"teacher": str(teacher), "kind": "hard"}, "ema": {"decay": 0.9}}
    content["stages"] |= {"swap_head": {}, "finetune": finetune}
    case = Case(tmp_path / "whole", shards, content=content)
    ended = case.start(how="run", environment=preloaded_environment).wait()
    assert ended.code == 0, ended.output
    assert any("val/fewshot_digits_2shot" in row for _, row in case.curve())
    for stage in ("pretrain", "finetune"):
        record = json.loads((case.run / stage / "stage.json").read_text(encoding="utf-8"))
        assert record["state"] == "done" and record["inputs"]["teacher"]
        load_model(case.run / stage / "model")  # strictly: the projection of features is not in it
