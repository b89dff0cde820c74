"""Removal of components that batch explains, in a basis of independent, principal or random components.

Components are those of residuals within strata, and the means of strata are put back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cellica.bases import Basis, choose_n_components, ica_basis, pca_basis, random_basis
from cellica.components import (
    MIXED,
    Rule,
    associations,
    batch_q,
    classify,
    nuisances,
    removal_path,
)
from cellica.roles import Account, Chain, Means, Rebuild, Roles, Transform, strata_at, within
from cellica.schema import InputError
from cellica.stability import Stability, stability

N_TOP = 5  # wells named for each component, those with the largest |source|
MATCHES = ("threshold", "number", "variance")
SAME = 0.95  # removed parts that agree to less than this are said to differ between seeds


def ica_drop(
    x: np.ndarray,
    roles: Roles,
    *,
    n_components: int | None = None,
    batch_r2: float = Rule.batch_r2,
    guard: bool = True,
    mixed: str = Rule.mixed,
    max_biology: float = Rule.max_biology,
    check_stability: bool = True,
    random_state: int = 0,
) -> tuple[Transform, Account]:
    """Whiten and ICA, remove the components that batch explains, rebuild from the rest.

    A component is removed where batch explains more than ``batch_r2`` of it among anchors (adjusted eta^2) and more of
    it than perturbation does among treated wells; ``guard=False`` removes by the first condition alone. Components that
    pass the first condition only are ``mixed``: kept (``"keep"``), removed (``"remove"``), or freed of what batch explains
    beyond perturbation in an additive fit to all wells (``"regress"``). In all, components that hold more than
    ``max_biology`` of what perturbation explains are not removed.

    Needs 2 batches that share anchors, and 2 treated wells of one perturbation in a batch for the guard: without these
    nothing is removed. One anchor alone says nothing of batches. Without ``n_components``: the rank, at most 100, and at
    least 6 wells for each component. ``check_stability`` refits seven times (``stability``).
    """
    rule = _rule(batch_r2, guard, mixed, max_biology)
    return _drop(x, roles, "ica_drop", ica_basis, n_components, rule, random_state, check_stability=check_stability)


def pca_drop(
    x: np.ndarray,
    roles: Roles,
    *,
    n_components: int | None = None,
    batch_r2: float = Rule.batch_r2,
    guard: bool = True,
    mixed: str = Rule.mixed,
    max_biology: float = Rule.max_biology,
    match: str = "threshold",
    random_state: int = 0,
) -> tuple[Transform, Account]:
    """The steps of ``ica_drop`` on principal components: what ICA has to beat.

    ``match``: at the same threshold, or as many components (``"number"``) or as much variance (``"variance"``) as
    ``ica_drop`` removes from these wells, those that batch explains most. Needs what ``ica_drop`` needs.
    """
    rule = _rule(batch_r2, guard, mixed, max_biology)
    return _drop(x, roles, "pca_drop", pca_basis, n_components, rule, random_state, match=match)


def random_drop(
    x: np.ndarray,
    roles: Roles,
    *,
    n_components: int | None = None,
    batch_r2: float = Rule.batch_r2,
    guard: bool = True,
    mixed: str = Rule.mixed,
    max_biology: float = Rule.max_biology,
    match: str = "threshold",
    random_state: int = 0,
) -> tuple[Transform, Account]:
    """The steps of ``ica_drop`` in a random rotation of the whitened principal components; ``match`` as in ``pca_drop``.

    A random basis that removes nothing proves nothing: look at it with ``match="number"`` and ``"variance"`` too.
    """
    rule = _rule(batch_r2, guard, mixed, max_biology)
    return _drop(x, roles, "random_drop", random_basis, n_components, rule, random_state, match=match)


def _rule(batch_r2: float, guard: bool, mixed: str, max_biology: float) -> Rule:
    if mixed not in MIXED:
        raise InputError(f"mixed={mixed!r} is not known: use one of {', '.join(map(repr, MIXED))}")
    for name, value in (("batch_r2", batch_r2), ("max_biology", max_biology)):
        if not 0 <= value <= 1:
            raise InputError(f"{name}={value} is a share: use 0 to 1")
    return Rule(batch_r2, guard, mixed=mixed, max_biology=max_biology)


def _drop(
    x: np.ndarray,
    roles: Roles,
    method: str,
    find: Callable[[np.ndarray, int, int], Basis],
    n_components: int | None,
    rule: Rule,
    random_state: int,
    *,
    match: str = "threshold",
    check_stability: bool = False,
) -> tuple[Transform, Account]:
    roles.require_batches(method)
    roles.require(roles.anchor, "anchor", method)
    if match not in MATCHES:
        raise InputError(f"match={match!r} is not known: use one of {', '.join(map(repr, MATCHES))}")
    strata_means = Means.of(x, roles.strata)
    residuals = x - strata_means.at(roles.strata)
    k = choose_n_components(residuals, n_components, len(x) // 6, roles)
    basis = find(residuals, k, random_state)
    if n_components and len(basis.unmixing) < k:
        roles.notes.append(f"{method}: {len(basis.unmixing)} components instead of {k}, which is the rank of the data")
    found, path = _judge(x, roles, basis, rule)
    if match != "threshold":
        path["action"] = _matched_actions(x, roles, ica_basis(residuals, k, random_state), path, rule, match)
    removed, regressed = (path["component"][path["action"] == act] for act in ("removed", "regressed"))
    _note_removal(method, path, found, rule, match, roles)
    if not basis.converged.all():
        roles.notes.append(
            f"{method}: {basis.converged.sum()} of {len(basis.converged)} components have a clearly non-Gaussian direction that "
            f"settled; {len(x)} wells do not tell the directions of the others from chance (columns converged, stability)"
        )
    stable = stability(residuals, basis, roles.batch, random_state) if check_stability else None
    if stable:
        _note_seeds(method, x, roles, basis, stable, removed, rule)

    sources = residuals @ basis.unmixing.T
    kept = np.setdiff1d(np.arange(len(basis.unmixing)), removed)
    # Without anything to remove the data stay as they are: rebuilding would cut them to the components' space
    projection = basis.mixing[:, kept] @ basis.unmixing[kept] if len(removed) else np.eye(x.shape[1])
    parts: list[Transform] = [Rebuild(strata_means, projection)]
    if len(regressed):
        parts.append(_regress(sources[:, regressed], basis, regressed, strata_means, roles))
    account = {
        "n_components": len(sources.T),
        "n_removed": len(removed),
        "n_regressed": len(regressed),
        "batch_r2": rule.batch_r2,
        "guard": rule.guard,
        "mixed": rule.mixed,
        "max_biology": rule.max_biology,
        "match": match,
        "components": _table(x, roles, basis, found, path, stable, random_state),
        "path": path,
        "sources": sources.astype(np.float32),
        "mixing": basis.mixing.astype(np.float32),
        "top_wells": _top_wells(sources, roles),
    }
    return (Chain(parts) if len(parts) > 1 else parts[0]), account


def _judge(
    x: np.ndarray, roles: Roles, basis: Basis, rule: Rule
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Shares of batch and perturbation in each component, and the removal path."""
    wells: dict[str, Any] = {"batch": roles.batch, "label": roles.label, "strata": roles.strata}
    found = associations(x @ basis.unmixing.T, anchors=roles.anchor, treated=roles.treated, **wells)
    labels = classify(found["batch_r2"], found["perturbation_r2"], rule)
    power = np.square(basis.mixing).sum(axis=0)
    return found, removal_path(labels, found["batch_r2"], found["perturbation_r2"], power, rule)


