"""What the loop is told: classification as it always was, to the bit; masked patches the same on any ranks."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.loading.batch import Batch
from shardvit.data_shards.loading.mixing import Mix
from shardvit.data_shards.shards.shard_set import ShardSet
from shardvit.data_shards.vocabulary import GOOGLES, LabelKind, Normalisation
from shardvit.model.loss import loss_function
from shardvit.model.self_supervised.masked_patch import colour_classes
from shardvit.model.vocabulary import COLOURS
from shardvit.pipeline.evaluation.evaluate import evaluate
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.stage.pixels import model_input, targets
from shardvit.pipeline.stage.task import Classification, Example
from shardvit.pipeline.tasks.make_task import make_task, task_outputs
from shardvit.pipeline.tasks.patch_corruption import MaskedPatches
from tests.data_shards.streams import SIZE, STEPS, micro_batches, pack_noise
from tests.own_training import write_example
from tests.small_recipe import small_recipe, small_stage

PATCH_SIZE, PATCHES = 3, (SIZE // 3) ** 2
CLASSES = tuple("abcde")


class Engine:
    """A device, and a model that is a function of its inputs."""

    device = torch.device("cpu")
    input_dtype = torch.float32

    def __init__(self, outputs_of: Any = None) -> None:
        self.module = SimpleNamespace(eval=lambda: None, train=lambda: None)
        self.predict = outputs_of


class Alone:
    """A single rank."""

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values[None].double()


def classification(*, label_kind: LabelKind = "single", normalisation: Normalisation = GOOGLES) -> Classification:
    return Classification(
        engine=Engine(),  # pyright: ignore[reportArgumentType]
        classes=CLASSES,
        label_kind=label_kind,
        normalisation=normalisation,
        train_loss=loss_function("softmax", label_smoothing=0.1),
        loss_kind="softmax",
    )


def masked_patches(engine: Engine | None = None, *, seed: int = 3) -> MaskedPatches:
    return MaskedPatches(engine=engine or Engine(), seed=seed, patch_size=PATCH_SIZE)  # pyright: ignore[reportArgumentType]


def batch(count: int = 6, *, labels: torch.Tensor | None = None, mix: Mix | None = None) -> Batch:
    generator = torch.Generator().manual_seed(count)
    return Batch(
        images=torch.randint(0, 256, (count, SIZE, SIZE, 3), dtype=torch.uint8, generator=generator),
        mirrored=torch.arange(count) % 2 == 0,
        labels=torch.arange(count) % 5 if labels is None else labels,
        counted=torch.ones(count, dtype=torch.bool),
        substituted=torch.zeros(count, dtype=torch.bool),
        samples=100 + torch.arange(count),
        epochs=torch.zeros(count, dtype=torch.int64),
        keys=("",) * count,
        mix=mix,
    )


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    return pack_noise(tmp_path_factory.mktemp("noise"), count=61, samples_per_shard=9)


def rows_of(example: Example) -> list[tuple[bytes, ...]]:
    """The bits of everything that the model and the loss are given of each image."""
    tensors = (*example.inputs, example.targets)
    return [tuple(tensor[row].numpy().tobytes() for tensor in tensors) for row in range(len(example.targets))]


@pytest.mark.parametrize("mix", [None, Mix("mixup", keep=0.7)])
@pytest.mark.parametrize("kind", ["single", "multi"])
def test_classification_shows_the_images_and_their_labels(kind: LabelKind, mix: Mix | None):
    labels = torch.tensor([[0, 1], [2, -1], [-1, -1], [4, 3], [1, -1], [0, 4]]) if kind == "multi" else None
    given = batch(labels=labels, mix=mix)
    others = Normalisation(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    example = classification(label_kind=kind, normalisation=others).example(given, use="train")
    (images,) = example.inputs
    cpu = torch.device("cpu")
    assert torch.equal(images, model_input(given, device=cpu, dtype=torch.float32, normalisation=others))
    assert torch.equal(example.targets, targets(given, device=cpu, num_classes=5, label_kind=kind))
    assert len(images) == len(example.targets) == (6 if mix is None else 5)


def test_classification_trains_with_smoothing_and_is_judged_without():
    task, logits = classification(), torch.randn(6, 5)
    wanted = torch.tensor([0, 1, 2, 3, 4, 0])
    assert torch.equal(task.loss(logits, wanted), F.cross_entropy(logits, wanted, label_smoothing=0.1))
    tally = task.tally(logits, wanted)
    assert torch.equal(tally.loss, F.cross_entropy(logits, wanted, reduction="none").double())
    assert torch.equal(tally.right, (logits.argmax(1) == wanted).double())
    assert torch.equal(tally.predictions, torch.ones(6, dtype=torch.float64))


def test_with_several_labels_the_best_class_is_to_be_one_of_them():
    logits = torch.eye(5)[[0, 1, 2]]
    wanted = torch.tensor([[1.0, 1, 0, 0, 0], [1, 0, 1, 0, 0], [0, 0, 0, 0, 0]])
    tally = classification(label_kind="multi").tally(logits, wanted)
    assert tally.right.tolist() == [1, 0, 0] and tally.predictions.tolist() == [1, 1, 1]
    assert tally.answers is not None and tally.answers.rank.tolist() == [0, 1, 5]


def test_the_targets_are_the_colours_of_what_the_model_is_shown():
    """Found again from the model's own input, flip and all."""
    given = batch()
    example = masked_patches().example(given, use="train")
    images, source, corrupted = example.inputs
    pixels = (images * 127.5 + 127.5).round().to(torch.uint8).permute(0, 2, 3, 1)
    colours = colour_classes(pixels, patch_size=PATCH_SIZE)
    assert torch.equal(example.targets, colours.gather(1, corrupted))
    assert source.shape == (6, PATCHES) and corrupted.shape == (6, PATCHES // 2)
    unflipped = masked_patches().example(replace(given, mirrored=torch.zeros(6, dtype=torch.bool)), use="train")
    assert [torch.equal(a, b) for a, b in zip(unflipped.targets, example.targets, strict=True)] == [False, True] * 3


@pytest.mark.parametrize(("world_size", "accumulation_steps", "workers"), [(1, 4, 0), (2, 1, 2), (4, 2, 0)])
def test_the_stream_of_masked_patches_is_the_same_on_any_ranks_and_workers(
    shards: ShardSet, world_size: int, accumulation_steps: int, workers: int
):
    def stream(*, start_step: int = 0, **options: int) -> list[set[tuple[bytes, ...]]]:
        steps: list[set[tuple[bytes, ...]]] = [set() for _ in range(STEPS)]
        per_step = options.get("accumulation_steps", 1)
        for rank in range(options.get("world_size", 1)):
            found = micro_batches(shards, rank=rank, start_step=start_step, kind="thread", **options)
            for number, each in enumerate(found):
                steps[start_step + number // per_step] |= set(rows_of(masked_patches().example(each, use="train")))
        return steps

    undivided = stream()
    assert len({row for step in undivided for row in step}) == STEPS * 8  # no image looks twice the same
    options = {"world_size": world_size, "accumulation_steps": accumulation_steps, "workers": workers}
    assert stream(**options) == undivided
    assert stream(start_step=37, **options)[37:] == undivided[37:]  # resumed


def test_the_loss_is_the_mean_over_corrupted_patches_and_so_is_the_score():
    task, wanted = masked_patches(), torch.randint(0, 512, (4, 8))
    logits = torch.randn(4, 8, len(COLOURS))
    losses = -logits.log_softmax(-1).gather(2, wanted[..., None])
    torch.testing.assert_close(task.loss(logits, wanted), losses.mean(), rtol=1e-6, atol=1e-6)
    logits[0, :3, :] = 50.0 * F.one_hot(wanted[0, :3], 512)
    tally = task.tally(logits, wanted)
    assert tally.predictions.tolist() == [8] * 4 and tally.answers is None
    assert tally.right.tolist() == (logits.argmax(-1) == wanted).sum(dim=1).tolist() and tally.right[0] >= 3
    assert tally.loss.sum().item() == pytest.approx(32 * task.loss(logits, wanted).item(), rel=1e-6)


def test_an_evaluation_counts_every_image_once_however_they_are_divided():
    """Also with padding, with a batch of nothing but padding, and twice with the same masks."""
    mixing = torch.randn(3, len(COLOURS), generator=torch.Generator().manual_seed(0))

    def outputs_of(images: torch.Tensor, source: torch.Tensor, corrupted: torch.Tensor) -> torch.Tensor:
        return source.gather(1, corrupted)[..., None] * 0.1 + (images.mean(dim=(2, 3)) @ mixing)[:, None]

    engine = Engine(outputs_of)
    ledger = SimpleNamespace(note=lambda *arguments, **options: None)
    whole = batch(7)
    halves = [slice(0, 4), slice(4, 7)]

    def part(of: slice) -> Batch:
        fields = ("images", "mirrored", "labels", "counted", "substituted", "samples", "epochs", "keys")
        return replace(whole, **{name: getattr(whole, name)[of] for name in fields})

    padding = replace(whole, counted=torch.zeros(7, dtype=torch.bool))
    padded = replace(whole, counted=torch.arange(7) < 4)

    def evaluation(*batches: Batch) -> dict[str, float]:
        task = masked_patches(engine)
        return evaluate(batches, task=task, ranks=Alone(), faults=ledger).metrics  # pyright: ignore[reportArgumentType]

    once = evaluation(whole)
    assert set(once) == {"val/loss", "val/accuracy", "val/images"} and once["val/images"] == 7
    assert 0 <= once["val/accuracy"] < 1
    assert evaluation(whole) == once == evaluation(padding, whole)
    assert evaluation(*map(part, halves)) == pytest.approx(once, rel=1e-6)
    assert evaluation(padded, part(halves[1])) == pytest.approx(once, rel=1e-6)
    nothing = evaluation(padding)
    assert nothing["val/images"] == 0 and nothing["val/loss"] != nothing["val/loss"]


def own_file(folder: Path, text: str) -> str:
    (folder / "mine.py").write_text("import torch\nfrom torch.nn import functional as F\n" + text)
    return str(folder / "mine.py")


def recipe_with(**stage: Any) -> Recipe:
    return Recipe.model_validate(small_recipe(pretrain_=small_stage(**stage)))


def task_of(recipe: Recipe) -> Any:
    data: Any = SimpleNamespace(train=SimpleNamespace(classes=CLASSES, is_multi_label=False))
    engine: Any = Engine()
    return make_task(recipe, stage="pretrain", data=data, normalisation=GOOGLES, engine=engine)


@pytest.mark.parametrize("mix", [None, Mix("mixup", keep=0.7)])
def test_an_own_loss_that_is_the_built_in_one_gives_the_same_bits(tmp_path: Path, mix: Mix | None):
    mine = own_file(tmp_path, "def mine(logits, targets):\n    return F.cross_entropy(logits, targets)\n")
    ours, own = task_of(recipe_with()), task_of(recipe_with(loss={"custom": f"{mine}:mine"}))
    wanted = ours.example(batch(mix=mix), use="train").targets
    found = []
    for task in (ours, own):
        logits = torch.randn(len(wanted), 5, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        loss = task.loss(logits, wanted)
        loss.backward()
        assert logits.grad is not None
        found.append((loss, logits.grad))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    held_out = torch.arange(5)
    assert torch.equal(own.tally(torch.eye(5), held_out).loss, ours.tally(torch.eye(5), held_out).loss)


def test_a_loss_per_image_is_averaged(tmp_path: Path):
    mine = own_file(tmp_path, "def mine(logits, targets):\n    return logits.float().sum(1)\n")
    logits = torch.randn(6, 5, requires_grad=True)
    assert torch.equal(task_of(recipe_with(loss={"custom": f"{mine}:mine"})).loss(logits, None), logits.sum(1).mean())


@pytest.mark.parametrize(
    ("returns", "said"),
    [
        ("logits", r"a tensor \[6, 5\]"),
        ("logits.sum(1)[:2]", r"a tensor \[2\]"),
        ("logits.sum().item()", "float"),
        ("logits.detach().sum()", r"a tensor \[\], without a gradient"),
    ],
)
def test_a_loss_that_gives_something_else_is_named(tmp_path: Path, returns: str, said: str):
    mine = own_file(tmp_path, f"def mine(logits, targets):\n    return {returns}\n")
    with pytest.raises(UserError, match=rf"loss\.custom .*mine\.py:mine: it returned {said}"):
        task_of(recipe_with(loss={"custom": f"{mine}:mine"})).loss(torch.randn(6, 5, requires_grad=True), None)


def test_an_own_tasks_random_numbers_are_those_of_sample_and_epoch(shards: ShardSet, tmp_path: Path):
    """Whatever the processes; in an evaluation they are the same each time."""
    task, steps = task_of(recipe_with(task=f"{write_example(tmp_path)}:Rotations")), []
    for world_size in (1, 2):
        found: dict[tuple[int, int], bytes] = {}
        for rank in range(world_size):
            for each in micro_batches(shards, rank=rank, world_size=world_size):
                drawn = task.random(each, use="train", draws=3)
                for row, key in enumerate(zip(each.epochs.tolist(), each.samples.tolist(), strict=True)):
                    assert found.setdefault(key, drawn[row].tobytes()) == drawn[row].tobytes()
        steps.append(found)
    assert steps[0] == steps[1] and len(set(steps[0].values())) == len(steps[0])
    again = [task.random(batch(), use="eval", draws=2) for _ in range(2)]
    assert (again[0] == again[1]).all() and not (again[0] == task.random(batch(), use="train", draws=2)).any()


def test_an_own_task_sizes_the_head_and_shows_its_own_targets(tmp_path: Path):
    recipe = recipe_with(task=f"{write_example(tmp_path)}:Rotations")
    assert task_outputs(recipe.train_stage("pretrain"), classes=CLASSES) == ("0", "90", "180", "270")
    assert task_outputs(recipe_with().train_stage("pretrain"), classes=CLASSES) == CLASSES
    task, given = task_of(recipe), batch()
    example = task.example(given, use="train")
    plain = task_of(recipe_with()).example(given, use="train").inputs[0]
    for turned, image, turns in zip(example.inputs[0], plain, example.targets.tolist(), strict=True):
        assert torch.equal(turned, image.rot90(turns, (1, 2)))
    assert task.outputs == ("0", "90", "180", "270") and set(example.targets.tolist()) <= {0, 1, 2, 3}


def test_a_task_that_lacks_what_the_loop_calls_is_refused(tmp_path: Path):
    mine = own_file(tmp_path, "class Mine:\n    def __init__(self, **parts):\n        self.engine = self.step = 1\n")
    with pytest.raises(UserError, match=r"stages\.pretrain\.task .*mine\.py:Mine: it has no outputs"):
        task_of(recipe_with(task=f"{mine}:Mine"))
