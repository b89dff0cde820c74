"""Scores of maps on arrays: intervals over genes, clusters, replicates' agreement, distance from controls, gene-compound ranks.

A map holds one row a perturbation. Rows are usable (`metrics.usable_rows`) and cosines are of rows as they are: what
they are centred on is the caller's choice.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array
from scipy.stats import ks_2samp

from cellica.metrics import BOOTSTRAPS_AT_ONCE, group_means, unit_rows

SMOOTHING = 1e-4  # length of a self pair in the public energy distance, whose norm is smoothed
FEW_WELLS = 48  # up to which gathering the distances of a draw beats multiplying by all
DRAWS_AT_ONCE = 2**22
ROWS_AT_ONCE = 256


# ---------------------------------------------------------------------------------------------- annotated pairs


def pair_interval(
    pairs: np.ndarray, recalled: np.ndarray, *, level: float = 0.95, n_bootstraps: int = 1000, random_state: int = 0
) -> tuple[np.ndarray, np.ndarray, int]:
    """Bootstrap interval over genes of the share of pairs that are recalled.

    Parameters
    ----------
    pairs
        Rows of the members of each pair (pairs x 2).
    recalled
        Whether each is recalled (pairs x thresholds). The thresholds stay those of the whole map.

    Returns
    -------
    Lower and upper end for each threshold (NaN with fewer than 3 genes), and the number of genes in the pairs.

    Notes
    -----
    Genes are drawn with all of their pairs: with multinomial counts w a pair of a and b weighs w_a w_b (a vertex bootstrap of the
    network; Snijders and Borgatti, Connections 1999). Pairs that share a gene are not independent.
    """
    genes, code = np.unique(pairs, return_inverse=True)
    first, second = code.reshape(-1, 2).T
    n = len(genes)
    if n < 3:
        return np.full(recalled.shape[1], np.nan), np.full(recalled.shape[1], np.nan), n
    networks = [
        csr_array((hit, (first, second)), shape=(n, n)) for hit in [np.ones(len(pairs)), *recalled.T.astype(float)]
    ]
    rng = np.random.default_rng(random_state)
    shares = []
    for start in range(0, n_bootstraps, BOOTSTRAPS_AT_ONCE):
        size = min(BOOTSTRAPS_AT_ONCE, n_bootstraps - start)
        drawn = rng.multinomial(n, np.full(n, 1 / n), size=size).T.astype(float)
        total, *hits = (np.einsum("gb,gb->b", drawn, network @ drawn) for network in networks)
        shares.append(np.array(hits)[:, total > 0] / total[total > 0])
    low, high = np.quantile(np.hstack(shares), [(1 - level) / 2, (1 + level) / 2], axis=1)
    return low, high, n


# ---------------------------------------------------------------------------------------------- clusters


class Clusters(NamedTuple):
    """One entry a cluster: mean cosine within it and to all other rows, Kolmogorov-Smirnov statistic and its p-value."""

    within: np.ndarray
    between: np.ndarray
    statistic: np.ndarray
    p: np.ndarray


def cluster_test(profiles: np.ndarray, clusters: Sequence[np.ndarray]) -> Clusters:
    """Are cosines within clusters of a map distributed otherwise than from them to all other rows?

    Parameters
    ----------
    profiles
        Rows of the map (n x d).
    clusters
        Indices of each cluster's rows: at least 2, and not all.

    Notes
    -----
    Two-sided two-sample Kolmogorov-Smirnov test, as in Celik et al. (PLoS Comput Biol 2024). Cosines that share a row are not
    independent, so p is too small: compare with permuted names.
    """
    units = unit_rows(profiles)
    rows = []
    for members in clusters:
        within = (units[members] @ units[members].T)[np.triu_indices(len(members), k=1)]
        between = (units[members] @ np.delete(units, members, axis=0).T).ravel()
        test = ks_2samp(within, between)
        rows.append((within.mean(), between.mean(), test.statistic, test.pvalue))
    return Clusters(*np.array(rows, dtype=float).reshape(-1, 4).T)


# ---------------------------------------------------------------------------------------------- replicates


def mean_cosine(profiles: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Mean cosine between the rows of each group, for codes 0, 1, ... that all occur; NaN for a single row.

    With unit rows u and their sum s the mean over pairs is (|s|^2 - n) / (n (n - 1)): no pair is ever formed. 1 where
    replicates point the same way, 0 on average where they point anywhere.

    >>> mean_cosine(np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), np.array([0, 0, 0]))
    array([0.333...])
    """
    n = np.bincount(codes)
    sums = group_means(unit_rows(profiles), codes) * n[:, None]
    return _from_sums(sums, n)


