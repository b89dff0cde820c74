"""How far an ICA is the same over seeds, bootstraps and left-out batches: sources and unmixing rows, beside chance."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.stats import ortho_group

from cellica import ica
from cellica.bases import Basis, ica_basis
from cellica.whitening import Whitening

N_SEEDS, N_BOOTSTRAPS, N_FOLDS = 2, 2, 3
MAX_WELLS = 10_000  # of a refit without some batches


@dataclass
class Stability:
    """What refits say of each component, and the refits over seeds themselves.

    Attributes
    ----------
    columns
        ndarray (k,) by name. ``stability``, ``stability_batches``, ``stability_bootstrap``: |correlation| of the component's
        source with that of the refits matched to it one to one, mean over other seeds, over refits that leave out a
        third of the batches each, and over bootstraps of the wells. ``stability_rows``: |cosine| of the unmixing rows so
        matched, mean over all refits (a stable dictionary does not imply stable codes). ``stability_chance``,
        ``stability_rows_chance``: the same for wells shuffled, and for a random rotation of the same whitened wells.
    seeds
        Refits that differ by the seed alone.
    """

    columns: dict[str, np.ndarray]
    seeds: list[Basis]


def stability(residuals: np.ndarray, basis: Basis, batch: np.ndarray, random_state: int = 0) -> Stability:
    """Refit independent components to residuals (n, d) and match them with those of ``basis``.

    Seven refits: 2 other seeds and 2 bootstraps (``ica.stability``) on all wells, and 3 folds of batches on at most 10,000
    wells each. Where there are many features, they search in the leading principal directions, twice as many as components
    (bootstraps: in the space of the components).
    """
    k = len(basis.unmixing)
    sources = residuals @ basis.unmixing.T
    space = _principal_space(residuals, 2 * k)
    reduced = residuals if space is None else residuals @ space.T

    def refit(rows: np.ndarray | slice, seed: int) -> Basis:
        found = ica_basis(reduced[rows], k, seed)
        if space is None:
            return found
        return dataclasses.replace(found, unmixing=found.unmixing @ space, mixing=space.T @ found.mixing)

    seeds = [refit(slice(None), random_state + 1 + i) for i in range(N_SEEDS)]
    folds = [refit(rows, random_state + 1 + i) for i, rows in enumerate(_without_batches(batch, random_state))]
    columns, cosines = {}, []
    for name, refits in (("stability", seeds), ("stability_batches", folds)):
        found = [matched(sources, residuals @ one.unmixing.T, basis.unmixing, one.unmixing) for one in refits]
        columns[name] = np.mean([correlation for correlation, _ in found], axis=0) if found else np.full(k, np.nan)
        cosines += [cosine for _, cosine in found]
    drawn = ica.stability(
        basis.model, residuals.astype(np.float32), n_runs=N_BOOTSTRAPS, kind="bootstrap", random_state=random_state + 1
    )
    columns["stability_bootstrap"] = drawn.correlation
    columns["stability_rows"] = np.mean([*cosines, *(N_BOOTSTRAPS * [drawn.cosine])], axis=0)
    shuffled = np.random.default_rng(random_state).permutation(len(residuals))
    rotation = ortho_group.rvs(k, random_state=random_state) if k > 1 else np.eye(1)
    rotated = rotation @ basis.unmixing
    columns["stability_chance"] = matched(sources, sources[shuffled], basis.unmixing, basis.unmixing)[0]
    columns["stability_rows_chance"] = matched(sources, residuals @ rotated.T, basis.unmixing, rotated)[1]
    return Stability(columns, seeds)


def matched(a: np.ndarray, b: np.ndarray, rows_a: np.ndarray, rows_b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """|correlation| of each source of a (n, k) with the one of b (n, m) matched to it, and |cosine| of their rows.

    Matched one to one so that the sum of |correlation| is largest (Hungarian); 0 where m < k leaves none.
    """
    correlation = np.abs(_unit(a - a.mean(axis=0)).T @ _unit(b - b.mean(axis=0)))
    cosine = np.abs(_unit(rows_a.T).T @ _unit(rows_b.T))
    mine, theirs = linear_sum_assignment(-correlation)
    found = np.zeros((2, a.shape[1]))
    found[:, mine] = correlation[mine, theirs], cosine[mine, theirs]
    return found[0].clip(max=1), found[1].clip(max=1)


def _unit(columns: np.ndarray) -> np.ndarray:
    length = np.linalg.norm(columns, axis=0)
    return columns / np.where(length > 0, length, 1)


def _principal_space(residuals: np.ndarray, k: int) -> np.ndarray | None:
    """Leading k principal directions (k, d), or None where there are not many more features than that."""
    return Whitening(k).fit(residuals).directions_ if residuals.shape[1] > 2 * k and len(residuals) > k else None


def _without_batches(batch: np.ndarray, random_state: int) -> Iterator[np.ndarray]:
    """Rows left where each fold of the batches is left out in turn."""
    rng = np.random.default_rng(random_state)
    names, code = np.unique(batch.astype(str), return_inverse=True)
    n_folds = min(N_FOLDS, len(names))
    fold = rng.permutation(np.arange(len(names)) % n_folds)[code]
    for i in range(n_folds if n_folds > 1 else 0):
        rows = np.flatnonzero(fold != i)
        if len(rows) > 2:
            yield rng.choice(rows, MAX_WELLS, replace=False) if len(rows) > MAX_WELLS else rows
