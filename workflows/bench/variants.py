"""Would another recipe than `ica` be better? Variants of it on simulated screens, and what each gains over `ica`, paired.

    python workflows/bench/variants.py            a quarter of an hour on two cores; results/variants.csv

Anchors are controls and, where treatments lie in several batches, a quarter of them, drawn at random; the other treatments
are scored, and no fit sees their labels but for the biology guard. Real screens are not looked at here.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from cellica import (
    artifacts,
    bases,
    components,
    methods,
    normalize,
    progress,
    removal,
    retrieval,
    roles,
    simulate,
)
from cellica.roles import Account, Fit, Means, Rebuild, Roles, Transform
from cellica.tuning import paired_interval

WHERE = {  # preset: its size here, and what is scored
    "small": ({"n_experiments": 12, "n_treatments": 48}, "replicates"),
    "hard": ({"n_experiments": 12, "n_treatments": 48}, "classes"),
    "rxrx1-like": ({"n_experiments": 20, "n_treatments": 60, "n_anchors": 20}, "replicates"),
    "gaussian": ({"n_experiments": 20, "n_treatments": 60, "n_anchors": 20}, "replicates"),
}
N_SEEDS = 6
CONSENSUS = 5
MAX_QUERIES = 1500


def rebuilt(x: np.ndarray, wells: Roles, basis: bases.Basis, weights: np.ndarray) -> tuple[Transform, Account]:
    """Each component, in residuals within strata, multiplied by its weight; the data as they are where all are 1."""
    means = Means.of(x, wells.strata)
    whole = (basis.mixing * weights) @ basis.unmixing if (weights < 1).any() else np.eye(x.shape[1])
    return Rebuild(means, whole), {}


def judged(x: np.ndarray, wells: Roles, basis: bases.Basis) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Whether each component is removed by the rule of `ica`, its share of batch and its share of perturbation."""
    found, path = removal._judge(x, wells, basis, components.Rule())
    gone = np.zeros(len(basis.unmixing), dtype=bool)
    gone[path["component"][path["action"] == "removed"]] = True
    return gone, np.nan_to_num(found["batch_r2"]).clip(0, 1), np.nan_to_num(found["perturbation_r2"]).clip(0, 1)


