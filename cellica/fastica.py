"""Symmetric FastICA that sets aside what it has found: a search among the rest, then a polish of all that was found."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from scipy.linalg import qr
from torch import Tensor

from cellica.contrast import CONTRAST, Rows, StreamedRows, expectations, nearest_orthogonal, non_gaussian_score

SETTLED = 0.02  # 1 - |cosine| between two steps below which a non-Gaussian row needs no more search
ASIDE = 0.1  # share of the rows still searched for that must have settled to be set aside together
PATIENCE = 12  # steps without a gain after which the search ends
SADDLE_ROUNDS = 3  # at most, of leaving saddles and finishing again
SADDLE_ROWS = 16384  # rows that tell saddles from optima
SADDLE_SCORE = 7.0  # standard errors of a second derivative below 0
GAIN = 1.05  # ratio of the rows' scores, in sum, to the best before that counts as a gain

Callback = Callable[[int, int], None]


@dataclass
class Separation:
    """An orthogonal W (k, k) whose rows are the sources' directions, and what is known of each row."""

    rotation: Tensor
    n_found: int  # first rows, which were found; the others are left over
    score: Tensor  # standard errors of each row's contrast from that of a Gaussian
    stopped: Tensor  # whether each row has stopped moving
    n_iter: int

    @property
    def non_gaussian(self) -> Tensor:
        """Whether each row is a non-Gaussian direction."""
        return self.score > non_gaussian_score(len(self.score))


@dataclass(frozen=True)
class Settings:
    """Contrast, iterations at most, the movement (1 - |cosine|) that counts as none, and who is told of progress."""

    fun: str
    max_iter: int
    tol: float
    callback: Callback | None = None


class Finish(Protocol):
    """Bring the directions that a search has found to their optimum: ``polish``, or ``picard.descend``."""

    def __call__(self, rows: Rows | StreamedRows, found: Separation, settings: Settings) -> Tensor:
        """Rotation (k, k) of the rows, which were turned by the search; updates all else in ``found``."""


def separate(
    rows: Rows, start: Tensor, settings: Settings, finish: Finish, every_row: StreamedRows | None = None
) -> Separation:
    """Search from a first rotation, then finish; ``rows`` are turned in place to the sources.

    Where ``rows`` are a sample, ``every_row`` is what the sample was taken from, and is what the finish runs on.
    """
    found = search(rows, start, settings)
    data: list[Rows | StreamedRows] = [rows]
    if every_row is not None:
        every_row.turn(found.rotation)
        data.append(every_row)

    def turn(rotation: Tensor) -> None:
        for each in data:
            each.turn(rotation)
        found.rotation = rotation @ found.rotation

    turn(finish(data[-1], found, settings))
    for _ in range(SADDLE_ROUNDS):
        rotation, stuck = off_saddles(rows, found.n_found)
        if not bool(stuck.any()) or found.n_iter >= settings.max_iter:
            break
        found.stopped[: found.n_found] &= ~stuck
        turn(rotation)
        turn(finish(data[-1], found, settings))
    return found


def far_rows(rows: Rows, chosen: np.ndarray) -> Tensor:
    """Start (k, k) of a search: rows of data far from the centre and from each other, among the ``chosen`` ones.

    Where sources are sparse or have heavy tails, such a row owes its length to few of them, and lies nearer to their
    directions than a random rotation would: fewer steps to the same sources.
    """
    norm = torch.linalg.vector_norm(rows.z, dim=1).cpu().numpy()[chosen]
    longest = chosen[np.argsort(-norm, kind="stable")[: 2 * rows.k]]
    points = rows.z[torch.from_numpy(longest).to(rows.z.device)].double()
    pivots = qr(points.cpu().numpy().T, mode="r", pivoting=True)[1][: rows.k]
    return points[torch.from_numpy(pivots).to(rows.z.device)]


def search(rows: Rows, start: Tensor, settings: Settings) -> Separation:
    """Fixed-point steps w <- E[z g(w z)] - E[g'(w z)] w of all rows at once (Hyvarinen, 1999, eq. 20).

    A non-Gaussian row that has nearly stopped is set aside: the data are turned so that it is one of the first columns,
    which later steps leave out. Gaussian directions have no preferred rotation and never settle, so the search ends
    when ``PATIENCE`` steps have brought no new row and no higher scores, four times as many where a non-Gaussian row is
    still on its way.
    """
    limit = non_gaussian_score(rows.k)
    score = torch.full((rows.k,), torch.inf, dtype=torch.float64, device=start.device)
    stopped = torch.zeros(rows.k, dtype=torch.bool, device=start.device)
    rotation = torch.eye(rows.k, dtype=torch.float64, device=start.device)
    weights, aside = nearest_orthogonal(start), 0
    most, best, since = 0, 0.0, 0
    for n_iter in range(1, settings.max_iter + 1):
        found = expectations(rows, weights, settings.fun, skip=aside)
        non_gaussian = found.score > limit
        updated = _orthogonalize(found.outer - found.slope[:, None] * weights, non_gaussian)
        moved = _movement(updated, weights)
        weights = updated
        settled = non_gaussian & (moved < SETTLED)
        n_found, gain = aside + int(non_gaussian.sum()), float(found.score.sum())
        if n_found > most or gain > GAIN * best:
            most, best, since = max(most, n_found), gain, n_iter
        if settings.callback is not None:
            settings.callback(n_iter, aside + int(settled.sum()))
        on_its_way = bool((non_gaussian & ~settled).any())
        waiting = n_iter - since < (4 * PATIENCE if on_its_way else PATIENCE)
        done = bool((moved < settings.tol).all()) or not waiting or n_iter == settings.max_iter
        done |= bool(settled.all())
        if done:  # the rows to finish first
            settled = non_gaussian | (moved < settings.tol)
        if done or int(settled.sum()) >= ASIDE * len(weights):
            order = torch.cat([settled.nonzero(), (~settled).nonzero()]).ravel()
            rows.turn(weights[order], aside)
            rotation[aside:] = weights[order] @ rotation[aside:]
            if done:
                break
            aside, best = aside + int(settled.sum()), 0.0
            weights = torch.eye(rows.k - aside, dtype=torch.float64, device=start.device)
    score[aside:], stopped[aside:] = found.score[order], (moved < settings.tol)[order]
    n_found = aside + int(settled.sum())
    stopped[:n_found] = False  # by the measure of the finish
    return Separation(rotation, n_found, score, stopped, n_iter)


