"""Draw a model's attention: rollout on images, maps of blocks and heads, mean distance over depth."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.images.channels import as_colours, usual_range
from shardvit.data_shards.loading.batch import Batch
from shardvit.model.saved.model_folder import SavedModelMeta
from shardvit.pipeline.pictures.grid import Cell, Mark, image_grid
from shardvit.pipeline.pictures.paper.attention_inputs import SHOWN_IMAGES, SeenAttention
from shardvit.pipeline.pictures.paper.weight_figures import evenly, show_tiles, tiled
from shardvit.pipeline.pictures.style import ACCENT, INK, Drawn, draw_level, new_figure, sequential
from shardvit.pipeline.runs.pictures import Picture

_SHOWN_PIXELS = 192  # approximate side of an image in the figure
_INPUT_INCHES = 1.3
_MOST_BLOCKS, _MOST_HEADS = 12, 16  # in the figure of maps


def draw_rollout(attention: SeenAttention, batch: Batch, *, meta: SavedModelMeta, classes: Sequence[str]) -> Drawn:
    """Draw the first images of `batch`, each beside a copy lit by its rollout. `classes`: names for the labels; empty
    if the labels do not apply to this model."""
    colours = _colours(batch)
    cells: list[Cell] = []
    strongest: list[float] = []
    for number in range(min(SHOWN_IMAGES, len(batch.images))):
        shares = attention.rollout[number].double().numpy()
        image = _enlarged(colours[number])
        labels: list[int] = batch.labels[number].reshape(-1).tolist()
        truths = [classes[label] for label in labels if classes and label >= 0]
        guess: tuple[str, ...] = ()
        mark: Mark = "none"
        if number < len(attention.guesses):
            best, probability = attention.guesses[number]
            guess = (f"{100 * probability:.0f} % {meta.class_names[best]}",)
            if truths and set(truths) <= set(meta.class_names):
                mark = "right" if meta.class_names[best] in truths else "wrong"
        cells += [
            Cell(image, (", ".join(truths) or batch.keys[number],)),
            Cell(in_the_light_of(image, shares), guess, mark),
        ]
        strongest.append(float(shares.max() / shares.mean()))
    figure = image_grid(cells, columns=4, cell_inches=1.2, together=2, column_titles=("input", "attention") * 2)
    pools = {"cls": "the class token", "map": "attention pooling"}
    whose = pools.get(meta.model.pool, "the mean of all patches")
    if not meta.has_classes:
        whose = "all patches, in the mean,"
    picture = Picture(
        name="attention_rollout",
        title="Where the model looks",
        caption=f"How much of each patch reaches {whose} at the end, by attention rollout: the mean over heads of each "
        "block's attention, half of it replaced by the identity for the residual connection, multiplied from block to "
        "block (ViT paper, Figure 6). Of each image the patch with the largest share is at full brightness and the one "
        "with the smallest is black; between two images brightness does not compare.",
        alt=f"{len(cells) // 2} images, each beside a copy that is bright where attention goes. The "
        f"patch that gets most has {min(strongest):.1f} to {max(strongest):.1f} times the mean share of its image.",
        group="paper",
    )
    return picture, figure


def in_the_light_of(image: NDArray[np.uint8], shares: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Light an image [side, side, 3] by its patches' shares [grid, grid], as the paper's authors do
    (google-research/vision_transformer, issue 27): enlarge, blur over about one patch, stretch to 0..1, multiply."""
    from scipy.ndimage import gaussian_filter

    side, grid = len(image), len(shares)
    rows = np.minimum(np.arange(side) * grid // side, grid - 1)
    light = gaussian_filter(shares[np.ix_(rows, rows)], sigma=0.6 * side / grid, mode="nearest")
    low, high = light.min(), light.max()
    light = (light - low) / (high - low) if high > low else np.ones_like(light)
    return np.rint(image * light[..., None]).astype(np.uint8)


def _colours(batch: Batch) -> NDArray[np.uint8]:
    images = batch.images.numpy()
    mean, std = usual_range([*images]) if images.dtype != np.uint8 else ((), ())
    return as_colours(images, mean=mean, std=std)


def _enlarged(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Enlarge small images by a whole number, so that pixels stay squares."""
    times = max(1, round(_SHOWN_PIXELS / len(image)))
    return image.repeat(times, axis=0).repeat(times, axis=1)


def draw_maps(attention: SeenAttention, batch: Batch, *, meta: SavedModelMeta) -> Drawn:
    """Draw the attention of each block and head for the first image; for large models, a subset."""
    blocks = evenly(len(attention.maps), most=_MOST_BLOCKS)
    heads = evenly(attention.maps.shape[1], most=_MOST_HEADS)
    maps = attention.maps.numpy()[np.ix_(blocks, heads)]
    tiles = tiled(maps / np.maximum(maps.max(axis=(2, 3), keepdims=True), np.finfo(np.float32).tiny))
    across = min(5.2, 0.8 * len(heads))  # inches
    down = across * tiles.raster.shape[0] / tiles.raster.shape[1]
    width, height = 0.8 + _INPUT_INCHES + across, 0.75 + max(down, _INPUT_INCHES)
    figure, [[image, shown]] = new_figure(width=width, height=height, columns=2, width_ratios=(_INPUT_INCHES, across))
    image.set_anchor("N")
    image.imshow(_enlarged(_colours(batch)[0]), interpolation="none")
    image.set_title("input")
    image.set_axis_off()
    show_tiles(shown, tiles, cmap=sequential(), vmin=-0.06, vmax=1.0)  # no attention is still darker than the page
    shown.set_xticks(*tiles.ticks("columns", names=[str(head + 1) for head in heads]))
    shown.set_yticks(*tiles.ticks("rows", names=[str(block + 1) for block in blocks]))
    shown.set(xlabel="head", ylabel="block")
    whose = "the class token" if meta.model.pool == "cls" and meta.has_classes else "all patches in the mean"
    peaks = attention.maps.flatten(2).max(dim=2).values.mean(dim=1) * attention.maps[0, 0].numel()
    is_whole = maps.shape[:2] == attention.maps.shape[:2]
    left_out = "" if is_whole else " Of a large model evenly spaced ones are shown."
    picture = Picture(
        name="attention_maps",
        title="Attention of each block and head",
        caption=f"What {whose} attends to in one image: a row for each block, the first at the top, a column "
        f"for each head. In each map the darkest patch gets most; maps are scaled one by one.{left_out}",
        alt=f"{len(attention.maps)} blocks of {len(attention.maps[0])} heads. The patch that gets most has, in the "
        f"mean over heads, {peaks[0]:.1f} times an even share in the first block, {peaks[-1]:.1f} times in the last.",
        group="model",
    )
    return picture, figure


def draw_distance(attention: SeenAttention, *, meta: SavedModelMeta) -> Drawn:
    """Draw the mean attention distance of each head over depth."""
    distances, even = attention.distances.numpy(), attention.uniform_distance
    depth, heads = distances.shape
    numbers, means = np.arange(1, depth + 1), distances.mean(axis=1)
    figure, [[axes]] = new_figure(width=6.4, height=3.8)
    draw_level(axes, even, f"evenly on all patches: {_pixels(even)}", va="bottom")
    axes.plot(numbers, means, color=INK, linewidth=1.4, label="mean of heads", zorder=2)
    dots = {"s": 26, "color": ACCENT, "alpha": 0.65, "linewidths": 0, "label": "a head", "zorder": 3}
    axes.scatter(numbers.repeat(heads), distances.ravel(), **dots)
    axes.set(xlabel="depth (block)", ylabel="mean attention distance (px)", xlim=(0.5, depth + 0.5))
    axes.set_ylim(0, max(even, distances.max(), 1.0) * 1.15)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.grid(True)
    axes.legend(loc="lower right")
    first, last = (
        f"{_pixels(distances[block].min())} to {_pixels(distances[block].max())}, mean {_pixels(means[block])}"
        for block in (0, -1)
    )
    class_token = " The class token is left out." if meta.model.has_class_token else ""
    class_token += " Registers are left out." if meta.model.registers else ""
    picture = Picture(
        name="attention_distance",
        title="How far attention reaches",
        caption="Each dot is a head: the mean distance in pixels from a query patch to the patches it attends to, "
        f"weighted by attention, over all queries of {attention.images} images of {meta.image_size} px (ViT "
        f"paper, Figure 7, right). Low: local, as a convolution; dashed: attention spread evenly.{class_token}",
        alt=f"{depth} blocks of {heads} heads. In the first block heads reach {first}; in the last {last}. Even "
        f"attention would reach {_pixels(even)}.",
        group="paper",
    )
    return picture, figure


def _pixels(number: float) -> str:
    return f"{number:.3g} px"
