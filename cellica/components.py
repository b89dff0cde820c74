"""What a component is associated with, its label, and what is removed. Effect sizes decide, never p-values."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.stats import kurtosis

from cellica.metrics import adjusted_eta2, group_means, label_codes

LABELS = ("batch", "biology", "mixed", "other")
MIXED = ("keep", "remove", "regress")


@dataclass(frozen=True)
class Rule:
    """When a component counts as batch or biology, and what happens to it.

    Attributes
    ----------
    batch_r2
        A component is a candidate for removal where batch explains more than this share of it among anchors.
    guard
        Remove a candidate only where batch explains more of it than perturbation does (the biology guard).
    perturbation_r2
        A component that is no candidate is biology where perturbation explains more than this share among treated wells.
    mixed
        Candidates that the guard stops are kept, removed whole ("remove"), or freed of what batch explains beyond
        perturbation ("regress").
    max_biology
        Of all that perturbation explains in the features, the share that may be removed with components. Those that would
        exceed it are kept. Without the guard there is no such limit.
    """

    batch_r2: float = 0.4
    guard: bool = True
    perturbation_r2: float = 0.25
    mixed: str = "keep"
    max_biology: float = 0.2


# ------------------------------------------------------------------------------------------------- associations


def associations(
    sources: np.ndarray,
    *,
    batch: np.ndarray,
    label: np.ndarray,
    strata: np.ndarray,
    anchors: np.ndarray,
    treated: np.ndarray,
) -> dict[str, np.ndarray]:
    """Shares of each component's variance that decide on it, as adjusted eta^2 (1 - (1 - eta^2)(n - 1)/(n - k)).

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


