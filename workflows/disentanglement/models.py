"""Autoencoders with a code of numbers: plain, variational, of nonnegative and frugal code, and of quantized code.

Architectures: ``published``, that of the authors of InfoMEC (Hsu et al., 2023: twelve convolutions with instance norm), and
``small``, four convolutions. Losses are means over pixels of the cross-entropy. Sums over the code are divided by the number
of values of a 64 x 64 color picture, for which beta was chosen, whatever the size: so a bit of the code weighs as much
against a pixel's error in small pictures.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

PUBLISHED_WIDTHS = (32, 64, 128, 256)
SMALL_WIDTHS = (16, 32, 64, 64)
DENSE = 256
ARCHITECTURES = ("published", "small")
CODE_VALUES = 10  # of a quantized code
N_VALUES = 3 * 64 * 64  # of the pictures that the betas were chosen for
KINDS = {  # settings beside the cross-entropy, of the work that each is from
    "ae": {},
    "beta-vae": {"beta": 3.0},  # Higgins et al., 2017; this beta by Hsu et al., for Shapes3D
    "beta-tcvae": {"beta": 3.0},  # Chen et al., 2018; likewise
    "bio-ae": {"nonnegative": 1.0, "activity": 0.1},  # Whittington et al., 2023
    "qlae": {"quantization": 0.01, "commitment": 0.01},  # Hsu et al., 2023
}
VARIATIONAL = ("beta-vae", "beta-tcvae")


@dataclass(frozen=True)
class Shape:
    """What makes a model, besides its weights."""

    kind: str
    architecture: str
    image_size: int
    n_channels: int
    n_latents: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"model {self.kind!r} is not known: use one of {', '.join(KINDS)}")
        if self.architecture not in ARCHITECTURES:
            raise ValueError(f"architecture {self.architecture!r} is not known: use one of {', '.join(ARCHITECTURES)}")
        if self.image_size % 16 or self.image_size < 32:
            raise ValueError(f"image size {self.image_size} is not allowed: use 32, 48, 64 or another multiple of 16")


class Autoencoder(nn.Module):
    """Pictures (n, c, s, s) in [0, 1] to a code (n, n_latents) and back to logits of pictures."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        outputs = shape.n_latents * (2 if shape.kind in VARIATIONAL else 1)
        build = _published if shape.architecture == "published" else _small
        self.encoder, self.decoder = build(shape, outputs)
        self.register_buffer("values", torch.linspace(-0.5, 0.5, CODE_VALUES), persistent=False)

    def code(self, pictures: Tensor) -> Tensor:
        """The code without noise: means of a variational one, the values next to a quantized one."""
        found = self.encoder(pictures)
        if self.shape.kind in VARIATIONAL:
            return found.chunk(2, dim=1)[0]
        return self._quantized(found) if self.shape.kind == "qlae" else found

    def loss(self, pictures: Tensor, generator: torch.Generator, n_pictures: int) -> Tensor:
        """What training makes smallest, of one minibatch of a set of ``n_pictures``."""
        settings: dict[str, float] = KINDS[self.shape.kind]
        code, found = self.encoder(pictures), None
        if self.shape.kind in VARIATIONAL:
            mean, raw = code.chunk(2, dim=1)
            deviation = functional.softplus(raw) + 1e-6
            noise = torch.randn(mean.shape, generator=generator, device=mean.device)
            found = mean + deviation * noise
            divergence = _kl if self.shape.kind == "beta-vae" else _decomposed
            extra = divergence(found, mean, deviation, settings["beta"], n_pictures) / N_VALUES
        elif self.shape.kind == "bio-ae":
            extra = settings["nonnegative"] * functional.relu(-code).mean()
            extra = extra + settings["activity"] * code.square().mean()
        elif self.shape.kind == "qlae":
            near = self._quantized(code)
            found = code + (near - code).detach()
            extra = settings["quantization"] * (near - code.detach()).square().mean()
            extra = extra + settings["commitment"] * (near.detach() - code).square().mean()
        else:
            extra = code.new_zeros(())
        logits = self.decoder(code if found is None else found)
        return functional.binary_cross_entropy_with_logits(logits, pictures) + extra

    def _quantized(self, code: Tensor) -> Tensor:
        return self.values[(code[..., None] - self.values).abs().argmin(dim=-1)]


