"""Linear probes and neighbours on arrays: logistic regressions by the hundred, discriminants, votes of neighbours.

A probe asks whether something can be read from a representation in batches that it has not seen. All its scores are
higher where more can be read.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from sklearn.covariance import ledoit_wolf_shrinkage

from cellica.metrics import TIE, group_means, unit_rows

CS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # inverse strengths of the penalty to choose from
DEFAULT_C = 1e-2  # where there is nothing to choose by
ROUGH, EXACT = 1e-2, 1e-5  # relative errors of weights, to choose a C by and to report
INNER_FOLDS = 3
TOP_SHARE = 0.25
TIE_ORDERS = 200  # random orders of neighbours that are tied for the last place
ROWS_AT_ONCE, SCORES_AT_ONCE = 1024, 2**24
MARGINS_AT_ONCE = 2**22
BLOCK = 64
REFRESH = 8  # steps between two looks at the curvature
LARGEST = 80.0  # larger exponents overflow float32


# ---------------------------------------------------------------------------------------------- logistic regression


class Problems(NamedTuple):
    """Two-class problems that share their negative rows.

    ``shared`` (n x d) holds rows that are negative in every problem, unless ``kept`` (n x P, 0 or 1) leaves one out of some.
    ``own`` (m x d) holds the rows of single problems, one problem after the other: those of problem p, at least one, are
    ``own[starts[p] : starts[p + 1]]``. ``sign`` (m,) is 1 for a positive and -1 for a negative.
    """

    shared: np.ndarray
    own: np.ndarray
    sign: np.ndarray
    starts: np.ndarray
    kept: np.ndarray | None = None


def logistic_regressions(
    problems: Problems,
    C: float | np.ndarray,
    *,
    start: np.ndarray | None = None,
    tol: float = EXACT,
    max_iter: int = 2000,
) -> np.ndarray:
    """Logistic regressions with an L2 penalty, all problems at once.

    Each minimises C sum log(1 + exp(-y (x w + b))) + |w|^2 / 2 with b free, as
    ``sklearn.linear_model.LogisticRegression(C=C)`` does.

    Parameters
    ----------
    problems
        P problems over d features. Fastest where features are uncorrelated, as after a rotation to principal axes, which
        changes nothing else.
    C
        Inverse strength of the penalty, one for all or one a problem.
    start
        Where to start (P x d + 1), by default from zero.
    tol
        A problem is solved where the gradient of the above is shorter than tol |w|, which bounds the relative error of w.
    max_iter
        Most steps.

    Returns
    -------
    Weights and, last, the intercept (P x d + 1), of the type of ``problems.shared``.

    Notes
    -----
    Conjugate gradients (Polak and Ribiere), preconditioned by the diagonal of the Hessian. The problems share the two
    products with ``shared`` that a step takes.
    """
    task = problems._replace(shared=_with_ones(problems.shared), own=_with_ones(problems.own))
    n_problems, n_columns = len(task.starts) - 1, task.shared.shape[1]
    if start is None:
        found = np.zeros((n_columns, n_problems), dtype=task.shared.dtype)
        positive, negative = (_totals(task, (task.sign == one).astype(float)) for one in (1, -1))
        negative = negative + (len(task.shared) if task.kept is None else task.kept.sum(axis=0))
        found[-1] = np.log(np.maximum(positive, 0.5) / np.maximum(negative, 0.5))
    else:
        found = start.T.copy()
    penalty = np.broadcast_to(1 / np.asarray(C, dtype=task.shared.dtype), found.shape).copy()
    penalty[-1] = 0
    left = np.arange(n_problems)
    for _ in range(-(-max_iter // REFRESH)):
        solved = np.zeros(len(found.T), dtype=bool)
        for part in np.array_split(left, 1 + len(left) * len(task.shared) // MARGINS_AT_ONCE):
            found[:, part], solved[part] = _descend(_take(task, part), found[:, part], penalty[:, part], tol)
        left = left[~solved[left]]
        if not len(left):
            break
    return found.T


def _with_ones(x: np.ndarray) -> np.ndarray:
    return np.hstack([x, np.ones((len(x), 1), dtype=x.dtype)])


def _take(task: Problems, chosen: np.ndarray) -> Problems:
    """Some of the problems, in order."""
    sizes = np.diff(task.starts)
    if len(chosen) == len(sizes):
        return task
    rows = np.isin(np.repeat(np.arange(len(sizes)), sizes), chosen)
    kept = None if task.kept is None else task.kept[:, chosen]
    return Problems(task.shared, task.own[rows], task.sign[rows], np.append(0, np.cumsum(sizes[chosen])), kept)


def _descend(task: Problems, w: np.ndarray, penalty: np.ndarray, tol: float) -> tuple[np.ndarray, np.ndarray]:
    """A few steps of conjugate gradients from weights (d + 1 x P), and which problems are solved by them."""
    margin, own = task.shared @ w, _products(task, w)
    wrong, wrong_own = _wrong(task, margin, own)
    direction = before = scaled = np.zeros_like(w)
    for i in range(REFRESH + 1):
        gradient = task.shared.T @ wrong - _sums(task, task.own, task.sign * wrong_own) + penalty * w
        solved = np.linalg.norm(gradient, axis=0) <= tol * np.linalg.norm(w[:-1], axis=0) * penalty[0]
        if i == REFRESH or solved.all():
            break
        if i == 0:
            diagonal = np.square(task.shared).T @ (wrong * (1 - wrong)) + penalty
            diagonal += _sums(task, np.square(task.own), wrong_own * (1 - wrong_own))
            turn = np.zeros_like(w[0])
        else:
            turn = ((gradient - before) * gradient / diagonal).sum(axis=0) / _positive((before * scaled).sum(axis=0))
        before, scaled = gradient, gradient / diagonal
        direction = np.maximum(turn, 0) * direction - scaled
        slope = (gradient * direction).sum(axis=0)
        direction = np.where(slope < 0, direction, -scaled)
        slope = (gradient * direction).sum(axis=0)

        along, along_own = task.shared @ direction, _products(task, direction)
        curvature = np.einsum("np,np,np->p", along, along, wrong * (1 - wrong)) + (penalty * direction**2).sum(axis=0)
        curvature += _totals(task, along_own**2 * wrong_own * (1 - wrong_own))
        step = -slope / _positive(curvature)
        for _ in range(8):  # shorter where the loss has begun to rise again
            wrong, wrong_own = _wrong(
                task, margin + step * along, own + np.repeat(step, np.diff(task.starts)) * along_own
            )
            tilt = np.einsum("np,np->p", along, wrong) - _totals(task, task.sign * along_own * wrong_own)
            tilt += (penalty * direction * (w + step * direction)).sum(axis=0)
            steep = tilt > -slope / 2
            if not steep.any():
                break
            step = step * np.divide(slope, slope - tilt, out=np.ones_like(slope), where=steep)
        w = w + step * direction
        margin, own = margin + step * along, own + np.repeat(step, np.diff(task.starts)) * along_own
    return w, solved


def _wrong(task: Problems, margin: np.ndarray, own: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Probability that each row is not what it is: of the shared rows (n x P), and of the own ones (m,)."""
    shared = 1 / (1 + np.exp(np.minimum(-margin, LARGEST)))
    if task.kept is not None:
        shared *= task.kept
    return shared, 1 / (1 + np.exp(np.minimum(task.sign * own, LARGEST)))