def basis_of(x: np.ndarray, wells: Roles, seed: int, rows: np.ndarray | None = None) -> bases.Basis:
    residuals = roles.within(x, wells.strata)
    if rows is not None:
        residuals = residuals[rows]
    return bases.ica_basis(residuals, bases.choose_n_components(residuals, None, len(residuals) // 6, wells), seed)


def shrink(x: np.ndarray, wells: Roles, *, random_state: int = 0) -> tuple[Transform, Account]:
    """Batch components shrunk by what batch explains of them, not removed."""
    basis = basis_of(x, wells, random_state)
    gone, batch, _ = judged(x, wells, basis)
    return rebuilt(x, wells, basis, np.where(gone, np.sqrt(1 - batch), 1.0))


def shrink_all(x: np.ndarray, wells: Roles, *, random_state: int = 0) -> tuple[Transform, Account]:
    """Every component shrunk by what batch explains of it beyond perturbation: no threshold."""
    basis = basis_of(x, wells, random_state)
    _, batch, perturbation = judged(x, wells, basis)
    return rebuilt(x, wells, basis, np.sqrt(1 - (batch - perturbation).clip(0, 1)))


def consensus(x: np.ndarray, wells: Roles, *, random_state: int = 0) -> tuple[Transform, Account]:
    """The mean of what five seeds leave."""
    parts = []
    for i in range(CONSENSUS):
        basis = basis_of(x, wells, random_state + i)
        parts.append(rebuilt(x, wells, basis, (~judged(x, wells, basis)[0]).astype(float))[0].projection)  # type: ignore[attr-defined]
    return Rebuild(Means.of(x, wells.strata), np.mean(parts, axis=0)), {}


def subspace(x: np.ndarray, wells: Roles, *, random_state: int = 0) -> tuple[Transform, Account]:
    """Directions within the span of components of some batch (above .2) that batch explains most, by the rule of `ica`."""
    basis = basis_of(x, wells, random_state)
    _, batch, perturbation = judged(x, wells, basis)
    some = np.flatnonzero((batch > 0.2) & (batch > perturbation))
    if not len(some):
        return rebuilt(x, wells, basis, np.ones(len(batch)))
    anchors = wells.anchor
    noise = roles.within((x @ basis.unmixing[some].T)[anchors], wells.cells[anchors])
    between = Means.of(noise, wells.batch[anchors]).at(wells.batch[anchors])
    vectors = np.linalg.eigh(between.T @ between)[1]
    turned = bases.Basis(
        vectors.T @ basis.unmixing[some], basis.mixing[:, some] @ vectors, np.ones(len(some), dtype=bool)
    )
    gone, *_ = judged(x, wells, turned)
    whole = np.eye(x.shape[1]) - turned.mixing[:, gone] @ turned.unmixing[gone]
    return Rebuild(Means.of(x, wells.strata), whole), {}


def on_anchors(x: np.ndarray, wells: Roles, *, random_state: int = 0) -> tuple[Transform, Account]:
    """Components of the anchors alone."""
    basis = basis_of(x, wells, random_state, wells.anchor)
    return rebuilt(x, wells, basis, (~judged(x, wells, basis)[0]).astype(float))


def of_anchor_residuals(x: np.ndarray, wells: Roles, *, random_state: int = 0) -> tuple[Transform, Account]:
    """Components of what anchors differ by within perturbation: batch and noise, no biology."""
    anchors = wells.anchor
    noise = roles.within(x[anchors], wells.cells[anchors])
    basis = bases.ica_basis(noise, bases.choose_n_components(noise, None, len(noise) // 6, wells), random_state)
    return rebuilt(x, wells, basis, (~judged(x, wells, basis)[0]).astype(float))


def robust(x: np.ndarray, wells: Roles) -> tuple[Transform, Account]:
    """Median and median absolute deviation within strata, clipped at 10."""
    middle = np.median(x, axis=0)
    spread = 1.4826 * np.median(np.abs(roles.within(x, wells.strata)), axis=0)
    return Clipped(middle, roles.safe_scale(spread)), {}


class Clipped(roles.Scale):
    def apply(self, x: np.ndarray, roles: Roles) -> np.ndarray:
        """Scale rows, and clip them."""
        return super().apply(x, roles).clip(-10, 10)


S = methods.FITS
VARIANTS: dict[str, tuple[list[Fit], dict[str, object], str]] = {
    "ica": ([S["ica_drop"], S["sphere"]], {}, "the recipe"),
    "sphere": ([S["sphere"]], {}, "nothing removed"),
    "center+sphere": ([S["center"], S["sphere"]], {}, "the plain method"),
    "wccn": ([S["wccn"]], {}, "whitening on anchor residuals"),
    "ica_drop+center+sphere": ([S["ica_drop"], S["center"], S["sphere"]], {}, "centring after removal"),
    "center+ica_drop+sphere": ([S["center"], S["ica_drop"], S["sphere"]], {}, "centring before removal"),
    "sphere+ica_drop": ([S["sphere"], S["ica_drop"]], {}, "sphering before removal"),
    "ica_drop+wccn": ([S["ica_drop"], S["wccn"]], {}, "anchors in place of controls"),
    "wccn+ica_drop": ([S["wccn"], S["ica_drop"]], {}, "ICA in the space that wccn gives"),
    "ica_shrink": ([S["ica_shrink"]], {}, "noise covariance shrunk towards diagonal in the ICA basis"),
    "shrink": ([shrink, S["sphere"]], {}, "batch components shrunk instead of dropped"),
    "shrink_all": ([shrink_all, S["sphere"]], {}, "all components shrunk by their share of batch"),
    "regress": ([S["ica_drop"], S["sphere"]], {"mixed": "regress"}, "dual regression of mixed components"),
    "consensus": ([consensus, S["sphere"]], {}, "mean over five seeds"),
    "subspace": ([subspace, S["sphere"]], {}, "directions within the span of several components"),
    "on_anchors": ([on_anchors, S["sphere"]], {}, "fitted on anchors alone"),
    "of_anchor_residuals": ([of_anchor_residuals, S["sphere"]], {}, "ICA on anchor residuals"),
    "robust": ([robust, S["ica_drop"], S["sphere"]], {}, "median and MAD in place of mean and SD"),
    "batch_r2 .2": ([S["ica_drop"], S["sphere"]], {"batch_r2": 0.2}, "a lower threshold"),
    "batch_r2 .6": ([S["ica_drop"], S["sphere"]], {"batch_r2": 0.6}, "a higher threshold"),
}


def scores(preset: str, seed: int) -> Iterator[dict[str, object]]:
    """Mean average precision of each variant over the treatments that are not anchors."""
    sizes, what = WHERE[preset]
    adata = simulate.profiles(preset, random_state=seed, **sizes)
    label, control = adata.obs["perturbation"].astype(str), adata.obs["control"].astype(str)
    treated = np.unique(label[control == ""])
    anchors = set(label[control != ""])
    if what == "replicates":
        anchors |= set(np.random.default_rng(seed).choice(treated, len(treated) // 4, replace=False))
    wells = roles.roles_of(adata.obs, anchors=sorted(anchors))
    x = np.asarray(adata.X, dtype=np.float64)
    keep = ~label.isin(anchors).to_numpy()
    scored = adata[keep].copy()
    for name, (chain, options, _) in VARIANTS.items():
        given = {"check_stability": False, "random_state": seed, **options}
        y = methods.fit_chain(x, wells.take(np.ones(len(x), dtype=bool)), [normalize.standardize, *chain], given)[2]
        scored.obsm["X_y"] = y[keep].astype(np.float32)
        if what == "classes":
            keys = {"class_key": "moa", "group_key": "perturbation"}
            found = retrieval.class_retrieval(scored, use_rep="X_y", max_queries=MAX_QUERIES, **keys)
        else:
            found = retrieval.replicate_retrieval(scored, use_rep="X_y", max_queries=MAX_QUERIES)
        row = found.iloc[0]
        yield {
            "preset": preset,
            "seed": seed,
            "variant": name,
            "score": row["metric"],
            "value": row["value"],
            "chance": row["chance"],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "variants.csv")
    parser.add_argument("--seeds", type=int, default=N_SEEDS)
    arguments = parser.parse_args()
    progress.show()
    asked = [(preset, seed) for preset in WHERE for seed in range(arguments.seeds)]
    table = pd.DataFrame([row for one in progress.track(asked, "screens") for row in scores(*one)])
    artifacts.write_table(table.round(4), arguments.out, force=True)
    print(summary(table).to_string())


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Mean of each variant, and its paired difference from `ica` over seeds with a 95 % interval."""
    columns = {}
    for preset, part in table.groupby("preset", sort=False):
        values = part.pivot_table("value", "seed", "variant", sort=False)
        gains = values.sub(values["ica"], axis=0)
        columns[preset, "mAP"] = values.mean().map("{:.3f}".format)
        columns[preset, "gain"] = gains.apply(
            lambda g: "{:+.3f} ({:+.3f} to {:+.3f})".format(g.mean(), *paired_interval(g.to_numpy()))
        )
    return pd.DataFrame(columns).loc[list(VARIANTS)]


if __name__ == "__main__":
    main()
