"""Independent component analysis: whitening, then symmetric FastICA, on any device that torch knows."""

import warnings
from collections.abc import Callable

import numpy as np
from scipy.optimize import linear_sum_assignment
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from cellica.whitening import Whitening

CONTRASTS = ("logcosh", "exp", "cube")
NON_GAUSSIAN_Z = 5.0  # a row has a non-Gaussian direction where its contrast lies this many standard errors from 0
PATIENCE = 25  # iterations without a new non-Gaussian row after which those that still wander are taken as Gaussian


class ICA(TransformerMixin, BaseEstimator):
    """Whitening followed by symmetric FastICA (Hyvarinen, 1999), with convergence judged per component.

    Gaussian directions have no preferred rotation and never settle, so a component counts as converged when its
    direction is non-Gaussian and has stopped moving. The order is canonical (largest non-Gaussianity first), and so is
    the sign (positive skewness). Sources have unit variance.

    Parameters
    ----------
    n_components
        Number of sources; None takes all directions with variance. Lowered to the rank of the data where needed.
    fun
        Contrast: ``"logcosh"``, ``"exp"`` or ``"cube"``.
    max_iter, tol
        Iterations at most, and the change of direction (1 - |cosine|) below which a component has stopped.
    random_state
        Seed of the first rotation.
    device
        ``"cpu"``, ``"cuda"``, ...: where the iterations run.

    Attributes
    ----------
    components_ : ndarray (n_components, n_features)
        Unmixing W K: ``transform(X) = (X - mean_) @ components_.T``.
    mixing_ : ndarray (n_features, n_components)
        Its pseudo-inverse.
    mean_ : ndarray (n_features,)
    whitening_ : ndarray (n_components, n_features)
        K, before the rotation.
    rotation_ : ndarray (n_components, n_components)
        W, orthogonal.
    converged_ : ndarray of bool (n_components,)
        Non-Gaussian direction that has stopped moving.
    non_gaussian_ : ndarray of bool (n_components,)
    n_iter_ : int
    """

    def __init__(
        self,
        n_components: int | None = None,
        *,
        fun: str = "logcosh",
        max_iter: int = 200,
        tol: float = 1e-4,
        random_state: int | np.random.RandomState | None = None,
        device: str = "cpu",
    ):
        self.n_components = n_components
        self.fun = fun
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state
        self.device = device

    def fit(self, X: np.ndarray, y: object = None) -> "ICA":
        """Fit on X (n_samples, n_features)."""
        if self.fun not in CONTRASTS:
            raise ValueError(f"fun={self.fun!r} is not known: use one of {', '.join(map(repr, CONTRASTS))}")
        if self.max_iter < 1:
            raise ValueError(f"max_iter={self.max_iter!r} is not allowed: use 1 or more")
        X = validate_data(self, X, dtype=[np.float64, np.float32], ensure_min_samples=2)
        whiten = Whitening(self.n_components).fit(X)
        start = check_random_state(self.random_state).standard_normal((whiten.rank_, whiten.rank_))
        found = fast_ica(
            whiten.transform(X), start, fun=self.fun, max_iter=self.max_iter, tol=self.tol, device=self.device
        )
        rotation, self.converged_, self.non_gaussian_, self.n_iter_ = found
        sources = whiten.transform(X) @ rotation.T.astype(X.dtype)
        order, sign = canonical(sources)
        self.rotation_ = rotation[order] * sign[:, None]
        self.converged_, self.non_gaussian_ = self.converged_[order], self.non_gaussian_[order]
        self.mean_, self.whitening_ = whiten.mean_, whiten.whitening_
        self.components_ = self.rotation_ @ whiten.whitening_
        self.mixing_ = whiten.dewhitening_ @ self.rotation_.T
        unsettled = int(np.sum(self.non_gaussian_ & ~self.converged_))
        if unsettled:
            warnings.warn(
                f"{unsettled} of {int(self.non_gaussian_.sum())} non-Gaussian components were still moving after "
                f"{self.n_iter_} iterations: raise max_iter={self.max_iter} or lower n_components={whiten.rank_}",
                ConvergenceWarning,
                stacklevel=2,
            )
        return self

    def transform(self, X: np.ndarray) -> np.ndarray:
        """Sources (n_samples, n_components) of X, in the dtype of X."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        return (X - self.mean_.astype(X.dtype)) @ self.components_.T.astype(X.dtype)

    def inverse_transform(self, X: np.ndarray) -> np.ndarray:
        """Features (n_samples, n_features) that sources X stand for."""
        check_is_fitted(self)
        return X @ self.mixing_.T.astype(X.dtype) + self.mean_.astype(X.dtype)

    @property
    def _n_features_out(self) -> int:
        return self.components_.shape[0]


def fast_ica(
    whitened: np.ndarray,
    start: np.ndarray,
    *,
    fun: str = "logcosh",
    max_iter: int = 200,
    tol: float = 1e-4,
    device: str = "cpu",
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Symmetric FastICA on whitened data.

    Each iteration takes the fixed-point step w <- E[z g(w z)] - E[g'(w z)] w for all rows at once (Hyvarinen, 1999,
    eq. 20), then orthonormal rows: the nearest ones for the non-Gaussian rows, the rest in their complement, always in
    float64. It ends when all rows have stopped moving, or when the non-Gaussian ones have and no further row became
    non-Gaussian in ``PATIENCE`` iterations.

    Parameters
    ----------
    whitened
        Z (n_samples, k), zero mean and identity covariance; its dtype is that of the large products.
    start
        Matrix (k, k) whose nearest orthogonal matrix is the first W.

    Returns
    -------
    W : ndarray (k, k), orthogonal; sources are ``Z @ W.T``
    converged : ndarray of bool (k,)
    non_gaussian : ndarray of bool (k,)
    n_iter : int
    """
    import torch

    z = torch.as_tensor(np.ascontiguousarray(whitened), device=device)
    contrast = _contrast(fun)
    bounded = _contrast("logcosh") if fun == "cube" else contrast
    rotation = _nearest_orthogonal(torch.as_tensor(start, dtype=torch.float64, device=device))
    most, since = 0, 0
    for n_iter in range(1, max_iter + 1):
        step, z_score = _fixed_point(z, rotation, contrast, bounded)
        updated = _orthogonalize(step, z_score > NON_GAUSSIAN_Z)
        stopped = 1 - torch.abs(torch.sum(updated * rotation, dim=1)) < tol
        rotation, non_gaussian = updated, z_score > NON_GAUSSIAN_Z
        if int(non_gaussian.sum()) > most:
            most, since = int(non_gaussian.sum()), n_iter
        if bool(stopped.all()) or (bool((stopped | ~non_gaussian).all()) and n_iter - since >= PATIENCE):
            break
    return rotation.cpu().numpy(), (stopped & non_gaussian).cpu().numpy(), non_gaussian.cpu().numpy(), n_iter


