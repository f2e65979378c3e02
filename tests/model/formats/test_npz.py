"""Google's npz files without an oracle: layouts, what is inferred, what is refused. Logits: tests/oracles."""

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardvit.model.config import ModelConfig
from shardvit.model.formats.export import export_model
from shardvit.model.formats.external_model import UserHints
from shardvit.model.formats.google_names import BIG_VISION, VISION_TRANSFORMER, find_layout, infer_model, slots_of
from shardvit.model.formats.google_npz import GoogleNames, expected_arrays, read_google_npz, write_google_npz
from shardvit.model.positions.embedding import sincos_2d
from shardvit.model.saved.model_folder import side_path
from shardvit.model.variants import HYBRIDS, VARIANTS
from shardvit.model.vit import build_model
from tests.model.formats.small_npz import Arrays, arrays_of, meta_of, same, save, state_of


@pytest.mark.parametrize("head", ["linear", "mlp"])
@pytest.mark.parametrize("pool", ["cls", "gap"])
@pytest.mark.parametrize("prefix", ["", "opt/target/", "params/", "target/"])
def test_any_prefix_reads_the_same(tmp_path: Path, prefix: str, pool: str, head: str) -> None:
    arrays = {prefix + name: value for name, value in arrays_of(tmp_path, pool=pool, head=head).items()}
    if prefix:
        arrays |= {"opt/state/step": np.array(7), "epoch": np.array(1)}
    foreign = read_google_npz(save(tmp_path / "model.npz", arrays))
    same(foreign.state, state_of(meta_of(pool=pool, head=head)))
    assert [note for note in foreign.notes if "optimiser" in note] == (
        [f"2 arrays outside {prefix} (the optimiser's) are left out."] if prefix else []
    )
    assert (foreign.eval_protocol, foreign.class_names) == ("vit", ())


def test_weights_are_tensors_of_their_own(tmp_path: Path) -> None:
    """No view of an array that is kept alive, and no strides that safetensors would refuse."""
    foreign = read_google_npz(save(tmp_path / "model.npz", arrays_of(tmp_path)))
    for name, tensor in foreign.state.items():
        assert tensor.is_contiguous(), name
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name


@pytest.mark.parametrize("variant", [*(f"{name}/16" for name in VARIANTS), "B/32", "H/14", "g/14", *HYBRIDS])
@pytest.mark.parametrize("layout", [VISION_TRANSFORMER, BIG_VISION])
def test_a_named_variant_is_recognised_by_its_shapes(variant: str, layout: Any) -> None:
    config = ModelConfig(variant=variant)
    with torch.device("meta"):
        model = build_model(config, image_size=config.sizes.patch_size * 3, num_classes=7, head="linear")
    ours = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    slots = slots_of(ours, layout=layout)
    theirs = expected_arrays(slots, ours, heads=config.sizes.heads, depth=config.sizes.depth)
    shapes = {name.removeprefix(layout.prefix): shape for name, shape in theirs.items()}
    model = infer_model(shapes, layout=layout)
    assert model.config == config
    assert (model.image_size, model.num_classes, model.head) == (config.sizes.patch_size * 3, 7, "linear")


@pytest.mark.parametrize("other", [{"depth": 2}, {"heads": 6}, {"mlp_dim": 384}])
def test_almost_a_named_variant_is_told_by_its_sizes(tmp_path: Path, other: dict[str, int]) -> None:
    sizes = {"width": 192, "depth": 12, "heads": 3, "mlp_dim": 768} | other  # Ti's but for one
    path = save(tmp_path / "model.npz", arrays_of(tmp_path, **sizes))
    assert read_google_npz(path, hints=UserHints(depth=sizes["depth"])).config == ModelConfig(**sizes, patch_size=4)


