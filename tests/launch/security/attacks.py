"""What is done to somebody's files: a function for each kind of file, and the table of which command reads which."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import yaml

from model.saved import CONFIG_FILE, WEIGHTS_FILE
from tests.launch.security.somebody import World

Outcome = Literal["refused", "read as data", "not run, and said"]
Attack = Callable[[World], None]


@dataclass(frozen=True)
class Row:
    """One row of the page's table.

    Attributes:
        kind: the file, as the page calls it.
        commands: those that read it.
        outcome: what becomes of it there.
        attacks: what is done to such a file, each on its own.
        elsewhere: commands whose test is another one: file and name of it.
    """

    kind: str
    commands: tuple[str, ...]
    outcome: Outcome
    attacks: tuple[Attack, ...]
    elsewhere: dict[str, str] = field(default_factory=dict)


# ---- recipes and records --------------------------------------------------------------------------------------------


def tagged_recipe(world: World) -> None:
    for path in (world.recipe, world.run / "recipe.yaml"):
        path.write_text(f"{path.read_text()}\nmore: !!python/object/apply:os.mkdir ['{world.canary}']\n")


def tagged_parent(world: World) -> None:
    world.new("parent.yaml").write_text(f"seed: !!python/object/new:os.mkdir ['{world.canary}']\n")
    for path in (world.recipe, world.run / "recipe.yaml"):
        path.write_text(f"extends: {world.top / 'parent.yaml'}\n{path.read_text()}")


def pipe(world: World) -> None:
    world.change_recipe(train=world.pipe, duration="1 epochs")
    world.forget_model()


def pipe_to_evaluate(world: World) -> None:
    world.change_recipe(eval=world.pipe)
    world.forget_model()


def pipe_behind_a_tar(world: World) -> None:
    tar = next((world.top / "shards/val").glob("*.tar"))
    world.change_recipe(train={"shards": f"{{{tar},{world.pipe}}}", "classes": str(names_of(world))})
    world.forget_model()


def pipe_in_braces(world: World) -> None:
    world.change_recipe(train={"shards": f"{{{world.pipe},x}}"})
    world.forget_model()


def scheme_of_programs(world: World) -> None:
    world.change_recipe(train="dask://127.0.0.1:1/x.tar")
    world.forget_model()


def names_of(world: World) -> Path:
    path = world.new("names.txt")
    path.write_text("3\n8\n")
    return path


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


def command_as_state(world: World) -> None:
    revived = {"py/reduce": [{"py/function": "os.mkdir"}, {"py/tuple": [str(world.canary)]}]}
    world.seal({"identity": revived, "state": revived})


# ---- checkpoints ----------------------------------------------------------------------------------------------------

SHARDS = {
    0: ["mp_rank_00_model_states.pt"],
    1: ["mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"],
    2: ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"],
    3: ["zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"],
}


def engine_shards(stage: int) -> Attack:
    def attack(world: World) -> None:
        files = {f"deepspeed/{name}": {"module": {}, "optimizer_state_dict": world.ran} for name in SHARDS[stage]}
        world.save_engine(files, zero_stage=stage)

    attack.__name__ = f"zero_{stage}"
    return attack


def raw_pickle_as_shard(world: World) -> None:
    engine_shards(0)(world)
    (world.checkpoint / "deepspeed" / SHARDS[0][0]).write_bytes(pickle.dumps(world.ran, protocol=2))
    world.seal()


def accelerate(world: World) -> None:
    world.save_engine({"accelerate.pt": {"model": {}, "optimizer": world.ran}}, backend="accelerate")


# ---- models ---------------------------------------------------------------------------------------------------------


def pickle_as_safetensors(world: World) -> None:
    world.finish()
    torch.save({"head.weight": world.ran}, world.stage / "model" / WEIGHTS_FILE)
    world.model = world.stage / "model"


def safetensors_of_pickle(world: World) -> None:
    world.model = world.new("weights.safetensors")
    world.model.write_bytes(pickle.dumps(world.ran))


def torch_file(name: str) -> Attack:
    def attack(world: World) -> None:
        world.model = world.new(name)
        torch.save({"state_dict": {"blocks.0.norm1.weight": torch.ones(4), "more": world.ran}}, world.model)

    attack.__name__ = name
    return attack


def old_torch_file(world: World) -> None:
    world.model = world.new("old.pth")
    torch.save({"head": world.ran}, world.model, _use_new_zipfile_serialization=False)


def raw_pickle(world: World) -> None:
    world.model = world.new("raw.bin")
    world.model.write_bytes(pickle.dumps(world.ran))


def torch_tar(world: World) -> None:
    """torch's form of before 2017."""
    world.model = world.new("oldest.tar")
    with tarfile.open(world.model, "w") as tar:
        for name in ("storages", "tensors", "pickle"):
            add(tar, name, pickle.dumps(world.ran, protocol=2))


