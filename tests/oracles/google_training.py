"""Google's train steps, written in flax and optax from their published description, for the trajectory tests.

big_vision's (`train.py`, `optax.py`, `utils.py`): clip by the global norm, Adam, times the learning rate, plus weight
decay on parameters named `kernel` that the learning rate does not multiply, times the schedule (warm-up to 1, decay).
vision_transformer's fine-tuning (`train.py`): clip, momentum 0.9 in `optax.trace`'s form, times the schedule. Mixup:
images and labels times a, plus the batch rolled by one times 1 - a. The sigmoid loss is a sum over the classes.

Nothing of model/ or pipeline/engine is used here; batches come as pixels, labels and the mixing weight.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardvit.data_shards.loading.batch import Batch
from shardvit.pipeline.ranks.place import Place
from shardvit.pipeline.recipe.schema import Recipe
from shardvit.pipeline.recipe.stage_plan import plan_stage
from shardvit.pipeline.recipe.vocabulary import StageName
from shardvit.pipeline.runs.run_folder import RunFolder
from shardvit.pipeline.stage.batches import train_stream
from shardvit.pipeline.stage.stage_data import Stage, open_data
from tests.oracles.flax_vit import CLASSES, FlaxVit

Params = dict[str, Any]
GoogleBatch = tuple[np.ndarray, np.ndarray]  # float32 [n, S, S, 3] and [n, classes]


@dataclass(frozen=True)
class Trained:
    """What a training ended with."""

    losses: np.ndarray  # of each step, before its update
    params: Params
    average: Params  # of the parameters, with the EMA's decay


def schedule(
    peak: float, *, total: int, warmup: int, decay: Literal["linear", "cosine"], end: float = 0.0
) -> Callable[[Any], Any]:
    """big_vision's: the decay begins after the warm-up, which multiplies it; an optax schedule."""

    def at(step: Any) -> Any:
        progress = jnp.clip((step - warmup) / (total - warmup), 0.0, 1.0)
        share = 1.0 - progress if decay == "linear" else 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
        return (end + (peak - end) * share) * jnp.minimum(1.0, step / max(warmup, 1))

    return at


def big_vision_adam(
    *, lr: float, weight_decay: float, factor: Callable[[Any], Any], clip: float, moment: Any = None
) -> optax.GradientTransformation:
    """`factor` is the schedule, 1 at its peak: of the learning rate and of the weight decay; `moment`: the type of the
    first."""
    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.scale_by_adam(b1=0.9, b2=0.999, eps=1e-8, mu_dtype=moment),
        optax.scale(lr),
        optax.add_decayed_weights(weight_decay, mask=_kernels),
        optax.scale_by_schedule(factor),
        optax.scale(-1.0),
    )


def paper_adam(*, weight_decay: float, lr: Callable[[Any], Any], clip: float) -> optax.GradientTransformation:
    """The paper's unit: the decay is multiplied by the learning rate."""
    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.scale_by_adam(b1=0.9, b2=0.999, eps=1e-8),
        optax.add_decayed_weights(weight_decay, mask=_kernels),
        optax.scale_by_schedule(lr),
        optax.scale(-1.0),
    )


def google_momentum(*, lr: Callable[[Any], Any], clip: float) -> optax.GradientTransformation:
    """vision_transformer's fine-tuning; its accumulator in float32."""
    return optax.chain(
        optax.clip_by_global_norm(clip), optax.trace(decay=0.9), optax.scale_by_schedule(lr), optax.scale(-1.0)
    )


def _kernels(params: Params) -> Params:
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", params)


def train(
    model: FlaxVit,
    params: Params,
    batches: Iterable[GoogleBatch],
    *,
    optimizer: optax.GradientTransformation,
    loss: Literal["sigmoid", "softmax"],
    ema_decay: float = 0.0,
) -> Trained:
    """Train on every batch once; the average begins at `params`."""

    def loss_of(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits: Any = model.apply({"params": params}, images)
        if loss == "sigmoid":
            return optax.sigmoid_binary_cross_entropy(logits, labels).sum(axis=-1).mean()
        return optax.softmax_cross_entropy(logits, labels).mean()

    @jax.jit
    def step(state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
        params, moments, average = state
        value, gradient = jax.value_and_grad(loss_of)(params, images, labels)
        updates, moments = optimizer.update(gradient, moments, params)
        params: Any = optax.apply_updates(params, updates)
        return (params, moments, optax.incremental_update(params, average, 1.0 - ema_decay)), value

    params = jax.tree.map(jnp.asarray, params)
    state, losses = (params, optimizer.init(params), params), []
    for images, labels in batches:
        state, value = step(state, images, labels)
        losses.append(value)
    return Trained(np.asarray(losses, dtype=np.float64), state[0], state[2])


def batches_of(recipe: Recipe, *, stage: StageName) -> Iterator[GoogleBatch]:
    """The global batches of a stage, read by one process, flipped, normalised and mixed as Google's code does it."""
    data = open_data(recipe, stage=stage, report=lambda line: None)
    recipe = recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"max_micro_batch_size": 2**10})})
    plan = plan_stage(recipe, stage=stage, samples_per_epoch=data.train.num_samples, world_size=1)
    assert plan.accumulation_steps == 1

    stream = train_stream(Stage(recipe, stage, data, plan, run=RunFolder(Path(), name="r")), place=Place())
    for number in range(plan.total_steps):
        yield google_batch(stream[number], count=plan.global_batch_images)


def google_batch(batch: Batch, *, count: int) -> GoogleBatch:
    """The first `count` rows (the loader adds the first once more where it mixes)."""
    pixels, labels = batch.images.numpy()[:count], np.eye(CLASSES, dtype=np.float32)[batch.labels.numpy()[:count]]
    pixels = np.stack([image[:, ::-1] if flip else image for image, flip in zip(pixels, batch.mirrored, strict=False)])
    images = (pixels.astype(np.float32) - 127.5) / 127.5
    if batch.mix is not None:
        own = np.float32(max(batch.mix.keep, 1 - batch.mix.keep))
        images = own * images + (1 - own) * np.roll(images, -1, axis=0)
        labels = own * labels + (1 - own) * np.roll(labels, -1, axis=0)
    return images, labels
