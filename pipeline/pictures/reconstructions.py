"""Draw what a masked autoencoder makes of eight held-out images: what it sees, and what it fills in.

One forward pass on the CPU in float32. Patches are hidden as in every evaluation, so runs are comparable. Predictions
of normalised pixels get the true patch's mean and deviation back, as in the MAE paper's figures 2 to 4.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.images.channels import as_colours, usual_range
from shardvit.data_shards.text import counted
from shardvit.data_shards.vocabulary import Normalisation
from shardvit.pipeline.pictures.grid import Cell, image_grid
from shardvit.pipeline.pictures.held_out_images import held_out_images
from shardvit.pipeline.pictures.masked_patches import Pixels, enlarged, hatched, to_image, to_patches
from shardvit.pipeline.pictures.style import Drawn
from shardvit.pipeline.recipe.stages.pretraining import MaskedAutoencoderStage
from shardvit.pipeline.recipe.vocabulary import OWN_SET
from shardvit.pipeline.runs.pictures import DrawRequest, Picture

_IMAGES = 8


@dataclass(frozen=True)
class Reconstructed:
    """Predictions for n images, M patches of each hidden."""

    images: Pixels  # [n, S, S, 3]
    hidden: NDArray[np.int64]  # [n, M]
    predicted: Pixels  # [n, M, p, p, 3], pixels of the hidden patches
    losses: NDArray[np.float32]  # [n], mean squared errors of the targets


def draw_reconstructions(request: DrawRequest) -> Iterator[Drawn]:
    """Draw a finished masked_autoencoder stage; yield nothing for other stages."""
    config = request.recipe.train_stage(request.stage)
    if not isinstance(config, MaskedAutoencoderStage) or (found := reconstruct(request, config)) is None:
        return
    count, hidden = found.hidden.shape
    of_target = " Each gets the mean and the deviation of the true one." if config.target == "normalised" else ""
    picture = Picture(
        name="reconstructions",
        title="Reconstructions",
        caption=f"{counted(count, 'held-out image')}, of which the encoder does not see {hidden} patches each "
        f"(hatched). Predicted: the decoder's pixels of these patches.{of_target} Filled in: the same beside the "
        "visible patches; below, the mean squared error of its targets, 0 if they are met and about 1 if a normalised "
        "patch is predicted by its mean.",
        alt=f"{counted(count, 'image')} with {hidden} patches hidden, and what the model predicts for them: mean "
        f"squared errors of {found.losses.min():.2f} to {found.losses.max():.2f}.",
        group="evaluation",
    )
    cells = [cell for row in range(count) for cell in _cells(found, row)]
    titles = ("input", "visible", "predicted", "filled in")
    yield picture, image_grid(cells, columns=4, cell_inches=1.4, together=4, column_titles=titles)


def reconstruct(request: DrawRequest, config: MaskedAutoencoderStage) -> Reconstructed | None:
    """Predict held-out images; None if none is readable. UserError: the set does not open; ValueError: no model."""
    import torch

    from shardvit.model.saved.model_folder import build_from_saved
    from shardvit.model.self_supervised.masked_autoencoder import patches_of, standardised
    from shardvit.pipeline.stage.pixels import model_input
    from shardvit.pipeline.tasks.patch_reconstruction import draw_patches

    batch = held_out_images(request, set_name=OWN_SET, samples=range(_IMAGES))
    if not len(batch.keys):
        return None
    meta, model = build_from_saved(request.folder.model(request.stage))
    normalisation, side = Normalisation(mean=meta.mean, std=meta.std), meta.model.sizes.patch_size
    images = model_input(batch, device=torch.device("cpu"), dtype=torch.float32, normalisation=normalisation)
    patches, seed = patches_of(images, patch_size=side), request.recipe.seed
    num_patches = patches.shape[1]
    kept, hidden = draw_patches(batch, use="eval", seed=seed, num_patches=num_patches, mask_ratio=config.mask_ratio)
    with torch.inference_mode():
        predicted = model.eval()(images, kept, hidden)
    true = patches.gather(1, hidden[..., None].expand_as(predicted))
    targets = standardised(true) if config.target == "normalised" else true
    losses = (predicted - targets).square().mean(dim=(1, 2))
    if config.target == "normalised":
        variance, mean = torch.var_mean(true, dim=-1, keepdim=True)
        predicted = predicted * (variance + 1e-6).sqrt() + mean
    pixels = predicted.unflatten(-1, (side, side, -1)) * torch.tensor(meta.std) + torch.tensor(meta.mean)
    if batch.images.dtype == torch.uint8:
        images, pixels = batch.images.numpy(), (255 * pixels).round().clamp(0, 255).to(torch.uint8).numpy()
    else:
        mean, std = usual_range([*batch.images.numpy()])
        images, pixels = (as_colours(each.numpy(), mean=mean, std=std) for each in (batch.images, pixels))
    return Reconstructed(images=images, hidden=hidden.numpy(), predicted=pixels, losses=losses.numpy())


def _cells(found: Reconstructed, row: int) -> list[Cell]:
    image, hidden = found.images[row], found.hidden[row]
    grid = len(image) // found.predicted.shape[2]
    shown = to_patches(enlarged(image, grid=grid), grid)
    times = shown.shape[1] // found.predicted.shape[2]
    predicted = found.predicted[row].repeat(times, axis=1).repeat(times, axis=2)
    visible, alone, filled = (shown.copy() for _ in range(3))
    visible[hidden] = hatched(shown.shape[1])
    alone[:] = hatched(shown.shape[1])
    alone[hidden] = filled[hidden] = predicted
    lines = ((), (), (), (f"error {found.losses[row]:.2f}",))
    return [Cell(to_image(each, grid), line) for each, line in zip((shown, visible, alone, filled), lines, strict=True)]
