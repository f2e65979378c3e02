"""Google's npz files: those of a flax model read by us, ours read by flax and by timm's loader.

The flax model's modules have Google's names, so that its flattened parameters are the file: nothing here is converted
by hand. timm's loader (`load_pretrained`) is an independent reader of both code bases' layouts.
"""

import zipfile
from functools import cache
from pathlib import Path
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import timm
import torch
from flax.training.checkpoints import convert_pre_linen
from flax.traverse_util import flatten_dict, unflatten_dict

from shardvit.model.config import ModelConfig
from shardvit.model.formats.external_model import ExternalModel, UserHints
from shardvit.model.formats.google_npz import GoogleNames, read_google_npz, write_google_npz
from shardvit.model.saved.model_folder import SavedModelMeta
from shardvit.model.vit import build_model
from shardvit.model.vocabulary import HeadKind, Pool
from tests.model.comparing import SMALL_TOKENS, randomise
from tests.oracles.conftest import Measured

CLASSES, SIZE = 5, 24
SIZES: dict[str, Any] = {"width": 48, "depth": 4, "heads": 4, "mlp_dim": 80, "patch_size": 4}
Naming = Literal["pre_linen", "linen", "big_vision"]


class MlpBlock(nn.Module):
    mlp_dim: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = nn.gelu(nn.Dense(self.mlp_dim)(x))  # flax numbers in the order of calls: Dense_0
        return nn.Dense(x.shape[-1])(hidden)


class Encoder(nn.Module):
    naming: Naming

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        attention, norm, mlp = (1, 2, 3) if self.naming == "pre_linen" else (0, 1, 0)
        if self.naming != "big_vision":
            x = x + PositionEmbedding(name="posembed_input")(x)
        for index in range(SIZES["depth"]):
            x = Block(attention, norm, mlp, name=f"encoderblock_{index}")(x)
        return nn.LayerNorm(name="encoder_norm")(x)


class Block(nn.Module):
    attention: int
    norm: int
    mlp: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.LayerNorm(name="LayerNorm_0")(x)
        name = f"MultiHeadDotProductAttention_{self.attention}"
        x = x + nn.MultiHeadDotProductAttention(SIZES["heads"], name=name)(y, y)
        y = nn.LayerNorm(name=f"LayerNorm_{self.norm}")(x)
        return x + MlpBlock(SIZES["mlp_dim"], name=f"MlpBlock_{self.mlp}")(y)