def _matched_actions(
    x: np.ndarray, roles: Roles, independent: Basis, path: dict[str, np.ndarray], rule: Rule, match: str
) -> np.ndarray:
    """Remove as many components, or as much variance, as ``ica_drop`` does, those first that batch explains most."""
    theirs = _judge(x, roles, independent, rule)[1]
    gone = theirs["action"] == "removed"
    order = np.argsort(-np.nan_to_num(path["batch_r2"]), kind="stable")
    n = int(gone.sum())
    if match == "variance":
        asked = np.diff(theirs["variance_share"], prepend=0)[gone].sum()
        reached = np.cumsum(np.diff(path["variance_share"], prepend=0)[order])
        n = int(np.argmin(np.abs(np.append(0, reached) - asked)))  # the number that comes nearest
    action = np.full(len(order), "kept", dtype=object)
    action[order[:n]] = "removed"
    return action


def _table(
    x: np.ndarray,
    roles: Roles,
    basis: Basis,
    found: dict[str, np.ndarray],
    path: dict[str, np.ndarray],
    stable: Stability | None,
    random_state: int,
) -> dict[str, np.ndarray]:
    sources, anchor = x @ basis.unmixing.T, roles.anchor
    more = nuisances(
        sources,
        batch=roles.batch,
        label=roles.label,
        strata=roles.strata,
        anchors=anchor,
        plate=roles.plate,
        positions=roles.positions,
        covariates=roles.covariates,
    )
    q = batch_q(sources[anchor], batch=roles.batch[anchor], cells=roles.cells[anchor], random_state=random_state)
    unknown = {"stability": np.full(len(q), np.nan)}
    place = np.argsort(path["component"])
    return {
        **found,
        "batch_q": q,
        **more,
        "converged": basis.converged,
        **(stable.columns if stable else unknown),
        "label": path["label"][place],
        "removed": path["action"][place] == "removed",
    }