def _products(task: Problems, w: np.ndarray) -> np.ndarray:
    """Own rows times the weights of their problem (m,)."""
    return np.concatenate([task.own[a:b] @ w[:, p] for p, (a, b) in enumerate(_spans(task))])


def _sums(task: Problems, rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Weighted sums of the own rows of each problem (d + 1 x P)."""
    return np.stack([weight[a:b] @ rows[a:b] for a, b in _spans(task)], axis=1)


def _totals(task: Problems, values: np.ndarray) -> np.ndarray:
    return np.add.reduceat(values, task.starts[:-1])


def _spans(task: Problems) -> list[tuple[int, int]]:
    starts = task.starts.tolist()
    return list(pairwise(starts))


def _positive(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, np.finfo(x.dtype).tiny)


# ---------------------------------------------------------------------------------------------- probes of batches left out


class HeldOut(NamedTuple):
    """One entry a perturbation and held-out batch: their codes, AUROC, numbers of wells, and of the probe its C, the Hoyer
    sparsity and top share of its weights, and those of a probe of permuted labels.
    """

    label: np.ndarray
    batch: np.ndarray
    auroc: np.ndarray
    n_perturbed: np.ndarray
    n_controls: np.ndarray
    C: np.ndarray
    hoyer: np.ndarray
    top_share: np.ndarray
    permuted_hoyer: np.ndarray
    permuted_top_share: np.ndarray


def held_out_probes(
    x: np.ndarray,
    label: np.ndarray,
    batch: np.ndarray,
    group: np.ndarray,
    held: int,
    *,
    Cs: Sequence[float] = CS,
    random_state: int = 0,
) -> HeldOut:
    """Probes of each perturbation against controls, trained on all groups of batches but one and scored on its batches.

    Parameters
    ----------
    x
        Wells by features (n x d), finite. Standardised by the training wells.
    label
        (n,), the perturbation of each well, 0, 1, ..., or -1 for a control.
    batch, group
        (n,), the batch of each well, and the group of its batch.
    held
        The group that is left out.
    Cs
        Inverse strengths of the L2 penalty, rising. Chosen for each perturbation by the mean AUROC over the batches of
        three parts of the training groups, each left out in turn; `DEFAULT_C` where that cannot be done.
    random_state
        Seed of the parts, and of the labels that are permuted within batches.

    Returns
    -------
    Entries for the perturbations and held-out batches that have a perturbed well and a control, and whose perturbation
    has a training well: in order of the batch, then of the perturbation.
    """
    rng = np.random.default_rng(random_state)
    training = group != held
    z, axes = _rotated(x, training)
    C = _chosen_C(z, label, batch, group, training, Cs, rng)
    problems, names = _problems(z, label, training)
    if not len(names):
        return HeldOut(*(np.zeros(0, dtype=kind) for kind in (int, int, float, int, int, *[float] * 5)))
    weights = logistic_regressions(problems, C[names])
    found = _aurocs(z, label, batch, ~training, weights, names)
    permuted = logistic_regressions(_permuted(z, label, batch, training, names, rng), C[names])
    shape = [measure(w[:, :-1] @ axes.T) for w in (weights, permuted) for measure in (hoyer_sparsity, top_share)]
    place = np.searchsorted(names, found.label)
    return HeldOut(*found, C[found.label], *(values[place] for values in shape))


def batch_groups(
    batch: np.ndarray, stratum: np.ndarray, *, most: int = 12, n_groups: int = 10, random_state: int = 0
) -> np.ndarray:
    """Group of each row's batch, for leaving out one at a time: its own where there are at most ``most`` batches.

    More are dealt at random to ``n_groups`` groups, those of each stratum as evenly as can be. ``batch`` and ``stratum`` are
    codes from 0.

    >>> batch_groups(np.array([0, 0, 1, 2]), np.array([0, 0, 0, 0]))
    array([0, 0, 1, 2])
    """
    n_batches = batch.max(initial=-1) + 1
    if n_batches <= most:
        return batch
    lowest = np.full(n_batches, stratum.max(initial=0))
    np.minimum.at(lowest, batch, stratum)
    dealt = np.lexsort([np.random.default_rng(random_state).permutation(n_batches), lowest])
    group = np.empty(n_batches, dtype=np.int64)
    group[dealt] = np.arange(n_batches) % n_groups
    return group[batch]


class _Areas(NamedTuple):
    label: np.ndarray
    batch: np.ndarray
    auroc: np.ndarray
    n_perturbed: np.ndarray
    n_controls: np.ndarray


def share_below(scores: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Share of the other scores (m x n, or n) that lie below each score (m,), equal ones counted by half.

    Its mean over positives, the others being negatives, is the AUROC: higher is better, chance is 0.5.

    >>> share_below(np.array([0.8, 0.3]), np.array([0.1, 0.3]))
    array([1.  , 0.75])
    """
    below = np.count_nonzero(others < scores[:, None], axis=1) + np.count_nonzero(others <= scores[:, None], axis=1)
    return below / 2 / others.shape[-1]


def hoyer_sparsity(weights: np.ndarray) -> np.ndarray:
    """Sparsity of each row of weights (P x d): (sqrt(d) - |w|_1 / |w|_2) / (sqrt(d) - 1), 1 for one weight, 0 for equal ones.

    NaN for a row of zeros, or of one weight (Hoyer, JMLR 2004).

    >>> hoyer_sparsity(np.array([[0.0, 2.0, 0.0, 0.0], [1.0, -1.0, 1.0, 1.0]]))
    array([1., 0.])
    """
    root, length = np.sqrt(weights.shape[1]), np.linalg.norm(weights, axis=1)
    known = (length > 0) & (root > 1)
    ratio = np.abs(weights).sum(axis=1)[known] / length[known]
    sparsity = np.full(len(weights), np.nan)
    sparsity[known] = (root - ratio) / (root - 1)
    return sparsity


def top_share(weights: np.ndarray, share: float = TOP_SHARE) -> np.ndarray:
    """Share of the sum of squared weights (P x d) that the largest ``share`` of them hold, NaN for a row of zeros.

    For standardised features: of the variance of the probe's terms. Equal weights hold ``share`` there.

    >>> top_share(np.array([[3.0, 1.0, 1.0, 1.0]]))
    array([0.75])
    """
    squares = np.sort(np.square(weights), axis=1)[:, ::-1]
    total = squares.sum(axis=1)
    top = squares[:, : int(np.ceil(share * weights.shape[1]))].sum(axis=1)
    return np.divide(top, total, out=np.full(len(weights), np.nan), where=total > 0)


def _rotated(x: np.ndarray, training: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows standardised by the training rows and rotated to their principal axes, and the axes (d x r)."""
    x = np.asarray(x, dtype=np.float64)
    mean, scale = x[training].mean(axis=0), x[training].std(axis=0)
    z = (x - mean) / np.where(scale > 1e-9 * np.abs(mean), scale, np.inf)
    axes = _axes(z[training])
    return z @ axes, axes


def _axes(z: np.ndarray) -> np.ndarray:
    """Principal axes (d x r) of rows: all d, or those that fewer rows span, in which all that is fitted to them lies."""
    if len(z) >= z.shape[1]:
        return np.linalg.eigh(z.T @ z)[1]
    squares, sides = np.linalg.eigh(z @ z.T)
    kept = squares > 1e-10 * max(squares[-1], 1e-300)
    return z.T @ (sides[:, kept] / np.sqrt(squares[kept]))


def _problems(z: np.ndarray, label: np.ndarray, rows: np.ndarray) -> tuple[Problems, np.ndarray]:
    """Each perturbation of the rows against their controls, and the codes of these perturbations; none without controls."""
    control = rows & (label < 0)
    own = np.flatnonzero(rows & (label >= 0)) if control.any() else np.zeros(0, dtype=np.int64)
    own = own[np.argsort(label[own], kind="stable")]
    names, counts = np.unique(label[own], return_counts=True)
    return Problems(z[control], z[own], np.ones(len(own), dtype=z.dtype), np.append(0, np.cumsum(counts))), names


def _permuted(
    z: np.ndarray, label: np.ndarray, batch: np.ndarray, rows: np.ndarray, names: np.ndarray, rng: np.random.Generator
) -> Problems:
    """As `_problems`, with the labels of the wells of each batch permuted in each problem."""
    at = np.flatnonzero(rows & (label < 0))
    controls = {b: np.flatnonzero(batch[at] == b) for b in np.unique(batch[rows])}
    kept = np.ones((len(at), len(names)), dtype=z.dtype)
    own, sign = [], []
    for p, name in enumerate(names):
        mine = np.flatnonzero(rows & (label == name))
        positive = np.ones(len(mine), dtype=z.dtype)
        for b in np.unique(batch[mine]):
            here = np.flatnonzero(batch[mine] == b)
            drawn = rng.permutation(len(here) + len(controls[b]))[: len(here)]
            swapped = controls[b][drawn[drawn >= len(here)] - len(here)]
            kept[swapped, p] = 0
            positive[np.delete(here, drawn[drawn < len(here)])] = -1
            own.append(at[swapped])
            sign.append(np.ones(len(swapped), dtype=z.dtype))
        own.append(mine)
        sign.append(positive)
    sizes = kept.shape[0] - kept.sum(axis=0) + np.array([np.count_nonzero(rows & (label == name)) for name in names])
    starts = np.append(0, np.cumsum(sizes)).astype(np.int64)
    return Problems(z[at], z[np.concatenate(own)], np.concatenate(sign), starts, kept)


def _aurocs(
    z: np.ndarray, label: np.ndarray, batch: np.ndarray, rows: np.ndarray, weights: np.ndarray, names: np.ndarray
) -> _Areas:
    """AUROC of each perturbation in each batch of the rows that has it and controls."""
    found = []
    for b in np.unique(batch[rows]):
        here = rows & (batch == b)
        controls = z[here & (label < 0)] @ weights[:, :-1].T
        own = np.flatnonzero(here & np.isin(label, names))
        if len(controls) and len(own):
            place = np.searchsorted(names, label[own])
            area = share_below(np.vecdot(z[own], weights[place, :-1]), controls.T[place])
            p, at, n = np.unique(place, return_inverse=True, return_counts=True)
            found.append((names[p], np.full(len(p), b), np.bincount(at, area) / n, n, np.full(len(p), len(controls))))
    columns = [np.concatenate(column) for column in zip(*found)] if found else [np.zeros(0, dtype=np.int64)] * 5
    return _Areas(*columns)


def _chosen_C(
    z: np.ndarray,
    label: np.ndarray,
    batch: np.ndarray,
    group: np.ndarray,
    training: np.ndarray,
    Cs: Sequence[float],
    rng: np.random.Generator,
) -> np.ndarray:
    """The C of each perturbation, by the AUROC in parts of the training groups left out; the smallest of equals."""
    groups = rng.permutation(np.unique(group[training]))
    parts = [groups[i::INNER_FOLDS] for i in range(min(INNER_FOLDS, len(groups)))]
    n_labels = label.max(initial=-1) + 1
    total, count = np.zeros((n_labels, len(Cs))), np.zeros(n_labels)
    single = z.astype(np.float32)
    for part in parts if len(groups) > 1 and len(Cs) > 1 else ():
        aside = np.isin(group, part)
        problems, names = _problems(single, label, training & ~aside)
        weights = None
        for i, C in enumerate(Cs):
            if len(names):
                weights = logistic_regressions(problems, C, start=weights, tol=ROUGH)
                found = _aurocs(single, label, batch, training & aside, weights, names)
                np.add.at(total[:, i], found.label, found.auroc)
                np.add.at(count, found.label, i == 0)
    best = np.asarray(Cs, dtype=float)[np.argmax(np.round(total / np.maximum(count, 1)[:, None], 9), axis=1)]
    return np.where(count > 0, best, Cs[0] if len(Cs) == 1 else DEFAULT_C)


# ---------------------------------------------------------------------------------------------- classifiers of many classes


Scores = Iterator[
    tuple[np.ndarray, np.ndarray]
]  # queries, and their scores (queries x classes); a query may come repeatedly


def neighbor_votes(
    x: np.ndarray, code: np.ndarray, n_classes: int, queries: np.ndarray, *, k: int = 5, random_state: int = 0
) -> Scores:
    """Classes of the k training rows (n x d) that are nearest to each query by cosine, each one vote.

    Where more rows are tied for the last places than there are, the query is given `TIE_ORDERS` times, each with
    random ones of them.
    """
    rng, units = np.random.default_rng(random_state), unit_rows(x)
    k = min(k, len(units))
    for rows, chunk in _chunks(unit_rows(queries), len(units)):
        row, near, similarity = _at_least_nearest(chunk @ units.T, k)
        last = similarity[np.searchsorted(row, np.arange(len(rows))) + k - 1]
        inside = similarity >= last[row] - TIE
        sure = np.bincount(row[inside], minlength=len(rows)) == k
        yield rows[sure], _votes(code[near[inside & sure[row]]].reshape(-1, k), n_classes)
        for i in np.flatnonzero(~sure):
            above, tied = (row == i) & (similarity > last[i] + TIE), (row == i) & (abs(similarity - last[i]) <= TIE)
            sorted_out = np.bincount(code[near[above]], minlength=n_classes)
            others = np.bincount(code[near[tied]], minlength=n_classes)
            drawn = rng.multivariate_hypergeometric(others, k - int(np.count_nonzero(above)), size=TIE_ORDERS)
            yield np.full(TIE_ORDERS, rows[i]), drawn + sorted_out


def _at_least_nearest(similarity: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row, column and value of the k largest entries of each row, of all tied with them and of some more, largest first.

    The k-th largest of the maxima of blocks of columns is at most the k-th largest entry, and found sooner.
    """
    tops = np.maximum.reduceat(similarity, np.arange(0, similarity.shape[1], BLOCK), axis=1)
    if tops.shape[1] > k:
        bound = np.partition(tops, -k, axis=1)[:, -k] - TIE
        row, column = np.divmod(np.flatnonzero(similarity >= bound[:, None]), similarity.shape[1])
    else:
        row, column = np.indices(similarity.shape).reshape(2, -1)
    value = similarity[row, column]
    order = np.lexsort([-value, row])
    return row[order], column[order], value[order]


def class_mean_cosines(x: np.ndarray, code: np.ndarray, n_classes: int, queries: np.ndarray) -> Scores:
    """Cosines of each query to the mean of the unit training rows (n x d) of each class, all of which occur."""
    means = unit_rows(group_means(unit_rows(x), code))
    for rows, chunk in _chunks(unit_rows(queries), n_classes):
        yield rows, chunk @ means.T


def discriminants(x: np.ndarray, code: np.ndarray, n_classes: int, queries: np.ndarray) -> Scores:
    """Linear discriminants: closeness to the class means in the metric of the covariance within classes.

    x S^-1 m - m S^-1 m / 2 for class means m and the pooled covariance S within classes, shrunk towards a multiple of the
    identity (Ledoit and Wolf, 2004), with equal priors: ``sklearn.discriminant_analysis.LinearDiscriminantAnalysis`` in the time of
    one covariance and two products, n d^2 + (n + q) K d, which a thousand classes and a hundred thousand rows allow.
    """
    x = np.asarray(x, dtype=np.float64)
    center, scale = x.mean(axis=0), x.std(axis=0)
    scale = np.where(scale > 1e-9 * np.abs(center), scale, np.inf)
    z = (x - center) / scale
    means = group_means(z, code)
    residual = z - means[code]
    shrinkage = ledoit_wolf_shrinkage(residual, assume_centered=True) if residual.any() else 1.0
    size = np.square(residual).mean() or 1.0
    axes = _axes(z) if len(z) < z.shape[1] else None
    if axes is not None:
        residual, means = residual @ axes, means @ axes
    covariance = (1 - shrinkage) * (residual.T @ residual) / len(x)
    covariance[np.diag_indices_from(covariance)] += shrinkage * size + 1e-9 * size
    weights = np.linalg.solve(covariance, means.T)
    offset = (means.T * weights).sum(axis=0) / 2
    weights = weights if axes is None else axes @ weights
    for rows, chunk in _chunks(queries, n_classes):
        yield rows, (chunk - center) / scale @ weights - offset


def expected_hits(
    scores: Scores, right: np.ndarray, choices: Sequence[np.ndarray | None] = (None,)
) -> list[np.ndarray]:
    """Whether the class with the highest score is the right one; among c tied ones that is worth 1 / c.

    Parameters
    ----------
    scores
        Of one of the classifiers above.
    right
        (q,), code of the right class of each query.
    choices
        Classes among which each query's is to be found (q x classes), None for all; the scores are taken once for all of
        these.

    Returns
    -------
    For each of the choices (q,), between 0 and 1; chance is 1 over the number of classes to choose from.
    """
    hits, times = [np.zeros(len(right)) for _ in choices], np.zeros(len(right))
    for rows, found in scores:
        for hit, allowed in zip(hits, choices):
            score = found if allowed is None else np.where(allowed[rows], found, -np.inf)
            best = score.max(axis=1, keepdims=True)
            top = score >= best - TIE * np.maximum(1, np.abs(best))
            np.add.at(hit, rows, top[np.arange(len(rows)), right[rows]] / top.sum(axis=1))
        np.add.at(times, rows, 1)
    return [hit / np.maximum(times, 1) for hit in hits]


def _votes(classes: np.ndarray, n_classes: int) -> np.ndarray:
    at = classes + n_classes * np.arange(len(classes))[:, None]
    return np.bincount(at.ravel(), minlength=len(classes) * n_classes).reshape(-1, n_classes)


def _chunks(x: np.ndarray, width: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows and their indices, as many at a time as allow so many scores each."""
    size = max(1, min(ROWS_AT_ONCE, SCORES_AT_ONCE // max(width, 1)))
    for start in range(0, len(x), size):
        yield np.arange(start, min(start + size, len(x))), x[start : start + size]
