"""Google's initial distributions: flax's own draws for the same architecture, and for a ResNet's kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import ks_2samp

from shardvit.model.config import ModelConfig
from shardvit.model.init import initialise
from shardvit.model.vit import build_model
from shardvit.model.vocabulary import HeadKind, Pool
from tests.oracles.flax_vit import CLASSES, FlaxVit, leaves, to_flax


@pytest.mark.parametrize(("pool", "head"), [("cls", "mlp"), ("gap", "linear"), ("map", "linear")])
def test_initial_weights_have_flaxs_distributions(pool: Pool, head: HeadKind) -> None:
    config = ModelConfig(width=96, depth=1, heads=3, mlp_dim=160, patch_size=8, pool=pool)
    model = build_model(config, image_size=128, num_classes=CLASSES, head=head)
    initialise(model, seed=0, head_bias=-10.0)
    ours = dict(leaves(to_flax(dict(model.named_parameters()), depth=1, heads=3)))

    theirs = FlaxVit(96, 1, 3, 160, 8, head, pool, head_bias=-10.0)
    variables = jax.jit(theirs.init)(jax.random.PRNGKey(0), jnp.zeros((1, 128, 128, 3)))
    reference = dict(leaves(variables["params"]))

    assert ours.keys() == reference.keys()
    for name, theirs_value in reference.items():
        _compare(ours[name], theirs_value, name=name)


@pytest.mark.parametrize("kind", ["hybrid", "resnet"])
def test_kernels_of_resnets_have_flaxs_distribution(kind: str) -> None:
    """A standardised kernel is drawn as any: models_resnet.py and bit_jax leave the initialiser at its default."""
    trunk = {"width": 32, "depth": 1, "heads": 2, "patch_size": 8} if kind == "hybrid" else {}
    config = ModelConfig.model_validate(trunk | {"resnet_layers": (1, 1)})
    model = build_model(config, image_size=16, num_classes=CLASSES, head="linear")
    initialise(model, seed=0)
    kernels = {
        name: value.detach().numpy().transpose(2, 3, 1, 0)
        for name, value in model.named_parameters()
        if value.ndim == 4 and name != "patch_embed.proj.weight"
    }
    assert len(kernels) == 1 + 2 * 4
    for number, (name, kernel) in enumerate(kernels.items()):
        theirs = jax.nn.initializers.lecun_normal()(jax.random.PRNGKey(number), kernel.shape)
        _compare(kernel, np.asarray(theirs), name=name)


def _compare(value: np.ndarray, theirs: np.ndarray, *, name: str) -> None:
    """Whether two arrays can be samples of one distribution, or are the same constant."""
    assert value.shape == theirs.shape, name
    if theirs.std() == 0:  # zeros, ones, the constant bias
        assert np.array_equal(value, theirs), name
        return
    count = value.size
    # The relative error of a sample's standard deviation is at most 1 / sqrt(2 n) for these distributions,
    # that of the quotient of two of them 1 / sqrt(n).
    assert abs(value.std() / theirs.std() - 1) < 4.5 / np.sqrt(count), name
    assert abs(value.mean() - theirs.mean()) < 4.5 * theirs.std() * np.sqrt(2 / count), name
    assert ks_2samp(value.ravel(), theirs.ravel()).pvalue > 1e-3, name
    if count > 1000:  # the ends: uniform 1.7, truncated 2.3, normal 3.5 to 4.5 deviations
        assert np.abs(value).max() == pytest.approx(np.abs(theirs).max(), rel=0.25), name