def _top_wells(sources: np.ndarray, roles: Roles) -> np.ndarray:
    """Names (k, 5) of the wells with the largest |source|, the largest first; empty without names."""
    names = roles.names if roles.names is not None else np.arange(len(sources)).astype(str)
    return names[np.argsort(-np.abs(sources), axis=0, kind="stable")[:N_TOP]].T.astype(str).astype(object)


# --------------------------------------------------------------------------------------------------- what is said


def _note_removal(
    method: str, path: dict[str, np.ndarray], found: dict[str, np.ndarray], rule: Rule, match: str, roles: Roles
) -> None:
    label, action, k = path["label"], path["action"], len(path["label"])
    removed = action == "removed"
    why = "as batch" if match == "threshold" else f"to equal the {match} that ica_drop removes"
    text = f"{method}: {removed.sum()} of {k} components removed {why}"
    if removed.any():
        gone = {name: np.diff(path[name], prepend=0)[removed].sum() for name in ("batch_share", "biology_share")}
        text += (
            f"; with them go {gone['batch_share']:.0%} of what batch explains among anchors and "
            f"{gone['biology_share']:.1%} of what perturbation explains"
        )
    else:
        text += ", so the data stay as they are"
    kept = (label == "mixed") & (action == "kept")
    if kept.any():
        text += f", {kept.sum()} kept as mixed by the biology guard"
    if rule.mixed != "keep" and not (label == "mixed").any():
        text += f"; no component is mixed, so mixed={rule.mixed!r} did nothing"
    if (action == "regressed").any():
        text += f", {np.sum(action == 'regressed')} mixed freed of what batch explains beyond perturbation"
    capped = (action == "kept") & (label == "batch") if match == "threshold" else np.zeros(k, dtype=bool)
    if capped.any() or (kept.any() and rule.mixed == "remove"):
        text += (
            f"; {int(capped.sum() + (kept.sum() if rule.mixed == 'remove' else 0))} kept because removing them would take "
            f"more than {rule.max_biology:.0%} of what perturbation explains (max_biology)"
        )
    if np.isnan(found["perturbation_r2"]).all():
        text += "; no perturbation has two treated wells, so the guard kept every component"
    if np.isnan(found["batch_r2"]).all():
        text += "; no anchors repeat within and across batches, so the share of batch is unknown"
    roles.notes.append(text)
    shown = np.flatnonzero((label == "batch") | (label == "mixed") | removed)[:10]
    if len(shown):
        steps = [
            f"{path['component'][i]} ({label[i]}, batch {path['batch_r2'][i]:.2f}, perturbation {path['perturbation_r2'][i]:.2f}, "
            f"{action[i]}): {path['batch_share'][i]:.0%}, {path['biology_share'][i]:.1%}"
            for i in shown
        ]
        roles.notes.append(
            f"{method}: removal path, component by component, with the cumulative shares of what batch and what perturbation "
            f"explain: {'; '.join(steps)}"
        )


