"""Independent component analysis: whitening, then a rotation to independent sources, and how stable these are."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from cellica.whitening import (
    RowSink,
    RowSource,
    Whitening,
    chunks,
    is_row_source,
    principal_directions,
    project,
    rank,
    require_n_components,
    sample,
    signal_rank,
    validated,
    working_dtype,
)

SOLVERS = ("fastica", "picard")
CONTRASTS = ("logcosh", "exp", "cube")
ROWS_PER_ENTRY = 5  # samples for each entry of the unmixing matrix, against overlearning (Sarela and Vigario, 2003)
GAUSSIAN_SCORE = 3.0  # standard errors of its contrast from a Gaussian's below which nothing is known of a direction
IN_MEMORY = 2**30  # bytes of whitened rows that are held of a source that is read by chunks


class ICA(TransformerMixin, BaseEstimator):
    """Whitening followed by symmetric FastICA or Picard-O, with convergence judged per component.

    Gaussian directions have no preferred rotation and never settle, so a component counts as converged when its
    direction is non-Gaussian and has stopped moving. What is left over, Gaussian and still moving, is given the principal
    directions of its own span, so that the output does not hang on the seed. The order is canonical (largest
    non-Gaussianity first, then the left-over directions, largest variance first), and so is the sign (positive
    skewness). Sources have unit variance.

    X may be an array, or a matrix on disk that is read by slices of rows (``numpy.memmap``, ``h5py.Dataset``,
    ``zarr.Array``, the X of a backed AnnData). Of an array, the fit holds one whitened copy. Of a matrix on disk it holds at
    most 1 GiB of whitened rows: where there are more, it searches in a random sample of them and then polishes what it
    found on all rows, chunk by chunk.

    Parameters
    ----------
    n_components
        Number of sources; None takes all directions with variance, ``"auto"`` those above the noise
        (``whitening.signal_rank``) but no more than sqrt(n_samples / 5): a rule of thumb, as with fewer rows for each
        entry of the unmixing matrix ICA finds sources that are not there (Sarela and Vigario, 2003, on
        the effect). Lowered to the rank of the data where needed, with a warning.
    solver
        ``"fastica"`` (Hyvarinen, 1999) or ``"picard"`` (Picard-O; Ablin, Cardoso and Gramfort, 2018): the slower, with a
        line search, for data on which FastICA goes on moving.
    fun
        Contrast: ``"logcosh"``, ``"exp"`` or ``"cube"``.
    max_iter, tol
        Iterations at most, and the change of direction (1 - |cosine|) below which a component has stopped.
    random_state
        Seed of the first rotation, and of the sample of rows where one is taken. The order of rows acts as a seed does.
    device
        ``"cpu"``, ``"cuda"``, ...: where the iterations run.
    callback
        Called after each iteration with its number and the number of components that have settled.

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
        n_components: int | str | None = None,
        *,
        solver: str = "fastica",
        fun: str = "logcosh",
        max_iter: int = 200,
        tol: float = 1e-4,
        random_state: int | np.random.RandomState | None = None,
        device: str = "cpu",
        callback: Callable[[int, int], None] | None = None,
    ):
        self.n_components = n_components
        self.solver = solver
        self.fun = fun
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state
        self.device = device
        self.callback = callback

    def fit(self, X: np.ndarray | RowSource, y: object = None) -> "ICA":
        """Fit on X (n_samples, n_features)."""
        if self.solver not in SOLVERS:
            raise ValueError(f"solver={self.solver!r} is not known: use one of {', '.join(map(repr, SOLVERS))}")
        if self.fun not in CONTRASTS:
            raise ValueError(f"fun={self.fun!r} is not known: use one of {', '.join(map(repr, CONTRASTS))}")
        if not isinstance(self.max_iter, int | np.integer) or self.max_iter < 1:
            raise ValueError(f"max_iter={self.max_iter!r} is not allowed: use a whole number of 1 or more")
        if not 0 <= self.tol < 1:
            raise ValueError(f"tol={self.tol!r} is not allowed: use 0 or more, below 1")
        require_n_components(self.n_components)
        from cellica import fastica

        X = validated(self, X)
        rng = check_random_state(self.random_state)
        self.mean_, eigenvalues, directions = principal_directions(X)
        k = self._n_sources(eigenvalues, X.shape[0])
        scale = np.sqrt(eigenvalues[:k, None])
        self.whitening_, dewhitening = directions[:k] / scale, (directions[:k] * scale).T
        rows, every_row = self._whitened_rows(X, rng)
        half = rng.choice(rows.n, max(rows.n // 2, min(rows.n, 2 * rows.k)), replace=False)
        found = self._separated(rows, every_row, fastica.far_rows(rows, half))
        rotation, order = _arranged(rows, found, dewhitening, X.shape[0])
        self.rotation_, self.n_iter_ = rotation, found.n_iter
        self.non_gaussian_ = found.non_gaussian.cpu().numpy()[order]
        self.converged_ = self.non_gaussian_ & found.stopped.cpu().numpy()[order]
        self.components_ = self.rotation_ @ self.whitening_
        self.mixing_ = dewhitening @ self.rotation_.T
        unsettled = int(np.sum(self.non_gaussian_ & ~self.converged_))
        if unsettled:
            warnings.warn(
                f"{unsettled} of {int(self.non_gaussian_.sum())} non-Gaussian components were still moving after "
                f"{self.n_iter_} iterations: raise max_iter={self.max_iter} or lower n_components={k}",
                ConvergenceWarning,
                stacklevel=2,
            )
        return self

    def transform(self, X: np.ndarray | RowSource, out: RowSink | None = None) -> Any:
        """Sources (n_samples, n_components) of X, in the dtype of X; by chunks into ``out``, as a matrix on disk, where given."""
        check_is_fitted(self)
        return project(validated(self, X, reset=False), self.components_, minus=self.mean_, out=out)

    def inverse_transform(self, X: np.ndarray | RowSource) -> np.ndarray:
        """Features (n_samples, n_features) that sources X stand for."""
        check_is_fitted(self)
        return project(X, self.mixing_, plus=self.mean_)

    @property
    def _n_features_out(self) -> int:
        return self.components_.shape[0]

    def _n_sources(self, eigenvalues: np.ndarray, n_samples: int) -> int:
        """Number of sources to look for; a number that had to be lowered is said."""
        available = rank(eigenvalues)
        if self.n_components is None:
            return available
        if self.n_components == "auto":
            wanted = min(available, signal_rank(eigenvalues, n_samples))
            limit = max(1, int((n_samples / ROWS_PER_ENTRY) ** 0.5))
            why = f"{n_samples} rows carry {limit} ({ROWS_PER_ENTRY} k^2 rows for k components)"
        else:
            wanted, limit = int(self.n_components), available
            why = f"{n_samples} rows of {len(eigenvalues)} features vary in {limit} directions"
        if wanted > limit:
            warnings.warn(f"n_components is {limit} instead of {wanted}: {why}", UserWarning, stacklevel=3)
        return min(wanted, limit)

    def _whitened_rows(self, X: np.ndarray | RowSource, rng: np.random.RandomState):  # type: ignore[no-untyped-def]
        """Whitened rows to search in, held in memory, and all rows, read by chunks, where those are only a sample."""
        import torch

        from cellica.contrast import Rows, StreamedRows

        n, width = X.shape[0], len(self.whitening_) * working_dtype(X).itemsize
        if not is_row_source(X) or n * width <= IN_MEMORY:
            held, every_row = project(X, self.whitening_, minus=self.mean_), None
        else:
            chosen = np.sort(rng.choice(n, max(len(self.whitening_), IN_MEMORY // width), replace=False))
            held = sample(X, chosen, self.whitening_, self.mean_)
            every_row = StreamedRows(X, self.mean_, self.whitening_, self.device)
        return Rows(torch.from_numpy(held).to(self.device)), every_row

    def _separated(self, rows, every_row, start):  # type: ignore[no-untyped-def]
        """Run the solver from a first rotation; ``rows`` are turned to the sources."""
        from cellica import fastica, picard

        settings = fastica.Settings(self.fun, self.max_iter, self.tol, self.callback)
        finish = fastica.polish if self.solver == "fastica" else picard.descend
        return fastica.separate(rows, start, settings, finish, every_row)


@dataclass(frozen=True)
class Stability:
    """How well other runs find each component again: means over runs, components matched one to one."""

    correlation: np.ndarray  # |correlation| of the sources (k,)
    cosine: np.ndarray  # |cosine| of the rows of the unmixing matrix (k,), in feature space
    chance: float  # mean |correlation| with the sources of a random rotation, matched in the same way


def stability(
    model: ICA, X: np.ndarray | RowSource, *, n_runs: int = 2, kind: str = "seed", random_state: int | None = None
) -> Stability:
    """Run the rotation of a fitted model again and match the components (after Himberg, Hyvarinen and Esposito, 2004).

    The runs share the model's whitening and settings and start from other random rotations. Gaussian components have no
    direction of their own and lie near ``chance``.

    Parameters
    ----------
    model
        Fitted, on X.
    X
        The rows (n_samples, n_features) it was fitted on.
    n_runs
        Runs beside the model's own.
    kind
        ``"seed"``: on the same rows. ``"bootstrap"``: on as many rows drawn with replacement, and whitened anew.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> X = np.hstack([rng.laplace(size=(2000, 3)), rng.normal(size=(2000, 1))]) @ rng.normal(size=(4, 4))
    >>> found = stability(ICA(random_state=0).fit(X), X, kind="bootstrap", random_state=1)
    >>> bool(found.correlation[:3].min() > 0.99)
    True
    """
    if kind not in ("seed", "bootstrap"):
        raise ValueError(f"kind={kind!r} is not known: use 'seed' or 'bootstrap'")
    if n_runs < 1:
        raise ValueError(f"n_runs={n_runs!r} is not allowed: use 1 or more")
    check_is_fitted(model)
    rng = check_random_state(random_state)
    z = model._whitened_rows(validated(model, X, reset=False), rng)[0].z.cpu().numpy()
    correlation, cosine, chance = [], [], []
    for _ in range(n_runs):
        other = _unmixing(model, z, kind, rng)
        matched = _matched(_cosines(model.rotation_, other))  # of whitened data: what the sources correlate
        correlation.append(matched.max(axis=1))
        features = _cosines(model.components_, other @ model.whitening_)
        cosine.append((features * (matched > 0)).max(axis=1))
        random = np.linalg.qr(rng.standard_normal(model.rotation_.shape))[0]
        chance.append(_matched(_cosines(model.rotation_, random)).max(axis=1).mean())
    return Stability(np.mean(correlation, axis=0), np.mean(cosine, axis=0), float(np.mean(chance)))


def _unmixing(model: ICA, z: np.ndarray, kind: str, rng: np.random.RandomState) -> np.ndarray:
    """Unmixing matrix of whitened rows z (n_samples, k) from another run."""
    import torch

    from cellica.contrast import Rows

    rewhitening = np.eye(z.shape[1])
    if kind == "bootstrap":
        z = z[rng.randint(len(z), size=len(z))]
        whiten = Whitening().fit(z)
        z, rewhitening = whiten.transform(z), whiten.whitening_
    rows = Rows(torch.tensor(z, device=model.device))
    start = torch.tensor(rng.standard_normal((rows.k, rows.k)), device=model.device)
    return model._separated(rows, None, start).rotation.cpu().numpy() @ rewhitening


def _cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """|cosine| of each row of a with each row of b."""
    a = a / np.linalg.norm(a, axis=1, keepdims=True)
    return np.abs(a @ (b / np.linalg.norm(b, axis=1, keepdims=True)).T).clip(max=1)


def _matched(similarity: np.ndarray) -> np.ndarray:
    """The similarities (k, m) of the pairs that are matched one to one (Hungarian), 0 elsewhere."""
    rows, columns = linear_sum_assignment(-similarity)
    matched = np.zeros_like(similarity)
    matched[rows, columns] = similarity[rows, columns]
    return matched


def fast_ica(
    whitened: np.ndarray,
    start: np.ndarray,
    *,
    fun: str = "logcosh",
    max_iter: int = 200,
    tol: float = 1e-4,
    device: str = "cpu",
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Symmetric FastICA on whitened data: see ``fastica.separate``.

    Parameters
    ----------
    whitened
        Z (n_samples, k), zero mean and identity covariance; its dtype is that of the large products. Left as it is.
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

    from cellica import fastica
    from cellica.contrast import Rows

    rows = Rows(torch.tensor(whitened, device=device))
    first = torch.tensor(start, dtype=torch.float64, device=device)
    found = fastica.separate(rows, first, fastica.Settings(fun, max_iter, tol), fastica.polish)
    non_gaussian, stopped = found.non_gaussian.cpu().numpy(), found.stopped.cpu().numpy()
    return found.rotation.cpu().numpy(), stopped & non_gaussian, non_gaussian, found.n_iter


def _arranged(rows, found, dewhitening: np.ndarray, n_samples: int) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[no-untyped-def]
    """Rotation (k, k) in canonical order and sign, and that order; ``rows`` are turned to the sources."""
    import torch

    rotation = found.rotation.cpu().numpy()
    left_over = ((found.score < GAUSSIAN_SCORE) & ~found.stopped).cpu().numpy()
    left_over &= n_samples >= ROWS_PER_ENTRY * rows.k**2  # with fewer rows, weak sources score no higher than this
    if left_over.any():
        principal = np.linalg.svd(dewhitening @ rotation[left_over].T, full_matrices=False)[2]
        turn = np.eye(len(rotation))
        turn[np.ix_(left_over, left_over)] = principal
        rows.turn(torch.from_numpy(turn).to(found.rotation.device))
        rotation = turn @ rotation
    non_gaussianity, skewness = _marginals(rows.chunks(), rows.n)
    order = np.concatenate([np.flatnonzero(~left_over), np.flatnonzero(left_over)])
    settled = int((~left_over).sum())
    order[:settled] = order[:settled][np.argsort(-non_gaussianity[order[:settled]], kind="stable")]
    return rotation[order] * np.where(skewness[order] < 0, -1.0, 1.0)[:, None], order


def canonical(sources: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Order (largest |E[log cosh s] - E[log cosh Gauss]| first) and sign (positive skewness) of sources (n, k)."""
    import torch

    non_gaussianity, skewness = _marginals(map(torch.tensor, chunks(sources)), len(sources))
    order = np.argsort(-non_gaussianity, kind="stable")
    return order, np.where(skewness[order] < 0, -1.0, 1.0)


def _marginals(sources, n: int) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[no-untyped-def]
    """|E[log cosh s] - E[log cosh Gauss]| and E[s^3] of each column of chunks of sources."""
    import torch

    from cellica.contrast import log_cosh

    sums: list[Any] = [0.0, 0.0]
    for chunk in sources:
        sums[0] += log_cosh(chunk).sum(dim=0).double()
        sums[1] += (chunk**3).sum(dim=0).double()
    means = torch.stack(sums).cpu().numpy() / n
    return np.abs(means[0] - 0.37456719), means[1]  # E log cosh of a standard Gaussian


def matched_correlation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """|correlation| of each column of a (n, k) with the column of b (n, m) matched to it one to one (Hungarian).

    A column of a without a partner (m < k) gets 0.
    """
    a = (a - a.mean(axis=0)) / np.maximum(a.std(axis=0), np.finfo(a.dtype).tiny)
    b = (b - b.mean(axis=0)) / np.maximum(b.std(axis=0), np.finfo(b.dtype).tiny)
    return _matched(np.abs(a.T @ b) / len(a)).max(axis=1).clip(max=1)
