"""Adam's trajectory beside a flax model like big_vision's: the class token's position makes the difference.

A model that adds a position to the class token has two parameters where big_vision has one. Both get the gradient of
their sum, so Adam moves the sum twice as far.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch.nn import functional

from shardvit.model.config import ModelConfig
from shardvit.model.init import initialise
from shardvit.model.vit import build_model
from shardvit.model.vocabulary import ClassTokenPosition
from tests.oracles.flax_vit import CLASSES, FlaxVit, to_flax

STEPS, BATCH, LEARNING_RATE = 20, 16, 1e-3
ROUNDING = 1e-5
POSITIONS = 16  # of patches
SIZES: dict[str, Any] = {"width": 32, "depth": 2, "heads": 2, "mlp_dim": 64, "patch_size": 4}


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(3)
    return [
        (generator.standard_normal((BATCH, 3, 16, 16)).astype(np.float32), generator.integers(0, CLASSES, BATCH))
        for _ in range(STEPS)
    ]


def built(class_token_position: ClassTokenPosition) -> torch.nn.Module:
    """The same function at the start: the class token's position, if there is one, is zero."""
    config = ModelConfig(**SIZES, class_token_position="none")
    model = build_model(config, image_size=16, num_classes=CLASSES, head="linear")
    initialise(model, seed=5, style="big_vision")
    if class_token_position == "none":
        return model
    state = model.state_dict()
    state["pos_embed"] = functional.pad(state["pos_embed"], (0, 0, 1, 0))
    other = build_model(ModelConfig(**SIZES), image_size=16, num_classes=CLASSES, head="linear")
    other.load_state_dict(state)
    return other


def class_token(model: torch.nn.Module) -> torch.Tensor:
    """As it enters the blocks."""
    token, positions = (model.get_parameter(name).detach().clone() for name in ("cls_token", "pos_embed"))
    has_position = positions.shape[1] > POSITIONS
    return (token + positions[:, :1] if has_position else token).flatten()


def our_losses(model: torch.nn.Module, *, steps: int = STEPS) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for images, labels in batches()[:steps]:
        loss = functional.cross_entropy(model(torch.from_numpy(images)), torch.from_numpy(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_class_token_of_two_parameters_moves_twice_as_far() -> None:
    """In the first step that moves it; before, the head's zeros stop its gradient."""
    moved = []
    for model in (built("none"), built("learned")):
        before = class_token(model)
        our_losses(model, steps=2)
        moved.append(class_token(model) - before)
    assert moved[0].abs().min() > LEARNING_RATE / 2
    torch.testing.assert_close(moved[1], 2 * moved[0])


def test_without_the_class_tokens_position_adam_follows_big_vision() -> None:
    theirs = FlaxVit(32, 2, 2, 64, 4, "linear", class_token_position="none")
    parameters = to_flax(dict(built("none").named_parameters()), depth=2, heads=2)
    parameters = jax.tree.map(jnp.asarray, parameters)
    adam = optax.adam(LEARNING_RATE)
    state = adam.init(parameters)

    def loss_of(tree: Any, images: Any, labels: Any) -> Any:
        logits = theirs.apply({"params": tree}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    step = jax.jit(jax.value_and_grad(loss_of))
    losses = []
    for images, labels in batches():
        loss, gradients = step(parameters, jnp.asarray(images.transpose(0, 2, 3, 1)), jnp.asarray(labels))
        updates, state = adam.update(gradients, state)
        parameters = optax.apply_updates(parameters, updates)
        losses.append(float(loss))

    near = np.abs(np.array(our_losses(built("none"))) - losses)
    far = np.abs(np.array(our_losses(built("learned"))) - losses)
    assert near.max() < ROUNDING, near
    # Between 2e-3 and 3e-2, depending on the initial weights.
    assert far[:1].max() < ROUNDING and far.max() > 100 * ROUNDING, far
