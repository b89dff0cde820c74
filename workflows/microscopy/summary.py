"""Tables of all runs: scores by arm, paired differences between arms and what the claims are worth, beside the paper's numbers.

    python workflows/microscopy/summary.py PROBES.csv... --batches BATCHES.csv... --out FOLDER      of DATA/SEED/ each

Intervals: Student's over seeds where there are several; else a bootstrap over perturbations (of the batch probe: over folds).
A claim ``holds`` where the whole interval lies on its side, ``holds weakly`` where it does but the difference is below .01, is ``refuted``
where the interval lies on the other side, says ``no difference`` where it holds zero and lies within .005 of it, and is else
``open``. A claim of equality holds where there is no difference. Where an arm dropped nothing in any fold, its claims say ``nothing dropped``.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from cellica.metrics import cluster_interval

sys.path.insert(0, str(Path(__file__).parents[1]))
import validation

WEAK, EQUAL = 0.01, 0.005
SCORES = ["auroc", "hoyer", "top_quarter"]
BATCH = ["batch_probe", "batch_chance", "n_features", "n_dropped", "n_converged"]
CLAIMS = (  # said; score; arm and other arm; sign of the difference that is claimed (0: none); whose claim
    ("whitening raises AUROC", "auroc", "pca", "base", 1, "paper"),
    ("ICA raises AUROC over whitening", "auroc", "pca+ica", "pca", 1, "paper"),
    ("ICA raises AUROC over a random rotation", "auroc", "pca+ica", "pca+random", 1, "paper"),
    ("a random rotation leaves AUROC as it is", "auroc", "pca+random", "pca", 0, "paper"),
    ("ICA makes weights sparser than whitening", "hoyer", "pca+ica", "pca", 1, "paper"),
    ("ICA makes weights sparser than a random rotation", "hoyer", "pca+ica", "pca+random", 1, "paper"),
    ("ICA makes weights sparser than raw features", "hoyer", "pca+ica", "base", 1, "paper"),
    ("whitening raises the top quarter's share", "top_quarter", "pca", "base", 1, "paper"),
    ("ICA raises the top quarter's share over whitening", "top_quarter", "pca+ica", "pca", 1, "paper"),
    ("ICA raises it over a random rotation", "top_quarter", "pca+ica", "pca+random", 1, "paper"),
    ("dropping batch components raises AUROC", "auroc", "ica_drop", "pca+ica", 1, "ours"),
    ("dropping in the ICA basis beats the PCA basis", "auroc", "ica_drop", "pca_drop", 1, "ours"),
    ("dropping in the ICA basis beats a random basis", "auroc", "ica_drop", "random_drop", 1, "ours"),
    ("ICA leaves the batch probe as it is", "batch_probe", "pca+ica", "pca", 0, "ours"),
    ("dropping lowers the batch probe", "batch_probe", "ica_drop", "pca+ica", -1, "ours"),
    ("... by more than in the PCA basis", "batch_probe", "ica_drop", "pca_drop", -1, "ours"),
    ("... by more than in a random basis", "batch_probe", "ica_drop", "random_drop", -1, "ours"),
)
PAPER = pd.DataFrame(  # arXiv 2603.11970: AUROC of EIF3H, share of signal in the top 25 % of features; RxRx3-core, OpenPhenom
    [("base", 0.682, 0.163), ("pca", 0.724, 0.332), ("pca+ica", 0.749, 0.386), ("pca+random", 0.725, 0.287)],
    columns=["arm", "auroc_eif3h", "top_quarter"],
)


def read(files: list[Path]) -> pd.DataFrame:
    tables = [pd.read_csv(file).assign(data=file.parent.parent.name, seed=int(file.parent.name)) for file in files]
    return pd.concat(tables, ignore_index=True)


def averaged(table: pd.DataFrame, by: list[str], values: list[str]) -> pd.DataFrame:
    return table.groupby(by, sort=False)[values].mean().reset_index()


def long(probes: pd.DataFrame, batches: pd.DataFrame) -> pd.DataFrame:
    """One row a value: data, penalty, score, seed, unit (perturbation, or fold) and arm."""
    of_probes = probes.melt(["data", "penalty", "seed", "perturbation", "arm"], SCORES, "score")
    of_batches = batches.assign(penalty="").melt(["data", "penalty", "seed", "fold", "arm"], BATCH, "score")
    names = {"perturbation": "unit", "fold": "unit"}
    return pd.concat([of_probes.rename(columns=names), of_batches.rename(columns=names)], ignore_index=True)


def interval(values: pd.DataFrame) -> list[object]:
    """Mean, ends, and number and kind of what the interval is over, of a table of value, seed and unit."""
    known = values.dropna(subset="value")
    by_seed = known.groupby("seed")["value"].mean()
    if len(by_seed) > 1:
        return [*validation.interval(by_seed), len(by_seed), "seeds"]
    unit = known["unit"].astype(str)
    found = known["value"].to_numpy(dtype=float)
    low, high = cluster_interval(found, unit.to_numpy()) if len(found) else (np.nan, np.nan)
    return [found.mean() if len(found) else np.nan, low, high, unit.nunique(), "units"]


def summary_of(values: pd.DataFrame) -> pd.DataFrame:
    by = ["data", "penalty", "score", "arm"]
    rows = [[*names, *interval(group)] for names, group in values.groupby(by, sort=False)]
    return pd.DataFrame(rows, columns=[*by, "mean", "low", "high", "n", "over"])


def claims_of(values: pd.DataFrame) -> pd.DataFrame:
    rows = []
    dropped = values[values["score"] == "n_dropped"].groupby(["data", "arm"])["value"].max()
    for (data, penalty), part in values.groupby(["data", "penalty"], sort=False):
        for said, score, arm, than, sign, whose in CLAIMS:
            wide = part[part["score"] == score].pivot_table("value", ["seed", "unit"], "arm", dropna=False)
            if arm in wide and than in wide:
                gain = (wide[arm] - wide[than]).rename("value").reset_index()
                found = interval(gain)
                idle = arm.endswith("_drop") and dropped.get((data, arm), 0) == 0
                told = "nothing dropped" if idle else verdict(*found[:3], sign)
                rows.append([data, penalty, said, whose, score, arm, than, *found, told])
    names = ["data", "penalty", "claim", "whose", "score", "arm", "than", "mean", "low", "high", "n", "over", "verdict"]
    return pd.DataFrame(rows, columns=names)


def verdict(mean: float, low: float, high: float, sign: int) -> str:
    """What an interval of a difference says of a claim of this sign, or of equality (0).

    >>> verdict(0.2, 0.1, 0.3, 1), verdict(0.004, 0.002, 0.006, 1), verdict(0.2, 0.1, 0.3, -1), verdict(0.0, -0.1, 0.1, 1)
    ('holds', 'holds weakly', 'refuted', 'open')
    """
    if not np.isfinite([low, high]).all():
        return "open"
    within = low <= 0 <= high and max(-low, high) < EQUAL
    if sign == 0:
        return "holds" if within else "refuted" if low > 0 or high < 0 else "open"
    if within:
        return "no difference"
    low, high = (low, high) if sign > 0 else (-high, -low)
    if low > 0:
        return "holds" if abs(mean) >= WEAK else "holds weakly"
    return "refuted" if high < 0 else "open"


def example_of(probes: pd.DataFrame, name: str = "EIF3H") -> pd.DataFrame:
    """AUROC of one perturbation by arm, beside the paper's; empty where it was not probed."""
    mine = probes[probes["perturbation"] == name]
    table = mine.pivot_table("auroc", ["data", "penalty", "arm"], sort=False).reset_index()
    return table.merge(PAPER[["arm", "auroc_eif3h"]].rename(columns={"auroc_eif3h": "paper"}), on="arm", how="left")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("probes", type=Path, nargs="+")
    parser.add_argument("--batches", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    probes = averaged(read(options.probes), ["data", "seed", "penalty", "arm", "perturbation"], SCORES)
    batches = averaged(read(options.batches), ["data", "seed", "arm", "fold"], BATCH)
    values = long(probes, batches)
    validation.write(probes.round(4), options.out / "probes.csv")
    validation.write(batches.round(4), options.out / "batches.csv")
    validation.write(summary_of(values), options.out / "summary.csv")
    validation.write(claims_of(values), options.out / "claims.csv")
    validation.write(example_of(probes), options.out / "eif3h.csv")
    validation.write(PAPER, options.out / "paper.csv")


if __name__ == "__main__":
    main()
