"""Scores on arrays: average precision, nearest neighbours, recall of known relationships, adjusted eta squared.

Rows that carry no direction (all-zero, constant or non-finite) are left out of every similarity, and ties favour
nobody: a score is the expected value over the orders of tied candidates.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import repeat
from typing import NamedTuple

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.special import digamma, gammaln
from threadpoolctl import ThreadpoolController

from cellica.extremes import extremes

TIE = 1e-7  # cosine similarities closer than this are tied
FEW = 12  # positives a query up to which counting beats sorting
THRESHOLDS = ((0.05, 0.95), (0.1, 0.9))
BOOTSTRAPS_AT_ONCE = 100
RANKS_AT_ONCE = 2**22
PAIRS_AT_ONCE = 2**22  # similarities that a thread holds
_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
N_THREADS = (
    min(_CORES, int(given)) if (given := os.environ.get("OMP_NUM_THREADS", "")).isdigit() and int(given) else _CORES
)


class Pairs(NamedTuple):
    """Which pairs of rows count: those with equal codes in all of ``same`` and unequal codes in all of ``diff``.

    Each array holds one integer code a row; a negative code means missing, and such a row pairs with none. A row is
    never paired with itself.
    """

    same: Sequence[np.ndarray] = ()
    diff: Sequence[np.ndarray] = ()

    def mask(self, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Pairs as a boolean array (rows x columns); both are indices of rows of the codes."""
        paired = np.not_equal.outer(rows.astype(np.int32), columns.astype(np.int32))
        for codes, compare in ((self.same, np.equal), (self.diff, np.not_equal)):
            for code in codes:
                mine, theirs = code[rows], code[columns]
                paired &= compare.outer(mine, theirs)
                if mine.min(initial=0) < 0 or theirs.min(initial=0) < 0:
                    paired &= (mine >= 0)[:, None] & (theirs >= 0)
        return paired

    def narrowed(self) -> "Pairs":
        """The same pairs, by codes of the smallest type that holds them: they compare several times as fast."""
        return Pairs(
            *([code.astype(np.min_scalar_type(-int(code.max(initial=0)) - 1)) for code in codes] for codes in self)
        )


class Counts(NamedTuple):
    """Positives of a few queries: query (sorted, from 0) and similarity of each, negatives above it and tied with it; and
    the number of negatives of each query."""

    row: np.ndarray
    score: np.ndarray
    above: np.ndarray
    tied: np.ndarray
    n_neg: np.ndarray


class AveragePrecision(NamedTuple):
    """One entry a query: average precision (NaN without a positive), numbers of positives and of negatives."""

    value: np.ndarray
    n_pos: np.ndarray
    n_neg: np.ndarray


# ---------------------------------------------------------------------------------------------- similarities


def usable_rows(embeddings: np.ndarray) -> np.ndarray:
    """Rows with a direction: finite, not all zero and, with several features, not constant.

    >>> usable_rows(np.array([[1.0, 2.0], [0.0, 0.0], [3.0, 3.0], [np.inf, 1.0]]))
    array([ True, False, False, False])
    """
    embeddings = np.asarray(embeddings)
    low, high = embeddings.min(axis=1), embeddings.max(axis=1)
    varied = low < high if embeddings.shape[1] > 1 else low != 0
    return np.isfinite(low) & np.isfinite(high) & varied


def unit_rows(embeddings: np.ndarray) -> np.ndarray:
    """Rows scaled to length 1 in float64; unusable rows become zeros."""
    units = np.where(usable_rows(embeddings)[:, None], embeddings, 0).astype(np.float64)
    for length in (lambda x: np.abs(x).max(axis=1), lambda x: np.linalg.norm(x, axis=1)):  # squares must not overflow
        units /= np.where((size := length(units)) > 0, size, 1)[:, None]
    return units


# ---------------------------------------------------------------------------------------------- average precision


