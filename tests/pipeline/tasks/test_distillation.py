"""What a student learns from its teacher: DeiT's losses, restated, and torch's KL; both see the same pixels."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from timm.models import save_for_hf
from torch.nn import functional as F

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.loading.batch import Batch
from shardvit.data_shards.loading.mixing import Mix
from shardvit.data_shards.vocabulary import GOOGLES, Normalisation
from shardvit.model.config import ModelConfig
from shardvit.model.loss import loss_function
from shardvit.model.saved.model_folder import save_model
from shardvit.pipeline.checkpoint.store import assemble
from shardvit.pipeline.engine.saved_state.portable import open_state
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.stage.pixels import model_input
from shardvit.pipeline.tasks.distillation import Distillation, Taught, divergence, prepare_student
from shardvit.pipeline.using.teacher import Teacher, check_teacher, compared_tokens, load_teacher
from tests.model.formats.small_model import CONFIG, NAMES, described, random_model
from tests.small_recipe import small_recipe, small_stage

IMAGENET = Normalisation(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def saved(folder: Path, **changes: Any) -> Path:
    meta = described(**changes)
    save_model(folder, random_model(meta).state_dict(), meta=meta)
    return folder


def recipe(teacher: Path | str, *, stage: str = "pretrain", size: Any = 24, keys: Any = None, **distill: Any) -> Recipe:
    given = {"teacher": str(teacher), "kind": "hard", **distill}
    config = small_stage(image_size=size, distill=given, **(keys or {}))
    return Recipe.model_validate(small_recipe(**{f"{stage}_": config}))


def loaded(teacher: Path | str, **distill: Any) -> Teacher:
    return load_teacher(recipe(teacher, **distill), stage="pretrain", classes=NAMES)


def task_of(teacher: Teacher, **changes: Any) -> Distillation:
    engine: Any = SimpleNamespace(device=torch.device("cpu"), input_dtype=torch.float32)
    fields = {"classes": NAMES, "label_kind": "single", "normalisation": GOOGLES, "loss_kind": "softmax"}
    teacher.settle("fp32", device=engine.device, normalisation=fields["normalisation"])
    return Distillation(engine, train_loss=loss_function("softmax"), teacher=teacher, **fields | changes)


def batch_of(count: int, *, size: int = 24, mix: Mix | None = None) -> Batch:
    generator = torch.Generator().manual_seed(0)
    return Batch(
        images=torch.randint(0, 256, (count, size, size, 3), dtype=torch.uint8, generator=generator),
        mirrored=torch.arange(count) % 2 == 1,
        labels=torch.arange(count) % len(NAMES),
        counted=torch.ones(count, dtype=torch.bool),
        substituted=torch.zeros(count, dtype=torch.bool),
        samples=torch.arange(count),
        epochs=torch.zeros(count, dtype=torch.int64),
        keys=("",) * count,
        mix=mix,
    )


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("heads", [1, 2])
def test_hard_and_soft_losses_are_deits(tmp_path: Path, share: float, heads: int):
    """DeiT's equations 2 and 3; its code divides the soft term by the number of classes, too."""
    generator = torch.Generator().manual_seed(1)
    student, token, taught = (3 * torch.randn(7, len(NAMES), generator=generator) for _ in range(3))
    labels = torch.arange(7) % len(NAMES)
    outputs: Any = student if heads == 1 else (student, token)
    learns, base = (student if heads == 1 else token), F.cross_entropy(student, labels)
    folder = saved(tmp_path / "teacher")

    hard = task_of(loaded(folder, kind="hard", share=share)).loss(outputs, Taught(labels, taught))
    torch.testing.assert_close(hard, base * (1 - share) + F.cross_entropy(learns, taught.argmax(1)) * share)

    tau = 3.0
    soft = task_of(loaded(folder, kind="soft", share=share, temperature=tau)).loss(outputs, Taught(labels, taught))
    their = F.kl_div(
        F.log_softmax(learns / tau, dim=1), F.log_softmax(taught / tau, dim=1), reduction="sum", log_target=True
    ) * (tau * tau / learns.numel())
    torch.testing.assert_close(soft, base * (1 - share) + their * len(NAMES) * share)


