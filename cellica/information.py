"""Mutual information of a factor with a latent, by counts or by nearest neighbours, and what prepares columns for it."""

import numpy as np
from scipy.special import digamma
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_random_state

N_NEIGHBORS = 10  # of the same code
JITTER = 1e-10  # of a standard deviation, so that equal values have distances


def mutual_information(column: np.ndarray, code: np.ndarray, n_neighbors: int = N_NEIGHBORS) -> float:
    """I(column; code) in nats of a continuous column (n,) and codes 0, 1, ..., by nearest neighbours (Ross, 2014); 0 at least.

    psi(n) + mean psi(k) - mean psi(n_c) - mean psi(m), over the rows whose code occurs twice or more: n_c of the code, k =
    min(n_neighbors, n_c - 1), m the rows of any code that are nearer than the k-th neighbour of the same code, the row itself
    counted. In one dimension neighbours are runs of the sorted values, so sorting replaces a tree.

    >>> x = np.random.default_rng(0).normal(size=1000)
    >>> bool(abs(mutual_information(x, (x > 0).astype(int)) - np.log(2)) < 0.02)
    True
    """
    counts = np.bincount(code)
    if (counts == 1).any():
        kept = counts[code] > 1
        column, code = column[kept], code[kept]
        counts = np.bincount(code)
    if len(code) == 0:
        return 0.0
    order = np.argsort(column, kind="stable")
    within = order[np.argsort(code[order], kind="stable")]  # by code, then by value
    k = np.minimum(n_neighbors, counts - 1)[code[within]]
    radius = np.nextafter(_neighbor_distance(column[within], code[within], k), 0)
    m = _rows_within(column[order], column[within], radius)
    mean = np.mean(digamma(k)) - np.mean(digamma(counts[code])) - np.mean(digamma(m))
    return max(0.0, float(digamma(len(code)) + mean))


def counted_information(a: np.ndarray, b: np.ndarray) -> float:
    """Mutual information in nats of two columns of codes 0, 1, ..."""
    shape = (a.max() + 1, b.max() + 1)
    joint = np.bincount(a * shape[1] + b, minlength=shape[0] * shape[1]).reshape(shape) / len(a)
    apart = np.outer(joint.sum(axis=1), joint.sum(axis=0))
    seen = joint > 0
    return max(0.0, float(np.sum(joint[seen] * np.log(joint[seen] / apart[seen]))))


def coded(columns: np.ndarray) -> np.ndarray:
    """Each column (n,) as codes 0, 1, ... of its values in order."""
    return np.stack([np.unique(column, return_inverse=True)[1].ravel() for column in columns.T], axis=1)


def binned(latents: np.ndarray, n_bins: int) -> np.ndarray:
    """Codes of bins of equal width between the extremes of each column."""
    low, width = latents.min(axis=0), np.ptp(latents, axis=0)
    return np.minimum(n_bins * ((latents - low) / np.where(width > 0, width, 1)), n_bins - 1).astype(np.int64)


def jittered(latents: np.ndarray, random_state: int) -> np.ndarray:
    """Standardised latents, each with the same tiny noise."""
    standard = StandardScaler().fit_transform(latents).astype(np.float64)
    spread = standard.std(axis=0)
    standard = standard / np.where(spread > 0, spread, 1)
    noise = check_random_state(random_state).standard_normal(size=(len(latents), 1))
    return standard + JITTER * np.maximum(1, np.abs(standard).mean(axis=0)) * noise


def _neighbor_distance(values: np.ndarray, code: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Distance of each value to its k-th nearest of the same code; values ascend within each code."""
    nearest = np.full(len(values), np.inf)
    place = np.arange(len(values))
    for below in range(int(k.max()) + 1):
        first, last = place - below, place + k - below
        held = (first >= 0) & (last < len(values)) & (last >= place)
        first, last, here = first[held], last[held], place[held]
        held = (code[first] == code[here]) & (code[last] == code[here])
        first, last, here = first[held], last[held], here[held]
        reach = np.maximum(values[here] - values[first], values[last] - values[here])
        nearest[here] = np.minimum(nearest[here], reach)
    return nearest


def _rows_within(ascending: np.ndarray, values: np.ndarray, radius: np.ndarray) -> np.ndarray:
    """Number of ascending values within the radius of each value, bounds included."""
    low = np.searchsorted(ascending, values - radius, side="left")
    high = np.searchsorted(ascending, values + radius, side="right")
    padded = np.concatenate([[-np.inf], ascending, [np.inf]])
    while (step := values - padded[low] <= radius).any():  # sums round: the differences decide
        low -= step
    while (step := values - padded[low + 1] > radius).any():
        low += step
    while (step := padded[high + 1] - values <= radius).any():
        high += step
    while (step := padded[high] - values > radius).any():
        high -= step
    return high - low
