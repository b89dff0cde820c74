"""Contrasts of ICA and their expectations over whitened rows, by chunks of rows, on any device that torch knows."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cellica.whitening import RowSource, chunks, project, working_dtype

CHUNK_SIZE = 1024  # rows whose products stay in a core's cache
CHUNK_SIZE_CUDA = 65536


def non_gaussian_score(k: int) -> float:
    """Standard errors from 0 beyond which the contrast of one of k rows is that of a non-Gaussian direction.

    Rows are chosen for their contrast: in Gaussian noise those found in k dimensions come to .6 sqrt(k), however many
    samples there are. The direction of a row with a score of sqrt(k) is known to within about a radian.
    """
    return max(5.0, 0.75 * k**0.5)


class Rows:
    """Whitened rows (n, k) held in memory, which may be turned in place."""

    def __init__(self, z: Tensor):
        self.z = z
        self.n, self.k = z.shape
        self.precision = torch.finfo(z.dtype).eps

    def chunks(self, skip: int = 0) -> Iterator[Tensor]:
        """Chunks of rows, without the first ``skip`` columns."""
        size = CHUNK_SIZE_CUDA if self.z.is_cuda else CHUNK_SIZE
        return iter(torch.split(self.z[:, skip:], size))

    def turn(self, rotation: Tensor, skip: int = 0) -> None:
        """Replace each row, its first ``skip`` columns left alone, by its product with a rotation."""
        weights = rotation.T.to(self.z.dtype)
        for chunk in self.chunks(skip):
            chunk.copy_(chunk @ weights)


class StreamedRows:
    """Whitened rows (n, k) made anew in each pass from a matrix that is read by chunks."""

    def __init__(self, X: RowSource, mean: np.ndarray, whitening: np.ndarray, device: str):
        self.X, self.mean, self.whitening, self.device = X, mean, whitening, device
        self.n, self.k = X.shape[0], whitening.shape[0]
        self.precision = float(np.finfo(working_dtype(X)).eps)

    def chunks(self, skip: int = 0) -> Iterator[Tensor]:
        """Chunks of rows, without the first ``skip`` columns."""
        for chunk in chunks(self.X):
            yield torch.from_numpy(project(chunk, self.whitening[skip:], minus=self.mean)).to(self.device)

    def turn(self, rotation: Tensor, skip: int = 0) -> None:
        """Turn the whitening matrix, and so each row."""
        turned = rotation.cpu().numpy() @ self.whitening[skip:]
        self.whitening = np.concatenate([self.whitening[:skip], turned])


@dataclass(frozen=True)
class Expectations:
    """Means over the rows z, with y = W z, contrast g = G' and standard Gaussian v; float64."""

    outer: Tensor  # E[g(y) z^T]
    slope: Tensor  # E[g'(y)]
    score: Tensor  # |E[y b(y)] - E[b'(y)]| in standard errors, b the contrast, bounded
    loss: Tensor  # E[G(y)], 0 where it was not asked for


def expectations(
    rows: Rows | StreamedRows, weights: Tensor, fun: str, *, skip: int = 0, loss: bool = False
) -> Expectations:
    """One pass over the rows, their first ``skip`` columns left out, with W ``weights`` (m, k - skip).

    The score uses a bounded contrast: with an unbounded one, few wells would decide.
    """
    m, k = weights.shape
    sums = torch.zeros(4, m, dtype=torch.float64, device=weights.device)  # g'; curvature and its square; G
    outer = torch.zeros(m, k, dtype=torch.float64, device=weights.device)
    as_they_are = torch.equal(weights, torch.eye(m, k, dtype=weights.dtype, device=weights.device))
    w = None
    for z in rows.chunks(skip):
        if w is None:
            w = weights.to(z.dtype)
            y, g, slope = (torch.empty(m, len(z), dtype=z.dtype, device=z.device) for _ in range(3))
        elif len(z) < y.shape[1]:
            y, g, slope = y[:, : len(z)], g[:, : len(z)], slope[:, : len(z)]
        if as_they_are:
            y.copy_(z.T[:m])
        else:
            torch.mm(w, z.T, out=y)
        CONTRAST[fun](y, g, slope)
        outer += g @ z
        sums[0] += slope.sum(dim=1)
        if loss:
            sums[3] += LOSS[fun](y).sum(dim=1)
        if fun == "cube":
            _logcosh(y, g, slope)
        curvature = y.mul_(g).sub_(slope)
        sums[1] += curvature.sum(dim=1)
        sums[2] += torch.linalg.vector_norm(curvature, dim=1).square()
    mean, square = sums[1] / rows.n, sums[2] / rows.n
    spread = torch.sqrt(torch.clamp(square - mean**2, min=1e-300))
    return Expectations(outer / rows.n, sums[0] / rows.n, torch.abs(mean) * rows.n**0.5 / spread, sums[3] / rows.n)


def _logcosh(y: Tensor, g: Tensor, slope: Tensor) -> None:
    torch.sigmoid(torch.mul(y, 2, out=g), out=g).mul_(2).sub_(1)  # tanh(y), in half of torch.tanh's time
    torch.mul(g, g, out=slope).neg_().add_(1)


def _exp(y: Tensor, g: Tensor, slope: Tensor) -> None:
    bell = torch.mul(y, y, out=slope).mul_(-0.5).exp_()
    torch.mul(y, bell, out=g)
    slope.addcmul_(y, g, value=-1)  # (1 - y^2) exp(-y^2 / 2)


def _cube(y: Tensor, g: Tensor, slope: Tensor) -> None:
    torch.mul(y, y, out=slope)
    torch.mul(slope, y, out=g)
    slope.mul_(3)


def log_cosh(y: Tensor) -> Tensor:
    """Log of the hyperbolic cosine, without overflow."""
    magnitude = y.abs()
    return magnitude + torch.log1p(torch.exp(-2 * magnitude)) - math.log(2)


# y, g, slope: g(y) and g'(y) are written into g and slope
CONTRAST: dict[str, Callable[[Tensor, Tensor, Tensor], None]] = {"logcosh": _logcosh, "exp": _exp, "cube": _cube}
LOSS: dict[str, Callable[[Tensor], Tensor]] = {
    "logcosh": log_cosh,
    "exp": lambda y: -torch.exp(-y * y / 2),
    "cube": lambda y: y**4 / 4,
}


def nearest_orthogonal(matrix: Tensor) -> Tensor:
    """Polar factor of a matrix with no more rows than columns, in float64."""
    matrix = matrix.double()
    values, vectors = torch.linalg.eigh(matrix @ matrix.T)
    if values[0] > 1e-5 * values[-1]:
        return (vectors * values.rsqrt()) @ vectors.T @ matrix
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)  # near a lower rank, where squares lose too much
    return u @ vh