def test_the_divergence_is_zero_at_the_teacher_and_its_gradient_the_difference_of_probabilities():
    teacher = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    assert divergence(teacher + 5, teacher, temperature=2.0).abs() < 1e-6
    student = torch.randn(4, 6, generator=torch.Generator().manual_seed(3)).requires_grad_()
    divergence(student, teacher, temperature=1.0).backward()
    torch.testing.assert_close(student.grad, (student.softmax(1) - teacher.softmax(1)).detach() / 4)


def test_the_teacher_sees_the_students_pixels_by_its_own_normalisation_and_size(tmp_path: Path):
    folder = saved(tmp_path / "teacher", mean=IMAGENET.mean, std=IMAGENET.std)
    teacher = loaded(folder)
    task, mix = task_of(teacher), Mix("mixup", keep=0.3)
    for size in (24, 40):
        batch = batch_of(6, size=size, mix=mix)
        example = task.example(batch, use="train")
        assert torch.equal(example.inputs[0], model_input(batch, device=torch.device("cpu"), dtype=torch.float32))
        theirs = model_input(batch, device=torch.device("cpu"), dtype=torch.float32, normalisation=IMAGENET)
        if size != 24:
            theirs = F.interpolate(theirs, size=(24, 24), mode="bicubic", antialias=True)
        with torch.no_grad():
            expected = random_model(described(mean=IMAGENET.mean, std=IMAGENET.std))(theirs)
        torch.testing.assert_close(example.targets.teacher, expected, rtol=1e-4, atol=1e-5)
        assert example.targets.labels.shape == (5, len(NAMES)) and not example.targets.teacher.requires_grad


def test_its_answers_do_not_depend_on_the_split_into_micro_batches(tmp_path: Path):
    teacher = loaded(saved(tmp_path / "teacher")).settle("fp32", device=torch.device("cpu"))
    images = torch.randn(8, 3, 24, 24, generator=torch.Generator().manual_seed(4))
    whole = teacher(images)
    torch.testing.assert_close(torch.cat([teacher(images[:3]), teacher(images[3:])]), whole, rtol=1e-5, atol=1e-5)
    assert teacher.digest == loaded(tmp_path / "teacher").digest != loaded(saved(tmp_path / "b", head="mlp")).digest


def test_evaluations_are_the_students_alone(tmp_path: Path):
    task = task_of(loaded(saved(tmp_path / "teacher")))
    example = task.example(batch_of(4), use="eval")
    assert torch.equal(example.targets, torch.arange(4))