def test_big_vision_of_before_2022_has_positions_in_the_encoder_and_for_the_class_token(tmp_path: Path) -> None:
    arrays = arrays_of(tmp_path, "big_vision")
    state = state_of(meta_of())
    arrays["params/Transformer/pos_embedding"] = state["pos_embed"].numpy()
    arrays["params/cls"] = state["cls_token"].numpy()
    del arrays["params/pos_embedding"]
    foreign = read_google_npz(save(tmp_path / "model.npz", arrays))
    same(foreign.state, state)
    assert foreign.eval_protocol == "big_vision"


def test_big_visions_class_token_takes_up_its_position(tmp_path: Path) -> None:
    """And then has none. A record that speaks of one is believed: it is zero, and the sum is the same."""
    state, path = state_of(meta_of()), tmp_path / "model.npz"
    arrays = arrays_of(tmp_path, "big_vision")
    token = state["cls_token"] + state["pos_embed"][:, :1]
    bare = read_google_npz(save(path, arrays))
    assert bare.config.class_token_position == "none"
    assert torch.equal(bare.state["pos_embed"], state["pos_embed"][:, 1:])
    assert torch.equal(bare.state["cls_token"], token)

    write_google_npz(path, state, meta=meta_of(), names="big_vision")
    recorded = read_google_npz(path)
    assert recorded.config.class_token_position == "learned"
    assert not recorded.state["pos_embed"][:, 0].any()
    assert torch.equal(recorded.state["pos_embed"][:, 1:], state["pos_embed"][:, 1:])
    assert torch.equal(recorded.state["cls_token"], token)


@pytest.mark.parametrize("names", ["big_vision", "vision_transformer"])
def test_a_class_token_without_position_comes_back(tmp_path: Path, names: GoogleNames) -> None:
    """Bit for bit; vision_transformer's file has a row of zeros for it, which a reader without the record keeps."""
    meta = meta_of(class_token_position="none")
    state, path = state_of(meta), tmp_path / "model.npz"
    assert state["pos_embed"].shape[1] == meta.model.grid_size(meta.image_size) ** 2
    write_google_npz(path, state, meta=meta, names=names)
    found = read_google_npz(path)
    assert found.config == meta.model
    same(found.state, state)

    side_path(path).unlink()
    bare = read_google_npz(path)
    if names == "big_vision":
        assert bare.config.class_token_position == "none"
        same(bare.state, state)
    else:
        assert bare.config.class_token_position == "learned"
        assert not bare.state["pos_embed"][:, 0].any()
        assert torch.equal(bare.state["pos_embed"][:, 1:], state["pos_embed"])


@pytest.mark.parametrize("pool", ["cls", "gap"])
@pytest.mark.parametrize(
    ("names", "position", "array"),
    [
        ("vision_transformer", "sincos_2d", "Transformer/posembed_input/pos_embedding"),
        ("vision_transformer", "none", "Transformer/posembed_input/pos_embedding"),
        ("big_vision", "none", "params/pos_embedding"),
    ],
)
def test_fixed_positions_are_numbers_for_who_does_not_know_them(
    tmp_path: Path, names: GoogleNames, position: str, array: str, pool: str
) -> None:
    """Nothing for the class token; a reader with the record has the fixed ones again."""
    meta, path = meta_of(position=position, pool=pool), tmp_path / "model.npz"
    state, grid = state_of(meta), meta.model.grid_size(meta.image_size)
    write_google_npz(path, state, meta=meta, names=names)
    expected = sincos_2d(grid, meta.model.sizes.width) * (position == "sincos_2d")
    with np.load(path) as held:
        written = torch.from_numpy(held[array])[0]
    assert torch.equal(written[-(grid**2) :], expected) and not written[: -(grid**2)].any()
    found = read_google_npz(path)
    assert found.config == meta.model
    same(found.state, state)
    side_path(path).unlink()
    assert read_google_npz(path).config.position == "learned_1d"


