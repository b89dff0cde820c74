"""Whitening: a linear map after which the covariance of the fitted data is the identity; and rows read by chunks."""

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted, validate_data

CHUNK_SIZE = 4096  # rows


class RowSource(Protocol):
    """A matrix that is read by slices of rows: ``numpy.memmap``, ``h5py.Dataset``, ``zarr.Array``, a backed ``adata.X``."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns."""

    @property
    def dtype(self) -> np.dtype:
        """Type of the values."""

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Rows, as a dense array."""


class RowSink(Protocol):
    """A matrix that is written by slices of rows: an array, or one on disk as a ``RowSource`` may be."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns."""

    def __setitem__(self, rows: slice, values: np.ndarray) -> None:
        """Write rows."""


class Whitening(TransformerMixin, BaseEstimator):
    """PCA or ZCA whitening with a cut in rank or a ridge.

    With covariance C = V diag(e) V^T (n - 1 in the denominator) and f = e + ridge * mean(e), PCA whitening is
    f^(-1/2) V^T and ZCA whitening V f^(-1/2) V^T (Kessy, Lewin and Strimmer, 2018). Without a ridge, directions that have
    no variance are left out, so the rank may be lower than asked for: see ``rank_``. A ``RowSource`` is read by chunks of
    rows and never held as a whole.

    Parameters
    ----------
    n_components
        Directions kept, largest variance first; None keeps all (without a ridge, all that have variance), ``"auto"``
        those above the noise (``signal_rank``).
    method
        ``"pca"``: outputs are principal components. ``"zca"``: outputs are as many as the features, as near to
        them as whitening allows.
    ridge
        Added to each eigenvalue, as a multiple of the mean eigenvalue. 0 whitens exactly.

    Attributes
    ----------
    mean_ : ndarray (n_features,)
    eigenvalues_ : ndarray (rank_,)
        Variances along the directions kept.
    directions_ : ndarray (rank_, n_features)
        Orthonormal principal directions.
    whitening_ : ndarray (n_outputs, n_features)
        K, with ``transform(X) = (X - mean_) @ K.T``.
    dewhitening_ : ndarray (n_features, n_outputs)
        Pseudo-inverse of K.
    rank_ : int
        Directions in use.
    """

    def __init__(self, n_components: int | str | None = None, *, method: str = "pca", ridge: float = 0.0):
        self.n_components = n_components
        self.method = method
        self.ridge = ridge

    def fit(self, X: np.ndarray | RowSource, y: object = None) -> "Whitening":
        """Fit on X (n_samples, n_features); covariance and eigenvalues are taken in float64."""
        if self.method not in ("pca", "zca"):
            raise ValueError(f"method={self.method!r} is not known: use 'pca' or 'zca'")
        if not (isinstance(self.ridge, int | float | np.number) and 0 <= self.ridge < np.inf):
            raise ValueError(f"ridge={self.ridge!r} is not allowed: use a finite number of 0 or more")
        require_n_components(self.n_components)
        X = validated(self, X)
        self.mean_, eigenvalues, directions = principal_directions(X)
        self.rank_ = len(eigenvalues) if self.ridge > 0 else rank(eigenvalues)
        if self.n_components == "auto":
            self.rank_ = min(self.rank_, signal_rank(eigenvalues, X.shape[0]))
        elif self.n_components is not None:
            self.rank_ = min(self.rank_, int(self.n_components))
        self.eigenvalues_, self.directions_ = eigenvalues[: self.rank_], directions[: self.rank_]
        scale = np.sqrt(self.eigenvalues_ + self.ridge * eigenvalues.mean())[:, None]
        self.whitening_ = self.directions_ / scale
        self.dewhitening_ = (self.directions_ * scale).T
        if self.method == "zca":
            self.whitening_ = self.directions_.T @ self.whitening_
            self.dewhitening_ = self.dewhitening_ @ self.directions_
        return self

    def transform(self, X: np.ndarray | RowSource, out: RowSink | None = None) -> Any:
        """Whiten X (n_samples, n_features) to (n_samples, n_outputs), in the dtype of X; into ``out`` where given."""
        check_is_fitted(self)
        return project(validated(self, X, reset=False), self.whitening_, minus=self.mean_, out=out)

    def inverse_transform(self, X: np.ndarray | RowSource) -> np.ndarray:
        """Map whitened X back; exact where no direction was cut."""
        check_is_fitted(self)
        return project(X, self.dewhitening_, plus=self.mean_)

    @property
    def _n_features_out(self) -> int:
        return self.whitening_.shape[0]


def require_n_components(n_components: int | str | None) -> None:
    """Refuse a number of components that is neither a count, nor ``"auto"``, nor None."""
    if n_components is None or n_components == "auto":
        return
    if not isinstance(n_components, int | np.integer) or n_components < 1:
        raise ValueError(f"n_components={n_components!r} is not allowed: use 1 or more, 'auto', or None for all")