@pytest.mark.parametrize(("pools", "tokens"), [(("cls", "cls"), 37), (("cls", "gap"), 36), (("gap", "cls"), 36)])
def test_features_are_regressed_by_a_linear_layer_onto_normed_ones(tmp_path: Path, pools: tuple[str, str], tokens: int):
    """Feature distillation (arXiv 2205.14141): smooth L1 with beta 2 on tokens whitened by a plain LayerNorm."""
    student, other = (CONFIG.model_copy(update={"pool": pool}) for pool in pools)
    folder = saved(tmp_path / "teacher", config=other)
    teacher, model = loaded(folder, kind="feature", share=1), random_model(described(student))
    before = set(model.state_dict())
    prepare_student(model, teacher, seed=0)
    assert set(model.state_dict()) - before == {"distill_projection.weight", "distill_projection.bias"}
    task, batch = task_of(teacher), batch_of(5)
    assert task.more_train_metrics == ()
    example = task.example(batch, use="train")
    logits, projected = model.train()(*example.inputs)
    assert projected.shape == (5, tokens, 48) and torch.equal(model.eval()(*example.inputs), logits)
    with torch.no_grad():
        seen = random_model(described(other)).forward_features(*example.inputs)[:, -tokens:]
    wanted = (seen - seen.mean(-1, keepdim=True)) / (seen.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    torch.testing.assert_close(example.targets.teacher, wanted, rtol=1e-4, atol=1e-4)
    error = (projected - wanted).abs()
    expected = torch.where(error <= 2, error.square() / 4, error - 1).mean()
    loss = task.loss((logits, projected), example.targets)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    loss.backward()
    assert all(each.grad is not None for each in model.parameters())  # the head's are zeros
    assert all(each.grad is None for each in teacher.parameters())


def test_registers_are_not_compared():
    tokens = torch.arange(7)[None, :, None]  # a class token, three registers, three patches
    assert compared_tokens(tokens, prefix=4, class_token=True).flatten().tolist() == [0, 4, 5, 6]
    assert compared_tokens(tokens, prefix=4, class_token=False).flatten().tolist() == [4, 5, 6]


@pytest.mark.parametrize("backend", ["deepspeed", "accelerate"])
def test_a_checkpoints_model_is_the_student_without_projection(tmp_path: Path, backend: str):
    student = random_model(described())
    prepare_student(student, loaded(saved(tmp_path / "teacher"), kind="feature"), seed=0)
    optimizer = torch.optim.AdamW(student.named_parameters())
    content = {"model": student.state_dict(), "optimizer": optimizer.state_dict(), "scaler": None}
    torch.save(content, tmp_path / ("ddp.pt" if backend == "deepspeed" else "accelerate.pt"))
    written, alone = {"backend": backend, "zero_stage": 0, "processes": 1}, random_model(described())
    found = assemble(tmp_path, written=written, model=alone)
    assert found.keys() == alone.state_dict().keys()
    assert all(torch.equal(each, student.get_parameter(name)) for name, each in found.items())
    with pytest.raises(UserError, match="distill_projection"):  # to train on, it takes all
        open_state(tmp_path, written=written, model=alone)


def test_agreement_is_the_share_of_equal_answers_of_the_mean_of_both_heads(tmp_path: Path):
    task = task_of(loaded(saved(tmp_path / "teacher")))
    one = torch.eye(5)[:4]
    other = torch.eye(5)[[0, 1, 3, 3]] * 3
    taught, labels = torch.eye(5)[[0, 2, 3, 3]], torch.tensor([0, 1, 2, 3])
    assert task.train_score((one, other), Taught(labels, taught)).tolist() == [0.75, 0.75]
    assert task.train_score(one, Taught(labels, taught)).tolist() == [1.0, 0.5]
    assert task.more_train_metrics == ("train/teacher_agreement",)


@pytest.mark.parametrize("architecture", ["regnety_002", "resnet10t"])
def test_a_timm_folder_of_another_architecture_teaches_what_timm_says(tmp_path: Path, architecture: str):
    theirs = timm.create_model(architecture, num_classes=5).eval()
    save_for_hf(theirs, tmp_path, safe_serialization=True)
    teacher = loaded(tmp_path).settle("fp32", device=torch.device("cpu"), normalisation=GOOGLES)
    images = torch.randn(2, 3, teacher.facts.image_size, teacher.facts.image_size)
    mean, std = (torch.tensor(each)[:, None, None] for each in (IMAGENET.mean, IMAGENET.std))
    with torch.no_grad():
        expected = theirs(((images * 0.5 + 0.5) - mean) / std)
    torch.testing.assert_close(teacher(images), expected, rtol=1e-4, atol=1e-4)
    assert teacher.facts.parameters == sum(each.numel() for each in theirs.parameters())


def test_a_teachers_running_statistics_keep_their_precision(tmp_path: Path):
    theirs = timm.create_model("resnet10t", num_classes=5).eval()
    statistics = {name: each.uniform_(0.5, 1.5) for name, each in theirs.named_buffers() if each.is_floating_point()}
    save_for_hf(theirs, tmp_path, safe_serialization=True)
    teacher, images = loaded(tmp_path), torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    for _ in range(2):  # after a rollback it settles again
        teacher.settle("bf16", device=torch.device("cpu"))
        assert teacher.model.get_parameter("fc.weight").dtype == torch.bfloat16
        assert statistics and all(torch.equal(teacher.model.get_buffer(name), it) for name, it in statistics.items())
    assert teacher(images).isfinite().all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architecture": "no_such_net"}, "no_such_net"),
        ({"num_classes": 10**9}, "num_classes"),
        ({"model_args": {"pretrained_cfg_overlay": {"file": "/etc/passwd"}}}, "model_args"),
        ({"architecture": "resnet18"}, "resnet18"),
    ],
)
def test_a_timm_folder_builds_nothing_but_what_its_weights_are(tmp_path: Path, change: dict[str, Any], words: str):
    save_for_hf(timm.create_model("resnet10t", num_classes=5), tmp_path, safe_serialization=True)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | change))
    with pytest.raises(UserError, match=words):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("changes", "distill", "words"),
    [
        ({}, {"teacher": "nowhere"}, "nowhere"),
        ({"class_names": ("a", "b", "c", "d", "e")}, {}, "class 0"),
        ({"class_names": NAMES[:4], "num_classes": 4}, {}, "4 classes"),
        ({"image_size": 16}, {"kind": "feature"}, "patches"),
    ],
)
def test_a_teacher_that_does_not_fit_is_one_sentence_that_names_the_key(
    tmp_path: Path, changes: dict[str, Any], distill: dict[str, Any], words: str
):
    given = recipe(**{"teacher": saved(tmp_path / "teacher", **changes), **distill})
    for check in (check_teacher, load_teacher):
        with pytest.raises(UserError, match=words) as refused:
            check(given, stage="pretrain", classes=NAMES)
        assert str(refused.value).count("stages.pretrain.distill.teacher") == 1


