"""Pretrain a CA-MAE on plates: hide most of each image, and learn to paint it.

Settings as published (Kraus et al., arXiv 2404.10242; Lion: Chen et al., arXiv 2302.06675). What a step sees and hides
depends on the seed and the number of the step alone, so that a run that was killed goes on as if it had not been.
"""

import dataclasses
import hashlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from timm.optim import Lion
from torch import Tensor

from cellica import artifacts, mae, progress
from cellica.camae import CAMAE, Geometry
from cellica.encoder import DTYPES, NAMED, _device
from cellica.mae import DecoderGeometry, MaskedAutoencoder
from cellica.parts import claimed
from cellica.plates import Plate
from cellica.schema import InputError, WeightsError, first_few

DECODERS = {"openphenom": DecoderGeometry(), "camae-mini": DecoderGeometry(embed_dim=64, depth=1, num_heads=4)}
BETAS, WARM_UP = (0.9, 0.95), 0.1
HELD_OUT = 50  # every fiftieth site
LINES = 50  # of the loss curve
SHOWN = 3  # crops of the picture
MOMENT = "optimizer.exp_avg."
LOSSES = ("loss", "mse", "fourier")
CURVE = ("step", "learning_rate", *LOSSES, "held_out_mse")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a training run is made of; recorded in its checkpoints and in the model."""

    steps: int
    batch_size: int = 64
    learning_rate: float = 1e-4
    weight_decay: float = 0.05
    mask_ratio: float = 0.75
    fourier_weight: float = 0.01
    dtype: str = "float32"
    random_state: int = 0


def run(
    plates: Sequence[Plate | artifacts.PathLike],
    out: artifacts.PathLike,
    settings: Settings,
    *,
    geometry: Geometry | str = "camae-mini",
    decoder: DecoderGeometry | None = None,
    device: str = "auto",
    checkpoint_minutes: float = 5.0,
    force: bool = False,
) -> pd.DataFrame:
    """Train a CA-MAE, encoder and decoder, on the fields of plates.

    Each step takes one random crop, turned and mirrored at random, of ``batch_size`` fields; all fields are seen once
    before one is seen again. Every fiftieth site is held out to be painted only. Every ``checkpoint_minutes`` the state
    of the run is written beside ``out``, and the same call goes on from there.

    Parameters
    ----------
    plates
        Plates, or their paths, all of the same number of channels.
    out
        File of the model (``.safetensors``): float32 tensors of encoder and decoder, and their configuration. Beside it
        ``.csv``, the loss curve, and ``.png``: held-out crops, what was seen of them, and what was painted.
    settings
        Steps and the like. The learning rate is for batches of the size given.
    geometry, decoder
        Shape of the encoder, or the name of one ("openphenom", "camae-mini"), and of the decoder; by default the one
        that belongs to the name, for as many channels as the plates have.
    device
        "auto", "cpu", "cuda" or "cuda:N".

    Returns
    -------
    The loss curve: ``step, learning_rate, loss, mse, fourier, held_out_mse``. Losses are means over the steps since the
    line before, of images whose pixels have unit variance in each channel.

    Raises
    ------
    InputError
        Settings out of range; plates without sites, of different channels, or of fields smaller than the images.
    OutputExistsError, OutputBusyError
        ``out`` is there and ``force`` is False; another run is writing it.
    WeightsError
        The checkpoint beside ``out`` is of a run with other settings or plates, or is damaged.
    """
    out = Path(out)
    shape, fields, name = _checked(plates, out, settings, geometry, force)
    decoder = dataclasses.replace(decoder or DECODERS[name], num_modalities=fields.n_channels)
    step = artifacts.step("pretrain", dataclasses.asdict(settings), fields.inputs, torch=torch.__version__)
    config = {
        "architecture": "ca_mae_vit",
        **dataclasses.asdict(shape),
        "decoder": dataclasses.asdict(decoder),
        "provenance": [step],
    }
    training = _Training(shape, decoder, settings, _device(device), config)
    with claimed(out) as folder:
        checkpoint = folder / "checkpoint.safetensors"
        if checkpoint.exists():
            training.restore(checkpoint)
            progress.say(f"going on from step {training.step} of {settings.steps}: {checkpoint}")
        training.go_on(fields, checkpoint, 60 * checkpoint_minutes)
        curve = pd.DataFrame(training.curve, columns=list(CURVE))
        with (  # renamed when all three are whole
            artifacts.atomic(out.with_suffix(".png"), force=force) as picture,
            artifacts.atomic(out.with_suffix(".csv"), force=force) as table,
            artifacts.atomic(out, force=force) as model,
        ):
            training.picture(fields).save(picture)
            curve.to_csv(table, index=False)
            training.save(model, force=force)
    return curve


def plan(
    plates: Sequence[Plate | artifacts.PathLike],
    out: artifacts.PathLike,
    settings: Settings,
    *,
    geometry: Geometry | str = "camae-mini",
    force: bool = False,
) -> pd.DataFrame:
    """What `run` would train on, after all of its checks that need no training.

    Returns
    -------
    One row a plate: ``plate``, ``channels``, ``sites`` to train on, those ``held_out``, and ``seen``, how often each site of
    training is seen.
    """
    _, fields, _ = _checked(plates, Path(out), settings, geometry, force)
    held_out = set(fields.held_out)
    table = pd.DataFrame([(plate.name, i in held_out) for i, (plate, _) in enumerate(fields.places)])
    counts = table.groupby(0, sort=False)[1].agg(["size", "sum"])
    seen = round(settings.steps * settings.batch_size / len(fields.train), 2)
    return pd.DataFrame(
        {
            "plate": counts.index,
            "channels": fields.n_channels,
            "sites": (counts["size"] - counts["sum"]).to_numpy(),
            "held_out": counts["sum"].to_numpy(),
            "seen": seen,
        }
    )


def _checked(
    plates: Sequence[Plate | artifacts.PathLike],
    out: Path,
    settings: Settings,
    geometry: Geometry | str,
    force: bool,
) -> tuple[Geometry, "_Fields", str]:
    """The geometry, the fields and the name of the geometry that the decoder goes by; all that can be refused is."""
    _check(settings)
    if out.suffix != ".safetensors":
        raise InputError(f"{str(out)!r} is not a name for a model: use one that ends in .safetensors")
    for path in (out, out.with_suffix(".csv"), out.with_suffix(".png")):
        artifacts.refuse_existing(path, force=force)
    name = geometry if isinstance(geometry, str) else "camae-mini"
    if name not in NAMED:
        raise InputError(f"geometry {name!r} is not known: choose one of {', '.join(NAMED)}, or give a Geometry")
    shape = dataclasses.replace(NAMED[name] if isinstance(geometry, str) else geometry, bias_order="aligned")
    stores = [plate if isinstance(plate, Plate) else Plate(plate) for plate in plates]
    twice = sorted(name for name, n in Counter(str(store.path.resolve()) for store in stores).items() if n > 1)
    if twice:
        raise InputError(f"plates are named twice: {first_few(twice)}; name each once")
    empty = [store.name for store in stores if not len(store.sites)]
    if empty and len(empty) < len(stores):
        progress.say(f"{len(empty)} plates without sites are left out: {first_few(empty)}")
    fields = _Fields([store for store in stores if len(store.sites)], shape, settings)
    return shape, fields, name


def _check(settings: Settings) -> None:
    allowed = {
        "steps": settings.steps >= 1,
        "batch_size": settings.batch_size >= 1,
        "learning_rate": 0 < settings.learning_rate < math.inf,
        "weight_decay": 0 <= settings.weight_decay < math.inf,
        "mask_ratio": 0 < settings.mask_ratio < 1,
        "fourier_weight": 0 <= settings.fourier_weight <= 1,
        "dtype": settings.dtype in ("float32", "bfloat16"),
        "random_state": settings.random_state >= 0,
    }
    wrong = ", ".join(f"{name}={getattr(settings, name)!r}" for name, right in allowed.items() if not right)
    if wrong:
        raise InputError(
            f"settings out of range: {wrong}; steps and batch_size are 1 or more, mask_ratio lies between 0 and 1, "
            "fourier_weight from 0 to 1, rates and random_state are not negative, dtype is float32 or bfloat16"
        )


# ---------------------------------------------------------------------------------------------- what a step sees


class _Fields:
    """Fields of plates, as batches of crops and of noise; each a function of the number of its step."""

    def __init__(self, plates: Sequence[Plate], geometry: Geometry, settings: Settings) -> None:
        self.settings, self.size = settings, geometry.img_size
        self.places = [(plate, i) for plate in plates for i in range(len(plate.sites))]
        channels = {plate.name: plate.shape[0] for plate in plates}
        small = [plate.name for plate in plates if min(plate.shape[1:]) < self.size]
        if len(self.places) < 2:
            raise InputError(f"{len(plates)} plates hold {len(self.places)} sites: two at least are needed to train on")
        if small:
            raise InputError(f"fields of {', '.join(small)} are smaller than images of {self.size} x {self.size} px")
        if len(set(channels.values())) > 1 or max(channels.values()) > geometry.max_in_chans:
            raise InputError(
                f"plates have {channels} channels: a model is trained on plates of one number of channels, "
                f"{geometry.max_in_chans} at most"
            )
        self.n_channels = plates[0].shape[0]
        self.n_patches = self.n_channels * (geometry.img_size // geometry.patch_size) ** 2
        self.inputs = {plate.name: _sha256(plate) for plate in plates}
        held_out = np.zeros(len(self.places), dtype=bool)
        held_out[min(HELD_OUT, len(self.places)) - 1 :: HELD_OUT] = True
        self.train, self.held_out = np.flatnonzero(~held_out), np.flatnonzero(held_out)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Images (N, C, Y, X) uint8 and noise (N, T) of a step."""
        seed, n = self.settings.random_state, self.settings.batch_size
        rng = np.random.default_rng([seed, 1, step])
        epochs = range(step * n // len(self.train), ((step + 1) * n - 1) // len(self.train) + 1)
        order = np.concatenate([np.random.default_rng([seed, 2, e]).permutation(self.train) for e in epochs])
        start = step * n - epochs[0] * len(self.train)
        crops = [self._crop(site, rng) for site in order[start : start + n]]
        return torch.from_numpy(np.stack(crops)), self._noise(rng, n)

    def unseen(self) -> tuple[Tensor, Tensor]:
        """Middle crops of the held-out sites, and noise that is always the same."""
        rng = np.random.default_rng([self.settings.random_state, 3])
        crops = [self._crop(site, None) for site in self.held_out[:256]]
        return torch.from_numpy(np.stack(crops)), self._noise(rng, len(crops))

    def _noise(self, rng: np.random.Generator, n: int) -> Tensor:
        return torch.from_numpy(rng.random((n, self.n_patches), dtype=np.float32))

    def _crop(self, site: int, rng: np.random.Generator | None) -> np.ndarray:
        plate, i = self.places[site]
        field = next(plate.fields(1, start=i))[1][0]
        spare = np.array(field.shape[1:]) - self.size
        y, x = rng.integers(0, spare + 1) if rng else spare // 2
        crop = field[:, y : y + self.size, x : x + self.size]
        if rng:
            crop = np.rot90(crop, int(rng.integers(4)), axes=(1, 2))
            crop = crop[:, :, ::-1] if rng.integers(2) else crop
        return np.ascontiguousarray(crop)


def _sha256(plate: Plate) -> str:
    """SHA-256 that stands for a plate: of what is recorded of its making and its sites."""
    text = json.dumps([plate.provenance, list(plate.sites.index), plate.shape], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


# ---------------------------------------------------------------------------------------------- the run


class _Training:
    """Model, optimiser and loss curve of a run, and where it stands."""

    def __init__(
        self,
        geometry: Geometry,
        decoder: DecoderGeometry,
        settings: Settings,
        device: torch.device,
        config: dict[str, Any],
    ) -> None:
        self.settings, self.device, self.config = settings, device, config
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(settings.random_state)
            self.model = MaskedAutoencoder(CAMAE(geometry), decoder)
            mae.initialise(self.model)
        self.model.to(device)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.squeeze().ndim > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in trained if p.squeeze().ndim <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = Lion(groups, lr=settings.learning_rate, betas=BETAS)
        self.step = 0
        self.curve: list[dict[str, float]] = []
        self.sums = torch.zeros(len(LOSSES), dtype=torch.float64)
        self.steps_summed = 0

    def go_on(self, fields: _Fields, checkpoint: Path, checkpoint_seconds: float) -> None:
        """Train to the last step; write a checkpoint now and then."""
        total = self.settings.steps
        line = max(total // LINES, 1)
        saved = time.monotonic()
        with ThreadPoolExecutor(1) as reader:
            coming: Future[tuple[Tensor, Tensor]] = reader.submit(fields.batch, self.step)
            for step in progress.track(range(self.step + 1, total + 1), "pretrain, steps"):
                images, noise = coming.result()
                self.step = step
                if self.step < total:
                    coming = reader.submit(fields.batch, self.step)
                self.train(images, noise)
                if self.step % line == 0 or self.step == total:
                    self.write_line(fields)
                if self.step < total and time.monotonic() - saved >= checkpoint_seconds:
                    self.save(checkpoint, state=True, force=True)
                    saved = time.monotonic()

    def train(self, images: Tensor, noise: Tensor) -> None:
        """One step of the optimiser."""
        for group in self.optimizer.param_groups:
            group["lr"] = one_cycle(self.step - 1, self.settings.steps, self.settings.learning_rate)
        losses = mae.losses(self.masked(images, noise), self.settings.fourier_weight)
        self.optimizer.zero_grad(set_to_none=True)
        losses[0].backward()
        self.optimizer.step()
        self.sums += torch.stack(losses).detach().double().cpu()
        self.steps_summed += 1

    def masked(self, images: Tensor, noise: Tensor) -> mae.Masked:
        """One masked pass, in the precision of the run."""
        low = None if self.settings.dtype == "float32" else DTYPES[self.settings.dtype]
        images, noise = (x.to(self.device, non_blocking=True) for x in (images, noise))
        with torch.autocast(self.device.type, dtype=low, enabled=low is not None):
            return self.model(images, noise, self.settings.mask_ratio)

    @torch.inference_mode()
    def paint(self, fields: _Fields) -> tuple[Tensor, mae.Masked]:
        """Held-out images and their masked pass."""
        images, noise = fields.unseen()
        parts = [self.masked(*part) for part in zip(images.split(64), noise.split(64), strict=True)]
        return images, mae.Masked(*map(torch.cat, zip(*parts, strict=True)))

    def write_line(self, fields: _Fields) -> None:
        """Add a line to the loss curve; stop where the loss is no number."""
        means = (self.sums / self.steps_summed).tolist()
        if not math.isfinite(means[0]):
            raise InputError(
                f"the loss is {means[0]} after step {self.step}: try a lower learning_rate than "
                f"{self.settings.learning_rate}"
            )
        held_out = float(mae.losses(self.paint(fields)[1])[1])
        line = [self.step, self.optimizer.param_groups[0]["lr"], *means, held_out]
        self.curve.append(dict(zip(CURVE, line, strict=True)))
        self.sums.zero_()
        self.steps_summed = 0
        progress.say(f"step {self.step}: mse {means[1]:.4f}, held out {held_out:.4f}")

    def picture(self, fields: _Fields) -> Image.Image:
        """Grey picture: a row of channels for each of a crop, what was seen of it, and what was painted."""
        _, masked = self.paint(fields)
        hidden = masked.mask[:SHOWN, :, None].bool()
        target, painted = masked.target[:SHOWN], masked.reconstruction[:SHOWN]
        rows = (target, target.masked_fill(hidden, -3.0), torch.where(hidden, painted, target))
        images = torch.stack([mae.pictures(row, fields.n_channels) for row in rows], dim=1)  # crop, row, channel, y, x
        grid = images.permute(0, 1, 3, 2, 4).flatten(0, 2).flatten(1)
        return Image.fromarray(((grid.cpu().clamp(-2, 4) + 2) / 6 * 255).to(torch.uint8).numpy())

    def save(self, path: Path, *, state: bool = False, force: bool = False) -> None:
        """Write the model, or with ``state`` all that the run needs to go on."""
        tensors = dict(self.model.state_dict())
        metadata = {"config": json.dumps(self.config, sort_keys=True)}
        if state:
            moments = self.optimizer.state_dict()["state"]
            tensors |= {f"{MOMENT}{key}": moment["exp_avg"] for key, moment in moments.items()}
            tensors["sums"] = self.sums
            metadata["run"] = json.dumps(
                {"step": self.step, "curve": self.curve, "steps_summed": self.steps_summed}, sort_keys=True
            )
        tensors = {key: tensor.contiguous().cpu() for key, tensor in tensors.items()}
        with artifacts.atomic(path, force=force) as temporary:
            save_file(tensors, temporary, metadata)
            temporary.chmod(0o666 & ~_umask())  # safetensors keeps files to their owner

    def restore(self, checkpoint: Path) -> None:
        """Go back to where a checkpoint was written."""
        try:
            with safe_open(checkpoint, framework="pt") as archive:
                metadata = archive.metadata()
                tensors = {key: archive.get_tensor(key) for key in archive.keys()}  # noqa: SIM118
            config, run = json.loads(metadata["config"]), json.loads(metadata["run"])
        except Exception as error:
            raise WeightsError(f"{checkpoint} cannot be read ({error}): delete it to start anew") from error
        if config != json.loads(json.dumps(self.config)):
            raise WeightsError(
                f"{checkpoint} is of a run with other settings or plates: give the same, or delete it to start anew"
            )
        self.sums, self.step = tensors.pop("sums"), run["step"]
        self.curve, self.steps_summed = run["curve"], run["steps_summed"]
        moments = {int(k.removeprefix(MOMENT)): {"exp_avg": tensors.pop(k)} for k in [*tensors] if k.startswith(MOMENT)}
        self.model.load_state_dict(tensors)
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": moments})


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def one_cycle(step: int, steps: int, highest: float) -> float:
    """Learning rate of a step, counted from 0: up for a tenth of the steps, then down to nearly 0, both by a cosine.

    torch's ``OneCycleLR`` with its defaults, as a function of the step.
    """
    from_, to = highest / 25, highest / 25e4
    up = WARM_UP * steps - 1
    if step < up:
        start, end, part = from_, highest, step / up
    else:
        start, end, part = highest, to, (step - up) / (steps - 1 - up) if steps - 1 > up else 1.0
    return end + (start - end) / 2 * (1 + math.cos(math.pi * part))
