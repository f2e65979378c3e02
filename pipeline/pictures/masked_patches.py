"""Draw masked patch prediction on eight held-out images: the model's input and the colours it predicts.

One forward pass on the CPU in float32. Images are corrupted as in every evaluation, so runs are comparable.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.text import counted
from shardvit.pipeline.pictures.evaluated import percent
from shardvit.pipeline.pictures.grid import Cell, image_grid
from shardvit.pipeline.pictures.held_out_images import held_out_images
from shardvit.pipeline.pictures.style import Drawn
from shardvit.pipeline.recipe.stages.pretraining import MaskedPatchStage
from shardvit.pipeline.recipe.vocabulary import OWN_SET
from shardvit.pipeline.runs.pictures import DrawRequest, Picture

_IMAGES = 8
_PATCH_PIXELS = 16  # smallest side at which a frame and a hatch are visible
_HATCH, _HATCH_GROUND, _FRAME = 0x6E, 0xB4, 0x14  # greys

Pixels = NDArray[np.uint8]
Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class FilledIn:
    """Predictions for n images of N patches, K of them corrupted."""

    images: Pixels  # [n, S, S, 3]
    source: Numbers  # [n, N], index of the replacing patch; N: mask embedding
    corrupted: Numbers  # [n, K], the patches to predict
    predicted: Numbers  # [n, K], their colour classes
    true: Numbers  # [n, K]

    @property
    def right(self) -> NDArray[np.bool_]:
        return self.predicted == self.true


def draw_masked_patches(request: DrawRequest) -> Iterator[Drawn]:
    """Draw a finished masked_patch stage; yield nothing for other stages."""
    if not isinstance(request.recipe.train_stage(request.stage), MaskedPatchStage):
        return
    filled = fill_in(request)
    if filled is None:
        return
    count, patches = filled.corrupted.shape
    share = float(filled.right.mean())
    picture = Picture(
        name="masked_patches",
        title="Masked patches",
        caption=f"{counted(count, 'held-out image')}, of which {patches} patches each were corrupted. Corrupted: "
        "hatched patches were replaced by the mask's embedding, framed ones by another patch of the image; a tenth is "
        "kept as it is. Predicted: the model's mean colour of each corrupted patch, of 512 (3 bits a channel); below, "
        "how many are right to the bit. True colours: what they should be.",
        alt=f"{counted(count, 'image')} with half of their patches corrupted, the colours that the model fills in, and "
        f"the true ones: {int(filled.right.sum()):,} of {filled.right.size:,} patches ({percent(share)}) have exactly "
        "the right one of 512 colours.",
        group="evaluation",
    )
    cells = [cell for row in range(count) for cell in _cells(filled, row)]
    titles = ("input", "corrupted", "predicted", "true colours")
    yield picture, image_grid(cells, columns=4, cell_inches=1.4, together=4, column_titles=titles)


def fill_in(request: DrawRequest) -> FilledIn | None:
    """Predict held-out images; None if none is readable. UserError: the set does not open; ValueError: no model."""
    import torch

    from shardvit.model.saved.model_folder import build_from_saved
    from shardvit.model.self_supervised.masked_patch import colour_classes
    from shardvit.pipeline.stage.pixels import model_input
    from shardvit.pipeline.tasks.patch_corruption import corruption_held_out

    recipe = request.recipe
    batch = held_out_images(request, set_name=OWN_SET, samples=range(_IMAGES))
    if not len(batch.keys):
        return None
    _, model = build_from_saved(request.folder.model(request.stage))
    colours = colour_classes(batch.images, patch_size=recipe.model.sizes.patch_size)
    corruption = corruption_held_out(batch, seed=recipe.seed, num_patches=colours.shape[1])
    pixels = model_input(batch, device=torch.device("cpu"), dtype=torch.float32)
    with torch.inference_mode():
        logits = model.eval()(pixels, corruption.source, corruption.corrupted)
    return FilledIn(
        images=batch.images.numpy(),
        source=corruption.source.numpy(),
        corrupted=corruption.corrupted.numpy(),
        predicted=logits.argmax(dim=-1).numpy(),
        true=colours.gather(1, corruption.corrupted).numpy(),
    )


def colour_of(classes: Numbers) -> Pixels:
    """Centre colour [..., 3] of each class (64 r + 8 g + b, 3 bits a channel)."""
    levels = np.stack([classes // 64, classes // 8 % 8, classes % 8], axis=-1)
    return ((2 * levels + 1) * 255 // 16).astype(np.uint8)


def _cells(filled: FilledIn, row: int) -> list[Cell]:
    image, source, corrupted = filled.images[row], filled.source[row], filled.corrupted[row]
    grid = round(len(source) ** 0.5)
    patches = to_patches(enlarged(image, grid=grid), grid)
    seen, predicted, true = (patches.copy() for _ in range(3))
    for patch in corrupted.tolist():
        if source[patch] == len(source):
            seen[patch] = hatched(patches.shape[1])
        elif source[patch] != patch:
            seen[patch] = _framed(patches[source[patch]])
    predicted[corrupted] = colour_of(filled.predicted[row])[:, None, None]
    true[corrupted] = colour_of(filled.true[row])[:, None, None]
    right = f"{int(filled.right[row].sum())} of {len(corrupted)} right"
    shown = (to_image(each, grid) for each in (patches, seen, predicted, true))
    return [Cell(each, (right,) if number == 2 else ()) for number, each in enumerate(shown)]


def enlarged(image: Pixels, *, grid: int) -> Pixels:
    """Enlarge [S, S, 3] by a whole number, so that frames and hatches of its patches are visible."""
    scale = max(1, -(-_PATCH_PIXELS * grid // len(image)))
    return image.repeat(scale, axis=0).repeat(scale, axis=1)


def to_patches(image: Pixels, grid: int) -> Pixels:
    """Reshape [S, S, 3] to [N, P, P, 3], row by row."""
    side = len(image) // grid
    return image.reshape(grid, side, grid, side, 3).swapaxes(1, 2).reshape(grid * grid, side, side, 3)


def to_image(patches: Pixels, grid: int) -> Pixels:
    """Reshape [N, P, P, 3], row by row, to [S, S, 3]."""
    side = patches.shape[1]
    return patches.reshape(grid, grid, side, side, 3).swapaxes(1, 2).reshape(grid * side, grid * side, 3)


def hatched(side: int) -> Pixels:
    """Make stripes, which cannot be mistaken for a photograph."""
    across, down = np.meshgrid(np.arange(side), np.arange(side))
    is_stripe = (across + down) % 8 < 3
    return np.where(is_stripe[..., None], _HATCH, _HATCH_GROUND).astype(np.uint8).repeat(3, axis=-1)


def _framed(patch: Pixels) -> Pixels:
    sides = ((1, 1), (1, 1), (0, 0))
    return np.pad(np.pad(patch[2:-2, 2:-2], sides, constant_values=0xFF), sides, constant_values=_FRAME)
