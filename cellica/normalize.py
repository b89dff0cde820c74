"""Normalisations by controls and anchors: scaling, centring, whitening. Each says how many wells it needs.

What is estimated from wells (a covariance, the offset of a batch) is estimated on residuals within strata, and the means
of strata are put back, so that no method can mistake a cell type for a batch.
"""

from dataclasses import dataclass

import numpy as np

from cellica.bases import choose_n_components, ica_basis
from cellica.roles import (
    SMALL_SCALE,
    Account,
    Affine,
    Chain,
    Means,
    Roles,
    Scale,
    Transform,
    safe_scale,
    within,
)
from cellica.schema import InputError, first_few
from cellica.whitening import Whitening

NO_SPREAD = 1e-8  # standard deviation, in z-scored features, of what is rounding alone
ODD_PLATE = 4.0  # a plate this many times as wide, or as narrow, as the others of its stratum is named
WHITENINGS = ("zca", "zca-cor", "pca")


def standardize(x: np.ndarray, roles: Roles) -> tuple[Transform, Account]:
    """Z-score: mean of all wells, standard deviation within strata. Constant features become 0 and are counted."""
    mean, sd = x.mean(axis=0), within(x, roles.strata).std(axis=0)
    scale = safe_scale(sd, np.abs(mean), NO_SPREAD)
    constant = np.flatnonzero(scale != sd)
    if len(constant):
        roles.notes.append(
            f"{len(constant)} of {x.shape[1]} features do not vary within strata: left unscaled (number {first_few(constant.tolist())}, "
            "counted from 0)"
        )
    _note_odd_plates((x - mean) / scale, roles)
    return Scale(mean, scale), {"n_wells": len(x), "n_constant_features": len(constant)}


def _note_odd_plates(x: np.ndarray, roles: Roles) -> None:
    """Name plates whose wells spread far more, or far less, than those of the other plates of their stratum."""
    found = []
    for stratum in np.unique(roles.strata.astype(str)):
        rows = roles.strata.astype(str) == stratum
        names, index, counts = np.unique(roles.plate[rows].astype(str), return_inverse=True, return_counts=True)
        if len(names) < 3 or counts.min() < 4:
            continue
        wells = np.flatnonzero(rows)[np.argsort(index, kind="stable")]
        spread = np.array([np.median(x[part].std(axis=0)) for part in np.split(wells, np.cumsum(counts)[:-1])])
        if spread.max() < NO_SPREAD:
            continue
        ratio = spread / max(float(np.median(spread)), NO_SPREAD)
        odd = (ratio > ODD_PLATE) | (ratio < 1 / ODD_PLATE)
        found += [f"{name} ({times:.2g} times)" for name, times in zip(names[odd], ratio[odd])]
    if found:
        roles.notes.append(
            f"{len(found)} plates spread far more or less than the others: {first_few(found)}; look at them, and leave them "
            "out where they are faulty, as they enter every fit"
        )


def none(x: np.ndarray, roles: Roles) -> tuple[Transform, Account]:
    """Nothing but the z-score that every chain starts with. Needs no controls and no anchors."""
    return Scale(np.zeros(x.shape[1]), np.ones(x.shape[1])), {}


def pca(x: np.ndarray, roles: Roles, *, n_components: int | None = None) -> tuple[Transform, Account]:
    """Principal components of all wells, residuals within strata, not scaled. Needs no controls and no anchors.

    With ``center_scale`` after it, the normalisation that RxRx3-core's authors use.
    """
    rank = min(len(x) - 1, x.shape[1])
    whiten = Whitening(choose_n_components(x, n_components, rank, roles)).fit(within(x, roles.strata))
    return Affine(x.mean(axis=0), whiten.directions_), {"n_components": whiten.rank_}


# ----------------------------------------------------------------------------------------------------- whitening


