"""What a component is associated with, its label, and whether it is removed. Effect sizes decide, never p-values."""

from dataclasses import dataclass

import numpy as np
from scipy.stats import kurtosis

from cellica.metrics import adjusted_eta2

LABELS = ("batch", "biology", "mixed", "other")


@dataclass(frozen=True)
class Rule:
    """When a component counts as batch or biology.

    Attributes
    ----------
    batch_r2
        A component is a candidate for removal where batch explains more than this share of it among anchors.
    perturbation_r2
        A component that is no candidate is biology where perturbation explains more than this share among treated wells.
    guard
        Remove a candidate only where batch explains more of it than perturbation does (the biology guard).
    """

    batch_r2: float = 0.4
    guard: bool = True
    perturbation_r2: float = 0.25


def associations(
    sources: np.ndarray,
    *,
    batch: np.ndarray,
    label: np.ndarray,
    strata: np.ndarray,
    anchors: np.ndarray,
    treated: np.ndarray,
) -> dict[str, np.ndarray]:
    """Shares of each component's variance, as adjusted eta^2 (1 - (1 - eta^2)(n - 1)/(n - k)).

    Parameters
    ----------
    sources
        (n, k), a column a component; the means of strata are in it.
    batch, label, strata
        (n,), labels of the wells; missing ones are None.
    anchors, treated
        (n,), masks.

    Returns
    -------
    dict of ndarray (k,)
        ``batch_r2``: of batch among anchors, means of anchors within strata removed. ``strata_r2``: of strata.
        ``perturbation_r2``: of perturbation among treated wells, batch means removed; NaN where no perturbation has
        two wells. ``kurtosis``: excess kurtosis.
    """
    within_label, within_batch = cross(strata, label), cross(strata, batch)
    several = len(set(strata)) > 1
    return {
        "batch_r2": adjusted_eta2(sources[anchors], batch[anchors], within_label[anchors]),
        "strata_r2": adjusted_eta2(sources, strata) if several else np.zeros(sources.shape[1]),
        "perturbation_r2": adjusted_eta2(sources[treated], label[treated], within_batch[treated]),
        "kurtosis": kurtosis(sources, axis=0),
    }


def cross(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """One label for each combination of two (n,)."""
    return np.array([f"{x}\x1f{y}" for x, y in zip(a, b)], dtype=object)


def classify(batch_r2: np.ndarray, perturbation_r2: np.ndarray, rule: Rule = Rule()) -> tuple[np.ndarray, np.ndarray]:
    """Label of each component and whether it is removed.

    ``batch``: batch_r2 above the threshold and above perturbation_r2; removed. ``mixed``: above the threshold, but the
    perturbation explains as much, or its share is unknown; kept. ``biology`` and ``other``: the rest; kept.

    Returns
    -------
    labels : ndarray of str (k,)
    removed : ndarray of bool (k,)

    >>> classify(np.array([0.9, 0.5, 0.1, 0.0]), np.array([0.2, 0.8, 0.7, 0.1]))[0].tolist()
    ['batch', 'mixed', 'biology', 'other']
    """
    candidate = batch_r2 > rule.batch_r2  # NaN is no candidate
    removed = candidate & ((perturbation_r2 < batch_r2) | (not rule.guard))  # an unknown share does not pass the guard
    biology = ~candidate & (perturbation_r2 > rule.perturbation_r2)
    labels = np.select([removed, candidate, biology], ["batch", "mixed", "biology"], default="other")
    return labels.astype(object), removed
