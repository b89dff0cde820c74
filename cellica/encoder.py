"""Encoders that take any number of channels, and `embed`: a plate's images to one embedding a site.

The channel-agnostic masked autoencoder (CA-MAE; Kraus et al., arXiv 2404.10242) reads each channel as its own tokens
with one shared patch embedding, so an image may have any channels, in any order, up to a limit.
"""

import dataclasses
import hashlib
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from cellica import artifacts, images, progress
from cellica.camae import CAMAE, Geometry, initialise
from cellica.checkpoints import PREFIX, differences, fill, read_checkpoint, read_geometry
from cellica.plates import Plate
from cellica.schema import InputError, PlateError, WeightsError, first_few

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOKENS_AT_ONCE = {"cpu": 2048, "cuda": 65536}  # one 6-channel S/16 crop at a time is fastest on a CPU


NAMED = {
    "openphenom": Geometry(img_size=256, patch_size=16, embed_dim=384, depth=12, num_heads=6),
    "camae-mini": Geometry(img_size=128, patch_size=16, embed_dim=192, depth=6, num_heads=3, bias_order="aligned"),
}
LICENCE = "OpenPhenom's weights are for non-commercial use (Recursion's Non-Commercial End User Licence)"
HOW_TO_GET = {
    "openphenom": "download model.safetensors (712 MB) of recursionpharma/OpenPhenom from Hugging Face, at a fixed "
    f"revision, and pass weights=FILE. {LICENCE}",
    "camae-mini": "train it and pass weights=FILE",
    "camae": "pass weights=FILE, a model.safetensors with its config.json beside it",
}
OPENPHENOM_RELEASES = {
    "f6e5f1c97101331b1574c9e4b99623260191c55eea5d98e40460849c0e4c4d47": "OpenPhenom 575dbd0",
    "e1f1ad069f4478524c55525ed4c19f9eb82b0ea9a44995c87b312991f9ad9473": "OpenPhenom 7133893",
}


# ---------------------------------------------------------------------------------------------- timm's models


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
        """Features of each channel (N, C, D); there is no class token over channels."""
        x = images.flatten(0, 1)[:, None].expand(-1, self.in_chans, -1, -1).float() / 255
        return None, self.model((x - self.mean) / self.std).unflatten(0, images.shape[:2])


# ---------------------------------------------------------------------------------------------- the public encoder