def polish(rows: Rows | StreamedRows, found: Separation, settings: Settings) -> Tensor:
    """Fixed-point steps of the rows that were found, each until it has stopped; the others keep to their complement.

    Rows that have stopped stay where they are, and those that still move do so in what they leave.
    """
    eye = torch.eye(rows.k, dtype=torch.float64, device=found.rotation.device)
    weights = eye[: found.n_found]
    active = ~found.stopped[: found.n_found]
    while bool(active.any()) and found.n_iter < settings.max_iter:
        found.n_iter += 1
        now = expectations(rows, weights[active], settings.fun)
        step = now.outer - now.slope[:, None] * weights[active]
        updated = nearest_orthogonal(_without(step, weights[~active]))
        index = active.nonzero().ravel()
        found.stopped[index] = _movement(updated, weights[active]) < settings.tol
        found.score[index] = now.score
        weights = weights.index_copy(0, index, updated)
        active = ~found.stopped[: found.n_found]
        if settings.callback is not None:
            settings.callback(found.n_iter, int((~active).sum()))
    rest = _without(eye[found.n_found :], weights)
    return torch.cat([weights, nearest_orthogonal(rest)]) if len(rest) else weights


def off_saddles(rows: Rows, m: int) -> tuple[Tensor, Tensor]:
    """Rotation (k, k) of pairs of sources that are at a saddle by 45 degrees, and which of the m sources these are.

    FastICA also stops at (s_1 + s_2, s_1 - s_2) of two sources alike, where the contrast is stationary but no optimum
    (Tichavsky, Koldovsky and Oja, 2006). There the second derivative along the rotation of the pair is negative.
    """
    stride = max(1, rows.n // SADDLE_ROWS)
    y = Rows(rows.z[::stride, :m])
    sums = torch.zeros(2, m, dtype=torch.float64, device=y.z.device)
    cross = torch.zeros(m, m, dtype=torch.float64, device=y.z.device)
    for chunk in y.chunks():
        source = chunk.T.contiguous()
        g, slope = torch.empty_like(source), torch.empty_like(source)
        CONTRAST["logcosh"](source, g, slope)
        sums += torch.stack([(g * source).sum(dim=1), slope.sum(dim=1)])
        cross += slope @ (source * source).T
    projection, slope_mean = sums / y.n
    sign = torch.sign(slope_mean - projection)
    half = sign[:, None] * (cross / y.n - projection[:, None])
    curvature = half + half.T
    curvature.fill_diagonal_(0)
    rotation = torch.eye(rows.k, dtype=torch.float64, device=y.z.device)
    stuck = torch.zeros(m, dtype=torch.bool, device=y.z.device)
    low = torch.nonzero(torch.triu(curvature < -SADDLE_SCORE * y.n**-0.5))
    for i, j in low[torch.argsort(curvature[low[:, 0], low[:, 1]])].tolist():
        if not stuck[i] and not stuck[j]:
            stuck[i] = stuck[j] = True
            rotation[i, i] = rotation[i, j] = rotation[j, j] = 0.5**0.5
            rotation[j, i] = -(0.5**0.5)
    return rotation, stuck


def _movement(updated: Tensor, weights: Tensor) -> Tensor:
    """1 - |cosine| between the rows of two matrices."""
    return 1 - torch.abs(torch.sum(updated * weights, dim=1))


def _orthogonalize(step: Tensor, non_gaussian: Tensor) -> Tensor:
    """Nearest orthonormal rows, non-Gaussian rows first, the others in what they leave.

    The step of a Gaussian row is small and random. In one polar factor of all rows it would keep shaking the others.
    """
    if bool(non_gaussian.all()) or not bool(non_gaussian.any()):
        return nearest_orthogonal(step)
    rows = nearest_orthogonal(step[non_gaussian])
    basis = torch.linalg.qr(rows.T, mode="complete").Q.T[len(rows) :]
    updated = torch.empty_like(step)
    updated[non_gaussian] = rows
    updated[~non_gaussian] = nearest_orthogonal(step[~non_gaussian] @ basis.T) @ basis
    return updated


def _without(step: Tensor, rows: Tensor) -> Tensor:
    """Part of each row of a matrix that is orthogonal to orthonormal rows."""
    return step - (step @ rows.T) @ rows
