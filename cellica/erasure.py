"""Erasure of batch by one projection, fitted on anchors: RUV-III and LEACE. The means of strata are put back."""

import numpy as np

from cellica.confounding import require_separable
from cellica.roles import Account, Means, Rebuild, Roles, Transform, within
from cellica.schema import InputError, first_few


def ruv(x: np.ndarray, roles: Roles, *, n_factors: int | None = None) -> tuple[Transform, Account]:
    """RUV-III (Molania et al., 2019) with anchors as replicates and all features as negative controls.

    The leading directions of anchor residuals (within stratum and perturbation) are unwanted variation and are projected
    out. Without ``n_factors``: one less than there are batches, at most 10 and half the features. Needs 2 anchors of one
    perturbation for each factor, and 2 batches; an anchor that is alone in its stratum adds nothing.
    """
    if n_factors is not None and not (isinstance(n_factors, int) and n_factors >= 1):
        raise InputError(f"n_factors={n_factors!r} is not allowed: use a whole number of 1 or more, or leave it out")
    roles.require(roles.anchor, "anchor", "ruv")
    roles.require_batches("ruv")
    roles.require_shared_anchors("ruv")
    residuals = within(x[roles.anchor], roles.cells[roles.anchor])
    _, spread, directions = np.linalg.svd(residuals, full_matrices=False)
    rank = int(np.sum(spread > 1e-9 * max(spread[0], 1.0)))
    if rank == 0:
        raise InputError("ruv reads unwanted variation from replicates of anchors, and no anchor has any: name others")
    asked = n_factors or min(10, len(np.unique(roles.batch.astype(str))) - 1, max(1, x.shape[1] // 2))
    if asked > rank:
        roles.notes.append(f"ruv: {rank} factors instead of {asked}: anchor residuals span no more")
    out = directions[: min(asked, rank)]
    account = {"n_factors": len(out), "n_wells": int(roles.anchor.sum())}
    return Rebuild(Means.of(x, roles.strata), np.eye(x.shape[1]) - out.T @ out), account


def leace(x: np.ndarray, roles: Roles, *, on: str = "anchors") -> tuple[Transform, Account]:
    """Least-squares concept erasure of batch (Belrose et al., 2023, theorem 4.3), within strata.

    x - W^+ P W (x - mean), W the inverse square root of the covariance of x and P the projection on the columns of W times the
    covariance of x and batch: the least change after which no linear classifier tells batches better than chance. ``on``:
    where that is estimated, and holds: ``"anchors"`` (perturbation means removed; biology that is confounded with batch stays
    out of it) or ``"all"`` wells. Needs 2 batches that share anchors, and more anchors than features to estimate a covariance
    well; one anchor a batch leaves no residual to tell noise from batch. Erases as many directions as there are batches less
    strata: with more batches than features nothing would be left, which is refused.
    """
    if on not in ("anchors", "all"):
        raise InputError(f"on={on!r} is not known: use 'anchors' or 'all'")
    roles.require_batches("leace")
    if on == "all":
        require_separable(roles, "leace")
    else:
        roles.require(roles.anchor, "anchor", "leace")
        roles.require_shared_anchors("leace")
    rows = roles.anchor if on == "anchors" else np.ones(len(x), dtype=bool)
    cells = roles.cells[rows] if on == "anchors" else roles.strata[rows]
    batches, code = np.unique(roles.batch[rows].astype(str), return_inverse=True)
    if len(batches) < len(np.unique(roles.batch.astype(str))):
        unheard = sorted(set(roles.batch.astype(str)) - set(batches))
        roles.notes.append(f"leace: {first_few(unheard)} hold no anchors, so nothing of them is erased")
    residuals = within(x[rows], cells)
    if len(residuals) <= x.shape[1]:
        roles.notes.append(
            f"leace: {len(residuals)} wells for {x.shape[1]} features: the covariance that it inverts is not known, and what it "
            "erases may be biology; use fewer features or more anchors"
        )
    concept = within(np.eye(len(batches))[code], cells)
    values, vectors = np.linalg.eigh(residuals.T @ residuals / len(residuals))
    spread = values > 1e-10 * max(float(values[-1]), 1e-300)
    half = np.sqrt(values[spread])
    whiten, unwhiten = (vectors[:, spread] / half).T, vectors[:, spread] * half
    u, s, _ = np.linalg.svd(whiten @ (residuals.T @ concept / len(residuals)), full_matrices=False)
    u = u[:, s > 1e-8]
    if residuals.std() < 1e-12:
        raise InputError(f"leace needs wells that vary, and these {len(residuals)} do not")
    if u.shape[1] >= spread.sum():
        raise InputError(
            f"leace would erase all {int(spread.sum())} directions of {len(residuals)} wells: there are {len(batches)} batches; use a "
            "coarser batch key, or another method"
        )
    if u.shape[1] > spread.sum() / 2:
        roles.notes.append(f"leace: {u.shape[1]} of {int(spread.sum())} directions are erased")
    account = {"n_directions": u.shape[1], "n_wells": len(residuals), "on": on}
    return Rebuild(Means.of(x, roles.strata), np.eye(x.shape[1]) - (unwhiten @ u) @ (u.T @ whiten)), account