@dataclasses.dataclass(frozen=True, eq=False)
class Encoder:
    """Images to embeddings. Made by `load`; call it with images.

    Attributes
    ----------
    name, n_features, img_size
        Name given to `load`, length D of an embedding, side of the square images that it takes (pixels).
    max_channels
        Most channels of an image; None where there is no limit.
    weights, weights_sha256
        What the weights are, in words, and the SHA-256 of their file (of the tensors where they are random).
    device, dtype
        Where it runs, and in which precision the matrix products are done.
    """

    model: CAMAE | TimmChannels = dataclasses.field(repr=False)
    name: str
    n_features: int
    img_size: int
    max_channels: int | None
    weights: str
    weights_sha256: str
    device: torch.device
    dtype: str

    def __call__(self, images: np.ndarray | Tensor) -> Tensor:
        """Embedding of each image: the mean over the tokens of all channels, class token left out.

        Parameters
        ----------
        images
            uint8, (N, C, img_size, img_size), channels in any order.

        Returns
        -------
        float32 (N, D), on the encoder's device.

        Raises
        ------
        InputError
            The images are not uint8, not of that shape, or have more channels than the encoder takes.
        """
        return self._collect(images, lambda _, channels: channels.mean(dim=1))

    def channelwise(self, images: np.ndarray | Tensor) -> Tensor:
        """Mean over each channel's own tokens, in channel order: float32 (N, C * D). Images as in calling it."""
        return self._collect(images, lambda _, channels: channels.flatten(1))

    def class_token(self, images: np.ndarray | Tensor) -> Tensor:
        """Class token: float32 (N, D). Images as in calling it; an InputError where the model has none."""
        if isinstance(self.model, TimmChannels):
            raise InputError(f"{self.name} reads channels one by one and has no class token: call the encoder itself")
        return self._collect(images, lambda token, _: token)

    @torch.inference_mode()
    def _collect(self, images: np.ndarray | Tensor, take: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        images = self._checked(images)
        low = None if self.dtype == "float32" else DTYPES[self.dtype]
        parts = []
        with torch.autocast(self.device.type, dtype=low, enabled=low is not None):
            for part in images.split(self._images_at_once(images.shape[1])):
                parts.append(take(*self.model(part.to(self.device))).float())
        return torch.cat(parts)

    def _images_at_once(self, n_channels: int) -> int:
        tokens = n_channels * (self.img_size // 16) ** 2
        return max(1, TOKENS_AT_ONCE[self.device.type] // tokens)

    def _checked(self, images: np.ndarray | Tensor) -> Tensor:
        size, dtype = self.img_size, str(getattr(images, "dtype", type(images).__name__)).removeprefix("torch.")
        if dtype != "uint8":
            raise InputError(f"images are {dtype}, {self.name} takes uint8: bring them to 8 bits first")
        if images.ndim != 4 or tuple(images.shape[2:]) != (size, size) or images.shape[1] == 0:
            raise InputError(
                f"images have the shape {tuple(images.shape)}, {self.name} takes (N, C, {size}, {size}): "
                "cut fields into crops of that size with cellica.images.crops"
            )
        self.check_channels(images.shape[1])
        return images if isinstance(images, Tensor) else torch.from_numpy(np.require(images, requirements=["C", "W"]))

    def check_channels(self, n_channels: int) -> None:
        """Raise an InputError where an image has more channels than the encoder takes."""
        if self.max_channels is not None and n_channels > self.max_channels:
            raise InputError(f"images have {n_channels} channels, {self.name} takes at most {self.max_channels}")


def load(
    name: str,
    weights: artifacts.PathLike | None = None,
    *,
    device: str = "auto",
    dtype: str = "float32",
    random_state: int = 0,
) -> Encoder:
    """Load an encoder by name.

    Parameters
    ----------
    name
        "openphenom" (CA-MAE ViT-S/16 of 256 x 256 pixels), "camae-mini" (128 x 128 pixels), "camae" (any CA-MAE
        checkpoint: geometry from its shapes and the ``config.json`` beside it) or "timm/NAME" (any model of timm, each
        channel on its own and the features averaged). Nothing is ever downloaded.
    weights
        File of the weights: safetensors, or a pickle ``{"state_dict": ...}``, of which only tensors are read.
        "random" draws weights from ``random_state`` (see `initialise`; timm's models draw in their own way).
    device
        "auto" (a GPU where there is one), "cpu", "cuda" or "cuda:N".
    dtype
        Precision of the matrix products: "float32", "bfloat16" or "float16". Embeddings are float32 always.

    Raises
    ------
    WeightsError
        No weights are given, or they do not fit; missing and unexpected tensors are named.
    InputError, MissingFileError
        Unknown name, device or dtype; no such file.

    Examples
    --------
    >>> encoder = load("camae-mini", weights="random", device="cpu")
    >>> encoder(np.zeros((2, 5, 128, 128), dtype=np.uint8)).shape
    torch.Size([2, 192])
    """
    if name not in HOW_TO_GET and not name.startswith("timm/"):
        raise InputError(f"encoder {name!r} is not known: choose one of {', '.join(HOW_TO_GET)} or timm/NAME")
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not known: choose one of {', '.join(DTYPES)}")
    where = _device(device)
    if weights is None or (name == "camae" and weights == "random"):
        raise WeightsError(_no_weights(name, weights))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(random_state)
        model = _timm(name, weights) if name.startswith("timm/") else _camae(name, weights)
    description, digest = _describe(name, model, weights, random_state)
    model = model.eval().requires_grad_(False).to(where)
    return Encoder(model, name, model.n_features, model.img_size, model.max_channels, description, digest, where, dtype)


def _device(device: str) -> torch.device:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise InputError(f"device {device!r} is not known: choose auto, cpu, cuda or cuda:N")
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        device = "cuda" if n_gpus else "cpu"
    where = torch.device(device)
    if where.type == "cuda" and (where.index or 0) >= n_gpus:
        raise InputError(f"device {device!r} is not there: torch sees {n_gpus} GPUs; choose auto or cpu")
    return where


def _no_weights(name: str, weights: artifacts.PathLike | None) -> str:
    if weights == "random":
        return f"encoder {name!r} has no geometry of its own for random weights: {HOW_TO_GET[name]}"
    remedy = HOW_TO_GET.get(name, "pass weights=FILE with a state dict of the timm model")
    alternative = "" if name == "camae" else '; or pass weights="random" for an untrained encoder'
    return f"encoder {name!r} comes without weights: {remedy}{alternative}"


def _describe(name: str, model: nn.Module, weights: artifacts.PathLike, random_state: int) -> tuple[str, str]:
    if weights == "random":
        way = "timm's own initialisation" if name.startswith("timm/") else "truncated normal, LayerScale 1"
        return f"random ({way}, seed {random_state})", _tensors_sha256(model)
    digest = artifacts.sha256(weights)
    release = OPENPHENOM_RELEASES.get(digest)
    if name == "openphenom":
        progress.say(LICENCE)
        release = release or "not a release of OpenPhenom that cellica knows"
    return Path(weights).name + (f" ({release})" if release else ""), digest


def _tensors_sha256(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for key, tensor in sorted(model.state_dict().items()):
        digest.update(key.encode() + b"\0" + tensor.numpy().tobytes())
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------- checkpoints


def _camae(name: str, weights: artifacts.PathLike) -> CAMAE:
    if weights == "random":
        model = CAMAE(NAMED[name])
        initialise(model)
        return model
    tensors, config = read_checkpoint(weights, prefix="encoder.")
    geometry = read_geometry(tensors, config, weights)
    if name in NAMED and geometry != NAMED[name]:
        wrong = differences(dataclasses.asdict(geometry), dataclasses.asdict(NAMED[name]))
        raise WeightsError(f"{weights} is not {name}: {wrong}; load it as 'camae'")
    model = CAMAE(geometry)
    fill(model, tensors, weights, PREFIX)
    return model


def _timm(name: str, weights: artifacts.PathLike) -> TimmChannels:
    import timm

    model_name = name.removeprefix("timm/")
    if not timm.is_model(model_name):
        similar = timm.list_models(f"*{model_name}*")[:5] or timm.list_models()[:5]
        raise InputError(f"timm has no model {model_name!r}: it has {', '.join(similar)} and others")
    try:
        model: Any = timm.create_model(model_name, pretrained=False, num_classes=0)
    except RuntimeError as error:  # a tag of pretrained weights that the model does not have
        raise InputError(f"timm cannot make {model_name!r}: {error}") from error
    if weights != "random":
        tensors, _ = read_checkpoint(weights)
        classifier = model.pretrained_cfg.get("classifier") or ()
        heads = tuple(f"{head}." for head in ([classifier] if isinstance(classifier, str) else classifier))
        fill(model, {key: tensor for key, tensor in tensors.items() if not key.startswith(heads)}, weights)
    return TimmChannels(model, timm.data.resolve_model_data_config(model))


# ---------------------------------------------------------------------------------------------- plates


def embed(plate: Plate | artifacts.PathLike, encoder: Encoder, *, chunk_size: int = 8) -> ad.AnnData:
    """Embed every site of a plate.

    A field larger than the encoder's images is cut into the fewest crops that cover it (`cellica.images.crops`; they
    overlap where the size does not divide a side), and its embedding is the mean of theirs.

    Parameters
    ----------
    plate
        A `cellica.plates.Plate`, or the path of one.
    chunk_size
        Fields that are read and embedded together; changes memory and speed, not the result.

    Returns
    -------
    AnnData of float32 ``X`` (sites x features), ``obs`` the plate's sites plus ``intensity_{channel}`` (mean pixel
    of the field, 0 to 255, float32; a "/" in a channel's name becomes "_"), ``uns["cellica"]["provenance"]``.

    Raises
    ------
    InputError
        The plate has no sites, more channels than the encoder takes or fields smaller than its images; an embedding is
        not finite.
    """
    if isinstance(plate, str | os.PathLike):
        plate = Plate(plate)
    _refuse_unfit(plate, encoder)
    if chunk_size < 1:
        raise InputError(f"chunk_size is {chunk_size}: it must be 1 or more")
    names: list[str] = []
    embeddings, intensities, n_crops = [], [], 0
    total = math.ceil(len(plate.sites) / chunk_size)
    for sites, fields in progress.track(
        plate.fields(chunk_size), f"embed {plate.name}, chunks of {chunk_size} sites", total=total
    ):
        crops = images.crops(fields, encoder.img_size)
        n_crops = len(crops) // len(fields)
        embedding = encoder(crops).unflatten(0, (len(fields), n_crops)).mean(dim=1).cpu().numpy()
        _refuse_not_finite(embedding, sites, encoder)
        names += list(sites.index)
        embeddings.append(embedding)
        intensities.append(fields.mean(axis=(2, 3), dtype=np.float64).astype(np.float32))
    if names != list(plate.sites.index):
        raise PlateError(f"{plate.name} lists {len(plate.sites)} sites and gave {len(names)}, or in another order")
    return _site_embeddings(plate, encoder, np.concatenate(embeddings), np.concatenate(intensities), n_crops)


def _refuse_unfit(plate: Plate, encoder: Encoder) -> None:
    channels, height, width = plate.shape
    if not len(plate.sites):
        raise InputError(f"{plate.name} has no sites to embed")
    if min(height, width) < encoder.img_size:
        raise InputError(
            f"{plate.name} has fields of {height} x {width} pixels, {encoder.name} needs {encoder.img_size} x "
            f"{encoder.img_size} at least: choose an encoder of smaller images"
        )
    encoder.check_channels(channels)


def _refuse_not_finite(embedding: np.ndarray, sites: pd.DataFrame, encoder: Encoder) -> None:
    bad = sites.index[~np.isfinite(embedding).all(axis=1)]
    if len(bad):
        remedy = "check the weights" if encoder.dtype == "float32" else 'try dtype="float32"'
        raise InputError(f"embeddings of {len(bad)} sites are not finite ({first_few(list(bad))}): {remedy}")


def _site_embeddings(
    plate: Plate, encoder: Encoder, embeddings: np.ndarray, intensities: np.ndarray, n_crops: int
) -> ad.AnnData:
    obs = plate.sites.copy()
    for channel, values in zip(plate.channels, intensities.T):
        obs[f"intensity_{channel.replace('/', '_')}"] = values
    var = pd.DataFrame(index=[f"feature_{i}" for i in range(encoder.n_features)])
    adata = ad.AnnData(embeddings, obs=obs, var=var)
    for known in plate.provenance:
        artifacts.add_step(adata, known)
    parameters = {
        "encoder": encoder.name,
        "weights": encoder.weights,
        "dtype": encoder.dtype,
        "device": encoder.device.type,
        "crop_size": encoder.img_size,
        "crops_per_field": n_crops,
    }
    model = {"weights_sha256": encoder.weights_sha256, "torch": torch.__version__}
    inputs = {Path(plate.path).name: artifacts.sha256(plate.path)}
    artifacts.add_step(adata, artifacts.step("embed", parameters, inputs, **model))
    return adata