def sphere(
    x: np.ndarray, roles: Roles, *, ridge: float = 0.01, rank: int | None = None, whitening: str = "zca"
) -> tuple[Transform, Account]:
    """Whitening on negative controls, residuals within strata; the origin is the mean control.

    ``whitening``: ``"zca"``, ``"zca-cor"`` (scaled to unit variance first) or ``"pca"`` (Kessy, Lewin and Strimmer, 2018).
    ``ridge`` is added to the eigenvalues as a multiple of their mean, ``rank`` keeps that many directions. Needs 2
    controls in all, none on any particular plate; one is refused. With no more controls than features the ridge carries
    the directions that they do not span, and without a ridge these are cut; the notes say which.
    """
    roles.require(roles.control, "negative control", "sphere")
    controls = x[roles.control]
    residuals = within(controls, roles.strata[roles.control])
    return _whiten(controls, residuals, roles, "sphere", ridge, rank, whitening)


def wccn(x: np.ndarray, roles: Roles, *, ridge: float = 0.01, rank: int | None = None) -> tuple[Transform, Account]:
    """ZCA whitening on anchor residuals (within stratum and perturbation): within-class covariance normalisation.

    Residuals of anchors hold batch effect and noise but no perturbation (Hatch, Kajarekar and Stolcke, 2006). Needs
    2 anchors of one perturbation and 2 batches; an anchor that is alone in its stratum adds nothing. Scores of
    perturbations that are anchors are circular.
    """
    roles.require(roles.anchor, "anchor", "wccn")
    roles.require_batches("wccn")
    roles.require_shared_anchors("wccn")
    anchors = x[roles.anchor]
    return _whiten(anchors, within(anchors, roles.cells[roles.anchor]), roles, "wccn", ridge, rank)


def _whiten(
    wells: np.ndarray,
    residuals: np.ndarray,
    roles: Roles,
    method: str,
    ridge: float,
    rank: int | None,
    whitening: str = "zca",
) -> tuple[Transform, Account]:
    if whitening not in WHITENINGS:
        raise InputError(f"whitening={whitening!r} is not known: use one of {', '.join(map(repr, WHITENINGS))}")
    if residuals.std() < NO_SPREAD:
        raise InputError(
            f"{method} whitens what varies among {len(wells)} wells, and nothing does: they are too few in each stratum, or "
            "were centred on themselves; name more controls or anchors, or leave this step out"
        )
    scale = safe_scale(residuals.std(axis=0)) if whitening == "zca-cor" else np.ones(wells.shape[1])
    whiten = _whitening(residuals / scale, rank, whitening[:3], ridge)
    if len(wells) <= wells.shape[1] or (not ridge and rank is None and whiten.rank_ < wells.shape[1]):
        treatment = f"the ridge of {ridge:g} carries the rest" if ridge else f"rank {whiten.rank_} used"
        roles.notes.append(f"{method}: {len(wells)} wells for {wells.shape[1]} features; {treatment}")
    account = {"n_wells": len(wells), "rank": whiten.rank_, "ridge": ridge, "whitening": whitening}
    return Affine(wells.mean(axis=0), whiten.whitening_ / scale), account


def _whitening(residuals: np.ndarray, rank: int | None, method: str, ridge: float) -> Whitening:
    """Whitening; without a ridge, directions in which next to nothing varies are cut: they would be blown up."""
    whiten = Whitening(rank, method=method, ridge=ridge).fit(residuals)
    clear = int(np.sum(whiten.eigenvalues_ > SMALL_SCALE**2 * whiten.eigenvalues_.mean()))
    return whiten if ridge or clear == whiten.rank_ else Whitening(clear, method=method).fit(residuals)


def ica_shrink(
    x: np.ndarray,
    roles: Roles,
    *,
    n_components: int | None = None,
    ridge: float = 0.1,
    random_state: int = 0,
) -> tuple[Transform, Account]:
    """Whitening on anchor residuals whose covariance is shrunk towards one that is diagonal in the ICA basis.

    In source coordinates C = (1 - a) cov + a diag(cov) + ridge * mean variance * I, with the a that minimises the expected
    squared error (Schafer and Strimmer, 2005): near 0 with many anchors (``wccn`` in the ICA space), near 1 with few.
    Needs 2 anchors of one perturbation, 2 batches, and far more wells than components squared: without
    ``n_components``, the rank, at most 100 and the square root of the number of wells. Scores of perturbations that are
    anchors are circular.
    """
    roles.require(roles.anchor, "anchor", "ica_shrink")
    roles.require_batches("ica_shrink")
    roles.require_shared_anchors("ica_shrink")
    residuals = within(x, roles.strata)
    k = choose_n_components(residuals, n_components, int(len(x) ** 0.5), roles)
    basis = ica_basis(residuals, k, random_state)
    anchors = x[roles.anchor]
    noise = within(anchors, roles.cells[roles.anchor]) @ basis.unmixing.T
    covariance, intensity = shrink_to_diagonal(noise)
    if np.trace(covariance) < NO_SPREAD:
        raise InputError("ica_shrink whitens what varies among anchors, and nothing does: name more of them (--anchor)")
    covariance += ridge * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    values, vectors = np.linalg.eigh(covariance)
    whiten = (vectors / np.sqrt(values)) @ vectors.T
    u, _, vh = np.linalg.svd(basis.mixing, full_matrices=False)  # an isometry back to features: cosines stay
    account = {"n_wells": len(anchors), "n_components": len(values), "shrinkage": intensity, "ridge": ridge}
    return Affine(anchors.mean(axis=0), (u @ vh) @ whiten @ basis.unmixing), account