def canonical(sources: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Order (largest |E[log cosh s] - E[log cosh Gauss]| first) and sign (positive skewness) of sources (n, k)."""
    magnitude = np.abs(sources)
    log_cosh = magnitude + np.log1p(np.exp(-2 * magnitude)) - np.log(2)
    non_gaussianity = np.abs(log_cosh.mean(axis=0, dtype=np.float64) - 0.37456719)  # E log cosh of a standard Gaussian
    order = np.argsort(-non_gaussianity, kind="stable")
    skewness = np.mean(sources[:, order].astype(np.float64) ** 3, axis=0)
    return order, np.where(skewness < 0, -1.0, 1.0)


def matched_correlation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """|correlation| of each column of a (n, k) with the column of b (n, m) matched to it one to one (Hungarian).

    A column of a without a partner (m < k) gets 0.
    """
    a = (a - a.mean(axis=0)) / np.maximum(a.std(axis=0), np.finfo(a.dtype).tiny)
    b = (b - b.mean(axis=0)) / np.maximum(b.std(axis=0), np.finfo(b.dtype).tiny)
    correlation = np.abs(a.T @ b) / len(a)
    rows, columns = linear_sum_assignment(-correlation)
    matched = np.zeros(a.shape[1])
    matched[rows] = correlation[rows, columns]
    return matched.clip(max=1)


def _contrast(fun: str) -> Callable:
    """Function y -> (g(y), g'(y)) of a contrast."""
    import torch

    def logcosh(y):  # type: ignore[no-untyped-def]
        g = torch.tanh(y)
        return g, 1 - g * g

    def exp(y):  # type: ignore[no-untyped-def]
        bell = torch.exp(-y * y / 2)
        return y * bell, (1 - y * y) * bell

    def cube(y):  # type: ignore[no-untyped-def]
        return y**3, 3 * y * y

    return {"logcosh": logcosh, "exp": exp, "cube": cube}[fun]


def _fixed_point(z, rotation, contrast, bounded, chunk_size: int = 8192):  # type: ignore[no-untyped-def]
    """Step E[g(y) z] - E[g'(y)] W, and |E[y b(y)] - E[b'(y)]| of each row in standard errors.

    The bounded contrast b judges whether a row is Gaussian: with an unbounded one, few wells decide.
    """
    import torch

    k = rotation.shape[0]
    outer = torch.zeros(k, k, dtype=torch.float64, device=z.device)
    slope, first, second = (torch.zeros(k, dtype=torch.float64, device=z.device) for _ in range(3))
    weights = rotation.T.to(z.dtype)
    for chunk in torch.split(z, chunk_size):
        y = chunk @ weights
        g, g_prime = contrast(y)
        outer += (g.T @ chunk).double()
        slope += g_prime.sum(dim=0, dtype=torch.float64)
        b, b_prime = (g, g_prime) if bounded is contrast else bounded(y)
        curvature = y * b - b_prime
        first += curvature.sum(dim=0, dtype=torch.float64)
        second += (curvature * curvature).sum(dim=0, dtype=torch.float64)
    n = len(z)
    mean = first / n
    spread = torch.sqrt(torch.clamp(second / n - mean**2, min=1e-300))
    return outer / n - (slope / n)[:, None] * rotation, torch.abs(mean) * n**0.5 / spread


def _orthogonalize(step, non_gaussian):  # type: ignore[no-untyped-def]
    """Nearest orthonormal rows, non-Gaussian rows first, the others in what they leave.

    The step of a Gaussian row is small and random. In one polar factor of all rows it would keep shaking the others.
    """
    import torch

    if bool(non_gaussian.all()) or not bool(non_gaussian.any()):
        return _nearest_orthogonal(step)
    rows = _nearest_orthogonal(step[non_gaussian])
    _, _, basis = torch.linalg.svd(rows, full_matrices=True)
    complement = basis[len(rows) :]
    updated = torch.empty_like(step)
    updated[non_gaussian] = rows
    updated[~non_gaussian] = _nearest_orthogonal(step[~non_gaussian] @ complement.T) @ complement
    return updated


def _nearest_orthogonal(matrix):  # type: ignore[no-untyped-def]
    """Polar factor of a matrix with no more rows than columns, in float64."""
    import torch

    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u @ vh
