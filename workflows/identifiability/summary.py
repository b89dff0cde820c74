"""Tables of all pairs of runs, and what the claims are worth, beside the numbers of the paper.

    python workflows/identifiability/summary.py --digits LEAK.npz... --camae SEED.h5ad... --out FOLDER

``pairs.csv``: a row a pair, direction, space and class of maps. ``decoders.csv``: a row a pair of digits' autoencoders: L of both decoders,
sqrt(2 L + L^2), reconstruction, how far the two paint apart. ``scores.csv``: means over pairs. ``claims.csv``: in how many pairs an order
of errors holds. Pairs of one seed share it, so an interval over pairs would claim too much: medians and ranges are given.
"""

import argparse
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from cellica import identifiability, progress
from cellica.alignment import diameter

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
import compare
import validation

ORDER = (("linear", "rigid"), ("rigid", "ica"), ("ica", "permutation"))
L_KINDS = ("L", "L_90", "L_scaled")
ROUNDING = 1e-6
PAPER = pd.DataFrame(  # arXiv 2603.11970, table 1: mean error over the diameter
    [
        ("Pythia-160M, two seeds", 0.219, 0.150, 0.131, 0.202, 0.25),
        ("MAE, timm and original", 0.197, 0.109, 0.036, 0.145, 0.59),
        ("CheXpert MAE, small and base", 0.218, 0.104, 0.048, 0.175, 0.38),
        ("ResNet-18 fc, two seeds", 0.382, 0.206, 0.175, 0.312, 0.40),
    ],
    columns=["pair", "permutation", "rigid", "linear", "ica", "efficiency"],
)


