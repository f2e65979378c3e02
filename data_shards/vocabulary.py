"""Names and numbers that several files share: keys of random streams, and the data path's names in recipes.

Plain Python, so that reading a recipe or printing --help needs neither numpy nor torch. A new decoder, evaluation
protocol or worker kind is a name here and a branch where it is built.
"""

from dataclasses import dataclass
from enum import IntEnum, unique
from typing import Literal


@unique
class RandomStream(IntEnum):
    """First word of every `randomness` key, so that no two uses of a seed share random numbers, in any package.

    Never change a number: a resumed run would get another order. A new stream takes a number never used before.
    """

    SHARD_ORDER = 1
    WINDOW_SHUFFLE = 2
    AUGMENT = 3
    DROPOUT = 4
    MIX = 7
    SUBSTITUTE = 11
    SET_SEED = 12
    PATTERN_TIMES = 13
    HOLD_OUT = 14
    HOLD_OUT_SHARDS = 15
    CORRUPTION_TRAIN = 21
    CORRUPTION_HELD_OUT = 22
    HIDDEN_TRAIN = 23
    HIDDEN_HELD_OUT = 24
    CROP_ATTEMPTS = 31
    RAND_AUGMENT = 32
    COLOR_JITTER = 33
    ERASING = 34
    ERASING_NOISE = 35
    DROPOUT_BY_SAMPLE = 41
    FEW_SHOT = 51
    TRANSFER_IMAGES = 52
    TRANSFER_HOLD_OUT = 53
    OVERVIEW = 61
    OWN_TASK = 71


MOST_CHANNELS = 16  # of an image
IMAGE_TYPES = ("uint8", "uint16", "float32")  # of the values of images read as they are
DecoderName = Literal["auto", "nvimgcodec", "gpu", "simplejpeg", "pillow"]
EvalProtocol = Literal["vit", "vit_exact", "big_vision", "big_vision_exact", "timm"]
CropLaw = Literal["torchvision", "google", "resize_and_crop", "simple_random"]
CropInterpolation = Literal["bilinear", "bicubic", "area"]
TrainInterpolation = CropInterpolation | Literal["random"]
Antialias = Literal["antialiased", "none", "cast"]
EraseMode = Literal["const", "rand", "pixel"]  # timm's names
RandAugmentRanges = Literal["timm", "big_vision"]
WorkerKind = Literal["thread", "process"]
EngineName = Literal["processes", "ray"]  # where parts of a corpus' work run
OnCorrupt = Literal["stop", "substitute"]  # a damaged training image
LabelPart = Literal["cls", "json", "txt"]  # the tar member that holds the label
PartName = Literal["held_out", "rest"]  # of a set of shards
LabelKind = Literal["single", "multi"]  # one class per sample, or a list

MOST_PIXELS = 178_956_970  # Pillow's decompression bomb limit: 2 * (2**30 // 4 // 3)
# Pillow takes up to 17 bytes a pixel: 0.85 GB a worker. Most cameras' photographs pass.
USUAL_MOST_PIXELS = 50_000_000


@dataclass(frozen=True)
class Normalisation:
    """Map pixels x in 0 to 255 to (x - 255 mean) / (255 std), per channel; floats to (x - mean) / std."""

    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)


GOOGLES = Normalisation()  # (x - 127.5) / 127.5, in vision_transformer and big_vision alike

# Splits of a data set; val comes before test, whose labels are often not public.
SPLIT_FOLDERS = ("train", "val", "validation", "test")
