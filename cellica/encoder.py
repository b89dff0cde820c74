"""Encoders by name: their weights, and what they make of a plate.

The channel-agnostic masked autoencoder (CA-MAE; Kraus et al., arXiv 2404.10242) reads each channel as its own tokens
with one shared patch embedding, so an image may have any channels, in any order, up to a limit. Models of timm take the
channels one by one. `embed` and `verify` live in modules of their own and are public here.
"""

import dataclasses
import hashlib
import re
import time
from pathlib import Path

import torch
from torch import nn

from cellica import artifacts, progress, timm_models
from cellica.camae import CAMAE, Geometry, initialise
from cellica.checkpoints import PREFIX, cached, differences, fill, read_checkpoint, read_geometry
from cellica.embedding import CHANNELS, DTYPES, Encoder, crops_of, embed, is_embedded
from cellica.schema import InputError, WeightsError
from cellica.timm_models import TimmChannels
from cellica.verification import Published, Verification, read_published, verify

__all__ = [
    "DTYPES",
    "NAMED",
    "Encoder",
    "Published",
    "Verification",
    "crops_of",
    "embed",
    "is_embedded",
    "load",
    "read_published",
    "verify",
]

NAMED = {
    "openphenom": Geometry(img_size=256, patch_size=16, embed_dim=384, depth=12, num_heads=6),
    "camae-mini": Geometry(img_size=64, patch_size=8, embed_dim=128, depth=4, num_heads=2, bias_order="aligned"),
}
LICENCE = "OpenPhenom's weights are for non-commercial use (Recursion's Non-Commercial End User Licence)"
HOW_TO_GET = {
    "openphenom": "fetch model.safetensors (712 MB, recursionpharma/OpenPhenom on Hugging Face) with `cellica fetch "
    "openphenom DIR --accept-license` and pass --weights DIR (weights=DIR), or download it into the Hugging Face cache. "
    f"{LICENCE}",
    "camae": "pass weights=FILE, a model.safetensors with its config.json beside it",
}
BUNDLED = {"camae-mini": Path(__file__).with_name("weights") / "camae-mini.safetensors"}
REPOSITORIES = {"openphenom": "recursionpharma/OpenPhenom"}
OPENPHENOM_RELEASES = {
    "f6e5f1c97101331b1574c9e4b99623260191c55eea5d98e40460849c0e4c4d47": "OpenPhenom 575dbd0",
    "e1f1ad069f4478524c55525ed4c19f9eb82b0ea9a44995c87b312991f9ad9473": "OpenPhenom 7133893",
}


def load(
    name: str,
    weights: artifacts.PathLike | None = None,
    *,
    device: str = "auto",
    dtype: str = "float32",
    channels: str = "mean",
    random_state: int = 0,
) -> Encoder:
    """Load an encoder by name. Nothing is ever downloaded.

    Parameters
    ----------
    name
        "openphenom" (CA-MAE ViT-S/16 of 256 x 256 pixels), "camae-mini" (64 x 64 pixels, bundled), "camae" (any CA-MAE
        checkpoint: geometry from its shapes and the ``config.json`` beside it) or "timm/NAME" (any model of timm, at its
        own input size and with its own normalisation, each channel on its own).
    weights
        File of the weights, safetensors or a pickle ``{"state_dict": ...}`` of which only tensors are read, or a folder
        that holds ``model.safetensors``. None takes the bundled ones, or those in the Hugging Face cache (``HF_HOME`` is
        respected). "random"
        draws weights from ``random_state`` (see `cellica.camae.initialise`; timm's models draw in their own way).
    device
        "auto" (a GPU where there is one), "cpu", "cuda" or "cuda:N".
    dtype
        Precision of the matrix products: "float32", "bfloat16" or "float16". Embeddings are float32 always; their cosine
        to those of float32 is 0.9999 or more. Activations beyond 65504 overflow in float16, and `embed` refuses those.
    channels
        "mean" averages the features of the channels, "concat" puts them one after another (N, C * D).

    Raises
    ------
    WeightsError
        No weights are given or cached, or they do not fit; missing and unexpected tensors are named.
    InputError, MissingFileError
        Unknown name, device, dtype or way with channels; no such file.

    Examples
    --------
    >>> import numpy as np
    >>> encoder = load("camae-mini", device="cpu")
    >>> encoder(np.zeros((2, 5, 64, 64), dtype=np.uint8)).shape
    torch.Size([2, 128])
    """
    if name not in (*NAMED, "camae") and not name.startswith("timm/"):
        raise InputError(f"encoder {name!r} is not known: choose one of {', '.join(NAMED)}, camae or timm/NAME")
    for option, value, allowed in (("dtype", dtype, DTYPES), ("channels", channels, CHANNELS)):
        if value not in allowed:
            raise InputError(f"{option} {value!r} is not known: choose one of {', '.join(allowed)}")
    where = _device(device)
    source = _find_weights(name, weights)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(random_state)
        model = _timm(name, source) if name.startswith("timm/") else _camae(name, source)
    description, digest = _describe(name, model, source, random_state)
    _say_if_slow(where, dtype)
    return Encoder(
        model=model.eval().requires_grad_(False).to(where),
        name=name,
        n_features=model.n_features,
        img_size=model.img_size,
        max_channels=model.max_channels,
        weights=description,
        weights_sha256=digest,
        device=where,
        dtype=dtype,
        channels=channels,
    )


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


def _say_if_slow(device: torch.device, dtype: str) -> None:
    """Many CPUs have no instructions for the smaller dtypes, and are slower in them: a small product tells."""
    if device.type == "cuda" or dtype == "float32":
        return

    def seconds(x: torch.Tensor) -> float:
        x @ x
        start = time.perf_counter()
        x @ x
        return time.perf_counter() - start

    x = torch.ones(512, 512)
    ratio = seconds(x.to(DTYPES[dtype])) / seconds(x)
    if ratio > 1:
        progress.say(f"this CPU multiplies {dtype} {ratio:.1f} times slower than float32: float32 is the better choice")


# ---------------------------------------------------------------------------------------------- weights


def _find_weights(name: str, weights: artifacts.PathLike | None) -> artifacts.PathLike:
    """The file of the weights, or "random"."""
    if weights is not None and not (name == "camae" and weights == "random"):
        folder = Path(weights)
        return folder / "model.safetensors" if folder.is_dir() else weights
    if name in BUNDLED:
        return BUNDLED[name]
    repository = REPOSITORIES.get(name)
    if name.startswith("timm/"):
        repository = timm_models.repository(name.removeprefix("timm/"))
    found = cached(repository) if repository else None
    if found is None:
        raise WeightsError(_no_weights(name, weights, repository))
    progress.say(f"weights of {name} from the Hugging Face cache: {found}")
    return found


def _no_weights(name: str, weights: artifacts.PathLike | None, repository: str | None) -> str:
    if weights == "random":
        return f"encoder {name!r} has no geometry of its own for random weights: {HOW_TO_GET[name]}"
    where = (
        f" (model.safetensors of {repository} on Hugging Face), or download that into its cache" if repository else ""
    )
    remedy = HOW_TO_GET.get(name, f"pass weights=FILE with a state dict of the timm model{where}")
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
    model = timm_models.create(name.removeprefix("timm/"))
    if weights != "random":
        tensors, _ = read_checkpoint(weights)
        fill(model.model, model.without_head(tensors), weights)
    return model