def test_group_norms_of_older_flax_have_more_axes(tmp_path: Path) -> None:
    hybrid = {"patch_size": 16, "resnet_layers": (1, 2, 1), "image_size": 32}
    arrays = arrays_of(tmp_path, **hybrid)
    padded = {name: value.reshape(1, 1, 1, -1) if "gn" in name else value for name, value in arrays.items()}
    assert sum(value.ndim == 4 and value.shape[:3] == (1, 1, 1) for value in padded.values()) == 2 * (1 + 4 * 3 + 3)
    foreign = read_google_npz(save(tmp_path / "model.npz", padded))
    same(foreign.state, state_of(meta_of(**hybrid)))
    assert foreign.config == meta_of(**hybrid).model.model_copy(update={"resnet_width_factor": 1})


def test_a_head_of_zeros_is_told(tmp_path: Path) -> None:
    arrays = arrays_of(tmp_path)
    assert not any("zero" in note for note in read_google_npz(save(tmp_path / "model.npz", arrays)).notes)
    arrays["head/kernel"] = np.zeros_like(arrays["head/kernel"])  # the bias of the released files is not zero
    assert any("fine-tune it" in note for note in read_google_npz(save(tmp_path / "model.npz", arrays)).notes)


def test_a_file_without_a_head_has_no_classes(tmp_path: Path) -> None:
    arrays = {name: value for name, value in arrays_of(tmp_path).items() if not name.startswith("head/")}
    foreign = read_google_npz(save(tmp_path / "model.npz", arrays))
    assert (foreign.num_classes, foreign.head) == (0, "linear")
    same(foreign.state, {name: value for name, value in state_of(meta_of()).items() if not name.startswith("head.")})


@pytest.mark.parametrize("dtype", ["float16", "float64", ">f4"])
def test_other_precisions_become_float32(tmp_path: Path, dtype: str) -> None:
    arrays = arrays_of(tmp_path)
    stored = {name: np.asfortranarray(value.astype(dtype)) for name, value in arrays.items()}
    foreign = read_google_npz(save(tmp_path / "model.npz", stored))
    exact = read_google_npz(
        save(tmp_path / "exact.npz", {name: value.astype("float32") for name, value in stored.items()})
    )
    same(foreign.state, exact.state)
    assert any(str(np.dtype(dtype)) in note for note in foreign.notes)


def test_a_record_beside_the_file_is_believed(tmp_path: Path) -> None:
    meta = meta_of(pool="gap").model_copy(
        update={"eval_protocol": "timm", "eval_crop_share": 0.95, "mean": (0.1, 0.2, 0.3)}
    )
    write_google_npz(tmp_path / "model.npz", state_of(meta), meta=meta, names="big_vision")
    foreign = read_google_npz(tmp_path / "model.npz")
    assert foreign.config == meta.model
    for name in ("image_size", "num_classes", "head", "class_names", "mean", "std", "eval_protocol", "eval_crop_share"):
        assert getattr(foreign, name) == getattr(meta, name), name


def test_a_record_of_another_model_is_told_with_what_would_fix_it(tmp_path: Path) -> None:
    meta = meta_of()
    path = tmp_path / "model.npz"
    write_google_npz(path, state_of(meta), meta=meta, names="vision_transformer")
    record = json.loads(side_path(path).read_text())
    record["shardvit"] |= {"num_classes": 2, "class_names": ["a", "b"]}
    side_path(path).write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"(?s)model.npz: .*'head/bias' has the shape \(3,\).*3 classes"):
        read_google_npz(path)


def _without(name: str) -> Callable[[Arrays], None]:
    def change(arrays: Arrays) -> None:
        del arrays[name]

    return change


def _with(name: str, shape: tuple[int, ...], dtype: str = "float32") -> Callable[[Arrays], None]:
    def change(arrays: Arrays) -> None:
        arrays[name] = np.ones(shape, dtype)

    return change