def _note_seeds(
    method: str, x: np.ndarray, roles: Roles, basis: Basis, stable: Stability, removed: np.ndarray, rule: Rule
) -> None:
    """Say whether other seeds remove the same."""
    here = basis.mixing[:, removed] @ basis.unmixing[removed]
    counts, overlap = [], []
    for refit in stable.seeds:
        path = _judge(x, roles, refit, rule)[1]
        gone = path["component"][path["action"] == "removed"]
        there = refit.mixing[:, gone] @ refit.unmixing[gone]
        counts.append(len(gone))
        overlap.append(_agreement(within(x, roles.strata), here, there))
    if min(overlap) >= SAME and set(counts) == {len(removed)}:
        if len(removed):
            roles.notes.append(
                f"{method}: {len(counts)} other seeds remove the same ({min(overlap):.0%} or more alike)"
            )
        return
    roles.notes.append(
        f"{method}: other seeds do not remove the same: {', '.join(map(str, counts))} components against {len(removed)} here, "
        f"and what is removed is {min(overlap):.0%} to {max(overlap):.0%} alike; look at the column stability"
    )


def _agreement(residuals: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    """How far two matrices remove the same from residuals: 1 - |difference|^2 / (|a|^2 + |b|^2); 1 where both remove none."""
    one, other = residuals @ a.T, residuals @ b.T
    total = np.square(one).sum() + np.square(other).sum()
    return float(1 - np.square(one - other).sum() / total) if total > 0 else 1.0


# ------------------------------------------------------------------------------------------------ dual regression


@dataclass
class Regress:
    """Take from some components what batch explains beyond perturbation, and leave the rest of them."""

    strata_means: Means
    unmixing: np.ndarray
    mixing: np.ndarray
    cell_means: Means
    batch_means: Means

    def apply(self, x: np.ndarray, roles: Roles) -> np.ndarray:
        """Map rows; a batch that was not in the fit is read from its own anchors."""
        offset = self.batch_means.at(roles.batch)
        unseen = ~np.isin(roles.batch.astype(str), self.batch_means.names)
        if unseen.any():
            sources = (x - strata_at(self.strata_means, x, roles.strata)) @ self.unmixing.T
            known = np.isin(roles.cells, self.cell_means.names)
            beyond = sources - self.cell_means.at(roles.cells)
            for name in np.unique(roles.batch[unseen].astype(str)):
                rows = roles.batch.astype(str) == name
                if not (rows & known).any():
                    raise InputError(
                        f"batch {str(name)!r} holds no perturbation of the fit, so its share of the mixed components is unknown: give "
                        "its controls or anchors, or fit with mixed='keep'"
                    )
                offset[rows] = beyond[rows & known].mean(axis=0)
        return x - offset @ self.mixing.T


def _regress(sources: np.ndarray, basis: Basis, chosen: np.ndarray, strata_means: Means, roles: Roles) -> Regress:
    """Sources = perturbation within stratum + batch + noise, by least squares over all wells with a label."""
    rows = roles.labelled | roles.control
    cells, cell = np.unique(roles.cells[rows].astype(str), return_inverse=True)
    batches, batch = np.unique(roles.batch.astype(str), return_inverse=True)
    count = np.zeros((len(cells), len(batches)))
    np.add.at(count, (cell, batch[rows]), 1)
    beyond = within(sources[rows], cell)
    right = np.zeros((len(batches), sources.shape[1]))
    np.add.at(right, batch[rows], beyond)
    normal = np.diag(count.sum(axis=0)) - (count / count.sum(axis=1, keepdims=True)).T @ count
    effect = np.linalg.pinv(normal, rcond=1e-9, hermitian=True) @ right  # 0 for batches that share nothing
    cell_means = Means.of(sources[rows] - effect[batch[rows]], cells[cell])
    means = Means([str(name) for name in batches], effect)
    return Regress(strata_means, basis.unmixing[chosen], basis.mixing[:, chosen], cell_means, means)
