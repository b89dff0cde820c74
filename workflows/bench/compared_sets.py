"""`cellica compare` on public sets of several batches: all scores, paired gains, and a figure for each set.

    python workflows/bench/compared_sets.py FOLDER            results/compare_SET.csv and compare_SET.png

FOLDER as in ``public_sets.py``. The sets are development sets: settings were looked at on them. Anchors are the controls alone. Of sets of more than 1,000 features every so many is taken (said). A set
without controls is scored as it is: methods that need controls are rows that say so.
"""

import argparse
from pathlib import Path

from public_sets import SETS, read

from cellica import artifacts, plot, progress, retrieval
from cellica.drawing import figure_of

MANY = 1000  # features; of more every so many is taken, to keep it to minutes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--only", nargs="+", choices=SETS, default=list(reversed(SETS)))
    arguments = parser.parse_args()
    progress.show()
    for name in progress.track(arguments.only, "sets"):
        wells = read(arguments.folder / f"{name}.parquet")
        batch_key, _ = SETS[name]
        wells.obs["control"] = wells.obs["control"].fillna("")
        controls = sorted(set(wells.obs.loc[wells.obs["control"] == "negative", "perturbation"].dropna().astype(str)))
        classes = wells.obs["class_label"].notna().any() if "class_label" in wells.obs else False
        if wells.n_vars > MANY:
            step = -(-wells.n_vars // MANY)
            wells = wells[:, ::step].copy()
            print(f"{name}: every {step}th feature, {wells.n_vars} of them")
        table = retrieval.compare(
            wells,
            batch_key=batch_key,
            strata_key=None,
            anchors=controls or None,
            class_key="class_label" if classes else None,
        )
        table["note"] = table["note"].where(table["note"] == "", table["note"] + "; ") + "development set"
        artifacts.write_table(table.round(4), arguments.out / f"compare_{name}.csv", force=True)
        figure_of(plot.tradeoff(table)).savefig(arguments.out / f"compare_{name}.png", dpi=110)
        print(f"\n{name}\n{retrieval.summary(table, chance=True).dropna(axis=1, how='all').round(3).to_string()}")
        print(retrieval.gains(table).to_string(na_rep="-"))
        for text in retrieval.cautions(table):
            print(f"mind: {text}")


if __name__ == "__main__":
    main()
