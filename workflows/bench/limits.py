"""Where correction stops working: class retrieval as the batch effect, the design and the factors change, one at a time."""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import anndata as ad
import matplotlib as mpl
import numpy as np
import pandas as pd
from scipy.stats import norm, rankdata

from cellica import artifacts, correct, retrieval, simulate
from cellica.ica import matched_correlation
from cellica.schema import InputError

mpl.use("agg")
import matplotlib.pyplot as plt

METHODS = ("none", "ica_drop", "sphere", "center+sphere", "ica")  # wccn would be fitted on the labels that are scored
OPTIONS = {name: {"check_stability": False} for name in ("ica", "ica_drop")}
DESIGN = {"n_experiments": 12, "n_treatments": 64, "n_controls": 8}
SEEDS = (0, 1, 2)


def wells(
    seed: int, *, strength: float = 2.0, gaussian: float = 0.0, confounded: float = 0.0, **sizes: int
) -> ad.AnnData:
    """Simulated profiles: batch factors made stronger, some factors made Gaussian, some treatments kept in one batch only."""
    adata = simulate.profiles("small", random_state=seed, **{**DESIGN, **sizes})
    rng = np.random.default_rng(seed)
    factors = adata.obsm["factors"].astype(float)
    for j in np.flatnonzero(rng.random(factors.shape[1]) < gaussian):
        ranks = rankdata(factors[:, j] + 1e-6 * rng.standard_normal(len(factors)))
        factors[:, j] = factors[:, j].mean() + factors[:, j].std() * norm.ppf(ranks / (len(ranks) + 1))
    role = adata.uns["cellica"]["simulation"]["roles"]
    mixing = adata.varm["true_mixing"] * np.where(role == "batch", strength, 1.0)
    noise = simulate.FEATURE_NOISE * rng.standard_normal(adata.shape)
    adata.X = (factors @ mixing.T + noise).astype(np.float32)
    adata.obsm["factors"] = factors
    return _confounded(adata, confounded, rng)


def _confounded(adata: ad.AnnData, share: float, rng: np.random.Generator) -> ad.AnnData:
    """Keep a share of the treatments in one experiment each."""
    label, batch = (adata.obs[column].astype(str).to_numpy() for column in ("perturbation", "experiment"))
    treated = np.unique(label[adata.obs["control"] == ""])
    only = {name: rng.choice(np.unique(batch)) for name in treated[rng.random(len(treated)) < share]}
    return adata[[only.get(name, of) == of for name, of in zip(label, batch)]].copy()


AXES: dict[str, tuple[tuple[float, ...], Callable[[float, int], ad.AnnData]]] = {
    "strength of the batch effect": ((0, 0.5, 1, 2, 4), lambda level, seed: wells(seed, strength=level)),
    "treatments a plate": ((16, 32, 64, 128, 256), lambda level, seed: wells(seed, n_treatments=int(level))),
    "batches": ((2, 4, 8, 16, 32), lambda level, seed: wells(seed, n_experiments=int(level))),
    "controls a plate": ((1, 2, 4, 8, 16), lambda level, seed: wells(seed, n_controls=int(level))),
    "treatments in one batch only": ((0, 0.5, 0.9, 1), lambda level, seed: wells(seed, confounded=level)),
    "Gaussian factors": ((0, 0.5, 1), lambda level, seed: wells(seed, gaussian=level)),
}


def measure(adata: ad.AnnData) -> Iterator[dict[str, object]]:
    """Score of each method, and what ICA found and removed."""
    roles = adata.uns["cellica"]["simulation"]["roles"]
    for method in METHODS:
        row: dict[str, object] = {"method": method, "note": ""}
        try:
            correct.run(adata, method, **OPTIONS.get(method, {}))
        except InputError as error:
            yield row | {"note": str(error)}
            continue
        score = retrieval.class_retrieval(adata, class_key="moa", group_key="perturbation", use_rep=f"X_{method}").iloc[
            0
        ]
        row |= {"value": score["value"], "chance": score["chance"]}
        if method == "ica":
            found = matched_correlation(adata.obsm["factors"][:, roles == "batch"], adata.obsm["ica_sources"])
            row |= {
                "batch_factors_found": found.mean(),
                "n_removed": int(adata.uns["cellica"]["ica"]["components"]["removed"].sum()),
            }
        yield row


def draw(table: pd.DataFrame, path: Path) -> None:
    figure, axes = plt.subplots(1, len(AXES), figsize=(3.1 * len(AXES), 3.2), sharey=True, layout="constrained")
    for ax, (axis, (levels, _)) in zip(axes, AXES.items()):
        part = table[table["axis"] == axis]
        for method, own in part.groupby("method", sort=False):
            mean = own.groupby("level")["value"].mean().reindex(levels)
            ax.plot(range(len(levels)), mean, marker="o", label=method)
        ax.plot(range(len(levels)), part.groupby("level")["chance"].mean().reindex(levels), "k:", label="chance")
        ax.set(xticks=range(len(levels)), xticklabels=[f"{level:g}" for level in levels], xlabel=axis)
    axes[0].set_ylabel("class mAP across batches")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right", fontsize="small")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results", help="folder of table and figure"
    )
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="simulations for each setting")
    arguments = parser.parse_args()
    rows = [
        {"axis": axis, "level": level, "seed": seed, **row}
        for axis, (levels, make) in AXES.items()
        for level in levels
        for seed in range(arguments.seeds)
        for row in measure(make(level, seed))
    ]
    table = pd.DataFrame(rows)
    arguments.out.mkdir(parents=True, exist_ok=True)
    artifacts.write_table(table.round(4), arguments.out / "limits.csv", force=True)
    draw(table, arguments.out / "limits.png")
    for axis, part in table.groupby("axis", sort=False):
        mean = part.pivot_table("value", "level", "method")[list(METHODS)]
        ica = part[part["method"] == "ica"].groupby("level")[["batch_factors_found", "n_removed"]].mean()
        print(f"{axis}\n{mean.join(ica).round(3).to_string()}\n")


if __name__ == "__main__":
    main()
