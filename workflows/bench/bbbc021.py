"""BBBC021, a development set: `ica` over ten seeds, and its paired difference from every peer, whichever way it falls.

    python workflows/bench/bbbc021.py bbbc021.h5ad            the file that the README's `cellica import table` makes

Writes to results/: ``bbbc021.csv``, a row a method, and ``bbbc021_mechanisms.csv``, the score of each mechanism, and the
difference from `center+sphere` where that mechanism is left out. Intervals: 95 %, bootstrap over compounds. Nothing is
chosen here.
"""

import argparse
from pathlib import Path

import anndata as ad
import pandas as pd

from cellica import artifacts, correct, progress, retrieval
from cellica.metrics import cluster_interval

RIDGES = (0.001, 0.01, 0.1, 1.0)
PEERS: list[tuple[str, dict[str, float | str]]] = [
    ("none", {}),
    ("center", {}),
    ("combat", {}),
    ("harmony", {}),
    ("tvn", {}),
    ("ruv", {}),
    ("leace", {}),
    *(("sphere", {"ridge": ridge}) for ridge in RIDGES),
    *(("center+sphere", {"ridge": ridge}) for ridge in RIDGES),
    *(("wccn", {"ridge": ridge}) for ridge in RIDGES),
    ("ica_drop", {}),
    ("pca_drop+sphere", {}),
    *((f"{basis}_drop+sphere", {"match": match}) for basis in ("pca", "random") for match in ("number", "variance")),
    ("ica_shrink", {}),
    ("ica_drop+center+sphere", {}),
]
N_SEEDS = 10
PLAIN = "center+sphere, ridge=0.01"


def queries(wells: ad.AnnData, method: str, **options: object) -> pd.Series:
    """Average precision of each query: wells of other compounds and weeks, of the same mechanism."""
    correct.run(wells, method, key_added="now", **options)
    scored = (wells.obs["control"] != "negative").to_numpy() & wells.obs["moa"].notna().to_numpy()
    found = retrieval.average_precision(
        wells,
        pos_sameby=["moa"],
        pos_diffby=["compound", "experiment"],
        neg_diffby=["moa", "compound", "experiment"],
        use_rep="X_now",
        queries=scored,
        candidates=scored,
    )
    return found["average_precision"].dropna()


def interval(values: pd.Series, compound: pd.Series) -> tuple[float, float]:
    """Of the mean over queries, compounds drawn with all of their queries."""
    return cluster_interval(values.to_numpy(), compound[values.index].astype(str).to_numpy())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    progress.show()
    wells = artifacts.read_adata(arguments.file)
    compound, moa = wells.obs["compound"], wells.obs["moa"].astype(str)
    seeds = pd.DataFrame(
        {
            seed: queries(wells, "ica", random_state=seed, check_stability=False)
            for seed in progress.track(range(N_SEEDS), "ica")
        }
    )
    ica = seeds[0]
    rows = [{"method": "ica", "class_map": ica.mean()}]
    found = {"ica": ica}
    for method, options in progress.track(PEERS, "peers"):
        quick = {"check_stability": False} if method.startswith("ica_drop") else {}
        name = ", ".join([method, *(f"{key}={value}" for key, value in options.items())])
        found[name] = queries(wells, method, **options, **quick)
        gain = ica - found[name]
        low, high = interval(gain, compound)
        rows.append(
            {"method": name, "class_map": found[name].mean(), "ica_minus_this": gain.mean(), "low": low, "high": high}
        )
    table = pd.DataFrame(rows)
    artifacts.write_table(table.round(4), arguments.out / "bbbc021.csv", force=True)

    by_moa = pd.DataFrame(
        {
            name: found[name].groupby(moa[found[name].index]).mean()
            for name in ("none", "sphere, ridge=0.01", PLAIN, "ica")
        }
    )
    by_moa.insert(0, "n_queries", ica.groupby(moa[ica.index]).size())
    gain = ica - found[PLAIN]
    left_out = {one: gain[moa[gain.index] != one] for one in by_moa.index}
    by_moa["gain_without_it"] = [left_out[one].mean() for one in by_moa.index]
    by_moa[["low", "high"]] = [interval(left_out[one], compound) for one in by_moa.index]
    artifacts.write_table(
        by_moa.round(4).reset_index(names="mechanism"), arguments.out / "bbbc021_mechanisms.csv", force=True
    )
    print(table.round(3).to_string(index=False))
    print(by_moa.round(3).to_string())
    means = seeds.mean()
    print(f"ica over {N_SEEDS} seeds: mean {means.mean():.4f}, {means.min():.4f} to {means.max():.4f}")


if __name__ == "__main__":
    main()
