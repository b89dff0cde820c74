"""Picard-O: maximum likelihood over rotations by preconditioned L-BFGS (Ablin, Cardoso and Gramfort, 2018)."""

from collections import deque

import torch
from torch import Tensor

from cellica.contrast import Expectations, Rows, StreamedRows, expectations, nearest_orthogonal
from cellica.fastica import Separation, Settings

MEMORY = 7  # pairs of step and change of gradient that L-BFGS keeps
LEAST_CURVATURE = 0.01  # floor of the Hessian's approximation
HALVINGS = 10  # of a step that does not lower the loss

Steps = deque[tuple[Tensor, Tensor]]


def descend(rows: Rows | StreamedRows, found: Separation, settings: Settings) -> Tensor:
    """Lower the sum of s_i E[G(y_i)] by rotations exp(A) W until the non-Gaussian rows have stopped moving.

    s_i is the sign that makes source i a minimum, 0 for rows that are no longer, or not yet, non-Gaussian: their
    random gradients would only shake the others.
    """
    weights = torch.eye(rows.k, dtype=torch.float64, device=found.rotation.device)
    now = expectations(rows, weights, settings.fun, loss=True)
    steps: Steps = deque(maxlen=MEMORY)
    step: Tensor | None = None
    last_signs = last_gradient = torch.zeros(0, device=weights.device)
    found.score = now.score
    while bool(found.non_gaussian.any()) and found.n_iter < settings.max_iter:
        found.n_iter += 1
        signs, gradient, curvature = _derivatives(now, weights, found.non_gaussian)
        if not torch.equal(signs, last_signs):
            steps.clear()
        elif step is not None and float(torch.sum(step * (gradient - last_gradient))) > 0:
            steps.append((step, gradient - last_gradient))
        direction = _direction(gradient, curvature, steps)
        step, weights, now = _line_search(rows, weights, now, signs, direction, settings.fun)
        if step is None and steps:  # the memory misled: once more without it
            steps.clear()
            step, weights, now = _line_search(rows, weights, now, signs, -gradient / curvature, settings.fun)
        last_signs, last_gradient = signs, gradient
        moved = torch.zeros_like(now.score) if step is None else (step**2).sum(dim=1) / 2  # 1 - cosine
        found.stopped = moved < settings.tol
        found.score = now.score
        if settings.callback is not None:
            settings.callback(found.n_iter, int((found.stopped & found.non_gaussian).sum()))
        if bool((found.stopped | ~found.non_gaussian).all()):
            break
    return weights


def _derivatives(now: Expectations, weights: Tensor, non_gaussian: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Signs (k,), relative gradient (k, k), antisymmetric, and the diagonal of the Hessian's approximation (k, k)."""
    outer = now.outer @ weights.T  # E[g(y) y^T]
    excess = now.slope - outer.diagonal()
    signs = torch.sign(excess) * non_gaussian
    gradient = signs[:, None] * outer
    curvature = (signs * excess)[:, None] + signs * excess
    return signs, (gradient - gradient.T) / 2, (curvature / 2).clamp(min=LEAST_CURVATURE)


def _direction(gradient: Tensor, curvature: Tensor, steps: Steps) -> Tensor:
    """L-BFGS direction by the two-loop recursion, preconditioned by the Hessian's approximation."""
    q, shares = gradient.clone(), []
    for step, change in reversed(steps):
        share = torch.sum(step * q) / torch.sum(step * change)
        q -= share * change
        shares.append(share)
    z = q / curvature
    for (step, change), share in zip(steps, reversed(shares), strict=True):
        z += (share - torch.sum(change * z) / torch.sum(step * change)) * step
    return -z


def _line_search(
    rows: Rows | StreamedRows, weights: Tensor, now: Expectations, signs: Tensor, direction: Tensor, fun: str
) -> tuple[Tensor | None, Tensor, Expectations]:
    """Halve the step until the loss falls (or stays, within rounding); None, and all as it was, where it does not."""
    loss = float(torch.sum(signs * now.loss)) + len(signs) * rows.precision
    for _ in range(HALVINGS):
        turned = nearest_orthogonal(torch.linalg.matrix_exp(direction) @ weights)
        then = expectations(rows, turned, fun, loss=True)
        if float(torch.sum(signs * then.loss)) < loss:
            return direction, turned, then
        direction = direction / 2
    return None, weights, now
