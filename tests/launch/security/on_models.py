"""What is done to somebody's models."""

import io
import json
import pickle
import tarfile
import zipfile
from typing import Any

import numpy as np
import torch

from shardvit.model.saved.model_folder import CONFIG_FILE, WEIGHTS_FILE
from tests.launch.security.on_shards import add
from tests.launch.security.somebody import Attack, World


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
    objects = np.array([world.ran], dtype=object)
    np.savez(world.model, **dict.fromkeys(("embedding/kernel", "Transformer/encoder_norm/scale", "cls"), objects))


def npz_of_pickles(world: World) -> None:
    world.model = world.new("weights.npz")
    with zipfile.ZipFile(world.model, "w") as archive:
        for name in ("embedding/kernel", "Transformer/encoder_norm/scale", "cls"):
            archive.writestr(f"{name}.npy", pickle.dumps(world.ran))
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