def average_precision(
    embeddings: np.ndarray,
    positive: Pairs,
    negative: Pairs,
    *,
    queries: np.ndarray | None = None,
    candidates: np.ndarray | None = None,
    chunk_size: int | None = None,
    counter: Callable[..., tuple[Callable[[np.ndarray], Counts], int]] | None = None,
) -> AveragePrecision:
    """Average precision of each query's ranking of candidates by cosine similarity, expected over tie orders.

    Parameters
    ----------
    embeddings
        Rows by features. Unusable rows (see `usable_rows`) are neither queries nor candidates.
    positive, negative
        Which pairs are positives and negatives.
    queries, candidates
        Indices of rows, by default all.
    chunk_size
        Queries that a thread ranks at a time, by default at most 256 and fewer where candidates are many: memory grows
        with chunk_size x candidates, never with candidates squared.
    counter
        What counts instead of these threads, such as `ranks.counter` on a GPU: a function of unit rows, ``positive``,
        ``negative`` and candidates.

    Returns
    -------
    One entry a query, in the order of ``queries``. Without negatives every order is right and the value is 1, which is
    also its chance level.

    Notes
    -----
    A positive with A candidates above it, R of them positive, within a tie of g candidates, r of them positive (itself
    counted), contributes in expectation (McSherry & Najork, ECIR 2008)
    [(R + 1) D + (r - 1) / (g - 1) (g - (A + 1) D)] / g with D = sum over i = 1..g of 1 / (A + i).
    Where positives are few, negatives are counted by float32 similarities, and those that float32 cannot order are settled
    in float64; where positives or ties are many, float64 similarities are sorted.
    """
    usable = usable_rows(embeddings)
    units = unit_rows(embeddings)
    queries = np.arange(len(units)) if queries is None else np.asarray(queries)
    candidates = np.arange(len(units)) if candidates is None else np.asarray(candidates)
    candidates = candidates[usable[candidates]]
    count, most = (counter or _counter)(units, positive, negative, candidates)
    value = np.full(len(queries), np.nan)
    n_pos, n_neg = np.zeros(len(queries), dtype=np.int64), np.zeros(len(queries), dtype=np.int64)
    asked = np.flatnonzero(usable[queries]) if len(candidates) else np.zeros(0, dtype=np.int64)

    def rank(part: np.ndarray) -> None:
        row, score, above, tied, n_neg[part] = count(queries[part])
        n_pos[part] = np.bincount(row, minlength=len(part))
        better, equal = _rank_among_positives(row, score)
        gain = _expected_gain(above + better, better, tied + equal, equal)
        with np.errstate(invalid="ignore"):
            value[part] = np.bincount(row, weights=gain, minlength=len(part)) / n_pos[part]

    parts = np.split(asked, range(size := chunk_size or most, len(asked), size)) if len(asked) else []
    with _blas().limit(limits=1, user_api="blas"), ThreadPoolExecutor(1 if counter else N_THREADS) as threads:
        list(threads.map(rank, parts))  # numpy's loops use one thread each
    return AveragePrecision(value, n_pos, n_neg)


def cluster_interval(
    values: np.ndarray, units: np.ndarray, *, level: float = 0.95, n_bootstraps: int = 2000, random_state: int = 0
) -> tuple[float, float]:
    """Bootstrap interval of the mean of values (n,), whole units (n,) drawn with all of their values.

    Values of one unit (the wells of a compound) are not independent, so wells are never drawn (Davison and Hinkley,
    1997, 2.4). NaN where there are fewer than 2 units.

    >>> low, high = cluster_interval(np.array([0.0, 0.0, 1.0, 1.0]), np.array(["a", "a", "b", "b"]))
    >>> low, high
    (0.0, 1.0)
    """
    code = np.unique(units, return_inverse=True)[1].ravel()
    sums, counts = np.bincount(code, weights=values), np.bincount(code)
    if len(counts) < 2:
        return float("nan"), float("nan")
    rng = np.random.default_rng(random_state)
    even = np.full(len(counts), 1 / len(counts))
    means = []
    for start in range(0, n_bootstraps, BOOTSTRAPS_AT_ONCE):
        drawn = rng.multinomial(len(counts), even, size=min(BOOTSTRAPS_AT_ONCE, n_bootstraps - start))
        means.append((drawn @ sums) / (drawn @ counts))
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def chance_average_precision(n_pos: np.ndarray, n_neg: np.ndarray) -> np.ndarray:
    """Mean average precision over all rankings of ``n_pos`` positives and ``n_neg`` negatives; NaN without a positive.

    With n = n_pos + n_neg and the harmonic number H: [H(n) + (n_pos - 1) (n - H(n)) / (n - 1)] / n. It exceeds the share
    of positives, by most where they are few.

    >>> chance_average_precision(1, 1), chance_average_precision(2, 1)  # (1 + 1/2) / 2, (1 + 5/6 + 7/12) / 3
    (array(0.75), array(0.8055...))
    """
    n_pos, n = np.asarray(n_pos, dtype=float), np.asarray(n_pos, dtype=float) + np.asarray(n_neg, dtype=float)
    harmonic = digamma(n + 1) - digamma(1.0)
    chance = (harmonic + (n_pos - 1) * (n - harmonic) / np.maximum(n - 1, 1)) / np.maximum(n, 1)
    return np.where(n_pos > 0, chance, np.nan)


