"""Checkpoints: files of weights to tensors, the geometry that their shapes tell, and tensors into models.

Only tensors are read: safetensors, or pickles with ``weights_only=True``. No code comes from a checkpoint.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, try_to_load_from_cache
from safetensors import safe_open
from torch import Tensor, nn

from cellica import artifacts
from cellica.camae import BIAS_ORDERS, Geometry
from cellica.schema import WeightsError, first_few

PREFIX = "encoder.vit_backbone."


def read_checkpoint(path: artifacts.PathLike, prefix: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors under ``prefix``, and the configuration.

    Parameters
    ----------
    path
        safetensors, or a pickle of a state dict or of ``{"state_dict": ...}``; the first bytes tell. Pickles are read
        with ``weights_only=True``.

    Returns
    -------
    The tensors by name, and the JSON under "config" in the file's metadata, else in ``config.json`` beside it, else {}.

    Raises
    ------
    WeightsError, MissingFileError
        The file is neither, is damaged or holds more than tensors; it is not there.
    """
    path = artifacts.require_file(path, "weights")
    if not path.is_file():
        raise WeightsError(f"{path} is not a regular file: give the file of the weights")
    try:
        with path.open("rb") as stream:
            start = stream.read(9)
        if start[8:] == b"{":
            with safe_open(path, framework="pt") as archive:
                tensors = {key: archive.get_tensor(key) for key in archive.keys() if key.startswith(prefix)}  # noqa: SIM118
                recorded = (archive.metadata() or {}).get("config")
        elif start.startswith((b"PK", b"\x80")):
            with path.open("rb") as stream:  # given a path, torch goes by the name's ending
                state = torch.load(stream, map_location="cpu", weights_only=True)
            state = state.get("state_dict", state)
            tensors = {k: v for k, v in state.items() if isinstance(v, Tensor) and k.startswith(prefix)}
            recorded = None
        else:
            raise WeightsError(f"{path} is neither safetensors nor a pickle of torch: it starts with {start!r}")
        beside = path.with_name("config.json")
        if recorded is None and beside.is_file():
            recorded = beside.read_text(encoding="utf-8")
        config = json.loads(recorded or "{}")
        if not isinstance(config, dict):
            raise WeightsError(f"{path}: its configuration is {config!r:.60}, not a table of keys: correct config.json")
        return tensors, config
    except WeightsError:
        raise
    except Exception as error:
        raise WeightsError(
            f"{path} cannot be read as weights ({type(error).__name__}: {error}): give safetensors or a pickle of torch that "
            "holds tensors alone, or fetch the file again"
        ) from error


def cached(repository: str) -> Path | None:
    """Weights of a Hugging Face repository in the local cache: those of its main revision, else the newest there.

    Asks no server. The cache is where ``HF_HOME`` or ``HF_HUB_CACHE`` say.
    """
    for file in ("model.safetensors", "pytorch_model.bin"):
        found = try_to_load_from_cache(repository, file)
        if isinstance(found, str):
            return Path(found)
        folder = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}" / "snapshots"
        others = sorted(folder.glob(f"*/{file}"), key=lambda path: path.stat().st_mtime)
        if others:
            return others[-1]
    return None


def read_geometry(tensors: Mapping[str, Tensor], config: Mapping[str, Any], file: artifacts.PathLike) -> Geometry:
    """Geometry of a CA-MAE encoder from the shapes of its tensors.

    The configuration says what shapes cannot: ``max_in_chans`` (else 11) and ``bias_order`` (else "shifted").

    Raises
    ------
    WeightsError
        Tensors that tell the shape are missing, or the configuration contradicts them.
    """
    shapes = {key.removeprefix(PREFIX): tensor.shape for key, tensor in tensors.items()}
    telling = ("cls_token", "pos_embed", "patch_embed.proj.weight", "blocks.0.q_norm.weight")
    missing = [PREFIX + key for key in telling if key not in shapes]
    if missing:
        raise WeightsError(f"{file} is no CA-MAE encoder: it has no {', '.join(missing)}")
    cls_token, position, patch, q_norm = (shapes[key] for key in telling)
    if any(len(shape) < 3 for shape in (cls_token, position, patch)) or not len(q_norm):
        raise WeightsError(f"{file} is no CA-MAE encoder: {PREFIX}cls_token and others are no arrays of three axes")
    max_in_chans, n_positions = config.get("max_in_chans", 11), position[1] - 1
    if type(max_in_chans) is not int or max_in_chans < 1:
        raise WeightsError(f"{file}: max_in_chans is {max_in_chans!r}: put a whole number of channels into config.json")
    length = math.isqrt(n_positions // max_in_chans)
    if n_positions != max_in_chans * length**2:
        raise WeightsError(
            f"{file}: {n_positions} positions are not {max_in_chans} channels of a square: "
            "put the right max_in_chans into the config.json beside it"
        )
    geometry = Geometry(
        img_size=length * patch[-1],
        patch_size=patch[-1],
        embed_dim=cls_token[-1],
        depth=len({key.split(".")[1] for key in shapes if key.startswith("blocks.")}),
        num_heads=cls_token[-1] // q_norm[0],
        max_in_chans=max_in_chans,
        bias_order=config.get("bias_order", "shifted"),
    )
    wrong = differences(dataclasses.asdict(geometry), config)
    if wrong:
        raise WeightsError(f"{file} and its configuration disagree: {wrong}")
    if geometry.bias_order not in BIAS_ORDERS:
        raise WeightsError(f"{file}: bias_order {geometry.bias_order!r} is not one of {', '.join(BIAS_ORDERS)}")
    return geometry


def differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """Say where two mappings differ, of the keys that both have; "" where they agree."""
    keys = [key for key in found if key in expected and found[key] != expected[key]]
    return ", ".join(f"{key} {found[key]!r} where {expected[key]!r} is expected" for key in keys)


def fill(model: nn.Module, tensors: Mapping[str, Tensor], file: artifacts.PathLike, prefix: str = "") -> None:
    """Load tensors into a model; a WeightsError names those that are missing, unexpected or of another shape."""
    expected = {prefix + key: tensor for key, tensor in model.state_dict().items()}
    common = sorted(expected.keys() & tensors.keys())
    faults = {
        "missing": sorted(expected.keys() - tensors.keys()),
        "unexpected": sorted(tensors.keys() - expected.keys()),
        "of another shape": [key for key in common if tensors[key].shape != expected[key].shape],
    }
    told = "; ".join(f"{len(keys)} {fault}: {first_few(keys)}" for fault, keys in faults.items() if keys)
    if told:
        raise WeightsError(f"{file} does not fit the encoder; tensors {told}")
    model.load_state_dict({key.removeprefix(prefix): tensor for key, tensor in tensors.items()})
