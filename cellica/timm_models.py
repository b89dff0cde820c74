"""Encoders of timm: made for pictures of three colours, here given one channel at a time."""

import difflib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cellica.schema import InputError


class TimmChannels(nn.Module):
    """Any timm model, one channel at a time: each is repeated to the model's input channels, normalised its way."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: Any, config: Mapping[str, Any]) -> None:
        """Wrap a timm model without its head; ``config`` is its data configuration."""
        super().__init__()
        self.model = model
        self.n_features: int = model.head_hidden_size
        self.in_chans, self.img_size = config["input_size"][:2]
        self.max_channels: int | None = None
        self.register_buffer("mean", torch.tensor(config["mean"]).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(config["std"]).view(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> tuple[None, Tensor]:
        """Features of each channel (N, C, D) of uint8 (N, C, Y, X); there is no class token over channels."""
        x = images.flatten(0, 1)[:, None].expand(-1, self.in_chans, -1, -1).float() / 255
        return None, self.model((x - self.mean) / self.std).unflatten(0, images.shape[:2])

    def without_head(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Drop the tensors of the classifiers, which the wrapped model does not have."""
        classifier = self.model.pretrained_cfg.get("classifier") or ()
        heads = tuple(f"{head}." for head in ([classifier] if isinstance(classifier, str) else classifier))
        return {key: tensor for key, tensor in tensors.items() if not key.startswith(heads)}


def create(name: str) -> TimmChannels:
    """Make a timm model with weights as timm draws them.

    Raises
    ------
    InputError
        timm has no such model, or no such tag of its weights.
    """
    import timm

    if not timm.is_model(name):
        known = timm.list_models()
        similar = difflib.get_close_matches(name, known, 5, cutoff=0.4) or known[:5]
        raise InputError(f"timm has no model {name!r}: it has {', '.join(similar)} and others")
    try:
        model: Any = timm.create_model(name, pretrained=False, num_classes=0)
    except RuntimeError as error:  # a tag of pretrained weights that the model does not have
        raise InputError(f"timm cannot make {name!r}: {error}") from error
    return TimmChannels(model, timm.data.resolve_model_data_config(model))


def repository(name: str) -> str | None:
    """Name of the Hugging Face repository of a timm model's weights, None where it has none."""
    import timm

    try:
        config = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    except RuntimeError:  # a tag that the model does not have
        return None
    return config.hf_hub_id if config else None