def shrink_to_diagonal(residuals: np.ndarray) -> tuple[np.ndarray, float]:
    """Covariance (k, k) of centred rows (n, k) shrunk towards its diagonal, and the intensity (0 to 1) used.

    Intensity = sum of var(c_ij) / sum of c_ij^2 over i != j (Schafer and Strimmer, 2005, target D).
    """
    n = len(residuals)
    covariance = residuals.T @ residuals / n
    squared = residuals**2
    variance = (squared.T @ squared / n - covariance**2) / n
    off = ~np.eye(len(covariance), dtype=bool)
    total = float(np.sum(covariance[off] ** 2))
    intensity = float(np.clip(variance[off].sum() / total, 0, 1)) if total > 0 else 1.0
    return np.where(off, (1 - intensity) * covariance, covariance), intensity


@dataclass
class Coral:
    """Per batch, take the covariance of its controls (plus ridge * I) to the identity."""

    ridge: float

    def apply(self, x: np.ndarray, roles: Roles) -> np.ndarray:
        """Map rows by the controls of their own batch."""
        names, index = np.unique(roles.batch.astype(str), return_inverse=True)
        counts = np.bincount(index[roles.control], minlength=len(names))
        if counts.min() < 2:
            raise InputError(
                f"tvn with coral needs 2 controls in each batch; {first_few(names[counts < 2])} has fewer: leave it out, name "
                "another batch key (--batch-key), or use 'sphere' (in Python also coral=False)"
            )
        y = np.empty_like(x)
        for i in range(len(names)):
            rows = index == i
            values, vectors = np.linalg.eigh(
                np.cov(x[rows & roles.control], rowvar=False) + self.ridge * np.eye(x.shape[1])
            )
            y[rows] = x[rows] @ (vectors / np.sqrt(values)) @ vectors.T
        return y


def tvn(x: np.ndarray, roles: Roles, *, coral: bool = True, ridge: float = 0.5) -> tuple[Transform, Account]:
    """Typical variation normalisation (Ando, McLean and Berndl, 2017).

    Scale on controls, full PCA of controls, scale on controls again (n in the denominator). With ``coral``, then per
    batch x (cov(controls of the batch) + ridge * I)^(-1/2). Needs 2 controls in all, with coral 2 in each batch: a batch
    with one is refused by name. With fewer controls than features the rank is cut, and said.
    """
    if not isinstance(coral, bool):
        raise InputError(f"coral={coral!r} is not allowed: use True or False")
    roles.require(roles.control, "negative control", "tvn")
    controls = x[roles.control]
    residuals = within(controls, roles.strata[roles.control])
    if residuals.std() < NO_SPREAD:
        raise InputError(f"tvn whitens what varies among {len(controls)} controls, and nothing does: name more of them")
    scale = safe_scale(residuals.std(axis=0))
    whiten = _whitening(residuals / scale, None, "pca", 0.0)
    if whiten.rank_ < x.shape[1]:
        roles.notes.append(
            f"tvn: the {len(controls)} controls span {whiten.rank_} of {x.shape[1]} directions; that rank is used"
        )
    matrix = whiten.whitening_ / scale * np.sqrt(len(controls) / (len(controls) - 1))
    parts: list[Transform] = [Affine(controls.mean(axis=0), matrix)]
    return Chain([*parts, Coral(ridge)] if coral else parts), {"n_wells": len(controls), "rank": whiten.rank_}


