"""Every correction method on arrays: rows and the roles of their wells in, a fitted transform and its account out.

What is estimated from wells (a covariance, an ICA, the offset of a batch) is estimated on residuals within strata, and
the means of strata are put back, so that no method can mistake a cell type for a batch.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from scipy.stats import ortho_group
from sklearn.exceptions import ConvergenceWarning

from cellica.components import Rule, associations, classify, cross
from cellica.ica import ICA, matched_correlation
from cellica.metrics import group_means
from cellica.schema import InputError, first_few
from cellica.whitening import Whitening

MAX_COMPONENTS = 100
NO_SPREAD = 1e-8  # standard deviation, in z-scored features, of what is rounding alone


@dataclass
class Roles:
    """What each well is, for one correction: arrays (n,) of labels (None where missing) and masks, and notes taken."""

    batch: np.ndarray
    plate: np.ndarray
    label: np.ndarray
    strata: np.ndarray
    control: np.ndarray
    anchor: np.ndarray
    batch_key: str = "experiment"
    notes: list[str] = field(default_factory=list)

    @property
    def treated(self) -> np.ndarray:
        """Wells with a known perturbation that are no controls."""
        return ~self.control & np.array([value is not None for value in self.label], dtype=bool)

    @property
    def cells(self) -> np.ndarray:
        """Stratum and perturbation of each well: anchors that share them differ only by batch and noise."""
        return cross(self.strata, self.label)

    def require(self, mask: np.ndarray, what: str, method: str, least: int = 2) -> None:
        """Raise an InputError where fewer than ``least`` wells have a role."""
        if mask.sum() < least:
            raise InputError(
                f"{method} needs at least {least} {what}s and found {int(mask.sum())} in {len(mask)} wells: mark negative "
                "controls in obs['control'], or name perturbations by controls= or anchors= (--control, --anchor)"
            )

    def require_batches(self, method: str) -> None:
        """Raise an InputError where there is one batch, or a batch of one well."""
        names, counts = np.unique(self.batch.astype(str), return_counts=True)
        if len(names) < 2:
            raise InputError(
                f"{method} compares batches, but obs[{self.batch_key!r}] holds one, {first_few(names)}: name another batch key "
                "(--batch-key), such as 'plate', or use a method that needs none, such as 'sphere'"
            )
        if counts.min() < 2:
            raise InputError(
                f"{method} needs 2 wells in each batch; of obs[{self.batch_key!r}], {first_few(names[counts < 2])} has one: "
                "leave it out, or name another batch key"
            )


class Transform(Protocol):
    """A fitted method: maps rows (n, d), with the roles of their wells, to rows (n, d)."""

    def apply(self, x: np.ndarray, roles: Roles) -> np.ndarray: ...  # noqa: D102


Account = dict[str, Any]  # what a fit used and found; arrays under "sources" and "mixing", a table under "components"
Fit = Callable[..., tuple[Transform, Account]]

# ------------------------------------------------------------------------------------------------ groups of wells


@dataclass
class Means:
    """Mean (k, d) of each named group, remembered so that later rows meet the same means."""

    names: list[str]
    values: np.ndarray

    @classmethod
    def of(cls, x: np.ndarray, groups: np.ndarray) -> "Means":
        """Mean of each group."""
        names, index = np.unique(groups.astype(str), return_inverse=True)
        return cls([str(name) for name in names], group_means(x, index))

    def at(self, groups: np.ndarray) -> np.ndarray:
        """Mean of each row's group (n, d); the mean of means for a group that was not seen."""
        row = {name: i for i, name in enumerate(self.names)}
        table = np.vstack([self.values, self.values.mean(axis=0)])
        return table[[row.get(str(group), len(self.names)) for group in groups]]


