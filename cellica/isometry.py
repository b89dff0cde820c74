"""How near a decoder is to an isometry: singular values of its Jacobian, and the bound on identifiability they give."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cellica.alignment import matrix

QUANTILES = (0.01, 0.05, 0.5, 0.95, 0.99)


@dataclass(frozen=True)
class BiLipschitz:
    """Singular values of the Jacobian of a decoder at sample points, and the constants they give.

    Attributes
    ----------
    lower, upper
        Smallest and largest singular value over the points: locally, lower ||x - y|| <= ||g(x) - g(y)|| <= upper ||x - y||.
    L
        Least L with 1 / (1 + L) <= lower and upper <= 1 + L, so 1 + L = max(upper, 1 / lower); infinite where a direction is lost.
    L_scaled
        The same after the one scaling of g that makes it least, 1 + L = sqrt(upper / lower): the units of the latents, which are
        arbitrary, do not count.
    quantiles
        By level, of the singular values of all points.
    singular_values
        (n, d), largest first, of each point.
    """

    lower: float
    upper: float
    L: float
    L_scaled: float
    quantiles: dict[float, float]
    singular_values: np.ndarray


def bi_lipschitz(
    decoder: Callable[[Any], Any], points: np.ndarray, *, quantiles: Sequence[float] = QUANTILES, chunk_size: int = 64
) -> BiLipschitz:
    """Estimate the local bi-Lipschitz constant of a decoder from its Jacobian at sample points.

    arXiv 2603.11970 writes the constant as 1 + L; that this bounds stretch and shrinkage alike is our reading, which agrees
    with its example (three layers of LeakyReLU with slope a: about 1 / a^3). The largest over points is at most that over
    their region, so L is an estimate from below: look at the quantiles too, and at more points.

    Parameters
    ----------
    decoder
        Takes a tensor (N, d) to (N, ...) row by row, differentiably, as a ``torch.nn.Module`` in ``eval`` mode does
        (layers that mix rows or draw numbers have no Jacobian of their own).
    points
        Latents (n, d), an array or a tensor; a tensor's dtype and device are kept, arrays become float32.
    quantiles
        Levels between 0 and 1.
    chunk_size
        Points at a time.

    Examples
    --------
    >>> import torch
    >>> stretch = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.5, 0.0]])
    >>> found = bi_lipschitz(lambda z: z @ stretch, np.zeros((3, 2)))
    >>> found.lower, found.upper, found.L, found.L_scaled
    (0.5, 2.0, 1.0, 1.0)
    """
    import torch

    tensor: Any = points if torch.is_tensor(points) else None
    checked = matrix("points", points if tensor is None else tensor.detach().cpu().double().numpy(), rows=1)
    tensor = torch.from_numpy(checked).float() if tensor is None else tensor.detach()
    if not isinstance(chunk_size, int | np.integer) or chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size!r} is not allowed: use a whole number of 1 or more")
    if any(not 0 <= level <= 1 for level in quantiles):
        raise ValueError(f"quantiles={tuple(quantiles)!r} is not allowed: use levels from 0 to 1")
    if getattr(decoder, "training", False):
        raise ValueError("the decoder is in training mode, in which rows may mix: call decoder.eval() first")

    def decoded(point: Any) -> Any:
        return decoder(point[None]).flatten()

    jacobian = torch.func.vmap(torch.func.jacfwd(decoded))
    found = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "`torch.jit.script`", FutureWarning
        )  # torch's own, at its first forward derivative
        for chunk in tensor.split(chunk_size):
            values = torch.linalg.svdvals(jacobian(chunk).double())
            lost = values.new_zeros(len(values), tensor.shape[1] - values.shape[1])  # fewer outputs than latents
            found.append(torch.cat([values, lost], dim=1).cpu().numpy())
    singular = np.concatenate(found)
    lower, upper = float(singular.min()), float(singular.max())
    return BiLipschitz(
        lower=lower,
        upper=upper,
        L=max(upper, 1 / lower) - 1 if lower > 0 else float("inf"),
        L_scaled=float(np.sqrt(upper / lower)) - 1 if lower > 0 else float("inf"),
        quantiles={level: float(np.quantile(singular, level)) for level in quantiles},
        singular_values=singular,
    )


def rigid_bound(L: float) -> float:
    """sqrt(2 L + L^2), to which the error of the best rigid map is proportional where the decoder's constant is 1 + L.

    Theorem 1 of arXiv 2603.11970, whose factor depends on the latent space alone. 0 for an isometry; near 1 + L for large L.

    >>> rigid_bound(0.0), round(rigid_bound(0.25), 6)
    (0.0, 0.75)
    """
    if not L >= 0:
        raise ValueError(f"L={L!r} is not allowed: use the L of `bi_lipschitz`, 0 or more")
    return float(np.sqrt(2 * L + L * L))