# ------------------------------------------------------------------------------------------------------- centring


@dataclass
class Center:
    """Take from each plate (batch where ``scale``) the offset of its own controls from the controls of their stratum."""

    control_means: Means
    anchor_means: Means
    origin: np.ndarray
    scale: bool
    min_controls: int
    typical: np.ndarray | float = 1.0

    def apply(self, x: np.ndarray, roles: Roles) -> np.ndarray:
        """Map rows by the controls, or anchors, of their own plate."""
        method, what = ("center_scale", "batch") if self.scale else ("center", "plate")
        names, index = np.unique((roles.batch if self.scale else roles.plate).astype(str), return_inverse=True)
        anchor = roles.anchor & np.isin(roles.cells, self.anchor_means.names)
        controls = np.bincount(index[roles.control], minlength=len(names))
        anchors = np.bincount(index[anchor], minlength=len(names))
        few = controls < self.min_controls
        lacking = few if self.scale else few & (anchors < self.min_controls)
        if lacking.any():
            remedy = "" if self.scale else f" (or {self.min_controls} anchors)"
            raise InputError(
                f"{method} needs {self.min_controls} negative controls{remedy} on each {what}; {first_few(names[lacking])} "
                f"({lacking.sum()} of {len(names)}) lack them: name controls or anchors, leave these wells out, or use a "
                f"method that needs none on each {what}, such as 'sphere' or 'wccn'"
            )
        if few.any():
            roles.notes.append(
                f"center: {few.sum()} of {len(names)} plates have fewer than {self.min_controls} negative controls "
                f"({first_few(names[few])}): each was centred on its anchors instead ({anchors[few].min()} or more), anchor means removed"
            )
        of_controls = x - self.control_means.at(roles.strata)
        of_anchors = x - self.anchor_means.at(roles.cells)
        y, unscaled = np.empty_like(x), 0
        for i in range(len(names)):
            rows = index == i
            offsets = of_anchors[rows & anchor] if few[i] else of_controls[rows & roles.control]
            y[rows] = x[rows] - self.origin - offsets.mean(axis=0)
            if self.scale:
                spread = offsets.std(axis=0)
                y[rows] /= safe_scale(spread, self.typical)
                unscaled += int(np.sum(spread != safe_scale(spread, self.typical)))
        if unscaled:
            roles.notes.append(
                f"center_scale: {unscaled} of {len(names) * x.shape[1]} spreads of a feature among the controls of a {what} are "
                f"below a thousandth of its spread among all wells: not divided by"
            )
        return y


def center(x: np.ndarray, roles: Roles, *, min_controls: int = 3) -> tuple[Transform, Account]:
    """Centre each plate on its negative controls, within strata.

    Needs ``min_controls`` on each plate. A plate with fewer is centred on its anchors, anchor means removed, which the
    notes say: one control a plate is no basis. A plate with too few of either is an error. The origin is the mean control.
    """
    roles.require(roles.control | roles.anchor, "control or anchor", "center")
    return _center(x, roles, scale=False, min_controls=min_controls)


def center_scale(x: np.ndarray, roles: Roles, *, min_controls: int = 3) -> tuple[Transform, Account]:
    """Centre each batch on its negative controls and divide by their standard deviation (n in the denominator).

    Needs ``min_controls`` in each batch; a batch with fewer is an error that names it.
    """
    roles.require(roles.control, "negative control", "center_scale")
    return _center(x, roles, scale=True, min_controls=min_controls)


def _center(x: np.ndarray, roles: Roles, *, scale: bool, min_controls: int) -> tuple[Transform, Account]:
    basis = roles.control if roles.control.any() else roles.anchor
    control_means = Means.of(x[basis], roles.strata[basis])
    anchor = roles.anchor if roles.anchor.any() else basis
    anchor_means = Means.of(x[anchor], roles.cells[anchor])
    typical = within(x, roles.strata).std(axis=0)
    transform = Center(control_means, anchor_means, x[basis].mean(axis=0), scale, min_controls, typical)
    return transform, {"n_controls": int(roles.control.sum()), "n_anchors": int(roles.anchor.sum())}
