"""Where among the cosines of all pairs of rows some of them lie: exact order statistics in one pass, in bounded memory.

Similarities are taken in float32, several at a time; the few that float32 cannot order are settled in float64.
"""

from collections.abc import Iterator
from typing import NamedTuple, cast

import numpy as np

NULL_SAMPLE = 2**15  # pairs that say about where in the null a rank lies
BEYOND = 2.0  # more than any cosine


class Extremes(NamedTuple):
    """Cosines of the pairs asked for, and the order statistics of the cosines of all pairs of rows."""

    similarity: np.ndarray
    ends: np.ndarray


def extremes(units: np.ndarray, pairs: np.ndarray, ranks: np.ndarray, *, chunk_size: int = 256) -> Extremes:
    """Cosines of some pairs of rows, and order statistics of the cosines of all of them.

    Parameters
    ----------
    units
        Rows of length 1, float64 (n x d), n at least 2.
    pairs
        Sorted codes i n + j of pairs of rows i < j.
    ranks
        Places, from 0, in the sorted cosines of the n (n - 1) / 2 pairs.
    chunk_size
        Rows at a time. Memory grows with chunk_size x n, and with a few hundredths of the pairs for each rank.

    Returns
    -------
    Similarities compare with the order statistics as those of float64 do; where they are far from all, they are float32's.

    Notes
    -----
    A sample of the pairs brackets each order statistic. What lies below its bracket is counted, what lies within is kept,
    so that one pass is enough; where the sample misled, or many cosines are equal, all are kept in a second one.
    """
    found = _one_pass(units, pairs, ranks, *_brackets(units, ranks, NULL_SAMPLE), chunk_size)
    everything = np.full(len(ranks), -BEYOND), np.full(len(ranks), BEYOND)
    return found or cast(Extremes, _one_pass(units, pairs, ranks, *everything, chunk_size))


def _brackets(units: np.ndarray, ranks: np.ndarray, n_sample: int) -> tuple[np.ndarray, np.ndarray]:
    """Values between which each order statistic lies, by 6 standard errors of a sample's quantile."""
    n = len(units)
    rng = np.random.default_rng(0)
    first, step = rng.integers(n, size=n_sample), rng.integers(1, n, size=n_sample)
    sample = np.sort(np.vecdot(units[first], units[(first + step) % n]))
    share, slack = ranks / (n * (n - 1) // 2), 3 / np.sqrt(n_sample)
    low, high = (sample[((n_sample - 1) * np.clip(share + side, 0, 1)).astype(int)] for side in (-slack, slack))
    return np.where(share <= slack, -BEYOND, low), np.where(share >= 1 - slack, BEYOND, high)


def _one_pass(
    units: np.ndarray, pairs: np.ndarray, ranks: np.ndarray, low: np.ndarray, high: np.ndarray, chunk_size: int
) -> Extremes | None:
    """Both in one pass over all pairs, or None where an order statistic is not within its bracket."""
    n = len(units)
    first, second = np.divmod(pairs, n)
    similarity, below = np.empty(len(pairs)), np.zeros(len(ranks), dtype=np.int64)
    near: list[list[np.ndarray]] = [[] for _ in ranks]
    codes: list[list[np.ndarray]] = [[] for _ in ranks]
    for start, block in _blocks(units.astype(np.float32), chunk_size):
        mine = slice(*np.searchsorted(first, [start, start + len(block)]))
        similarity[mine] = block[first[mine] - start, second[mine] - start]
        block[:, : len(block)][np.tri(len(block), dtype=bool)] = 2 * BEYOND  # itself and what came before
        values = block.ravel()
        for i in range(len(ranks)):
            within = values >= low[i]
            below[i] += len(values) - np.count_nonzero(within)
            within &= values <= high[i]
            at = np.flatnonzero(within)
            row, column = np.divmod(at, block.shape[1])
            near[i].append(values[at])
            codes[i].append((start + row) * n + start + column)
    error = (units.shape[1] + 4) * float(np.finfo(np.float32).eps)  # at most, of a float32 cosine
    ends = np.empty(len(ranks))
    for i, values in enumerate(map(np.concatenate, near)):
        end = _settled(units, values, np.concatenate(codes[i]), ranks[i] - below[i], error)
        if end is None or end - low[i] < 2 * error or high[i] - end < 2 * error:
            return None
        ends[i] = end
    unsettled = (np.abs(similarity[:, None] - ends) <= 2 * error).any(axis=1)
    similarity[unsettled] = _cosines(units, pairs[unsettled])
    return Extremes(similarity, ends)


def _settled(units: np.ndarray, values: np.ndarray, codes: np.ndarray, place: int, error: float) -> float | None:
    """Cosine at a place among float32 values of coded pairs, in float64; None where there is no such place.

    No order statistic of the values is further than ``error`` from that of the cosines.
    """
    if not 0 <= place < len(values):
        return None
    about = np.partition(values, place)[place]
    close = np.abs(values - about) <= 2 * error
    exact = np.sort(_cosines(units, codes[close]))
    return float(exact[place - np.count_nonzero((values < about) & ~close)])


def _cosines(units: np.ndarray, codes: np.ndarray) -> np.ndarray:
    first, second = np.divmod(codes, len(units))
    return np.vecdot(units[first], units[second])


def _blocks(units: np.ndarray, chunk_size: int) -> Iterator[tuple[int, np.ndarray]]:
    """First row of each chunk, and its similarities to itself and all later rows, in one buffer for all."""
    n = len(units)
    buffer = np.empty(min(chunk_size, n) * n, dtype=units.dtype)
    for start in range(0, n, chunk_size):
        rows = units[start : start + chunk_size]
        block = buffer[: len(rows) * (n - start)].reshape(len(rows), n - start)
        yield start, np.matmul(rows, units[start:].T, out=block)
