"""Methods that correct the rows they were fitted on and no others: ComBat and Harmony, by their public packages."""

from dataclasses import dataclass

import numpy as np

from cellica.confounding import require_separable
from cellica.roles import Account, Means, Roles, Transform
from cellica.schema import InputError
from cellica.whitening import Whitening


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
    """ComBat on batch (Johnson, Li and Rabinovic, 2007; scanpy's), on residuals within strata.

    Looks at no controls and no anchors: what perturbations do that lie in one batch only is removed with the batch. Needs
    2 wells in each batch; a batch with one is refused by name, and so is a screen whose batches are its perturbations.
    """
    import anndata as ad
    import scanpy as sc

    roles.require_batches("combat")
    require_separable(roles, "combat")
    means = Means.of(x, roles.strata).at(roles.strata)
    batches = ad.AnnData(x - means, obs={"batch": roles.batch.astype(str)})
    batches.obs["batch"] = batches.obs["batch"].astype("category")
    with np.errstate(divide="ignore", invalid="ignore"):  # of its test of convergence, where an effect is 0
        corrected = sc.pp.combat(batches, key="batch", inplace=False)
    return Joint("combat", x, corrected + means), {}


def harmony(x: np.ndarray, roles: Roles, *, n_components: int = 50, random_state: int = 0) -> tuple[Transform, Account]:
    """Principal components of residuals within strata, then Harmony on batch (Korsunsky et al., 2019; harmonypy's).

    Looks at no controls and no anchors, as ComBat. Needs 30 wells, and 2 in each batch.
    """
    require_wells(x, roles, "harmony")
    means = Means.of(x, roles.strata).at(roles.strata)
    whiten = Whitening(min(n_components, len(x) - 1)).fit(x - means)
    scores = (x - means) @ whiten.directions_.T
    corrected = integrate(scores, roles.batch, random_state=random_state)
    return Joint("harmony", x, corrected @ whiten.directions_ + means), {"n_components": whiten.rank_}


def harmony_full(x: np.ndarray, roles: Roles, *, random_state: int = 0) -> tuple[Transform, Account]:
    """Harmony as in the benchmark of Arevalo et al. (2024): all features, 300 clusters, 20 iterations.

    With fewer than 1,200 wells, a cluster for each 4 of them, and said. Looks at no controls and no anchors. Needs 30 wells,
    and 2 in each batch.
    """
    require_wells(x, roles, "harmony_full")
    n_clusters = min(300, len(x) // 4)
    if n_clusters < 300:
        roles.notes.append(f"harmony_full: {n_clusters} clusters instead of 300, as there are {len(x)} wells")
    means = Means.of(x, roles.strata).at(roles.strata)
    settings = {"nclust": n_clusters, "max_iter_harmony": 20}
    corrected = integrate(x - means, roles.batch, random_state=random_state, **settings)
    return Joint("harmony_full", x, corrected + means), {"n_clusters": n_clusters}


def require_wells(x: np.ndarray, roles: Roles, method: str) -> None:
    """Raise an InputError where Harmony cannot run or would mean nothing."""
    roles.require_batches(method)
    require_separable(roles, method)
    if len(x) < 30:
        raise InputError(f"{method} clusters wells and needs 30 of them, and found {len(x)}: use another method")


def integrate(scores: np.ndarray, batch: np.ndarray, *, random_state: int, **settings: int) -> np.ndarray:
    """Harmony's rows (n, d)."""
    import harmonypy
    import pandas as pd

    n, d = scores.shape
    meta = pd.DataFrame({"batch": batch.astype(str)})
    given = np.pad(scores, ((0, 0), (0, int(n == d))))  # harmonypy takes a square matrix for its transpose
    found = harmonypy.run_harmony(given, meta, "batch", verbose=False, random_state=random_state, **settings)
    corrected = np.asarray(found.Z_corr)
    if corrected.shape != given.shape:
        raise RuntimeError(f"harmonypy gave {corrected.shape} for {given.shape}")
    return corrected[:, :d]