def within(x: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Residuals (n, d) from the means of groups."""
    return x - Means.of(x, groups).at(groups)


def safe_scale(scale: np.ndarray, typical: np.ndarray | float = 1.0) -> np.ndarray:
    """Scales (d,) with those that vanish beside the typical size of their feature replaced by 1."""
    return np.where(scale > 1e-8 * np.maximum(np.abs(typical), 1e-30), scale, 1.0)


# ----------------------------------------------------------------------------------------------- affine methods


@dataclass
class Scale:
    """(x - offset) / scale."""

    offset: np.ndarray
    scale: np.ndarray

    def apply(self, x: np.ndarray, roles: Roles) -> np.ndarray:
        """Scale rows."""
        return (x - self.offset) / self.scale


@dataclass
class Affine:
    """(x - offset) @ matrix.T, filled up with zeros to the width of x."""

    offset: np.ndarray
    matrix: np.ndarray

    def apply(self, x: np.ndarray, roles: Roles) -> np.ndarray:
        """Map rows."""
        y = (x - self.offset) @ self.matrix.T
        return np.pad(y, ((0, 0), (0, x.shape[1] - y.shape[1])))


def standardize(x: np.ndarray, roles: Roles) -> tuple[Transform, Account]:
    """Z-score: mean of all wells, standard deviation within strata. Constant features become 0 and are counted."""
    mean, sd = x.mean(axis=0), within(x, roles.strata).std(axis=0)
    scale = safe_scale(sd, np.abs(mean))
    n_constant = int(np.sum(scale != sd))
    if n_constant:
        roles.notes.append(f"{n_constant} of {x.shape[1]} features do not vary within strata: left unscaled")
    return Scale(mean, scale), {"n_wells": len(x), "n_constant_features": n_constant}


def none(x: np.ndarray, roles: Roles) -> tuple[Transform, Account]:
    """Nothing but the z-score that every chain starts with."""
    return Scale(np.zeros(x.shape[1]), np.ones(x.shape[1])), {}


def sphere(x: np.ndarray, roles: Roles, *, ridge: float = 0.01, rank: int | None = None) -> tuple[Transform, Account]:
    """ZCA whitening on negative controls, residuals within strata; the origin is the mean control.

    ``ridge`` is added to the eigenvalues as a multiple of their mean, ``rank`` keeps that many directions. Needs 2
    controls in all, none on any particular plate.
    """
    roles.require(roles.control, "negative control", "sphere")
    controls = x[roles.control]
    return _whiten(controls, within(controls, roles.strata[roles.control]), roles, "sphere", ridge, rank)


def wccn(x: np.ndarray, roles: Roles, *, ridge: float = 0.01, rank: int | None = None) -> tuple[Transform, Account]:
    """ZCA whitening on anchor residuals (within stratum and perturbation): within-class covariance normalisation.

    Residuals of anchors hold batch effect and noise but no perturbation (Hatch, Kajarekar and Stolcke, 2006). Needs
    anchors in 2 batches or more. Scores of perturbations that are anchors are circular.
    """
    roles.require(roles.anchor, "anchor", "wccn")
    roles.require_batches("wccn")
    anchors = x[roles.anchor]
    return _whiten(anchors, within(anchors, roles.cells[roles.anchor]), roles, "wccn", ridge, rank)


def _whiten(
    wells: np.ndarray, residuals: np.ndarray, roles: Roles, method: str, ridge: float, rank: int | None
) -> tuple[Transform, Account]:
    if residuals.std() < NO_SPREAD:
        raise InputError(
            f"{method} whitens what varies among {len(wells)} wells, and nothing does: they are too few in each stratum, or "
            "were centred on themselves; name more controls or anchors, or leave this step out"
        )
    whiten = Whitening(rank, method="zca", ridge=ridge).fit(residuals)
    if len(wells) <= wells.shape[1]:
        treatment = f"the ridge of {ridge:g} carries the rest" if ridge else f"rank {whiten.rank_} used"
        roles.notes.append(f"{method}: {len(wells)} wells for {wells.shape[1]} features; {treatment}")
    account = {"n_wells": len(wells), "rank": whiten.rank_, "ridge": ridge}
    return Affine(wells.mean(axis=0), whiten.whitening_), account


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
                f"tvn with coral needs 2 controls in each batch; {first_few(names[counts < 2])} has fewer: use coral=False"
            )
        y = np.empty_like(x)
        for i in range(len(names)):
            rows = index == i
            values, vectors = np.linalg.eigh(
                np.cov(x[rows & roles.control], rowvar=False) + self.ridge * np.eye(x.shape[1])
            )
            y[rows] = x[rows] @ (vectors / np.sqrt(values)) @ vectors.T
        return y


@dataclass
class Chain:
    """Transforms one after the other."""

    parts: list[Transform]

    def apply(self, x: np.ndarray, roles: Roles) -> np.ndarray:
        """Map rows by each part in turn."""
        for part in self.parts:
            x = part.apply(x, roles)
        return x


def tvn(x: np.ndarray, roles: Roles, *, coral: bool = True, ridge: float = 0.5) -> tuple[Transform, Account]:
    """Typical variation normalisation (Ando, McLean and Berndl, 2017).

    Scale on controls, full PCA of controls, scale on controls again (n in the denominator). With ``coral``, then per
    batch x (cov(controls of the batch) + ridge * I)^(-1/2). Needs 2 controls, with coral 2 in each batch; with fewer
    controls than features the rank is cut, and said.
    """
    roles.require(roles.control, "negative control", "tvn")
    controls = x[roles.control]
    residuals = within(controls, roles.strata[roles.control])
    scale = safe_scale(residuals.std(axis=0))
    whiten = Whitening().fit(residuals / scale)
    if whiten.rank_ < x.shape[1]:
        roles.notes.append(
            f"tvn: the {len(controls)} controls span {whiten.rank_} of {x.shape[1]} directions; that rank is used"
        )
    matrix = whiten.whitening_ / scale * np.sqrt(len(controls) / (len(controls) - 1))
    parts: list[Transform] = [Affine(controls.mean(axis=0), matrix)]
    return Chain([*parts, Coral(ridge)] if coral else parts), {"n_wells": len(controls), "rank": whiten.rank_}


# ------------------------------------------------------------------------------------------- centring on controls


@dataclass
class Center:
    """Take from each plate (batch where ``scale``) the offset of its own controls from the controls of their stratum."""

    control_means: Means
    anchor_means: Means
    origin: np.ndarray
    scale: bool
    min_controls: int

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
        y = np.empty_like(x)
        for i in range(len(names)):
            rows = index == i
            offsets = of_anchors[rows & anchor] if few[i] else of_controls[rows & roles.control]
            y[rows] = x[rows] - self.origin - offsets.mean(axis=0)
            if self.scale:
                y[rows] /= safe_scale(offsets.std(axis=0))
        return y


def center(x: np.ndarray, roles: Roles, *, min_controls: int = 3) -> tuple[Transform, Account]:
    """Centre each plate on its negative controls, within strata.

    A plate with fewer than ``min_controls`` is centred on its anchors, anchor means removed, which the notes say: one
    control a plate is no basis. A plate with too few of either is an error. The origin is the mean control.
    """
    roles.require(roles.control | roles.anchor, "control or anchor", "center")
    return _center(x, roles, scale=False, min_controls=min_controls)


def center_scale(x: np.ndarray, roles: Roles, *, min_controls: int = 3) -> tuple[Transform, Account]:
    """Centre each batch on its negative controls and divide by their standard deviation (n in the denominator)."""
    roles.require(roles.control, "negative control", "center_scale")
    return _center(x, roles, scale=True, min_controls=min_controls)


def _center(x: np.ndarray, roles: Roles, *, scale: bool, min_controls: int) -> tuple[Transform, Account]:
    basis = roles.control if roles.control.any() else roles.anchor
    control_means = Means.of(x[basis], roles.strata[basis])
    anchor = roles.anchor if roles.anchor.any() else basis
    anchor_means = Means.of(x[anchor], roles.cells[anchor])
    transform = Center(control_means, anchor_means, x[basis].mean(axis=0), scale, min_controls)
    return transform, {"n_controls": int(roles.control.sum()), "n_anchors": int(roles.anchor.sum())}


# --------------------------------------------------------------------------------------------------- components


@dataclass
class Rebuild:
    """Rebuild residuals within strata from the components kept, and put the means of strata back."""

    strata_means: Means
    projection: np.ndarray

    def apply(self, x: np.ndarray, roles: Roles) -> np.ndarray:
        """Map rows; a stratum that was not seen uses its own mean."""
        means = self.strata_means.at(roles.strata)
        unseen = ~np.isin(roles.strata.astype(str), self.strata_means.names)
        if unseen.any():
            means[unseen] = Means.of(x[unseen], roles.strata[unseen]).at(roles.strata[unseen])
        return (x - means) @ self.projection.T + means


@dataclass
class Basis:
    """Components found in residuals: sources = residuals @ unmixing.T, residuals ~ sources @ mixing.T."""

    unmixing: np.ndarray
    mixing: np.ndarray
    converged: np.ndarray
    stability: np.ndarray


def ica_basis(residuals: np.ndarray, k: int, random_state: int) -> Basis:
    """Independent components; stability is the matched |correlation| of sources with a second seed's."""
    with warnings.catch_warnings():  # convergence is reported for each component
        warnings.simplefilter("ignore", ConvergenceWarning)
        first, second = (
            ICA(k, random_state=seed).fit(residuals.astype(np.float32)) for seed in (random_state, random_state + 1)
        )
    stability = matched_correlation(first.transform(residuals), second.transform(residuals))
    return Basis(first.components_, first.mixing_, first.converged_, stability)


def pca_basis(residuals: np.ndarray, k: int, random_state: int) -> Basis:
    """Principal components, unit variance."""
    whiten = Whitening(k).fit(residuals)
    return _settled(whiten.whitening_, whiten.dewhitening_)


def random_basis(residuals: np.ndarray, k: int, random_state: int) -> Basis:
    """Whitened principal components in a random rotation."""
    whiten = Whitening(k).fit(residuals)
    rotation = ortho_group.rvs(whiten.rank_, random_state=random_state) if whiten.rank_ > 1 else np.eye(1)
    return _settled(rotation @ whiten.whitening_, whiten.dewhitening_ @ rotation.T)


def _settled(unmixing: np.ndarray, mixing: np.ndarray) -> Basis:
    return Basis(unmixing, mixing, np.ones(len(unmixing), dtype=bool), np.full(len(unmixing), np.nan))


def ica_drop(
    x: np.ndarray,
    roles: Roles,
    *,
    n_components: int | None = None,
    batch_r2: float = Rule.batch_r2,
    guard: bool = True,
    random_state: int = 0,
) -> tuple[Transform, Account]:
    """Whiten and ICA, remove the components that batch explains, rebuild from the rest.

    A component is removed where batch explains more than ``batch_r2`` of it among anchors (adjusted eta^2) and more of
    it than perturbation does among treated wells; ``guard=False`` removes by the first condition alone. Needs 2 batches
    that share anchors. Without ``n_components``: the rank, at most 100, and at least 6 wells for each component.
    """
    return _drop(x, roles, "ica_drop", ica_basis, n_components, Rule(batch_r2, guard), random_state)


def pca_drop(
    x: np.ndarray,
    roles: Roles,
    *,
    n_components: int | None = None,
    batch_r2: float = Rule.batch_r2,
    guard: bool = True,
    random_state: int = 0,
) -> tuple[Transform, Account]:
    """The steps of ``ica_drop`` on principal components: what ICA has to beat."""
    return _drop(x, roles, "pca_drop", pca_basis, n_components, Rule(batch_r2, guard), random_state)


def random_drop(
    x: np.ndarray,
    roles: Roles,
    *,
    n_components: int | None = None,
    batch_r2: float = Rule.batch_r2,
    guard: bool = True,
    random_state: int = 0,
) -> tuple[Transform, Account]:
    """The steps of ``ica_drop`` in a random rotation of the whitened principal components."""
    return _drop(x, roles, "random_drop", random_basis, n_components, Rule(batch_r2, guard), random_state)


def _drop(
    x: np.ndarray,
    roles: Roles,
    method: str,
    find: Callable[[np.ndarray, int, int], Basis],
    n_components: int | None,
    rule: Rule,
    random_state: int,
) -> tuple[Transform, Account]:
    roles.require_batches(method)
    roles.require(roles.anchor, "anchor", method)
    strata_means = Means.of(x, roles.strata)
    residuals = x - strata_means.at(roles.strata)
    basis = find(residuals, choose_n_components(residuals, n_components, len(x) // 6, roles), random_state)
    found = associations(
        x @ basis.unmixing.T,
        batch=roles.batch,
        label=roles.label,
        strata=roles.strata,
        anchors=roles.anchor,
        treated=roles.treated,
    )
    labels, removed = classify(found["batch_r2"], found["perturbation_r2"], rule)
    _note_removal(method, labels, found, roles)
    kept = ~removed
    account = {
        "n_components": len(removed),
        "n_removed": int(removed.sum()),
        "batch_r2": rule.batch_r2,
        "guard": rule.guard,
        "components": {
            **found,
            "converged": basis.converged,
            "stability": basis.stability,
            "label": labels,
            "removed": removed,
        },
        "sources": (residuals @ basis.unmixing.T).astype(np.float32),
        "mixing": basis.mixing.astype(np.float32),
    }
    return Rebuild(strata_means, basis.mixing[:, kept] @ basis.unmixing[kept]), account


def choose_n_components(x: np.ndarray, asked: int | None, carried: int, roles: Roles) -> int:
    """Components to look for in x (n, d): ``asked``, or what the wells carry; at most 100 and the rank, and said."""
    rank = min(x.shape[0] - 1, x.shape[1])
    if asked is not None and asked < 1:
        raise InputError(f"n_components={asked} is not allowed: use 1 or more, or leave it out")
    k = asked or max(1, min(MAX_COMPONENTS, carried))
    if asked and asked > rank:
        roles.notes.append(f"n_components lowered from {asked} to {rank}: {x.shape[0]} wells x {x.shape[1]} features")
    return min(k, rank)


def _note_removal(method: str, labels: np.ndarray, found: dict[str, np.ndarray], roles: Roles) -> None:
    counts = {name: int(np.sum(labels == name)) for name in ("batch", "mixed")}
    text = f"{method}: {counts['batch']} of {len(labels)} components removed as batch"
    if not counts["batch"]:
        text += f", so all this does is to cut the data to {len(labels)} dimensions"
    if counts["mixed"]:
        text += f", {counts['mixed']} kept as mixed by the biology guard"
    if np.isnan(found["perturbation_r2"]).all():
        text += "; no perturbation has two treated wells, so the guard kept every component"
    roles.notes.append(text)


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
    Needs anchors in 2 batches or more, and far more wells than components squared: without ``n_components``, the rank, at
    most 100 and the square root of the number of wells. Scores of perturbations that are anchors are circular.
    """
    roles.require(roles.anchor, "anchor", "ica_shrink")
    roles.require_batches("ica_shrink")
    residuals = within(x, roles.strata)
    k = choose_n_components(residuals, n_components, int(len(x) ** 0.5), roles)
    basis = ica_basis(residuals, k, random_state)
    anchors = x[roles.anchor]
    noise = within(anchors, roles.cells[roles.anchor]) @ basis.unmixing.T
    covariance, intensity = shrink_to_diagonal(noise)
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


# ------------------------------------------------------------------------------------------------ joint methods


@dataclass
class Joint:
    """Output of a method that corrects only the rows it was fitted on."""

    method: str
    rows: np.ndarray
    output: np.ndarray

    def apply(self, x: np.ndarray, roles: Roles) -> np.ndarray:
        """Give the fitted rows back."""
        if not np.array_equal(x, self.rows):
            raise InputError(
                f"{self.method} corrects the {len(self.output)} rows it was fitted on, not {len(x)} new ones: fit it on "
                "all rows together, or use a method that can be applied later, such as 'sphere' or 'ica'"
            )
        return self.output


def combat(x: np.ndarray, roles: Roles) -> tuple[Transform, Account]:
    """ComBat on batch (Johnson, Li and Rabinovic, 2007; scanpy's), on residuals within strata."""
    import anndata as ad
    import scanpy as sc

    roles.require_batches("combat")
    _note_confounding("combat", roles)
    means = Means.of(x, roles.strata).at(roles.strata)
    batches = ad.AnnData(x - means, obs={"batch": roles.batch.astype(str)})
    batches.obs["batch"] = batches.obs["batch"].astype("category")
    return Joint("combat", x, sc.pp.combat(batches, key="batch", inplace=False) + means), {}


def _note_confounding(method: str, roles: Roles) -> None:
    """Say where a method that does not look at controls cannot tell batch from perturbation."""
    label, batch = roles.label[roles.treated], roles.batch[roles.treated]
    names, index = np.unique(label.astype(str), return_inverse=True)
    single = sum(len(set(batch[index == i])) == 1 for i in range(len(names)))
    if single:
        roles.notes.append(
            f"{method}: {single} of {len(names)} perturbations lie in one batch only; what they do cannot be told from "
            "what the batch does, and is removed with it"
        )


def harmony(x: np.ndarray, roles: Roles, *, n_components: int = 50, random_state: int = 0) -> tuple[Transform, Account]:
    """Principal components of residuals within strata, then Harmony on batch (Korsunsky et al., 2019; harmonypy's)."""
    import harmonypy
    import pandas as pd

    roles.require_batches("harmony")
    _note_confounding("harmony", roles)
    if len(x) < 30:
        raise InputError(f"harmony clusters wells and needs 30 of them, and found {len(x)}: use another method")
    means = Means.of(x, roles.strata).at(roles.strata)
    whiten = Whitening(min(n_components, len(x) - 1)).fit(x - means)
    scores = (x - means) @ whiten.directions_.T
    meta = pd.DataFrame({"batch": roles.batch.astype(str)})
    found = harmonypy.run_harmony(scores, meta, "batch", verbose=False, random_state=random_state)
    corrected = np.asarray(found.Z_corr)
    if corrected.shape != scores.shape:
        raise RuntimeError(f"harmonypy gave {corrected.shape} for {scores.shape}")
    return Joint("harmony", x, corrected @ whiten.directions_ + means), {"n_components": whiten.rank_}


FITS: dict[str, Fit] = {
    fit.__name__: fit
    for fit in (
        none,
        center,
        center_scale,
        sphere,
        wccn,
        tvn,
        combat,
        harmony,
        ica_drop,
        pca_drop,
        random_drop,
        ica_shrink,
    )
}