def test_classes_known_by_number_alone_fit_any_of_as_many(tmp_path: Path):
    numbers = tuple(map(str, range(5)))
    given = recipe(saved(tmp_path / "teacher", class_names=numbers))
    assert check_teacher(given, stage="pretrain", classes=NAMES).class_names == numbers
    check_teacher(recipe(saved(tmp_path / "b")), stage="pretrain", classes=numbers)


@pytest.mark.parametrize(
    ("distill", "keys", "words"),
    [
        ({"kind": "hard", "temperature": 2}, {}, "temperature"),
        ({"share": 0}, {}, "share"),
        ({"kind": "feature"}, {"patch_dropout": 0.5}, "patch_dropout"),
        ({"share": 1}, {"label_smoothing": 0.1}, "label_smoothing"),
        ({"kind": "feature", "size": {"from": 8, "to": 24, "over": "50%", "steps": 2}}, {}, "image_size"),
    ],
)
def test_keys_that_nothing_would_read_are_refused(distill: dict[str, Any], keys: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        recipe(
            "t",
            **distill,
            keys=keys,
        )


def test_a_distillation_token_learns_from_the_teacher_and_the_class_token_from_labels(tmp_path: Path):
    given = ModelConfig(width=48, depth=2, heads=4, patch_size=4, distillation_token="learned")
    teacher, model = loaded(saved(tmp_path / "teacher"), kind="hard", share=0.5), random_model(described(given))
    prepare_student(model, teacher, seed=0)
    task, batch = task_of(teacher), batch_of(6)
    example = task.example(batch, use="train")
    pair = model.train()(*example.inputs)
    loss = task.loss(pair, example.targets)
    expected = [F.cross_entropy(pair[0], batch.labels), F.cross_entropy(pair[1], example.targets.teacher.argmax(1))]
    torch.testing.assert_close(loss, sum(expected) / 2)
    torch.testing.assert_close(model.eval()(*example.inputs), (pair[0] + pair[1]) / 2, rtol=1e-4, atol=1e-5)


def test_the_token_is_of_models_with_a_linear_head_and_not_for_features():
    model = {"width": 16, "depth": 1, "heads": 2, "patch_size": 4, "distillation_token": "learned"}
    for keys, words in (({}, "head"), ({"head": "linear", "distill": {"teacher": "t", "kind": "feature"}}, "feature")):
        with pytest.raises(ValueError, match=words):
            Recipe.model_validate(small_recipe(model=model, pretrain_=small_stage(**keys)))
