"""What the recipe says of the images, made into the data path's terms."""

from __future__ import annotations

from data_shards.images.rand_augment import RandAugment
from data_shards.images.transforms import EvalTransform, TrainTransform
from data_shards.loading.mixing import MixupConfig
from pipeline.recipe.schema import TrainStage


def train_transform(config: TrainStage) -> TrainTransform:
    """A stage's crop, resize, flip and RandAugment."""
    augment = config.augment
    return TrainTransform(
        image_size=config.image_size,
        crop_area=augment.crop_area,
        crop_ratio=augment.crop_ratio,
        interpolation=augment.interpolation,
        flip=augment.flip,
        rand_augment=augment.rand_augment
        and RandAugment(num_ops=augment.rand_augment.num_ops, magnitude=augment.rand_augment.magnitude),
    )


def eval_transform(config: TrainStage) -> EvalTransform:
    """What is evaluated of an image."""
    return EvalTransform(config.image_size, protocol=config.eval_protocol, crop_share=config.eval_crop_share)


def mixup(config: TrainStage) -> MixupConfig | None:
    """A stage's mixing of images; None for none."""
    augment = config.augment
    if not augment.mixup_alpha and not augment.cutmix_alpha:
        return None
    return MixupConfig(
        mixup_alpha=augment.mixup_alpha, cutmix_alpha=augment.cutmix_alpha, switch_share=augment.cutmix_share
    )
