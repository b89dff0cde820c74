"""Whitening: a linear map after which the covariance of the fitted data is the identity."""

import numpy as np
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted, validate_data


class Whitening(TransformerMixin, BaseEstimator):
    """PCA or ZCA whitening with a cut in rank or a ridge.

    With covariance C = V diag(e) V^T (n - 1 in the denominator) and f = e + ridge * mean(e), PCA whitening is
    f^(-1/2) V^T and ZCA whitening V f^(-1/2) V^T (Kessy, Lewin and Strimmer, 2018). Without a ridge, directions that have
    no variance are left out, so the rank may be lower than asked for: see ``rank_``.

    Parameters
    ----------
    n_components
        Directions kept, largest variance first; None keeps all (without a ridge, all that have variance).
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

    def __init__(self, n_components: int | None = None, *, method: str = "pca", ridge: float = 0.0):
        self.n_components = n_components
        self.method = method
        self.ridge = ridge

    def fit(self, X: np.ndarray, y: object = None) -> "Whitening":
        """Fit on X (n_samples, n_features); covariance and eigenvalues are taken in float64."""
        if self.method not in ("pca", "zca"):
            raise ValueError(f"method={self.method!r} is not known: use 'pca' or 'zca'")
        if self.ridge < 0:
            raise ValueError(f"ridge={self.ridge!r} is negative: use 0 or more")
        if self.n_components is not None and self.n_components < 1:
            raise ValueError(f"n_components={self.n_components!r} is not allowed: use 1 or more, or None for all")
        X = validate_data(self, X, dtype=[np.float64, np.float32], ensure_min_samples=2)
        self.mean_ = X.mean(axis=0, dtype=np.float64)
        eigenvalues, vectors = np.linalg.eigh(covariance(X, self.mean_))
        eigenvalues, vectors = eigenvalues[::-1], vectors[:, ::-1]
        precision = 10 * X.shape[1] * np.finfo(np.float64).eps  # float32 rounding, squared, lies below this too
        self.rank_ = int(np.sum(eigenvalues > precision * max(eigenvalues[0], 0)))
        if self.rank_ == 0:
            raise ValueError(f"whitening needs variance, but all {len(X)} rows are identical")
        eigenvalues = eigenvalues.clip(min=0)
        if self.ridge > 0:
            self.rank_ = len(eigenvalues)
        if self.n_components is not None:
            self.rank_ = min(self.rank_, self.n_components)
        self.eigenvalues_ = eigenvalues[: self.rank_]
        self.directions_ = vectors[:, : self.rank_].T
        scale = np.sqrt(self.eigenvalues_ + self.ridge * eigenvalues.mean())[:, None]
        self.whitening_ = self.directions_ / scale
        self.dewhitening_ = (self.directions_ * scale).T
        if self.method == "zca":
            self.whitening_ = self.directions_.T @ self.whitening_
            self.dewhitening_ = self.dewhitening_ @ self.directions_
        return self

    def transform(self, X: np.ndarray) -> np.ndarray:
        """Whiten X (n_samples, n_features) to (n_samples, n_outputs), in the dtype of X."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        return (X - self.mean_.astype(X.dtype)) @ self.whitening_.T.astype(X.dtype)

    def inverse_transform(self, X: np.ndarray) -> np.ndarray:
        """Map whitened X back; exact where no direction was cut."""
        check_is_fitted(self)
        return X @ self.dewhitening_.T.astype(X.dtype) + self.mean_.astype(X.dtype)

    @property
    def _n_features_out(self) -> int:
        return self.whitening_.shape[0]


def covariance(X: np.ndarray, mean: np.ndarray, chunk_size: int = 16384) -> np.ndarray:
    """Covariance (n_features, n_features) in float64, n - 1 in the denominator, by chunks of rows."""
    total = np.zeros((X.shape[1], X.shape[1]))
    for start in range(0, len(X), chunk_size):
        centred = X[start : start + chunk_size] - mean
        total += centred.T @ centred
    return total / (len(X) - 1)
