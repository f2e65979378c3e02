"""Adapt an external model to another resolution or number of classes, as the paper does.

ViT paper, section 3.2: position embeddings are interpolated, "we remove the whole pre-trained prediction head and
attach a zero-initialized D x K feedforward layer". Unchanged tensors are shared with the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from model.formats.external_model import ExternalModel
from model.saved.model_folder import SavedModelMeta, check_state, first_mistake
from model.vocabulary import LossKind

if TYPE_CHECKING:
    from torch import Tensor


def adapt(
    external: ExternalModel,
    *,
    image_size: int | None = None,
    num_classes: int | None = None,
    class_names: Sequence[str] | None = None,
    loss: LossKind | None = None,
) -> tuple[SavedModelMeta, dict[str, Tensor]]:
    """The record and the weights of `external`, for `image_size` pixels and `num_classes` classes if given.

    Args:
        external: what a reader returned.
        image_size: another resolution: positions are interpolated with the kernel of `external.config`.
        num_classes: another count: the whole head is dropped, a zero linear one is attached. The same keeps the head.
        class_names: default: the file's, else "0", "1", ...; their number is `num_classes` if that is not given.
        loss: of a new head; None: softmax.

    Raises:
        ValueError: the weights do not fit `external.config` (with a table) or are not finite, there is neither a head
            nor a count, or an argument does not fit.
    """
    import torch

    if class_names is not None:
        if num_classes is not None and num_classes != len(class_names):
            raise ValueError(f"{len(class_names)} class names for --num-classes {num_classes}: give as many")
        num_classes = len(class_names)
    if num_classes is not None and num_classes < 1:
        raise ValueError(f"--num-classes must be at least 1, not {num_classes}")
    wanted = num_classes if num_classes is not None else external.num_classes
    if wanted == 0:
        raise ValueError(f"the {external.format} {external.headless}: give --num-classes to attach a zero one")

    state = dict(external.state)
    new_head = wanted != external.num_classes
    if new_head:
        state = {name: tensor for name, tensor in state.items() if not name.startswith("head.")}
        like = next(tensor for tensor in state.values() if tensor.is_floating_point())
        state["head.weight"] = torch.zeros(wanted, external.config.num_features, dtype=like.dtype)
        state["head.bias"] = torch.zeros(wanted, dtype=like.dtype)
    described = _record(external, num_classes=wanted, head="linear" if new_head else external.head)
    check_state(state, meta=described, says=f"{external.format}: does not fit the model that it was taken for")
    broken = next((name for name, tensor in state.items() if not tensor.isfinite().all()), None)
    if broken:
        raise ValueError(f"the {external.format} has NaN or infinity in {broken}: it is damaged, get it again")
    if class_names is None:
        class_names = external.class_names if external.class_names and not new_head else list(map(str, range(wanted)))
    changes: dict[str, Any] = {"class_names": tuple(class_names)}
    if new_head:
        changes["loss"] = loss or "softmax"
    if image_size is not None and image_size != external.image_size:
        from model.positions.interpolation import resize_state

        sizes = {"from_image_size": external.image_size, "to_image_size": image_size}
        state = resize_state(state, config=external.config, **sizes)
        changes["image_size"] = image_size
    return SavedModelMeta.model_validate(described.model_dump() | changes), state


def _record(external: ExternalModel, *, num_classes: int, head: str) -> SavedModelMeta:
    """The record at `external`'s own resolution, with that head; class names still to come."""
    names = ("image_size", "mean", "std", "eval_protocol", "eval_crop_share")
    try:
        return SavedModelMeta.model_validate(
            {name: getattr(external, name) for name in names}
            | {"loss": external.loss or "softmax", "model": external.config, "num_classes": num_classes, "head": head}
            | {"class_names": tuple(map(str, range(num_classes)))}
        )
    except ValidationError as error:
        raise ValueError(f"the {external.format} says what cannot be: {first_mistake(error)}") from None