def random_average_precision(n_pos: int, n_neg: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """Average precision (size,) of random rankings of ``n_pos`` positives and ``n_neg`` negatives."""
    n = n_pos + n_neg
    found = np.empty(size)
    step = max(1, RANKS_AT_ONCE // n)
    for start in range(0, size, step):
        drawn = rng.random((min(step, size - start), n))
        ranks = np.sort(np.argpartition(drawn, n_pos - 1, axis=1)[:, :n_pos], axis=1) + 1 if n_pos < n else None
        if ranks is None:
            found[start : start + step] = 1.0
        else:
            found[start : start + step] = (np.arange(1, n_pos + 1) / ranks).mean(axis=1)
    return found


def mean_average_precision_p(
    value: np.ndarray,
    n_pos: np.ndarray,
    n_neg: np.ndarray,
    group: np.ndarray,
    *,
    null_size: int = 10_000,
    random_state: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Mean average precision of groups of queries, and its p-value against random rankings.

    Parameters
    ----------
    value, n_pos, n_neg
        (n,), of each query: average precision, numbers of positives and of negatives, each at least 1.
    group
        (n,), codes 0 ... g - 1.

    Returns
    -------
    Mean and p (g,), p = (1 + #{null >= mean}) / (1 + null_size), at least 1 / (1 + null_size).

    Notes
    -----
    A draw of the null is the mean over the group of the draws of its queries' numbers; queries with the same numbers
    share their draws, as in copairs (Kalinin et al., 2025): the wells of a perturbation rank nearly the same candidates,
    so their scores are not independent.
    """
    counts = np.bincount(group)
    mean = np.bincount(group, weights=value) / counts
    kinds, kind = np.unique(np.column_stack([n_pos, n_neg]), axis=0, return_inverse=True)
    rng = np.random.default_rng(random_state)
    null = np.stack([random_average_precision(int(pos), int(neg), null_size, rng) for pos, neg in kinds])
    share = coo_array((1 / counts[group], (group, kind.ravel())), shape=(len(counts), len(kinds))).tocsr()
    p = np.array([(1 + np.sum((share[[i]] @ null)[0] >= mean[i] - TIE)) / (1 + null_size) for i in range(len(counts))])
    return mean, p


def least_p(n_pos: np.ndarray, n_neg: np.ndarray, group: np.ndarray, null_size: int) -> np.ndarray:
    """Smallest p-value (g,) that groups of queries can reach by `mean_average_precision_p`, in expectation.

    It is that of perfect rankings: the product over the kinds of queries in a group of 1 / (n_pos + n_neg choose n_pos), and at
    least 1 / (1 + null_size).

    >>> least_p(np.array([1, 1]), np.array([4, 4]), np.array([0, 0]), 1000)
    array([0.2])
    """
    kinds, kind = np.unique(np.column_stack([n_pos, n_neg]), axis=0, return_inverse=True)
    log = -(gammaln(kinds.sum(axis=1) + 1) - gammaln(kinds[:, 0] + 1) - gammaln(kinds[:, 1] + 1))
    pairs = np.unique(np.column_stack([group, kind.ravel()]), axis=0)
    perfect = np.exp(np.bincount(pairs[:, 0], weights=log[pairs[:, 1]]))
    return np.maximum(perfect, 1 / (1 + null_size))


@cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController()


def _counter(
    units: np.ndarray, positive: Pairs, negative: Pairs, candidates: np.ndarray
) -> tuple[Callable[[np.ndarray], Counts], int]:
    targets = units if np.array_equal(candidates, np.arange(len(units))) else units[candidates]
    targets32 = targets.astype(np.float32)
    positive, negative = positive.narrowed(), negative.narrowed()

    def count(rows: np.ndarray) -> Counts:
        pos, neg = positive.mask(rows, candidates), negative.mask(rows, candidates)
        near, near32 = targets, targets32
        used = np.flatnonzero(pos.any(axis=0) | neg.any(axis=0))
        if len(used) < len(candidates) // 2:  # as where negatives are the controls of a batch
            pos, neg, near, near32 = pos[:, used], neg[:, used], targets[used], targets32[used]
        row, column = np.divmod(np.flatnonzero(pos), max(1, len(near)))
        score = _dots(units[rows], row, near, column)
        ranks = _count_negatives(units[rows], near, near32, neg, row, score)
        above, tied = ranks or _sort_negatives(units[rows], near, neg, row, score)
        return Counts(row, score, above, tied, neg.sum(axis=1, dtype=np.int32))

    return count, max(1, min(256, PAIRS_AT_ONCE // max(1, len(candidates))))


def _dots(a: np.ndarray, rows: np.ndarray, b: np.ndarray, columns: np.ndarray, size: int = 8192) -> np.ndarray:
    parts = [slice(start, start + size) for start in range(0, len(rows), size)]
    return np.concatenate([np.zeros(0), *(np.vecdot(a[rows[part]], b[columns[part]]) for part in parts)])


def _count_negatives(
    queries: np.ndarray, targets: np.ndarray, targets32: np.ndarray, neg: np.ndarray, row: np.ndarray, score: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """Negatives above each positive and tied with it, or None where sorting in float64 is cheaper."""
    place = np.arange(len(row)) - np.searchsorted(row, row)  # of a positive among those of its query
    if place.max(initial=0) >= FEW:
        return None
    similarity = queries.astype(np.float32) @ targets32.T
    larger = np.zeros((len(queries), -(-len(targets) // 8) * 8), dtype=bool)  # whole words, to count eight at a time
    margin = TIE + np.finfo(np.float32).eps * np.sqrt(queries.shape[1])
    high, low = (score + margin).astype(np.float32), (score - margin).astype(np.float32)
    above, reach, tied = (np.zeros(len(row), dtype=np.int64) for _ in range(3))
    for k in range(place.max(initial=-1) + 1):
        at = np.flatnonzero(place == k)
        mine = slice(None) if len(at) == len(similarity) else row[at]
        lines, allowed, found = similarity[mine], neg[mine], larger[: len(at)]
        for count, threshold in ((above, high), (reach, low)):
            np.greater(lines, threshold[at, None], out=found[:, : len(targets)])
            found[:, : len(targets)] &= allowed
            count[at] = np.bitwise_count(found.view(np.uint64)).sum(axis=1, dtype=np.int32)
    if (reach - above).sum() > similarity.size // 64:
        return None
    unsure = np.flatnonzero(reach > above)
    for part in np.split(unsure, range(len(queries), len(unsure), len(queries))):
        lines = similarity[row[part]]
        near = (lines > low[part, None]) & (lines <= high[part, None]) & neg[row[part]]
        which, column = np.divmod(np.flatnonzero(near), len(targets))
        gap = np.vecdot(targets[column], queries[row[part[which]]]) - score[part[which]]
        above[part] += np.bincount(which[gap > TIE], minlength=len(part))
        tied[part] = np.bincount(which[np.abs(gap) <= TIE], minlength=len(part))
    return above, tied


def _sort_negatives(
    queries: np.ndarray, targets: np.ndarray, neg: np.ndarray, row: np.ndarray, score: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Negatives above each positive and tied with it."""
    similarity = np.sort(np.where(neg, queries @ targets.T, -2), axis=1)
    keys = (similarity + 4.0 * np.arange(len(queries))[:, None]).ravel()  # rows cannot overlap
    above = neg.shape[1] * (row + 1) - np.searchsorted(keys, score + TIE + 4.0 * row, side="right")
    reach = neg.shape[1] * (row + 1) - np.searchsorted(keys, score - TIE + 4.0 * row, side="left")
    return above, reach - above


def _rank_among_positives(row: np.ndarray, score: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positives of the same query above each positive, and tied with it (itself counted)."""
    key = score + 4.0 * row
    ordered = np.sort(key)
    last = np.searchsorted(row, row, side="right")
    reach = np.searchsorted(ordered, key + TIE, side="right")
    return last - reach, reach - np.searchsorted(ordered, key - TIE, side="left")


def _expected_gain(above: np.ndarray, better: np.ndarray, tied: np.ndarray, equal: np.ndarray) -> np.ndarray:
    spread = digamma(above + tied + 1.0) - digamma(above + 1.0)
    among = (equal - 1) / np.maximum(tied - 1, 1) * (tied - (above + 1) * spread)
    return ((better + 1) * spread + among) / tied


# ---------------------------------------------------------------------------------------------- nearest neighbour


def nearest_neighbor(
    embeddings: np.ndarray, positive: Pairs, negative: Pairs, *, chunk_size: int = 256
) -> tuple[np.ndarray, np.ndarray]:
    """Whether the nearest candidate of each row by cosine is a positive, and the chance of that.

    Returns
    -------
    Share of positives among the nearest candidates (0 or 1 unless several are tied), and share of positives among all
    candidates; both (rows,), NaN where a row has no positive or is unusable.
    """
    usable, units = usable_rows(embeddings), unit_rows(embeddings)
    value, chance = np.full(len(units), np.nan), np.full(len(units), np.nan)
    columns = np.flatnonzero(usable)
    for start in range(0, len(columns), chunk_size):
        rows = columns[start : start + chunk_size]
        pos = positive.mask(rows, columns)
        paired = pos | negative.mask(rows, columns)
        similarity = np.where(paired, units[rows] @ units[columns].T, -2)
        nearest = paired & (similarity >= similarity.max(axis=1, keepdims=True) - TIE)
        some = pos.any(axis=1)
        value[rows[some]] = (pos & nearest)[some].sum(axis=1) / nearest[some].sum(axis=1)
        chance[rows[some]] = pos[some].sum(axis=1) / paired[some].sum(axis=1)
    return value, chance


# ---------------------------------------------------------------------------------------------- known relationships


class Recall(NamedTuple):
    """Recall of annotated pairs: at each pair of thresholds, the pairs on the map and all pairs of the map.

    ``pairs`` (pairs x 2 rows, the lesser first) are the annotated pairs on the map, ``recalled`` (pairs x thresholds) says
    which of them were.
    """

    value: np.ndarray
    n_pairs: int
    null_size: int
    pairs: np.ndarray
    recalled: np.ndarray


def relationship_recall(
    profiles: np.ndarray,
    names: Sequence[str],
    pairs: np.ndarray,
    *,
    thresholds: Sequence[tuple[float, float]] = THRESHOLDS,
    chunk_size: int = 256,
) -> Recall:
    """Share of known relationships among the most similar and most opposed pairs of a map. Higher is better.

    Parameters
    ----------
    profiles
        One usable row a perturbation.
    names
        Name of each row, all different.
    pairs
        Annotated relationships (pairs x 2 names). Those with a member that is not on the map are left out, as are self
        pairs; A-B and B-A count once.
    thresholds
        Lower and upper rank (0 <= lower < upper <= 1); a pair is recalled at or beyond either. Chance is lower + 1 - upper.
    chunk_size
        Rows whose cosines are taken at a time. Memory grows with chunk_size x rows, never with rows squared.

    Returns
    -------
    Recall at each pair of thresholds; NaN where no annotated pair is on the map.

    Notes
    -----
    The null is the cosine of all pairs of the map (Celik et al., PLoS Comput Biol 2024). Only its order statistics at
    the thresholds matter; these are exact.
    """
    return relationship_recalls(profiles, names, [pairs], thresholds=thresholds, chunk_size=chunk_size)[0]


def relationship_recalls(
    profiles: np.ndarray,
    names: Sequence[str],
    sources: Sequence[np.ndarray],
    *,
    thresholds: Sequence[tuple[float, float]] = THRESHOLDS,
    chunk_size: int = 256,
) -> list[Recall]:
    """`relationship_recall` of several sources of annotated pairs, against one pass over the null."""
    place, n = {name: i for i, name in enumerate(names)}, len(names)
    asked = [_pairs_on_map(pairs, place) for pairs in sources]
    every, at = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *asked]), return_inverse=True)
    n_null = n * (n - 1) // 2
    recalled = np.zeros((len(every), len(thresholds)), dtype=bool)
    if len(every):
        ranks = np.array([rank for low, high in thresholds for rank in _end_ranks(low, high, n_null)])
        similarity, ends = extremes(unit_rows(profiles), every, ranks, chunk_size=chunk_size)
        recalled = (similarity[:, None] < ends[::2]) | (similarity[:, None] > ends[1::2])
    found = []
    for code, mine in zip(asked, np.split(at, np.cumsum([len(code) for code in asked])[:-1])):
        value = recalled[mine].mean(axis=0) if len(mine) else np.full(len(thresholds), np.nan)
        found.append(Recall(value, len(mine), n_null, np.column_stack(np.divmod(code, max(n, 1))), recalled[mine]))
    return found


def _pairs_on_map(pairs: np.ndarray, place: Mapping[str, int]) -> np.ndarray:
    """Annotated pairs on the map as sorted codes, first row x number of rows + second."""
    pairs = np.asarray(pairs, dtype=object).reshape(-1, 2)
    a, b = (np.fromiter(map(place.get, column, repeat(-1)), np.int64, len(pairs)) for column in pairs.T)
    kept = (a >= 0) & (b >= 0) & (a != b)
    codes = np.sort(np.minimum(a, b)[kept] * len(place) + np.maximum(a, b)[kept])  # several times faster than np.unique
    return codes[np.diff(codes, prepend=-1) > 0]


def _end_ranks(low: float, high: float, n: int) -> tuple[int, int]:
    """Places (from 0) in the sorted null of the first value beyond the low end, and of the last before the high end."""
    k, j = (int(share * n) + np.arange(-2, 3) for share in (low, high))
    return int(k[k / n <= low].max()), int(j[j / n >= high].min()) - 1


# ---------------------------------------------------------------------------------------------- variance shares


def adjusted_eta2(values: np.ndarray, groups: np.ndarray, strata: np.ndarray | None = None) -> np.ndarray:
    """Share of each column's variance that lies between groups, corrected for the number of groups.

    1 - (1 - eta^2)(n - 1) / (n - k), n rows in k groups: 0 in expectation for noise, and negative about half the time.
    With strata, eta^2 is that of residuals from stratum means, and both numbers are the degrees of freedom that are
    left: n less the strata, and that less what groups add to strata. What strata explain counts nowhere. A group has one
    effect, shared by the strata in which it occurs.

    Parameters
    ----------
    values
        Rows by columns, finite.
    groups, strata
        One label a row. Rows where either is missing (None, NaN) are left out.

    Returns
    -------
    One share a column, float64. NaN where nothing can be said: groups add nothing to strata (a single group), nothing is
    left within groups (a single row in each), or the column has no variance.

    >>> adjusted_eta2(np.array([[1.0, 0.0], [1.0, 1.0], [3.0, 0.0], [3.0, 1.0]]), np.array(["a", "a", "b", "b"]))
    array([ 1. , -0.5])
    """
    group = label_codes(groups)
    stratum = np.zeros(len(group), dtype=np.int64) if strata is None else label_codes(strata)
    known = (group >= 0) & (stratum >= 0)
    values = np.asarray(values, dtype=np.float64)[known]
    group, stratum = (np.unique(code[known], return_inverse=True)[1] for code in (group, stratum))
    n_groups, n_strata = group.max(initial=-1) + 1, stratum.max(initial=-1) + 1
    share = np.full(values.shape[1], np.nan)
    left = len(values) - n_strata
    added = n_groups - _n_connected(stratum, group, n_strata, n_groups)
    if not added or left <= added:
        return share
    residual = values - group_means(values, stratum)[stratum]
    total = np.square(residual).sum(axis=0)
    within = np.square(residual - group_means(residual, group)[group]).sum(axis=0)
    varied = total > len(values) * np.square(1e-12 * np.abs(values).max(axis=0))
    share[varied] = 1 - within[varied] / total[varied] * left / (left - added)
    return share


def _n_connected(stratum: np.ndarray, group: np.ndarray, n_strata: int, n_groups: int) -> int:
    """Sets of strata that share no group: groups nested in strata add one degree of freedom less in each of them."""
    n = n_strata + n_groups
    edges = coo_array((np.ones(len(group)), (stratum, group + n_strata)), shape=(n, n))
    return connected_components(edges, directed=False)[0]


def label_codes(labels: np.ndarray) -> np.ndarray:
    """Labels as integers from 0 in order of their names, missing ones (None, NaN) as -1.

    >>> label_codes(np.array(["b", None, "a", "b"], dtype=object))
    array([ 1, -1,  0,  1])
    """
    labels = np.asarray(labels)
    missing = np.array([label is None or label != label for label in labels.tolist()], dtype=bool)
    codes = np.full(len(labels), -1, dtype=np.int64)
    codes[~missing] = np.unique(labels[~missing].astype(str), return_inverse=True)[1]
    return codes


def group_means(values: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Mean row of each group (groups x columns), for codes 0, 1, ... that all occur."""
    order = np.argsort(codes, kind="stable")
    starts = np.searchsorted(codes[order], np.arange(codes.max(initial=-1) + 1))
    sums = np.add.reduceat(np.asarray(values, dtype=np.float64)[order], starts, axis=0)
    return sums / np.bincount(codes)[:, None]