def principal_directions(X: np.ndarray | RowSource) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean (d,), eigenvalues (d,) of the covariance, largest first, and orthonormal directions (d, d) as rows."""
    mean, covariance = mean_and_covariance(X)
    eigenvalues, vectors = np.linalg.eigh(covariance)
    if eigenvalues[-1] <= 0 or rank(eigenvalues[::-1]) == 0:
        raise ValueError(f"whitening needs variance, but all {X.shape[0]} rows are identical")
    return mean, eigenvalues[::-1].clip(min=0), vectors[:, ::-1].T


def mean_and_covariance(X: np.ndarray | RowSource) -> tuple[np.ndarray, np.ndarray]:
    """Mean (d,) and covariance (d, d), n - 1 in the denominator, in float64, in one pass over chunks of rows."""
    n, d = X.shape
    shift = next(chunks(X)).mean(axis=0, dtype=np.float64)  # near the mean, so that little is cancelled below
    total, outer = np.zeros(d), np.zeros((d, d))
    for chunk in chunks(X):
        centred = chunk - shift
        total += centred.sum(axis=0)
        outer += centred.T @ centred
    offset = total / n
    return shift + offset, (outer - n * np.outer(offset, offset)) / (n - 1)


def rank(eigenvalues: np.ndarray) -> int:
    """Number of directions that have variance, of eigenvalues with the largest first."""
    precision = 10 * len(eigenvalues) * np.finfo(np.float64).eps  # float32 rounding, squared, lies below this too
    return int(np.sum(eigenvalues > precision * max(eigenvalues[0], 0)))


def signal_rank(eigenvalues: np.ndarray, n_samples: int) -> int:
    """Number of directions above the noise, of eigenvalues (d,) of a covariance of ``n_samples`` rows; 1 at least.

    The optimal hard threshold for singular values in noise of unknown level, a multiple of their median that depends
    on the shape of the matrix (Gavish and Donoho, 2014, eq. 4 and 5). It takes at least half of the directions as noise.
    """
    varying = eigenvalues[: rank(eigenvalues)]
    ratio = min(len(eigenvalues), n_samples - 1) / max(len(eigenvalues), n_samples - 1)
    omega = 0.56 * ratio**3 - 0.95 * ratio**2 + 1.82 * ratio + 1.43
    return max(1, int(np.sum(varying > omega**2 * np.median(varying))))


def is_row_source(X: object) -> bool:
    """Whether X is read by slices of rows rather than held in memory."""
    lazy = isinstance(X, np.memmap) or not isinstance(X, np.ndarray)
    has_rows = hasattr(X, "shape") and hasattr(X, "__getitem__") and isinstance(getattr(X, "dtype", None), np.dtype)
    return lazy and has_rows and not hasattr(X, "tocsr")


def validated(estimator: BaseEstimator, X: np.ndarray | RowSource, *, reset: bool = True) -> np.ndarray | RowSource:
    """X as float64 or float32 with the number of features the estimator knows; a source of rows is left unread."""
    if not is_row_source(X):
        least = 2 if reset else 1
        return validate_data(estimator, X, reset=reset, dtype=[np.float64, np.float32], ensure_min_samples=least)
    if len(X.shape) != 2 or X.shape[0] < (2 if reset else 1) or X.shape[1] < 1:
        raise ValueError(f"a source of rows has shape {X.shape}: use two axes, 2 rows and 1 feature at least")
    if reset:
        estimator.n_features_in_ = X.shape[1]
    elif X.shape[1] != estimator.n_features_in_:
        raise ValueError(
            f"X has {X.shape[1]} features, but {type(estimator).__name__} is expecting "
            f"{estimator.n_features_in_} features as input"
        )
    return X


def working_dtype(X: np.ndarray | RowSource) -> np.dtype:
    """float64 for float64, float32 for all else."""
    return np.dtype(np.float64 if X.dtype == np.float64 else np.float32)


def chunks(X: np.ndarray | RowSource, chunk_size: int = CHUNK_SIZE) -> Iterator[np.ndarray]:
    """Rows of X in turn, float64 or float32; NaN and infinity are refused where X was not validated before."""
    unseen = is_row_source(X)
    for start in range(0, X.shape[0], chunk_size):
        chunk = np.asarray(X[start : start + chunk_size], dtype=working_dtype(X))
        if unseen and not np.isfinite(chunk).all():
            row = start + int(np.argmin(np.isfinite(chunk).all(axis=1)))
            raise ValueError(f"row {row} holds NaN or infinity: leave such rows out, or fill them")
        yield chunk


def project(
    X: np.ndarray | RowSource,
    matrix: np.ndarray,
    *,
    minus: np.ndarray | float = 0.0,
    plus: np.ndarray | float = 0.0,
    out: RowSink | None = None,
) -> Any:
    """``(X - minus) @ matrix.T + plus`` (n_samples, n_outputs) in the dtype of X, by chunks of rows.

    Into ``out`` where one is given, which is returned.
    """
    X = X if is_row_source(X) else np.asarray(X)
    shape, dtype = (X.shape[0], matrix.shape[0]), working_dtype(X)
    if out is None:
        out = np.empty(shape, dtype)
    elif tuple(out.shape) != shape:
        raise ValueError(f"out has the shape {tuple(out.shape)}: {shape} is needed")
    weights = matrix.T.astype(dtype)
    start, room = 0, np.empty((min(CHUNK_SIZE, X.shape[0]), X.shape[1]), dtype)
    for chunk in chunks(X):
        centred = np.subtract(chunk, minus, out=room[: len(chunk)], casting="same_kind")  # in the wider of their dtypes
        rows = centred @ weights
        if np.any(plus):
            rows += plus
        out[start : start + len(chunk)] = rows
        start += len(chunk)
    return out


def sample(X: RowSource, chosen: np.ndarray, matrix: np.ndarray, minus: np.ndarray) -> np.ndarray:
    """``(X[chosen] - minus) @ matrix.T`` for ascending row numbers, in one pass over chunks of rows."""
    out = np.empty((len(chosen), matrix.shape[0]), dtype=working_dtype(X))
    start = done = 0
    for chunk in chunks(X):
        end = int(np.searchsorted(chosen, start + len(chunk)))
        out[done:end] = project(chunk[chosen[done:end] - start], matrix, minus=minus)
        start, done = start + len(chunk), end
    return out