BLOCK = "Transformer/encoderblock_10/"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without(f"{BLOCK}MultiHeadDotProductAttention_1/key/bias"), "attn.qkv.bias"),
        (_without(f"{BLOCK}LayerNorm_2/scale"), "'Transformer/encoderblock_10/LayerNorm_2/scale' is missing"),
        (_without("Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel"), "MlpBlock_3/Dense_0/kernel' is missing"),
        (_without("embedding/bias"), "'embedding/bias' is missing"),
        (_without("embedding/kernel"), "looked for the arrays embedding/kernel"),
        (_with("extra", (2,)), "'extra' does not belong to it"),
        (_with("Transformer/encoderblock_12/LayerNorm_0/bias", (16,)), "encoderblock_11/"),
        (_with(f"{BLOCK}MlpBlock_3/Dense_1/kernel", (16, 24)), r"shape \(16, 24\) instead of \(24, 16\)"),
        (_with("head/bias", (4,)), r"'head/bias' has the shape \(4,\) instead of \(3,\)"),
        (_with("head/bias", (3,), "int64"), "'head/bias' holds int64"),
        (_with("Transformer/posembed_input/pos_embedding", (1, 8, 16)), "7 patches are no square grid"),
        (_with("embedding/kernel", (4, 2, 3, 16)), "only square patches"),
        (_with("embedding/kernel", (16,)), "should have 4 axes"),
        (_with("embedding/kernel", (4, 4, 3, 20)), "2 attention heads of 8 do not make tokens of 20"),
        (_with("conv_root/kernel", (7, 7, 3, 64)), r"'embedding/kernel' has the shape \(4, 4, 3, 16\)"),
        (_with("conv_root/kernel", (7, 7, 3, 65)), "65 channels at the root"),
    ],
)
def test_arrays_that_do_not_fit_are_named(tmp_path: Path, change: Callable[[Arrays], None], message: str) -> None:
    arrays = arrays_of(tmp_path)
    change(arrays)
    with pytest.raises(ValueError, match=rf"(?s)model.npz: .*{message}"):
        read_google_npz(save(tmp_path / "model.npz", arrays))


def test_pickles_are_refused_unopened(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "sprung",))

    arrays = arrays_of(tmp_path)
    arrays["head/bias"] = np.array([Trap()] * 3, dtype=object)
    with pytest.raises(ValueError, match="'head/bias' holds object"):
        read_google_npz(save(tmp_path / "model.npz", arrays))
    assert not (tmp_path / "sprung").exists()
    (tmp_path / "bare.npz").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ValueError, match="no npz file"):
        read_google_npz(tmp_path / "bare.npz")
    assert not (tmp_path / "sprung").exists()


def test_what_is_no_npz_is_told_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        read_google_npz(tmp_path / "nowhere.npz")
    with pytest.raises(ValueError, match="no npz file"):
        read_google_npz(tmp_path)
    with zipfile.ZipFile(tmp_path / "empty.npz", "w"):
        pass
    with pytest.raises(ValueError, match="found none"):
        read_google_npz(tmp_path / "empty.npz")
    with pytest.raises(ValueError, match="found resnet/root_block/kernel"):
        read_google_npz(save(tmp_path / "bit.npz", {"resnet/root_block/kernel": np.ones(3)}))


def test_a_damaged_file_is_refused_or_harmless(tmp_path: Path) -> None:
    """Cut anywhere, or with a bit flipped in an array: a ValueError that names the file, never other weights."""
    path = save(tmp_path / "model.npz", arrays_of(tmp_path, depth=1))
    good, damaged = path.read_bytes(), tmp_path / "damaged.npz"
    generator = np.random.default_rng(0)
    with zipfile.ZipFile(path) as archive:
        last = archive.infolist()[-1]
        end_of_arrays = last.header_offset + last.compress_size
    for length in generator.integers(0, len(good), 40):
        damaged.write_bytes(good[:length])
        with pytest.raises(ValueError, match=r"damaged\.npz"):
            read_google_npz(damaged)
    expected, refused = read_google_npz(path).state, 0
    for position in generator.integers(0, end_of_arrays, 200):
        content = bytearray(good)
        content[position] ^= 1 << int(generator.integers(8))
        damaged.write_bytes(content)
        try:
            state = read_google_npz(damaged).state
        except ValueError:
            refused += 1
        else:
            same(state, expected)
    assert refused > 100