def folder_with_code(world: World) -> None:
    """As transformers' `trust_remote_code` would run it."""
    world.model = world.new("hub/config.json").parent
    code = f"import os\nos.mkdir({str(world.canary)!r})\n"
    for name in ("modeling_evil.py", "__init__.py", "setup.py", "conftest.py"):
        (world.model / name).write_text(code)
    content = {
        "model_type": "vit",
        "architectures": ["Evil"],
        "auto_map": {"AutoConfig": "modeling_evil.Evil", "AutoModelForImageClassification": "modeling_evil.Evil"},
        "custom_pipelines": {"image-classification": {"impl": "modeling_evil.Evil"}},
    }
    (world.model / "config.json").write_text(json.dumps(content))
    torch.save({"vit.embeddings.cls_token": world.ran}, world.model / "pytorch_model.bin")


def timm_folder_with_code(world: World) -> None:
    folder_with_code(world)
    content = {"architecture": "vit_base_patch16_224", "pretrained_cfg": {"custom_load": "modeling_evil.load"}}
    (world.model / "config.json").write_text(json.dumps(content))


def record_with_code(world: World) -> None:
    """Our own folder; its record names what could be imported."""
    world.finish()
    path = world.stage / "model" / CONFIG_FILE
    content = json.loads(path.read_text())
    content["shardvit"]["model"] |= {"gelu": f"__import__('os').mkdir({str(world.canary)!r})"}
    path.write_text(json.dumps(content))
    world.model = world.stage / "model"


def npz_of_objects(world: World) -> None:
    world.model = world.new("weights.npz")
    np.savez(world.model, **{"cls": np.array([world.ran], dtype=object), "head/bias": np.zeros(2, np.float32)})


def npz_of_pickles(world: World) -> None:
    world.model = world.new("weights.npz")
    with zipfile.ZipFile(world.model, "w") as archive:
        archive.writestr("head/bias.npy", pickle.dumps(world.ran))
        archive.writestr("../canary/x.npy", b"x")


def exported_program(world: World) -> None:
    """torch.export's archive with a pickle in each place where it may have one."""
    world.model = world.new("model.pt2")
    record = json.loads((world.stage / "model" / CONFIG_FILE).read_text())["shardvit"]
    names = list(torch_names(world))
    entries = {name: {"path_name": "weight_0", "is_param": True, "use_pickle": True} for name in names}
    evil = io.BytesIO()
    torch.save(world.ran, evil)
    with zipfile.ZipFile(world.model, "w") as archive:
        archive.writestr("model/archive_format", "pt2")
        archive.writestr("model/extra/shardvit.json", json.dumps(record))
        archive.writestr("model/data/weights/model_weights_config.json", json.dumps({"config": entries}))
        archive.writestr("model/data/weights/weight_0", evil.getvalue())
        archive.writestr("model/data/sample_inputs/model.pt", evil.getvalue())
        archive.writestr("model/data/constants/opaque_0", pickle.dumps(world.ran))


def torch_names(world: World) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(world.stage / "model" / WEIGHTS_FILE)


def onnx_with_weights_elsewhere(world: World) -> None:
    """A graph whose weights are said to lie in a file outside its folder."""
    from onnx import TensorProto, helper

    outside = world.new("secret.bin")
    outside.write_bytes(b"\0" * 4 * 2 * 192)
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[192, 2], data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value="../secret.bin")
    graph = helper.make_graph(
        [
            helper.make_node("Flatten", ["images"], ["flat"]),
            helper.make_node("MatMul", ["flat", "w"], ["logits"]),
        ],
        "g",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["n", 3, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 2])],
        initializer=[weight],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    record = json.loads((world.stage / "model" / CONFIG_FILE).read_text())["shardvit"]
    made.metadata_props.add(key="shardvit", value=json.dumps(record))
    world.model = world.new("onnx/model.onnx")
    world.model.write_bytes(made.SerializeToString())


# ---- shards ---------------------------------------------------------------------------------------------------------


def manifest_file(file: Callable[[World], str]) -> Attack:
    def attack(world: World) -> None:
        path = world.shards / "manifest.json"
        content = json.loads(path.read_text())
        content["shards"][0]["file"] = file(world)
        path.write_text(json.dumps(content))
        world.forget_model()

    return attack


manifest_pipe = manifest_file(lambda world: world.pipe)
manifest_pipe.__name__ = "manifest_pipe"
manifest_url = manifest_file(lambda world: "file:///etc/passwd")
manifest_url.__name__ = "manifest_url"
manifest_above = manifest_file(lambda world: "../val/x.tar")
manifest_above.__name__ = "manifest_above"