class PositionEmbedding(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.param("pos_embedding", nn.initializers.normal(), (1, *x.shape[1:]))


class MAPHead(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        probe = jnp.tile(self.param("probe", nn.initializers.normal(), (1, 1, x.shape[-1])), (x.shape[0], 1, 1))
        x = nn.MultiHeadDotProductAttention(SIZES["heads"])(probe, x)
        return (x + MlpBlock(SIZES["mlp_dim"])(nn.LayerNorm()(x)))[:, 0]


class FlaxVit(nn.Module):
    """Google's architecture from its description: vision_transformer adds positions to all tokens, big_vision to the
    patches alone, before the class token comes."""

    naming: Naming
    pool: Pool
    head: HeadKind
    position: Literal["learned_1d", "sincos_2d"] = "learned_1d"

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        patch = (SIZES["patch_size"],) * 2
        x = nn.Conv(SIZES["width"], patch, strides=patch, padding="VALID", name="embedding")(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        if self.position == "sincos_2d":
            x = x + _sincos(int(np.sqrt(x.shape[1])), x.shape[2])
        elif self.naming == "big_vision":
            x = x + self.param("pos_embedding", nn.initializers.normal(), (1, *x.shape[1:]))
        if self.pool == "cls":
            cls = self.param("cls", nn.initializers.zeros, (1, 1, x.shape[-1]))
            x = jnp.concatenate([jnp.tile(cls, (x.shape[0], 1, 1)), x], axis=1)
        x = Encoder(self.naming, name="Transformer")(x)
        x = x[:, 0] if self.pool == "cls" else x.mean(axis=1) if self.pool == "gap" else MAPHead(name="MAPHead_0")(x)
        if self.head == "mlp":
            x = jnp.tanh(nn.Dense(x.shape[-1], name="pre_logits")(x))
        return nn.Dense(CLASSES, name="head")(x)


def _sincos(side: int, width: int) -> np.ndarray:
    """MoCo v3's: sin and cos of x and of y, at width / 4 wavelengths from 2 pi to 2 pi * 10000."""
    quarter = width // 4
    frequencies = 10_000.0 ** (-np.arange(quarter) / (quarter - 1))
    y, x = (axis.reshape(-1, 1) * frequencies for axis in np.mgrid[:side, :side])
    return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1)[None].astype(np.float32)


def _random(shape: tuple[int, ...], name: str, generator: np.random.Generator) -> np.ndarray:
    """Nothing at zero or one, where flax starts biases and scales; small tokens, so that the norms' epsilon matters."""
    small = name.endswith(("cls", "pos_embedding")) or "embedding" in name
    value = (0.01 if small else 0.2) * generator.standard_normal(shape)
    return (value + name.endswith("scale")).astype(np.float32)


@cache
def _flax_file(model: FlaxVit) -> tuple[dict[str, np.ndarray], jax.Array, jax.Array]:
    """The arrays of a flax model with random weights (not to be changed), images, and its logits on them."""
    generator = np.random.default_rng(0)
    images = jnp.asarray(generator.standard_normal((3, SIZE, SIZE, 3)).astype(np.float32))
    flat = flatten_dict(jax.eval_shape(lambda: model.init(jax.random.PRNGKey(0), images))["params"], sep="/")
    arrays = {name: _random(value.shape, name, generator) for name, value in flat.items()}
    logits = jnp.asarray(model.apply({"params": unflatten_dict(arrays, sep="/")}, images))
    assert jnp.abs(logits).mean() > 0.1
    return arrays, images, logits


def _stacked(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All blocks in one array, as flax's scan keeps them."""
    stacked = {name: value for name, value in arrays.items() if "/encoderblock_" not in name}
    for name in arrays:
        if "/encoderblock_0/" in name:
            layers = [arrays[name.replace("_0/", f"_{index}/", 1)] for index in range(SIZES["depth"])]
            stacked[name.replace("encoderblock_0/", "encoderblock/")] = np.stack(layers)
    return stacked


def _our_logits(foreign: ExternalModel, images: Any) -> np.ndarray:
    model = build_model(
        foreign.config, image_size=foreign.image_size, num_classes=foreign.num_classes, head=foreign.head
    ).eval()
    model.load_state_dict(foreign.state, strict=True)
    with torch.no_grad():
        return model(torch.from_numpy(np.array(images)).permute(0, 3, 1, 2)).numpy()


CASES = [
    ("pre_linen", "cls", "linear"),
    ("pre_linen", "cls", "mlp"),
    ("pre_linen", "gap", "linear"),
    ("pre_linen", "gap", "mlp"),
    ("linen", "cls", "mlp"),
    ("big_vision", "gap", "linear"),
    ("big_vision", "gap", "mlp"),
    ("big_vision", "map", "linear"),
    ("big_vision", "cls", "mlp"),
]


@pytest.mark.parametrize(("naming", "pool", "head"), CASES)
def test_a_file_of_flax_gives_its_logits(
    tmp_path: Path, naming: Naming, pool: Pool, head: HeadKind, measured: Measured
) -> None:
    arrays, images, logits = _flax_file(FlaxVit(naming, pool, head))
    np.savez(tmp_path / "model.npz", **arrays)
    foreign = read_google_npz(tmp_path / "model.npz")
    without = naming == "big_vision" and pool == "cls"  # its class token has no position
    assert foreign.config == ModelConfig(**SIZES, pool=pool, class_token_position="none" if without else "learned")
    assert (foreign.image_size, foreign.num_classes, foreign.head) == (SIZE, CLASSES, head)
    assert ("big_vision" in foreign.format) == (naming == "big_vision")
    semantic = "npz read, vision_transformer's names" if naming != "big_vision" else "npz read, big_vision's names"
    measured(semantic, "flax", "logits", _our_logits(foreign, images), logits)


@pytest.mark.parametrize("pool", ["gap", "map", "cls"])
def test_stacked_blocks_give_the_same(tmp_path: Path, pool: Pool, measured: Measured) -> None:
    arrays, images, logits = _flax_file(FlaxVit("big_vision", pool, "linear"))
    np.savez_compressed(tmp_path / "model.npz", **{f"params/{name}": value for name, value in _stacked(arrays).items()})
    foreign = read_google_npz(tmp_path / "model.npz")
    assert foreign.config.sizes.depth == SIZES["depth"]
    measured("npz read, blocks stacked by scan", "flax", "logits", _our_logits(foreign, images), logits)


def test_fixed_positions_give_the_same_with_a_note(tmp_path: Path, measured: Measured) -> None:
    arrays, images, logits = _flax_file(FlaxVit("big_vision", "gap", "mlp", "sincos_2d"))
    np.savez(tmp_path / "model.npz", **arrays)
    foreign = read_google_npz(tmp_path / "model.npz", hints=UserHints(position="sincos_2d"))
    assert foreign.config.position == "sincos_2d"
    assert foreign.image_size == 224
    assert any("sincos_2d" in note for note in foreign.notes)
    at_our_size = ExternalModel(
        foreign.format, foreign.state, foreign.config, image_size=SIZE, num_classes=CLASSES, head=foreign.head
    )
    measured("npz read, sincos_2d", "flax", "logits", _our_logits(at_our_size, images), logits)


def test_bfloat16_as_big_vision_saves_it(tmp_path: Path, measured: Measured) -> None:
    arrays, images, _ = _flax_file(FlaxVit("big_vision", "gap", "linear"))
    rounded = {f"params/{name}": value.astype(ml_dtypes.bfloat16) for name, value in arrays.items()}
    np.savez(tmp_path / "model.npz", **rounded)
    with np.load(tmp_path / "model.npz") as file:
        assert file["params/head/kernel"].dtype.kind == "V"
    foreign = read_google_npz(tmp_path / "model.npz")
    assert all(tensor.dtype == torch.float32 for tensor in foreign.state.values())
    assert any("bfloat16" in note for note in foreign.notes)
    exact = {name.removeprefix("params/"): value.astype(np.float32) for name, value in rounded.items()}
    theirs = FlaxVit("big_vision", "gap", "linear").apply({"params": unflatten_dict(exact, sep="/")}, images)
    measured("npz read, bfloat16", "flax", "logits", _our_logits(foreign, images), theirs)


def _our_model(pool: Pool, head: HeadKind, **more: Any) -> tuple[SavedModelMeta, torch.nn.Module]:
    config = ModelConfig.model_validate(SIZES | {"pool": pool} | more)
    model = build_model(config, image_size=SIZE, num_classes=CLASSES, head=head).eval()
    randomise(model, token_scale=SMALL_TOKENS)
    meta = SavedModelMeta(model=config, image_size=SIZE, num_classes=CLASSES, class_names=tuple("abcde"), head=head)
    return meta, model


WRITABLE: list[tuple[GoogleNames, Pool, HeadKind]] = [
    ("vision_transformer", "cls", "linear"),
    ("vision_transformer", "cls", "mlp"),
    ("vision_transformer", "gap", "linear"),
    ("big_vision", "cls", "mlp"),
    ("big_vision", "gap", "linear"),
    ("big_vision", "map", "linear"),
]


@pytest.mark.parametrize(
    ("names", "pool", "head", "position"),
    [*((*case, "learned_1d") for case in WRITABLE), ("big_vision", "gap", "mlp", "sincos_2d")],
)
def test_flax_reads_ours(
    tmp_path: Path,
    names: GoogleNames,
    pool: Pool,
    head: HeadKind,
    position: Literal["learned_1d", "sincos_2d"],
    measured: Measured,
) -> None:
    """Through flax's own `convert_pre_linen`, which both code bases call on what they load."""
    meta, model = _our_model(pool, head, position=position)
    write_google_npz(tmp_path / "model.npz", model.state_dict(), meta=meta, names=names)
    with np.load(tmp_path / "model.npz") as file:
        assert {file[name].dtype for name in file} == {np.dtype(np.float32)}
        tree = convert_pre_linen(unflatten_dict(dict(file), sep="/"))
    naming: Naming = "linen" if names == "vision_transformer" else "big_vision"
    tree = tree if names == "vision_transformer" else tree["params"]
    images = np.random.default_rng(1).standard_normal((3, SIZE, SIZE, 3)).astype(np.float32)
    theirs = FlaxVit(naming, pool, head, position)
    expected = jax.eval_shape(lambda: theirs.init(jax.random.PRNGKey(0), images))["params"]
    assert jax.tree.map(jnp.shape, tree) == jax.tree.map(jnp.shape, expected)
    with torch.no_grad():
        ours = model(torch.from_numpy(images).permute(0, 3, 1, 2))
    measured(f"npz written, {names}'s names", "flax", "logits", ours, theirs.apply({"params": tree}, images))


@pytest.mark.parametrize(("names", "pool"), [(names, pool) for names, pool, head in WRITABLE if head == "linear"])
def test_timms_loader_reads_ours(tmp_path: Path, names: GoogleNames, pool: Pool, measured: Measured) -> None:
    _timm_reads(measured, tmp_path, names, pool)


def test_timms_loader_reads_big_visions_class_token(tmp_path: Path, measured: Measured) -> None:
    _timm_reads(measured, tmp_path, "big_vision", "cls", no_embed_class=True)


def _timm_reads(measured: Measured, tmp_path: Path, names: GoogleNames, pool: Pool, **arguments: Any) -> None:
    meta, model = _our_model(pool, "linear")
    path = tmp_path / "model.npz"
    write_google_npz(path, model.state_dict(), meta=meta, names=names)
    theirs = timm.create_model(
        "vit_base_patch16_224",
        img_size=SIZE,
        patch_size=4,
        embed_dim=48,
        depth=4,
        num_heads=4,
        mlp_ratio=80 / 48,
        num_classes=CLASSES,
        act_layer="gelu_tanh",
        class_token=pool == "cls",
        global_pool={"cls": "token", "gap": "avg", "map": "map"}[pool],
        fc_norm=False,
        **arguments,
    ).eval()
    theirs.load_pretrained(str(path))
    images = torch.randn(3, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours, logits = model(images), theirs(images)
    assert ours.abs().mean() > 0.1
    measured(f"npz written, {names}'s names", "timm's loader", "logits", ours, logits)


def test_timms_loader_finds_the_same_hybrid(tmp_path: Path) -> None:
    """Parameter by parameter: timm's own hybrid has other epsilons, so its logits differ."""
    hybrid = {"patch_size": 16, "resnet_layers": (1, 2, 1)}
    config = ModelConfig.model_validate(SIZES | hybrid)
    model = build_model(config, image_size=32, num_classes=CLASSES, head="linear")
    randomise(model)
    meta = SavedModelMeta(model=config, image_size=32, num_classes=CLASSES, class_names=tuple("abcde"), head="linear")
    path = tmp_path / "model.npz"
    write_google_npz(path, model.state_dict(), meta=meta, names="vision_transformer")

    backbone = timm.models.resnetv2.ResNetV2((1, 2, 1), num_classes=0, global_pool="", preact=False, stem_type="same")
    theirs = timm.models.vision_transformer.VisionTransformer(
        img_size=32,
        patch_size=1,
        embed_dim=48,
        depth=4,
        num_heads=4,
        mlp_ratio=80 / 48,
        num_classes=CLASSES,
        embed_layer=lambda **arguments: timm.layers.HybridEmbed(backbone, **arguments),
    )
    theirs.load_pretrained(str(path))
    ours, loaded = model.state_dict(), theirs.state_dict()
    assert ours.keys() == loaded.keys()
    for name, value in ours.items():
        assert torch.equal(value, loaded[name]), name


@pytest.mark.parametrize(("naming", "pool", "head"), [case for case in CASES if case[0] != "linen"])
def test_reading_and_writing_gives_the_file_back_to_the_bit(
    tmp_path: Path, naming: Naming, pool: Pool, head: HeadKind
) -> None:
    arrays, _, _ = _flax_file(FlaxVit(naming, pool, head))
    names: GoogleNames = "big_vision" if naming == "big_vision" else "vision_transformer"
    if names == "big_vision":
        arrays = {f"params/{name}": value for name, value in arrays.items()}
    np.savez(tmp_path / "theirs.npz", **arrays)
    foreign = read_google_npz(tmp_path / "theirs.npz")
    meta = SavedModelMeta(
        model=foreign.config, image_size=SIZE, num_classes=CLASSES, class_names=tuple("abcde"), head=head
    )
    write_google_npz(tmp_path / "ours.npz", foreign.state, meta=meta, names=names)
    with np.load(tmp_path / "ours.npz") as ours:
        assert set(ours) == set(arrays)
        for name, value in arrays.items():
            assert ours[name].dtype == value.dtype, name
            assert np.array_equal(ours[name].view(np.int32), value.view(np.int32)), name
    assert zipfile.ZipFile(tmp_path / "ours.npz").testzip() is None
