"""How sure a share of variance is: adjusted eta squared over batches drawn again."""

from collections.abc import Sequence

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.stats import t

from cellica.metrics import group_means

LEAST_BATCHES = 3  # fewest from which a spread over batches can be told


def batch_share_intervals(
    values: np.ndarray,
    group: np.ndarray,
    stratum: np.ndarray,
    shares: Sequence[float],
    *,
    n_bootstraps: int = 100,
    level: float = 0.95,
    random_state: int = 0,
) -> list[tuple[float, float]]:
    """Intervals of the plain and the variance-weighted mean over columns of ``metrics.adjusted_eta2``, over groups.

    Parameters
    ----------
    values
        Rows by columns, finite.
    group, stratum
        (rows,), codes 0, 1, ... that all occur.
    shares
        The two means.

    Returns
    -------
    Lower and upper end of each; NaN for fewer than three groups, or where nothing can be said.

    Notes
    -----
    Groups are drawn with replacement, a group drawn twice counts as two. With s the share and e the standard deviation of
    log(1 - s) over the draws, times sqrt(g / (g - 1)), the ends are 1 - (1 - s) exp(+-q e), q the quantile of Student's t with
    g - 1 degrees of freedom: a share of few groups is skewed, and at most 1. Draws are taken from the sums of the rows of
    each group and stratum.
    """
    n_groups = group.max(initial=-1) + 1
    draws = np.full((n_bootstraps, 2), np.nan)
    if n_groups >= LEAST_BATCHES:
        sums = _Sums(np.asarray(values, dtype=np.float64), group, stratum)
        drawn = np.random.default_rng(random_state).multinomial(n_groups, np.full(n_groups, 1 / n_groups), n_bootstraps)
        kinds, kind = np.unique(drawn, axis=0, return_inverse=True)
        draws = np.array([sums.shares(times) for times in kinds])[kind.ravel()]
    ends = []
    for share, found in zip(shares, draws.T):
        found = found[found < 1]
        if len(found) < n_bootstraps / 2 or not share < 1:
            ends.append((np.nan, np.nan))
            continue
        spread = np.log1p(-found).std(ddof=1) * np.sqrt(n_groups / (n_groups - 1))
        reach = np.exp(t.ppf((1 + level) / 2, n_groups - 1) * spread)
        ends.append((float(1 - (1 - share) * reach), float(1 - (1 - share) / reach)))
    return ends


class _Sums:
    """Numbers, sums and squares of the rows of each group and stratum: all that shares of groups drawn again need."""

    def __init__(self, values: np.ndarray, group: np.ndarray, stratum: np.ndarray) -> None:
        pairs, pair = np.unique(np.column_stack([group, stratum]), axis=0, return_inverse=True)
        self.group, self.stratum = pairs.T
        self.n = np.bincount(pair.ravel()).astype(np.float64)
        centred = values - values.mean(axis=0)
        self.sums = group_means(centred, pair.ravel()) * self.n[:, None]
        self.n_of_group = np.bincount(group).astype(np.float64)
        self.squares = group_means(centred**2, group) * self.n_of_group[:, None]
        ones, rows = np.ones(len(pairs)), np.arange(len(pairs))
        self.to_stratum = coo_array((ones, (self.stratum, rows))).tocsr()
        self.to_group = coo_array((ones, (self.group, rows))).tocsr()

    def shares(self, times: np.ndarray) -> tuple[float, float]:
        """Mean shares, plain and weighted, where each group occurs so many times (g,)."""
        weight = times[self.group].astype(np.float64)
        n = self.to_stratum @ (weight * self.n)
        means = (self.to_stratum @ (weight[:, None] * self.sums)) / np.maximum(n, 1)[:, None]
        rest = self.to_group @ (self.sums - self.n[:, None] * means[self.stratum])
        total = times @ self.squares - n @ means**2
        between = (times / self.n_of_group) @ rest**2
        left = n.sum() - np.count_nonzero(n)
        added = times.sum() - self._n_connected(weight > 0)
        varied = total > 1e-9 * (times @ self.squares)
        if added <= 0 or left <= added or not varied.any():
            return np.nan, np.nan
        share = 1 - (1 - between[varied] / total[varied]) * left / (left - added)
        return float(share.mean()), float(np.average(share, weights=total[varied]))

    def _n_connected(self, drawn: np.ndarray) -> int:
        strata, stratum = np.unique(self.stratum[drawn], return_inverse=True)
        groups, group = np.unique(self.group[drawn], return_inverse=True)
        n = len(strata) + len(groups)
        graph = coo_array((np.ones(len(group)), (stratum, group + len(strata))), shape=(n, n))
        return int(connected_components(graph, directed=False)[0])