def side_files_of_pipes(world: World) -> None:
    """What other tools would read."""
    (world.shards / "sizes.json").write_text(json.dumps({world.pipe: 100, "__len__": 10**9}))
    splits = {"train": {"name": "train", "num_samples": 9, "filenames": [world.pipe], "shard_lengths": [9]}}
    (world.shards.parent / "_info.json").write_text(json.dumps({"splits": splits}))
    world.forget_model()


def index_of_pickle(world: World) -> None:
    for tar in world.shards.glob("*.tar"):
        tar.with_suffix(".idx").write_bytes(pickle.dumps(world.ran))
    world.forget_model()


def add(tar: tarfile.TarFile, name: str, content: bytes = b"", **more: Any) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in more.items():
        setattr(info, key, value)
    tar.addfile(info, io.BytesIO(content))


def tar_of_others(world: World, *members: tuple[str, bytes], links: bool = False) -> None:
    """A folder of tars without a manifest, with a whole sample first."""
    world.shards = world.new("foreign/x-0.tar").parent
    with tarfile.open(world.shards / "x-0.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for key in ("a", "b", "c", "d") * 8:
            number = f"{key}{len(tar.getmembers())}"
            add(tar, f"{number}.png", world.image.read_bytes())
            add(tar, f"{number}.cls", b"0")
        for name, content in members:
            add(tar, name, content)
        if links:
            add(tar, "l.png", type=tarfile.SYMTYPE, linkname="/etc/passwd")
            add(tar, "m.png", type=tarfile.LNKTYPE, linkname="../../secret")
            add(tar, "fifo", type=tarfile.FIFOTYPE)
    world.change_recipe(train=str(world.shards), eval=str(world.shards))
    world.forget_model()


def members_above(world: World) -> None:
    tar_of_others(world, ("../canary/x.png", world.image.read_bytes()), ("../canary/x.cls", b"0"))


def links(world: World) -> None:
    tar_of_others(world, links=True)


def pickled_members(world: World) -> None:
    """webdataset decodes .pyd, .pickle and .pth by unpickling, if it is asked to decode."""
    evil = pickle.dumps(world.ran)
    members = [(f"p.{ending}", evil) for ending in ("pyd", "pickle", "pkl", "pth", "npy", "npz", "cls", "json", "png")]
    tar_of_others(world, *members)


def cached_index_of_objects(world: World) -> None:
    """An index that was left where ours are kept."""
    from data_shards.shard_set import ShardsSpec, open_shards

    tar_of_others(world)
    open_shards(ShardsSpec(str(world.shards)), report=lambda line: None)
    indexes = list(Path(os.environ["XDG_CACHE_HOME"]).rglob("*.npz"))
    assert indexes
    for path in indexes:
        with np.load(path) as arrays:
            names = list(arrays)
        np.savez(path, **dict.fromkeys(names, np.array([world.ran], dtype=object)))


# ---- images and labels ----------------------------------------------------------------------------------------------


def postscript(world: World) -> Path:
    """Pillow's EPS reader would start Ghostscript on it: here is one that tells."""
    path = world.new("bin/gs")
    path.write_text(f"#!/bin/sh\nmkdir {world.canary}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    world.image = world.new("scan.png")
    head = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%HiResBoundingBox: 0 0 8 8\n%%EndComments\n"
    world.image.write_text(f"{head}(%pipe%mkdir {world.canary}) (r) file\nshowpage\n%%EOF\n")
    return world.image


def postscript_image(world: World) -> None:
    postscript(world)


def postscript_to_pack(world: World) -> None:
    for name in ("a", "b"):
        (world.source / name).mkdir()
        shutil.copy(world.image, world.source / name / "whole.png")
    shutil.copy(postscript(world), world.source / "a/scan.png")


def postscript_in_a_tar(world: World) -> None:
    eps = postscript(world).read_bytes()
    world.image = world.top / "photo.png"
    tar_of_others(world, ("e.png", eps), ("e.cls", b"0"))


def pickles_to_pack(world: World) -> None:
    """CIFAR's own form, and other pickles among class folders."""
    for name in ("a", "b"):
        (world.source / name).mkdir()
        shutil.copy(world.image, world.source / name / "whole.png")
    for name in ("data_batch_1", "batches.meta", "a/x.pkl", "a/data.npy"):
        (world.source / name).write_bytes(pickle.dumps(world.ran))
    (world.source / "a/image.png").write_bytes(pickle.dumps(world.ran))


def labels_outside(ending: str) -> Attack:
    def attack(world: World) -> None:
        paths = ["../secret.png", "/etc/passwd", world.pipe, "whole.png"]
        shutil.copy(world.image, world.source / "whole.png")
        shutil.copy(world.image, world.top / "secret.png")
        labels = world.new(f"labels.{ending}")
        if ending == "csv":
            labels.write_text("path,label\n" + "".join(f'"{path}",=cmd|x\n' for path in paths))
        else:
            labels.write_text("".join(json.dumps({"path": path, "label": "x"}) + "\n" for path in paths))
        world.pack_options = ["--labels", str(labels)]

    attack.__name__ = f"labels_{ending}"
    return attack


def unsafe_yaml_is_a_canary(world: World) -> None:
    """For the control: the recipe's tag does run in a loader that obeys it."""
    tagged_recipe(world)
    yaml.unsafe_load(world.recipe.read_text())


# ---- the table ------------------------------------------------------------------------------------------------------

FOLDERS = ("predict", "export")
MODELS = ("predict", "export", "import")
LOOKS = ("run --dry-run", "submit --render", "plan")
RECIPES = ("run", *LOOKS)
RESUME = "tests/distributed/test_elastic.py: test_a_command_in_any_file_of_any_stage_is_refused_by_name_and_not_run"
RESUME_ACCELERATE = "tests/pipeline/test_state_reading.py: test_accelerate_goes_on_from_no_pickle"

ROWS = (
    Row("a recipe with YAML tags", ("status", *FOLDERS, *RECIPES), "refused", (tagged_recipe, tagged_parent)),
    Row(
        "a recipe with `pipe:`, or a URL of a kind that may start programs",
        ("status", "run --dry-run", "submit --render"),
        "not run, and said",
        (pipe, pipe_to_evaluate, pipe_behind_a_tar, pipe_in_braces, scheme_of_programs),
    ),
    Row(
        "the same for training images",
        ("plan",),
        "not run, and said",
        (pipe, pipe_behind_a_tar, pipe_in_braces, scheme_of_programs),
    ),
    Row(
        "the same in a run whose stage.json names no classes yet",
        FOLDERS,
        "refused",
        (pipe, pipe_to_evaluate, pipe_behind_a_tar, pipe_in_braces, scheme_of_programs),
    ),
    Row(
        "stage.json, mlflow.json, slurm/*.json",
        ("status", *FOLDERS, "run --dry-run", "submit --render"),
        "read as data",
        (commands_in_the_records,),
    ),
    Row("state.json of a checkpoint", FOLDERS, "refused", (command_as_state,)),
    Row(
        "DeepSpeed's checkpoint, ZeRO 0 to 3",
        (*FOLDERS, "run"),
        "refused",
        (*map(engine_shards, range(4)), raw_pickle_as_shard),
        {"run": RESUME},
    ),
    Row("accelerate's checkpoint", (*FOLDERS, "run"), "refused", (accelerate,), {"run": RESUME_ACCELERATE}),
    Row("safetensors", MODELS, "refused", (pickle_as_safetensors, safetensors_of_pickle)),
    Row(
        "weights of torch (.pt, .pth, .bin, .ckpt, .tar)",
        MODELS,
        "refused",
        (
            *map(torch_file, ("w.pt", "w.pth", "w.bin", "w.ckpt")),
            old_torch_file,
            raw_pickle,
            torch_tar,
        ),
    ),
    Row(
        "a model's folder (ours, timm's, transformers')",
        MODELS,
        "refused",
        (record_with_code, folder_with_code, timm_folder_with_code),
    ),
    Row("npz with objects", MODELS, "refused", (npz_of_objects, npz_of_pickles)),
    Row("torch.export (.pt2)", MODELS, "refused", (exported_program,)),
    Row("ONNX with weights outside its folder", MODELS, "refused", (onnx_with_weights_elsewhere,)),
    Row(
        "manifest.json that names a command, a URL or a path outside",
        ("check", "run", "run --dry-run", "submit --render", *FOLDERS),
        "refused",
        (manifest_pipe, manifest_url, manifest_above),
    ),
    Row("the same manifest.json", ("plan",), "not run, and said", (manifest_pipe, manifest_url, manifest_above)),
    Row("sizes.json, _info.json", ("check", *LOOKS, *FOLDERS), "read as data", (side_files_of_pipes,)),
    Row("an index (.idx, .npz)", ("check",), "read as data", (index_of_pickle, cached_index_of_objects)),
    Row(
        "tars: `../`, links, pickled members",
        ("check", *LOOKS, *FOLDERS),
        "read as data",
        (members_above, links, pickled_members),
    ),
    Row("an image that is PostScript", ("predict",), "refused", (postscript_image,)),
    Row("the same in shards", ("check",), "refused", (postscript_in_a_tar,)),
    Row("the same to be packed", ("pack",), "refused", (postscript_to_pack,)),
    Row("pickles among images, as CIFAR's", ("pack",), "refused", (pickles_to_pack,)),
    Row("CSV, JSONL with paths outside", ("pack",), "refused", tuple(map(labels_outside, ("csv", "jsonl")))),
)
