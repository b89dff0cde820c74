"""Train autoencoders of digits whose decoders bend space more or less, and keep their latents.

    python workflows/identifiability/digits.py OUT.npz --leak 0.5 --seeds 0 1 2 3 4 [--mnist mnist.npz]

The decoder has three hidden layers of LeakyReLU with one slope, the leak, between linear maps of orthonormal columns. With a leak
of 1 it is an isometry; with leak a it stretches some directions by a^3 and others not at all, so its bi-Lipschitz constant is
bounded by 1 / a^3. The encoder is the same for all leaks. Digits are scikit-learn's 1,797 of 8 x 8 pixels, or of MNIST, where
a file is given.

OUT.npz: ``latents`` (seeds, n, d); ``painted`` (seeds, n, p), what is made of them; ``L``, ``L_scaled`` and ``L_90`` (of the central 90 % of the
singular values), measured at the first ``--points`` latents; ``error``, the mean squared error over the variance of the pixels.
"""

import argparse
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

from cellica import artifacts, identifiability, progress

WIDTH = 128  # of the encoder's hidden layers
LEARNING_RATE = 2e-3


def digits(mnist: Path | None, n: int, random_state: int = 0) -> np.ndarray:
    """Rows of pixels in [0, 1]."""
    if mnist is None:
        return load_digits().data / 16
    try:
        with np.load(mnist, allow_pickle=False) as found:
            names = [name for name in found.files if found[name].ndim == 3 and found[name].dtype == np.uint8]
            pixels = found["x_train" if "x_train" in names else names[0]] if names else None
    except (ValueError, OSError) as error:
        raise ValueError(f"{mnist} is no .npz file of arrays: {error}") from error
    if pixels is None or pixels.shape[1:] != (28, 28):
        raise ValueError(f"{mnist} holds no uint8 pictures of 28 x 28: give mnist.npz, with x_train (60000, 28, 28)")
    chosen = np.random.default_rng(random_state).permutation(len(pixels))[:n]
    return pixels[chosen].reshape(len(chosen), -1) / 255


class Autoencoder(nn.Module):
    """Rows (n, p) to latents (n, d) and back."""

    def __init__(self, n_pixels: int, n_latents: int, leak: float) -> None:
        super().__init__()
        bend = [nn.Linear(n_pixels, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU()]
        self.encoder = nn.Sequential(*bend, nn.Linear(WIDTH, n_latents))
        self.straight = nn.Linear(n_pixels, n_latents)  # so that an isometry is easily found
        widths = (n_latents, n_pixels, n_pixels, n_pixels)
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [orthogonal(nn.Linear(before, after)), nn.LeakyReLU(leak)]
        self.decoder = nn.Sequential(*layers, orthogonal(nn.Linear(n_pixels, n_pixels)))

    def code(self, rows: Tensor) -> Tensor:
        return self.encoder(rows) + self.straight(rows)


def trained(rows: Tensor, n_latents: int, leak: float, seed: int, steps: int, device: str) -> Autoencoder:
    torch.manual_seed(seed)
    model = Autoencoder(rows.shape[1], n_latents, leak).to(device)
    there = rows.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in progress.track(range(steps), f"leak {leak}, seed {seed}"):
        some = there[torch.randint(len(rows), (256,), generator=generator).to(device)]
        loss = (model.decoder(model.code(some)) - some).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.cpu().eval()


def kept(model: Autoencoder, rows: Tensor, n_points: int) -> dict[str, np.ndarray]:
    """What is kept of one model."""
    with torch.inference_mode():
        latents = model.code(rows)
        painted = model.decoder(latents)
        error = float((painted - rows).square().mean() / rows.var(dim=0, unbiased=False).mean())
    found = identifiability.bi_lipschitz(model.decoder, latents[:n_points].numpy(), quantiles=(0.05, 0.95))
    low, high = found.quantiles[0.05], found.quantiles[0.95]
    return {
        "latents": latents.numpy(),
        "painted": painted.numpy(),
        "error": error,
        "L": found.L,
        "L_scaled": found.L_scaled,
        "L_90": max(high, 1 / low) - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--leak", type=float, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--mnist", type=Path)
    parser.add_argument("--rows", type=int, default=10_000, help="of MNIST, drawn at random")
    parser.add_argument("--latents", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--points", type=int, default=256)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    progress.show()
    if options.threads:
        torch.set_num_threads(options.threads)
    if not 0 < options.leak <= 1:
        parser.exit(2, f"error: a leak of {options.leak} is not allowed: use more than 0, up to 1\n")
    try:
        rows = torch.from_numpy(digits(options.mnist, options.rows)).float()
    except (ValueError, FileNotFoundError) as error:
        parser.exit(2, f"error: {error}\n")
    found = [
        kept(trained(rows, options.latents, options.leak, seed, options.steps, options.device), rows, options.points)
        for seed in options.seeds
    ]
    arrays = {name: np.stack([np.asarray(one[name]) for one in found]) for name in found[0]}
    with artifacts.atomic(options.out, force=True) as part, part.open("wb") as stream:
        np.savez(stream, **arrays, leak=options.leak, seeds=np.array(options.seeds))


if __name__ == "__main__":
    main()