def nuisances(
    sources: np.ndarray,
    *,
    batch: np.ndarray,
    label: np.ndarray,
    strata: np.ndarray,
    anchors: np.ndarray,
    plate: np.ndarray,
    positions: Mapping[str, np.ndarray],
    covariates: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """What else goes with each component, for the reader: none of it decides.

    Parameters
    ----------
    positions
        Groups of wells by position (n,), such as row, column and edge.
    covariates
        Numbers measured of each well (n,): columns of the number of cells and of intensity.

    Returns
    -------
    dict of ndarray (k,)
        ``plate_r2``: adjusted eta^2 of plates within batches among anchors. ``row_r2`` and so on, of positions among all
        wells with a label, means of perturbations within strata removed. ``cell_count_r2``, ``intensity_r2``: squared
        correlation within strata, the largest over columns. NaN where nothing can be said: where plates are the
        batches, or each perturbation has one position.
    """
    within_label = cross(strata, label)
    labelled = np.array([name is not None for name in label], dtype=bool)
    found = {"plate_r2": adjusted_eta2(sources[anchors], plate[anchors], cross(within_label, batch)[anchors])}
    for name, group in positions.items():
        found[f"{name}_r2"] = adjusted_eta2(sources[labelled], group[labelled], within_label[labelled])
    for kind in ("cell_count", "intensity"):
        columns = [values for name, values in covariates.items() if name.startswith(kind)]
        if columns:
            found[f"{kind}_r2"] = np.max([_squared_correlation(sources, values, strata) for values in columns], axis=0)
    return found


def _squared_correlation(sources: np.ndarray, values: np.ndarray, strata: np.ndarray) -> np.ndarray:
    """Squared correlation (k,) within strata; 0 where the values do not vary."""
    known = np.isfinite(values)
    if known.sum() < 3:
        return np.full(sources.shape[1], np.nan)
    stratum = label_codes(strata[known])
    both = np.column_stack([sources[known], values[known]]).astype(np.float64)
    both -= group_means(both, stratum)[stratum]
    s, v = both[:, :-1], both[:, -1]
    total = np.square(s).sum(axis=0) * (v @ v)
    return np.divide(np.square(v @ s), total, out=np.zeros(s.shape[1]), where=total > 0)


def batch_q(
    sources: np.ndarray,
    *,
    batch: np.ndarray,
    cells: np.ndarray,
    n_permutations: int = 199,
    random_state: int = 0,
) -> np.ndarray:
    """Permutation p-value of the share that batch explains of each component, Benjamini-Hochberg over components.

    Parameters
    ----------
    sources
        (n, k), anchors.
    batch, cells
        (n,), batch of each anchor, and its stratum and perturbation: batches are permuted among anchors that share them.
    n_permutations
        The smallest p-value is 1 / (n_permutations + 1).

    Returns
    -------
    ndarray (k,)
        NaN where no anchor could be permuted. Reported only: with many wells every component is significant.
    """
    code, cell = label_codes(batch), label_codes(cells)
    residual = sources - group_means(sources, cell)[cell]
    counts = np.bincount(code)[:, None]
    if len(counts) < 2 or (np.bincount(cell)[cell] < 2).all():
        return np.full(sources.shape[1], np.nan)

    def between(codes: np.ndarray) -> np.ndarray:
        return (counts * np.square(group_means(residual, codes))).sum(axis=0)

    rng = np.random.default_rng(random_state)
    by_cell = np.argsort(cell, kind="stable")
    observed, exceeded, permuted = between(code), np.zeros(sources.shape[1]), np.empty_like(code)
    for _ in range(n_permutations):
        permuted[by_cell] = code[np.lexsort((rng.random(len(cell)), cell))]
        exceeded += between(permuted) >= observed * (1 - 1e-12)
    return adjust((1 + exceeded) / (1 + n_permutations))


def adjust(p: np.ndarray) -> np.ndarray:
    """Benjamini-Hochberg adjusted p-values.

    >>> adjust(np.array([0.01, 0.04, 0.03, 0.5])).round(3).tolist()
    [0.04, 0.053, 0.053, 0.5]
    """
    order = np.argsort(p)[::-1]
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum.accumulate(p[order] * len(p) / np.arange(len(p), 0, -1))
    return adjusted.clip(max=1)


def cross(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """One label for each combination of two (n,)."""
    return np.array([f"{x}\x1f{y}" for x, y in zip(a, b)], dtype=object)


# ------------------------------------------------------------------------------------------------------ removal


def classify(batch_r2: np.ndarray, perturbation_r2: np.ndarray, rule: Rule = Rule()) -> np.ndarray:
    """Label of each component, ndarray of str (k,).

    ``batch``: batch_r2 above the threshold and, with the guard, above perturbation_r2. ``mixed``: above the threshold, but
    the perturbation explains as much, or its share is unknown. ``biology``: below it, and perturbation_r2 above its own
    threshold. ``other``: the rest.

    >>> classify(np.array([0.9, 0.5, 0.1, 0.0]), np.array([0.2, 0.8, 0.7, 0.1])).tolist()
    ['batch', 'mixed', 'biology', 'other']
    """
    candidate = batch_r2 > rule.batch_r2  # NaN is no candidate
    batch = candidate & ((perturbation_r2 < batch_r2) | (not rule.guard))  # an unknown share does not pass the guard
    biology = ~candidate & (perturbation_r2 > rule.perturbation_r2)
    return np.select([batch, candidate, biology], ["batch", "mixed", "biology"], default="other").astype(object)


def removal_path(
    labels: np.ndarray, batch_r2: np.ndarray, perturbation_r2: np.ndarray, power: np.ndarray, rule: Rule = Rule()
) -> dict[str, np.ndarray]:
    """The order in which components would go, what each takes with it, and what is done with it. No score is looked at.

    Batch components come first, then mixed ones, then the others, each by falling share of batch.

    Parameters
    ----------
    labels, batch_r2, perturbation_r2
        (k,), of each component.
    power
        (k,), its variance in the features.

    Returns
    -------
    dict of ndarray (k,)
        ``component`` (number), ``label``, ``batch_r2``, ``perturbation_r2``, and of all components' variance, of what
        batch explains (among anchors) and of what perturbation explains, the shares of this and all components before it:
        ``variance_share``, ``batch_share``, ``biology_share``. ``action``: removed, regressed or kept.
    """
    rank = np.select([labels == "batch", labels == "mixed"], [0, 1], default=2)
    order = np.lexsort((-np.nan_to_num(batch_r2), rank))
    explained = {
        "variance_share": power,
        "batch_share": power * np.nan_to_num(batch_r2).clip(min=0),
        "biology_share": power * np.nan_to_num(perturbation_r2).clip(min=0),
    }
    total = {name: max(float(value.sum()), 1e-12) for name, value in explained.items()}
    shares = {name: value[order] / total[name] for name, value in explained.items()}
    action, biology = [], 0.0
    for i, label in enumerate(labels[order]):
        wanted = {"batch": "removed", "mixed": {"remove": "removed", "regress": "regressed"}.get(rule.mixed, "kept")}
        act = wanted.get(label, "kept")
        if act == "removed" and rule.guard and biology + shares["biology_share"][i] > rule.max_biology:
            act = "kept"
        biology += shares["biology_share"][i] if act == "removed" else 0.0
        action.append(act)
    return {
        "component": order,
        "label": labels[order],
        "batch_r2": batch_r2[order],
        "perturbation_r2": perturbation_r2[order],
        **{name: np.cumsum(value) for name, value in shares.items()},
        "action": np.array(action, dtype=object),
    }