def _kl(sample: Tensor, mean: Tensor, deviation: Tensor, beta: float, n_pictures: int) -> Tensor:
    """beta times the divergence from a standard normal, mean over the minibatch."""
    return beta * (0.5 * (mean.square() + deviation.square() - 1) - deviation.log()).sum(dim=1).mean()


def _decomposed(sample: Tensor, mean: Tensor, deviation: Tensor, beta: float, n_pictures: int) -> Tensor:
    """Mutual information + beta total correlation + divergence of each latent, by minibatch-weighted sampling."""
    each = _log_normal(sample[:, None], mean, deviation)
    scale = math.log(len(sample) * n_pictures)
    joint = each.sum(dim=2).logsumexp(dim=1) - scale
    product = (each.logsumexp(dim=1) - scale).sum(dim=1)
    own = _log_normal(sample, mean, deviation).sum(dim=1)
    prior = _log_normal(sample, torch.zeros_like(mean), torch.ones_like(mean)).sum(dim=1)
    return (own - joint + beta * (joint - product) + product - prior).mean()


def _log_normal(x: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    return -0.5 * ((x - mean) / deviation).square() - deviation.log() - 0.5 * math.log(2 * math.pi)


def _small(shape: Shape, outputs: int) -> tuple[nn.Module, nn.Module]:
    side, widths = shape.image_size // 16, SMALL_WIDTHS
    layers: list[nn.Module] = []
    for before, width in zip((shape.n_channels, *widths), widths):
        layers += [nn.Conv2d(before, width, 4, 2, 1), nn.LeakyReLU()]
    flat = widths[-1] * side**2
    encoder = nn.Sequential(*layers, nn.Flatten(), nn.Linear(flat, DENSE), nn.ReLU(), nn.Linear(DENSE, outputs))
    back: list[nn.Module] = []
    for i, width in enumerate(reversed(widths)):
        after = widths[-2 - i] if i < 3 else shape.n_channels
        back += [nn.ConvTranspose2d(width, after, 4, 2, 1), nn.LeakyReLU()]
    dense = [nn.Linear(shape.n_latents, DENSE), nn.ReLU(), nn.Linear(DENSE, flat), nn.ReLU()]
    return encoder, nn.Sequential(*dense, nn.Unflatten(1, (widths[-1], side, side)), *back[:-1])


def _published(shape: Shape, outputs: int) -> tuple[nn.Module, nn.Module]:
    side, widths = shape.image_size // 16, PUBLISHED_WIDTHS
    layers: list[nn.Module] = []
    before = shape.n_channels
    for width in widths:
        for kernel, stride in ((3, 1), (3, 1), (4, 2)):
            layers += _block(nn.Conv2d(before, width, kernel, stride, 1, bias=False), width)
            before = width
    flat = widths[-1] * side**2
    head = [nn.Linear(flat, DENSE), nn.ReLU(), nn.Linear(DENSE, DENSE), nn.ReLU(), nn.Linear(DENSE, outputs)]
    encoder = nn.Sequential(*layers, nn.Flatten(), *head)
    dense = [nn.Linear(shape.n_latents, DENSE), nn.ReLU(), nn.Linear(DENSE, DENSE), nn.ReLU()]
    dense += [nn.Linear(DENSE, flat), nn.ReLU(), nn.Unflatten(1, (widths[-1], side, side))]
    back: list[nn.Module] = []
    for width in reversed(widths):
        for kernel, stride in ((3, 1), (3, 1), (4, 2)):
            back += _block(nn.ConvTranspose2d(before, width, kernel, stride, 1, bias=False), width)
            before = width
    return encoder, nn.Sequential(*dense, *back, nn.Conv2d(before, shape.n_channels, 1))


def _block(layer: nn.Module, width: int) -> list[nn.Module]:
    return [layer, nn.InstanceNorm2d(width, affine=True), nn.LeakyReLU()]


def numbers_of(pictures: Any, device: str) -> Tensor:
    """uint8 pictures as float32 in [0, 1]."""
    return torch.as_tensor(pictures).to(device).float() / 255