def _from_sums(sums: np.ndarray, n: np.ndarray | int) -> np.ndarray:
    n = np.asarray(n, dtype=float)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(n > 1, (np.einsum("nd,nd->n", sums, sums) - n) / (n * (n - 1)), np.nan)


def drawn_mean_cosine(
    units: np.ndarray, pools: Sequence[np.ndarray], counts: Sequence[int], size: int, rng: np.random.Generator
) -> np.ndarray:
    """Mean cosine (size,) among rows drawn from pools of rows, so many from each, none twice.

    A null for replicates that lie so many in each batch: pools are the controls of these batches. Each pool holds at
    least as many rows as are drawn, in all at least 2.
    """
    n = int(sum(counts))
    found = []
    for start in range(0, size, step := max(1, DRAWS_AT_ONCE // max(1, *map(len, pools)))):
        draws = min(step, size - start)
        drawn = [pool[subsets(len(pool), count, draws, rng)] for pool, count in zip(pools, counts)]
        row = np.hstack(drawn).ravel()
        chosen = csr_array((np.ones(len(row)), row, np.arange(0, len(row) + 1, n)), shape=(draws, len(units)))
        found.append(_from_sums(chosen @ units, n))
    return np.concatenate(found)


def subsets(n: int, k: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """Random subsets (size x k) of 0 ... n - 1."""
    if k >= n:
        return np.tile(np.arange(n), (size, 1))
    return np.argpartition(rng.random((size, n), dtype=np.float32), k, axis=1)[:, :k]


# ---------------------------------------------------------------------------------------------- distance from controls


class EnergyDistance(NamedTuple):
    """One entry a group: V-statistic, U-statistic, and the p-value of the latter by permuted labels."""

    biased: np.ndarray
    unbiased: np.ndarray
    p: np.ndarray


def energy_distance(
    profiles: np.ndarray,
    groups: Sequence[np.ndarray],
    controls: np.ndarray,
    *,
    n_permutations: int = 1000,
    random_state: int = 0,
) -> EnergyDistance:
    """Energy distance of groups of rows to controls: 2 E|x-y| - E|x-x'| - E|y-y'|. Higher is further; chance is 0 (unbiased).

    Parameters
    ----------
    profiles
        Rows (n x d), finite.
    groups
        Indices of the rows of each group, at least 2.
    controls
        Indices of controls, at least 2.
    n_permutations
        Divisions of a group's and the controls' rows, drawn anew, behind a p-value, (1 + #{permuted >= value}) / (1 + n_permutations);
        0 for none (NaN).

    Notes
    -----
    The V-statistic counts self pairs, and grows as n shrinks; with the norm sqrt(|x - y|^2 + 1e-8) it is the value of Celik
    et al. (PLoS Comput Biol 2024). The U-statistic leaves self pairs out: its mean is 0 where nothing differs (Szekely and
    Rizzo, J Stat Plan Inference 2013). Groups of one size share the divisions that are drawn.
    """
    of_controls = _distances(profiles[controls], profiles[controls], same=True)
    m = len(controls)
    found = np.full((3, len(groups)), np.nan)
    sizes = np.array([len(rows) for rows in groups])
    for n in np.unique(sizes):
        pooled = np.empty((m + n, m + n))  # distances of controls, then of a group
        pooled[:m, :m] = of_controls
        draws = subsets(m + n, int(n), n_permutations, np.random.default_rng([random_state, int(n)]))
        for i in np.flatnonzero(sizes == n).tolist():
            x = profiles[groups[i]]
            pooled[m:, m:] = _distances(x, x, same=True)
            pooled[:m, m:] = _distances(profiles[controls], x)
            pooled[m:, :m] = pooled[:m, m:].T
            biased, unbiased = _energies(pooled, np.arange(m, m + n)[None])
            found[:2, i] = biased[0], unbiased[0]
            if n_permutations:
                null = _energies(pooled, draws)[1]
                found[2, i] = (1 + np.count_nonzero(null >= unbiased[0] - 1e-12)) / (1 + n_permutations)
    return EnergyDistance(*found)


def _energies(distances: np.ndarray, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """V- and U-statistic of each drawn set of rows (draws x n) against the rest of a matrix of distances."""
    n, m = draws.shape[1], len(distances) - draws.shape[1]
    from_row = distances.sum(axis=1)
    inside = _sums_within(distances, draws)
    across = from_row[draws].sum(axis=1) - inside
    outside = from_row.sum() - 2 * across - inside
    biased = 2 * across / (n * m) - inside / n**2 - outside / m**2
    unbiased = (
        2 * across / (n * m) - (inside - SMOOTHING * n) / (n * (n - 1)) - (outside - SMOOTHING * m) / (m * (m - 1))
    )
    return biased, unbiased


def _sums_within(distances: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Sum of the distances between the rows of each draw."""
    found = []
    n = draws.shape[1]
    if n <= FEW_WELLS:
        for start in range(0, len(draws), step := max(1, DRAWS_AT_ONCE // n**2)):
            some = draws[start : start + step]
            found.append(distances[some[:, :, None], some[:, None, :]].sum(axis=(1, 2)))
        return np.concatenate(found)
    chosen = np.zeros((len(draws), len(distances)))
    np.put_along_axis(chosen, draws, 1.0, axis=1)
    return np.einsum("bn,bn->b", chosen @ distances, chosen)


def _distances(x: np.ndarray, y: np.ndarray, same: bool = False) -> np.ndarray:
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    squared = np.square(x).sum(axis=1)[:, None] + np.square(y).sum(axis=1) - 2 * (x @ y.T)
    if same:
        np.fill_diagonal(squared, 0)
    return np.sqrt(np.maximum(squared, 0) + SMOOTHING**2)


# ---------------------------------------------------------------------------------------------- compounds and genes


def ranking_scores(positives: np.ndarray, negatives: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Average precision and AUROC of positives (p,) among each of several sets of negatives (sets x q). Higher is better.

    As scikit-learn's: average precision is the mean over positives of the precision among all that score as high or
    higher, and in the AUROC ties count half. By chance .5 for AUROC, `metrics.chance_average_precision` for the other.
    """
    at_least = (negatives[:, None, :] >= positives[:, None]).sum(axis=2)
    above = (negatives[:, None, :] > positives[:, None]).sum(axis=2)
    hits = (positives >= positives[:, None]).sum(axis=1)
    return (hits / (hits + at_least)).mean(axis=1), 1 - (above + at_least).mean(axis=1) / 2 / negatives.shape[1]


def quantile_interval(
    values: np.ndarray, share: float, *, level: float = 0.95, n_bootstraps: int = 2000, random_state: int = 0
) -> tuple[float, float, int]:
    """Bootstrap interval of a quantile of values (n,), each a unit of its own, and n; NaN with fewer than 2."""
    n = len(values)
    if n < 2:
        return float("nan"), float("nan"), n
    drawn = np.random.default_rng(random_state).integers(n, size=(n_bootstraps, n))
    low, high = np.quantile(np.quantile(values[drawn], share, axis=1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high), n


# ---------------------------------------------------------------------------------------------- chromosome arms


def without_arm_means(
    profiles: np.ndarray, arms: np.ndarray, basis: np.ndarray | None = None, *, min_genes: int = 5
) -> tuple[np.ndarray, np.ndarray]:
    """Profiles less the mean profile of their chromosome arm, and which were changed.

    Parameters
    ----------
    profiles
        Rows of genes (n x d).
    arms
        Code of each gene's arm, negative where unknown.
    basis
        Genes (n,) whose mean is taken, such as those that are not expressed: all without it.
    min_genes
        Fewest genes of the basis on an arm; rows on arms with fewer stay as they are.

    Notes
    -----
    Nuclease cuts can lose the rest of a chromosome arm, so that genes look like their neighbours (Lazar et al., Nature
    Genetics 2024). What the basis of an arm shares is taken for that.
    """
    basis = (arms >= 0) & (np.ones(len(arms), dtype=bool) if basis is None else basis)
    changed = np.zeros(len(arms), dtype=bool)
    corrected = np.array(profiles, dtype=np.float64)
    for arm in np.unique(arms[basis]):
        of_arm = arms == arm
        if np.count_nonzero(of_arm & basis) >= min_genes:
            corrected[of_arm] -= corrected[of_arm & basis].mean(axis=0)
            changed |= of_arm
    return corrected, changed


def group_auroc(profiles: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Chance (n,) that a row is more similar to one of its group than to one of another; .5 without any likeness.

    Ties count half. Rows with a negative code are left out; NaN for them, and where there is no other row of the group or
    none of another.
    """
    known = np.flatnonzero(codes >= 0)
    units, group = unit_rows(profiles[known]), codes[known]
    value = np.full(len(codes), np.nan)
    for start in range(0, len(known), ROWS_AT_ONCE):
        for i, similarity in enumerate(units[start : start + ROWS_AT_ONCE] @ units.T, start):
            same = group == group[i]
            outside = np.sort(similarity[~same])
            same[i] = False
            inside = similarity[same]
            if len(inside) and len(outside):
                below = np.searchsorted(outside, inside, side="left") + np.searchsorted(outside, inside, side="right")
                value[known[i]] = below.mean() / 2 / len(outside)
    return value
