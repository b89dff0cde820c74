"""Do no harm: corrections of public sets of several batches, against uncorrected profiles, paired over perturbations.

    python workflows/bench/public_sets.py FOLDER              parquet files; results/public_sets.csv

FOLDER holds dye_std4, varchamp_b14p2_raw, varchamp_b20_21 and cytosummarynet_stain (see README.md for their sources), one row a
well: columns batch, experiment, plate, well, perturbation, class_label, control, then features. Anchors are the controls alone,
so that no fit sees a label that is scored but for the biology guard; where there are no controls, methods that need them refuse,
and all wells are named as controls in a second run.
"""

import argparse
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd

from cellica import artifacts, correct, progress, retrieval
from cellica.schema import InputError
from cellica.tuning import paired_interval

COLUMNS = ("batch", "experiment", "plate", "well", "perturbation", "class_label", "control")
SETS = {  # name: column of the batch, and what else a replicate must differ in
    "varchamp_b14p2_raw": ("batch", ()),
    "varchamp_b20_21": ("experiment", ()),
    "dye_std4": ("batch", ("well",)),
    "cytosummarynet_stain": ("batch", ()),
}
METHODS = (
    "none",
    "center",
    "sphere",
    "center+sphere",
    "tvn",
    "combat",
    "harmony",
    "ica_drop",
    "ica",
    "sphere+ica_drop",
)


def read(file: Path) -> ad.AnnData:
    table = pd.read_parquet(file)
    columns = [name for name in COLUMNS if name in table]
    x = table.drop(columns=columns).to_numpy(np.float32)
    obs = table[columns].astype(object)
    obs.index = pd.Index([f"w{i}" for i in range(len(obs))], dtype=object)
    return ad.AnnData(x[:, np.isfinite(x).all(axis=0)], obs=obs)


def scores(wells: ad.AnnData, batch_key: str, apart: tuple[str, ...], key: str) -> pd.Series:
    """Average precision of each perturbation: its wells in other batches, among all treated wells of other batches."""
    treated = (wells.obs["control"] == "").to_numpy()
    found = retrieval.average_precision(
        wells,
        pos_sameby=["perturbation"],
        pos_diffby=[batch_key, *apart],
        neg_diffby=["perturbation", batch_key],
        use_rep=key,
        queries=treated,
        candidates=treated,
    )["average_precision"].dropna()
    return found.groupby(wells.obs["perturbation"].astype(str)[found.index]).mean()


def compared(name: str, wells: ad.AnnData, *, all_wells: bool = False) -> list[dict[str, object]]:
    """A row a method; ``all_wells``: every perturbation is named a control."""
    batch_key, apart = SETS[name]
    control = wells.obs["control"] == "negative"
    reference = sorted(set(wells.obs["perturbation"][control].dropna().astype(str))) or None
    if all_wells:
        name, reference = f"{name}, all wells as reference", sorted(set(wells.obs["perturbation"].astype(str)))
    rows: list[dict[str, object]] = []
    none = pd.Series(dtype=float)
    for method in METHODS:
        row: dict[str, object] = {"set": name, "method": method}
        options = {"check_stability": False} if "ica" in method else {}
        try:
            correct.run(
                wells, method, batch_key=batch_key, controls=reference, anchors=reference, key_added="now", **options
            )
        except InputError as error:
            rows.append(row | {"note": str(error)})
            continue
        values = scores(wells, batch_key, apart, "X_now")
        none = values if method == "none" else none
        difference = (values - none).to_numpy()
        low, high = paired_interval(difference)
        row |= {"replicate_map": values.mean(), "difference": difference.mean(), "low": low, "high": high}
        table = wells.uns["cellica"]["now"].get("components")
        rows.append(
            row | {"n_perturbations": len(values), "n_removed": np.nan if table is None else table["removed"].sum()}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "public_sets.csv")
    arguments = parser.parse_args()
    progress.show()
    rows: list[dict[str, object]] = []
    for name in progress.track(list(SETS), "sets"):
        wells = read(arguments.folder / f"{name}.parquet")
        rows += compared(name, wells)
        if not (wells.obs["control"] == "negative").any():
            rows += compared(name, wells, all_wells=True)
    table = pd.DataFrame(rows)
    artifacts.write_table(table.round(4), arguments.out, force=True)
    print(table.round(3).to_string(index=False))


if __name__ == "__main__":
    main()