def test_an_array_shorter_than_it_says_is_refused(tmp_path: Path) -> None:
    arrays = arrays_of(tmp_path)
    buffer = io.BytesIO()
    np.save(buffer, arrays.pop("head/bias"))
    path = save(tmp_path / "model.npz", arrays)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("head/bias.npy", buffer.getvalue()[:-1])
    with pytest.raises(ValueError, match="'head/bias' is damaged"):
        read_google_npz(path)


@pytest.mark.parametrize(
    ("names", "trunk", "message"),
    [
        ("vision_transformer", {"gelu": "erf"}, "GELU"),
        ("vision_transformer", {"layer_norm_eps": 1e-12}, "1e-12"),
        ("vision_transformer", {"position": "learned_2d"}, "learned_2d at stem, and theirs is learned_1d"),
        ("vision_transformer", {"pool": "map"}, "only big_vision"),
        ("big_vision", {"position": "learned_2d"}, "learned_2d at stem"),
        ("big_vision", {"position_at": "every_layer"}, "learned_1d at every_layer"),
        ("big_vision", {"variant": "R26+S/32", "image_size": 32}, "ResNet stem"),
        ("big_vision", {"variant": "R50x1", "image_size": 32}, "pure ResNet"),
    ],
)
def test_what_the_names_cannot_hold_is_not_written(
    tmp_path: Path, names: GoogleNames, trunk: dict[str, Any], message: str
) -> None:
    meta, to = meta_of(**trunk), "npz" if names == "vision_transformer" else "big_vision"
    with pytest.raises(ValueError, match=message):
        export_model(meta, {}, to=to, out=tmp_path / "model.npz")
    assert not list(tmp_path.iterdir())


def test_an_earlier_file_is_replaced_and_the_same_weights_are_the_same_bytes(tmp_path: Path) -> None:
    path, meta = tmp_path / "model.npz", meta_of()
    path.write_bytes(b"earlier")
    state = state_of(meta)
    write_google_npz(path, state, meta=meta, names="vision_transformer")
    first = path.read_bytes()
    on_the_way = {name: torch.nn.Parameter(value.double()) for name, value in state.items()}
    write_google_npz(path, on_the_way, meta=meta, names="vision_transformer")
    assert path.read_bytes() == first
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.npz", "model.npz.json"]
    same(read_google_npz(path).state, state)


@pytest.mark.parametrize("stopped_at", ["_write", "write_side_record"])
def test_an_interrupted_export_leaves_the_earlier_file_with_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped_at: str
) -> None:
    path = tmp_path / "model.npz"
    write_google_npz(path, state_of(meta_of()), meta=meta_of(), names="vision_transformer")

    def stop(file: Path, *rest: Any, **named: Any) -> None:
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(f"shardvit.model.formats.google_npz.{stopped_at}", stop)
    meta = meta_of(pool="gap")
    with pytest.raises(KeyboardInterrupt):
        write_google_npz(path, state_of(meta), meta=meta, names="vision_transformer")
    assert read_google_npz(path).config.pool == "cls" and side_path(path).exists()


def test_recognised_by_names() -> None:
    names = ["embedding/kernel", "Transformer/encoder_norm/scale"]
    for prefix in ("", "opt/target/", "params/", "target/"):
        assert find_layout([prefix + name for name in names]) is not None
    assert find_layout(names[:1]) is None
    assert find_layout(["params/embedding/kernel", "Transformer/encoder_norm/scale"]) is None
    assert find_layout(["blocks.0.norm1.weight"]) is None


def test_a_row_of_positions_that_is_lost_is_no_grid_without_class_position(tmp_path: Path) -> None:
    """Only big_vision adds positions before the class token comes."""
    arrays = arrays_of(tmp_path)
    name = "Transformer/posembed_input/pos_embedding"
    path = save(tmp_path / "model.npz", arrays | {name: arrays[name][:, 1:]})
    with pytest.raises(ValueError, match=r"posembed_input/pos_embedding|pos_embed"):
        read_google_npz(path)
