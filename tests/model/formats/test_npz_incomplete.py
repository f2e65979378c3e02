"""What is missing from an npz of Google's, or there twice, is told; no other model is made of it."""

import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest

from shardvit.model.formats.external_model import UserHints, adapt
from shardvit.model.formats.google_npz import (
    GoogleNames,
    read_google_npz,
)
from tests.model.formats.small_npz import arrays_of, meta_of, same, save, state_of


def test_a_file_without_its_last_blocks_is_no_shallower_model(tmp_path: Path) -> None:
    arrays = arrays_of(tmp_path, variant="Ti/4")
    shallower = {name: value for name, value in arrays.items() if "encoderblock_11/" not in name}
    with pytest.raises(ValueError, match=r"model.npz: it has 11 blocks where Ti has 12.*--depth 11"):
        read_google_npz(save(tmp_path / "model.npz", shallower))
    unknown = arrays_of(tmp_path)  # of no known width: but the optimiser's arrays remember
    last = {name: value for name, value in unknown.items() if "encoderblock_10/" in name}
    lost = {f"opt/target/{name}": value for name, value in unknown.items() if name not in last}
    lost |= {f"opt/state/param_states/{name}/grad_ema": value for name, value in last.items()}
    with pytest.raises(
        ValueError, match=r"model.npz: it has the weights of 10 blocks, and the optimiser's state of 11"
    ):
        read_google_npz(save(tmp_path / "model.npz", lost))


@pytest.mark.parametrize("names", ["vision_transformer", "big_vision"])
def test_a_file_without_positions_is_a_model_with_fixed_ones_only_if_the_user_says_so(
    tmp_path: Path, names: GoogleNames
) -> None:
    arrays = arrays_of(tmp_path, names, pool="gap")
    path = save(tmp_path / "model.npz", {name: value for name, value in arrays.items() if "pos_emb" not in name})
    with pytest.raises(ValueError, match=r"model.npz: it has no position embeddings.*--position sincos_2d"):
        read_google_npz(path)
    for position in ("sincos_2d", "none"):
        foreign = read_google_npz(path, hints=UserHints(position=position))
        assert (foreign.config.position, foreign.image_size) == (position, 224)
        assert any("224 pixels" in note for note in foreign.notes)


@pytest.mark.parametrize("again", ["embedding/bias.npy", "embedding/bias"])
def test_two_arrays_of_one_name_are_refused(tmp_path: Path, again: str) -> None:
    path = save(tmp_path / "model.npz", arrays_of(tmp_path))
    with zipfile.ZipFile(path, "a") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile's own
        archive.writestr(again, archive.read("embedding/bias.npy"))
    with pytest.raises(ValueError, match=r"model.npz: the array 'embedding/bias' is in it 2 times"):
        read_google_npz(path)


@pytest.mark.parametrize("has_logits", [True, False])
def test_a_representation_of_another_width_goes_with_the_head(tmp_path: Path, has_logits: bool) -> None:
    arrays = arrays_of(tmp_path)
    arrays |= {"pre_logits/kernel": np.ones((16, 40), "float32"), "pre_logits/bias": np.ones(40, "float32")}
    arrays["head/kernel"] = np.ones((40, 3), "float32")
    if not has_logits:
        del arrays["head/kernel"], arrays["head/bias"]
    foreign = read_google_npz(save(tmp_path / "model.npz", arrays))
    with pytest.raises(ValueError, match=r"has a representation layer .*: give --num-classes"):
        adapt(foreign)
    meta, state = adapt(foreign, num_classes=5)
    trunk = {name: value for name, value in state_of(meta_of()).items() if not name.startswith("head.")}
    assert (meta.num_classes, meta.head) == (5, "linear") and not state.pop("head.weight").any()
    assert not state.pop("head.bias").any()
    same(state, trunk)


def test_the_hybrid_with_a_root_alone_is_read(tmp_path: Path) -> None:
    hybrid = {"patch_size": 16, "resnet_layers": (), "image_size": 32}
    foreign = read_google_npz(save(tmp_path / "model.npz", arrays_of(tmp_path, **hybrid)))
    same(foreign.state, state_of(meta_of(**hybrid)))
    assert foreign.config.sizes == meta_of(**hybrid).model.sizes