def of_digits(file: Path, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Errors of every pair of seeds at one leak, and what their decoders are like."""
    with np.load(file, allow_pickle=False) as found:
        run = {name: found[name] for name in found.files}
    leak = float(run["leak"])
    names = [str(one) for one in run["seeds"]]
    sides = {name: pd.DataFrame(latents) for name, latents in zip(names, run["latents"])}
    pairs = compare.compared(sides, seed=seed).assign(data=f"digits, leak {leak:g}", leak=leak)
    rows = []
    for i, j in combinations(range(len(names)), 2):
        apart = np.linalg.norm(run["painted"][i] - run["painted"][j], axis=1).mean()
        size = diameter(run["painted"][j].astype(float))
        row = {
            "leak": leak,
            "a": names[i],
            "b": names[j],
            "error": run["error"][[i, j]].mean(),
            "painted_apart": apart / size,
        }
        for kind in L_KINDS:
            row[kind] = run[kind][[i, j]].mean()
            row[f"bound_{kind}"] = identifiability.rigid_bound(row[kind])
        for space in compare.SPACES:
            at = pairs[(pairs["space"] == space) & (pairs["group"] == "rigid")]
            both = at[at["a"].isin([names[i], names[j]]) & at["b"].isin([names[i], names[j]])]
            row[f"rigid_{space}"] = both["held_out"].mean()
        rows.append(row)
    return pairs, pd.DataFrame(rows)


def of_camae(files: list[Path], seed: int) -> pd.DataFrame:
    """As many components as the rows allow ICA: sqrt(rows / 10) of each half, 5 rows an entry of the unmixing matrix."""
    sides = {file.stem: compare.read(file, None) for file in files}
    n = min(len(side) for side in sides.values())
    k = min(int(np.sqrt(n / 10)), *(side.shape[1] for side in sides.values()))
    leading = {name: _leading(side, n // 4) for name, side in sides.items()}
    return compare.compared(leading, max(2, k), seed).assign(data="CA-MAE on a simulated screen", leak=np.nan)


def _leading(side: pd.DataFrame, most: int) -> pd.DataFrame:
    """The leading principal components, where there are more columns than half the rows can fit a map to."""
    if side.shape[1] <= most:
        return side
    centered = side - side.mean()
    _, _, directions = np.linalg.svd(centered.to_numpy(), full_matrices=False)
    return pd.DataFrame(centered.to_numpy() @ directions[:most].T, index=side.index)


def scores_of(pairs: pd.DataFrame) -> pd.DataFrame:
    """Mean, least and greatest over pairs, by data, space and class."""
    groups = pairs.groupby(["data", "space", "group"], sort=False)
    table = groups["held_out"].agg(["mean", "min", "max"]).join(groups["chance"].mean())
    table["n_pairs"] = groups.size()
    table["n_components"] = groups["n_components"].mean()
    table["n_converged"] = groups["n_converged"].mean()
    whitened = pairs[pairs["space"] == "whitened"].groupby("data")["efficiency"].median()
    return table.reset_index().assign(median_efficiency=lambda rows: rows["data"].map(whitened))


def claims_of(pairs: pd.DataFrame, decoders: pd.DataFrame) -> pd.DataFrame:
    """In how many pairs an order holds or both are equal, and what share of ICA's components settled: without that, it is no test."""
    rows = []
    keys = ["data", "a", "b", "space"]
    wide = pairs.pivot_table(index=keys, columns="group", values="held_out", sort=False).reset_index()
    settled = (pairs["n_converged"] / pairs["n_components"]).groupby(pairs["data"]).mean()
    for (data, space), part in wide.groupby(["data", "space"], sort=False):
        for low, high in ORDER:
            rows.append([f"{low} <= {high}", data, space, *_counted(part[high] - part[low]), "ica" in (low, high)])
    at = pairs[(pairs["space"] == "whitened") & (pairs["group"] == "ica")]
    for data, part in at.groupby("data", sort=False):
        rows.append(["efficiency > 0", data, "whitened", *_counted(part["efficiency"]), True])
    names = ["claim", "data", "space", "n_true", "n_equal", "n", "median", "of_ica"]
    table = pd.DataFrame(rows, columns=names)
    equal = table["n_equal"].where(table["claim"].str.contains("<="), 0)
    share = (table["n_true"] + equal) / table["n"]
    table["verdict"] = np.select([share == 1, share >= 0.9, share <= 0.1], ["holds", "mostly", "refuted"], "open")
    table["ica_settled"] = table["data"].map(settled).where(table.pop("of_ica"))
    if len(decoders):
        table = pd.concat([table, trends_of(decoders)], ignore_index=True)
    return table


def _counted(gain: pd.Series) -> tuple[int, int, int, float]:
    """Pairs above 0, pairs at 0 up to rounding, all pairs, and the median."""
    return int((gain > ROUNDING).sum()), int((gain.abs() <= ROUNDING).sum()), len(gain), float(gain.median())


def trends_of(decoders: pd.DataFrame) -> pd.DataFrame:
    """Does the rigid error rise with the bound? Spearman's correlation of the means by leak: holds above .9.

    And does it where outputs disagree as much? The theorem is about equal outputs, but runs paint further apart where leaks are
    small: the partial correlation over pairs, given that distance, holds above .5 and is refuted below -.5.
    """
    rows = []
    means = decoders.groupby("leak").mean(numeric_only=True)
    for kind in L_KINDS:
        for space in compare.SPACES:
            rho = spearmanr(means[f"bound_{kind}"], means[f"rigid_{space}"]).statistic if len(means) > 2 else np.nan
            verdict = "holds" if rho > 0.9 else "refuted" if rho < 0 else "open"
            rows.append(
                [f"rigid error rises with the bound by {kind}", "digits, all leaks", space, rho, len(means), verdict]
            )
            partial = _partial(decoders[f"rigid_{space}"], decoders[f"bound_{kind}"], decoders["painted_apart"])
            verdict = "holds" if partial > 0.5 else "refuted" if partial < -0.5 else "open"
            said = f"... with the distance of outputs held fixed, by {kind}"
            rows.append([said, "digits, all leaks", space, partial, len(decoders), verdict])
    return pd.DataFrame(rows, columns=["claim", "data", "space", "median", "n", "verdict"])


def _partial(x: pd.Series, y: pd.Series, given: pd.Series) -> float:
    """Pearson's correlation of what a straight line in ``given`` leaves of both."""
    if len(x) < 4 or given.std() == 0:
        return float("nan")
    left = [one - np.polyval(np.polyfit(given, one, 1), given) for one in (x, y)]
    return float(np.corrcoef(*left)[0, 1]) if min(np.std(left, axis=1)) > 0 else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--digits", type=Path, nargs="*", default=[])
    parser.add_argument("--camae", type=Path, nargs="*", default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    progress.show()
    digits = [of_digits(file, options.seed) for file in options.digits]
    pairs = [one for one, _ in digits] + ([of_camae(options.camae, options.seed)] if options.camae else [])
    whole = pd.concat(pairs, ignore_index=True)
    decoders = pd.concat([one for _, one in digits], ignore_index=True) if digits else pd.DataFrame()
    validation.write(whole, options.out / "pairs.csv")
    validation.write(decoders, options.out / "decoders.csv")
    validation.write(scores_of(whole), options.out / "scores.csv")
    validation.write(claims_of(whole, decoders), options.out / "claims.csv")
    validation.write(PAPER, options.out / "paper.csv")


if __name__ == "__main__":
    main()
